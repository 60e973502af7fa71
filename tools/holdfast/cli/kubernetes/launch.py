"""Runs `holdfast run --attach` in the launcher's pod, with the options that a restarted launcher needs.

Every pod of the launcher's Job identifies itself by the uid of the JobSet, so it follows the job that an earlier pod has
submitted. A job that has failed in a way that another attempt may fix is submitted again, and starts from its checkpoint. The
launcher waits for the final upload, because the nodes' pods, with their memory and disks, are deleted when it has ended.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from rich.console import Console

from holdfast.cli.client import Client
from holdfast.cli.endings import COMPLETED, DO_NOT_RESTART, FAILED, SIGNALLED, UNAVAILABLE, exit_code
from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.runtime.children import tied

UPLOAD_WAIT_S = 3600.0
POLL_S = 1.0


def options(found: Mapping[str, Any] | None, start: str, has_checkpoints: Callable[[], bool]) -> list[str]:
    """Return the options of `holdfast run`. `found`: the job that this launcher has submitted before; None = none yet. `start`:
    how the first submission uses checkpoints of the job's name: "resume", "fresh" or nothing."""
    if found is None:
        return [f"--{start}"] if start else []
    if found["phase"] != "failed" or exit_code(found) != FAILED:
        return []
    # Without any checkpoint, the failed run began at step 0, and so does the next one.
    began_anew = not found["checkpoint_step"] and found["goes_on_from"] is None and not has_checkpoints()
    return ["--fresh" if began_anew else "--resume"]


class LauncherPod:
    """Runs in the main thread of a separate process. `command`: `holdfast run --attach`, without options for the start."""

    def __init__(self, command: Sequence[str], job_file: str, name: str, console: Console) -> None:
        self._command, self._job_file, self._name, self._console = command, job_file, name, console
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ended_by = 0

    def run(self, client: Client, token: str, start: str) -> int:
        """Run the launcher. Returns the exit code of the container, which is that of `holdfast run`."""
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            found = client.attach(self._name, token)
            how = options(found, start, lambda: any(client.checkpoints(self._name)))
        except Unavailable as error:
            self._console.print(str(error), soft_wrap=True, markup=False)
            return UNAVAILABLE  # the next pod tries again
        code = self._follow([*self._command, *how, self._job_file])
        if code in (COMPLETED, DO_NOT_RESTART) and not self._ended_by:
            wait_for_upload(client, self._name, self._console, ended=lambda: bool(self._ended_by))
        return SIGNALLED + self._ended_by if self._ended_by else code

    def _follow(self, command: Sequence[str]) -> int:
        if self._ended_by:
            return SIGNALLED + self._ended_by
        self._launcher = subprocess.Popen(tied(command), stdin=subprocess.DEVNULL)
        self._pass_on()  # a signal may have arrived before the launcher was started
        code = self._launcher.wait()
        return code if code >= 0 else SIGNALLED - code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._ended_by = number
        self._pass_on()

    def _pass_on(self) -> None:
        if self._ended_by and self._launcher is not None and self._launcher.returncode is None:
            self._launcher.send_signal(self._ended_by)


def wait_for_upload(
    client: Client,
    name: str,
    console: Console,
    *,
    ended: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the final upload of a finished job, for at most `UPLOAD_WAIT_S`."""
    until, logged = clock() + UPLOAD_WAIT_S, False
    while not ended():
        try:
            leaving = client.job(name).get("leaving")
        except HoldfastError as error:
            console.print(f"the state of the final upload is unknown: {error}", soft_wrap=True, markup=False)
            return
        if not leaving:
            return
        if clock() >= until:
            console.print(f"the final upload has not ended within {UPLOAD_WAIT_S:g} s; the nodes are released")
            return
        if not logged:
            logged = True
            console.print("the last checkpoint is being uploaded to the object store; the nodes are kept until then")
        sleep(POLL_S)

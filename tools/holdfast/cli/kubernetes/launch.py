"""What the launcher's pod runs: `holdfast run --attach`, with what a restarted launcher has to know.

Every pod of the launcher's Job is the same launcher to the supervisor (by the uid of the JobSet), so it follows the job that an
earlier pod has submitted. A job that has failed in a way that another attempt may mend is submitted again, from its checkpoint.
The nodes' pods, and with them their memory and disks, are deleted when the launcher has ended: it waits for the last upload.
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
    """Return the options of `holdfast run`. `found`: the job that this launcher has submitted before; None = this is the first.
    `start`: what the first does with checkpoints of the job's name: "resume", "fresh" or nothing."""
    if found is None:
        return [f"--{start}"] if start else []
    if found["phase"] != "failed" or exit_code(found) != FAILED:
        return []
    # Without a checkpoint of its own or an earlier one, the run that failed began at step 0, and so does the next.
    began_anew = not found["checkpoint_step"] and found["goes_on_from"] is None and not has_checkpoints()
    return ["--fresh" if began_anew else "--resume"]


class LauncherPod:
    """Runs in the main thread of a process of its own. `command`: of `holdfast run --attach`, without options for the start."""

    def __init__(self, command: Sequence[str], job_file: str, name: str, console: Console) -> None:
        self._command, self._job_file, self._name, self._console = command, job_file, name, console
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ended_by = 0

    def run(self, client: Client, token: str, start: str) -> int:
        """Return the exit code of the container, as of `holdfast run`."""
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
        self._pass_on()  # a signal may have come before there was a launcher
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
    """Wait until the last checkpoint of a job that is over is in the object store, for at most `UPLOAD_WAIT_S`."""
    until, said = clock() + UPLOAD_WAIT_S, False
    while not ended():
        try:
            leaving = client.job(name).get("leaving")
        except HoldfastError as error:
            console.print(f"the last upload is not known: {error}", soft_wrap=True, markup=False)
            return
        if not leaving:
            return
        if clock() >= until:
            console.print(f"the last upload has not ended within {UPLOAD_WAIT_S:g} s; the nodes are released")
            return
        if not said:
            said = True
            console.print("the last checkpoint is on its way to the store; the nodes stay until it is there")
        sleep(POLL_S)

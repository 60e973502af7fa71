"""Runs `holdfast run --attach` in the launcher's pod, with the options that a restarted launcher needs.

Every pod of the launcher's Job identifies itself by the uid of the JobSet, so it follows the job that an earlier pod has
submitted. A job that has failed in a way that another attempt may fix is submitted again, and starts from its checkpoint. The
launcher waits for the final upload, because the nodes' pods, with their memory and disks, are deleted when it has ended.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

from holdfast.cli.client import Client
from holdfast.cli.endings import COMPLETED, DO_NOT_RESTART, SIGNALLED, UNAVAILABLE
from holdfast.cli.last_upload import wait_for_upload
from holdfast.cli.launcher import start_options
from holdfast.domain.errors import Unavailable
from holdfast.runtime.processes.children import tied


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
            how = start_options(found, start, lambda: any(client.checkpoints(self._name)))
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

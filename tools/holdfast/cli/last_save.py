"""The last save of a job whose local stack is interrupted by Ctrl-C, SIGTERM or SIGHUP.

Without it, a run would lose what it has trained since its last checkpoint, which may be ten minutes. A second signal ends the
wait, and the stack stops at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from holdfast.cli.client import Client
from holdfast.cli.endings import ENDED
from holdfast.cli.follow import How, kept, settled
from holdfast.domain.errors import HoldfastError

WAIT_S = 8.0  # for the save and its copy on the disk; Docker sends SIGKILL ten seconds after SIGTERM
POLL_S = 0.1


def stop_saved(
    client: Client,
    name: str,
    console: Console,
    *,
    reason: str,
    how: How,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Stop the job after a last save, and print what of it is kept. Waits for at most `WAIT_S`.

    `reason` becomes the reason of the stop. `check` keeps the stack running and may raise an exception to end the wait.
    Errors of the control plane end the wait: the caller stops the stack in any case.
    """
    deadline = clock() + WAIT_S
    _say(
        console,
        f"[bold]{escape(name)}[/] stops: it saves first if it can, for at most {WAIT_S:.0f} s. Ctrl-C again stops it at once",
    )
    ended = ""
    with contextlib.suppress(HoldfastError):
        job = client.job(name)
        if job["phase"] not in ENDED:
            client.stop(name, reason)
        while clock() < deadline:
            check()
            job = client.job(name)
            if job["phase"] in ENDED and settled(job):
                break
            sleep(POLL_S)
        if job["phase"] in ENDED:
            ended = kept(job, how) or "It has no checkpoint here: the same command starts it again"
    _say(console, f"[bold]{escape(name)}[/] is stopped. {escape(ended or f'To resume: {how.resume}')}")


def _say(console: Console, text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed
        console.print(text, soft_wrap=True)

"""The last save of jobs whose local stack is interrupted by Ctrl-C, SIGTERM or SIGHUP.

Without it, a run would lose what it has trained since its last checkpoint, which may be ten minutes. A second Ctrl-C ends the
wait, and the stack stops at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.endings import ENDED
from holdfast.cli.follow import How, kept, settled
from holdfast.cli.terminal import worker_output
from holdfast.domain.errors import HoldfastError
from holdfast.domain.words import plural

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
    output: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Stop the job after a last save, and print what of it is kept. Waits for at most `WAIT_S`.

    `reason` becomes the reason of the stop. `check` keeps the stack running and may raise an exception to end the wait.
    Errors of the control plane end the wait: the caller stops the stack in any case. `output` returns what the ranks have
    printed, which may say what the script has saved at its end.
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
        try:
            while clock() < deadline:
                check()
                job = client.job(name)
                if job["phase"] in ENDED and settled(job):
                    break
                sleep(POLL_S)
        finally:  # also at a second Ctrl-C
            for line in output():
                _say(console, worker_output(line))
        if job["phase"] in ENDED:
            ended = kept(job, how) or "It has no checkpoint here: the same command starts it again"
    _say(console, f"[bold]{escape(name)}[/] is stopped. {escape(ended or f'To resume: {how.resume}')}")


def save_running(
    connect: Callable[[], Client],
    nodes: Collection[str],
    say: Callable[[str], None],
    *,
    wait_s: float = WAIT_S,
) -> None:
    """Save the running jobs that have ranks on `nodes`, which end next, and report each save. Waits for at most `wait_s`.

    A job whose script reports no steps cannot be saved. Errors of the control plane are ignored: the stack ends in any case.
    """
    saves: list[threading.Thread] = []

    def save(name: str) -> None:
        with contextlib.suppress(HoldfastError), connect() as client:
            done = client.checkpoint(name, wait_s)
            say(f"[bold]{escape(name)}[/]: {escape(str(done.get('reason') or 'saved'))}")

    with contextlib.suppress(HoldfastError), connect() as client:
        names = [
            job["name"]
            for job in client.jobs()
            if job["phase"] == "running" and job["step"] and not set(nodes).isdisjoint(job["nodes"])
        ]
        # daemons: a save that does not come must not delay the end
        saves = [threading.Thread(target=save, args=(name,), name=f"save {name}", daemon=True) for name in names]
    if not saves:
        return
    say(f"saving {plural(len(saves), 'running job')} first, for at most {wait_s:.0f} s. Ctrl-C again stops at once")
    deadline = time.monotonic() + wait_s
    for thread in saves:
        thread.start()
    for thread in saves:
        thread.join(max(0.0, deadline - time.monotonic()))


def _say(console: Console, text: str | Text) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed
        console.print(text, soft_wrap=True)

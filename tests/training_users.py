"""An agent whose workers run as another user, on a machine where this interpreter may be in root's home directory."""

from __future__ import annotations

import atexit
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from agent_harness import Agent, ControlPlane

NOBODY = 65534
GROUP = 54321  # of no user of this machine
USER = f"{NOBODY}:{GROUP}"

# Gives a process its own view of one closed directory: everybody may pass, and it has only `kept` of what was in it.
_OPENED = """
set -e
closed=$1 kept=$2 stash=$3
shift 3
mount --bind "$closed/$kept" "$stash"
mount -t tmpfs -o mode=755 none "$closed"
mkdir "$closed/$kept"
mount --move "$stash" "$closed/$kept"
exec "$@"
"""


@cache
def reached_by_others() -> tuple[str, ...] | None:
    """The start of a command line whose process and children can be run by any user: empty if the interpreter can be reached,
    else a mount namespace in which it can. None if this machine allows neither."""
    if os.geteuid() != 0:
        return None
    interpreter = Path(sys.executable).resolve()
    closed = [path for path in interpreter.parents if not path.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return ()
    outer = closed[-1]
    stash = tempfile.mkdtemp(prefix="holdfast-stash-")  # stays empty outside the namespaces
    atexit.register(os.rmdir, stash)
    view = ("unshare", "-m", "sh", "-c", _OPENED, "sh", str(outer), interpreter.relative_to(outer).parts[0], stash)
    works = subprocess.run([*view, sys.executable, "-c", ""], check=False, capture_output=True)
    return view if len(closed) == 1 and works.returncode == 0 else None


def view() -> tuple[str, ...]:
    """`reached_by_others` where the tests run that need it."""
    found = reached_by_others()
    assert found is not None
    return found


needs_another_user = pytest.mark.skipif(
    reached_by_others() is None, reason="needs root, and an interpreter that other users can be given"
)


class OtherUsersAgent(Agent):
    """As `Agent`, on a machine on which other users can run the interpreter."""

    def __init__(self, plane: ControlPlane, root: Path, **options: Any) -> None:
        self.view = view()
        super().__init__(plane, root, **options)

    def become(self, user: str) -> None:
        """Start the agent again, after its end, with another training user."""
        self._environment["HOLDFAST_AGENT_USER"] = user
        self.restart()


class NewOtherUsersAgent(OtherUsersAgent):
    """Its processes are no forks of the test's: each has the privileges, descriptors and memory that an exec leaves it."""

    def _start(self) -> subprocess.Popen[bytes]:  # type: ignore[override]
        with (self.root / "agent.log").open("ab") as output:
            return subprocess.Popen(
                [*self.view, sys.executable, "-m", "holdfast.agent"],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


@contextmanager
def reachable_directory() -> Iterator[Path]:
    """pytest's own directories are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="holdfast-users-", dir="/tmp") as made:
        directory = Path(made)
        directory.chmod(0o755)
        yield directory


@contextmanager
def agent_of(
    root: Path,
    *,
    user: str = USER,
    replicator: bool = False,
    kind: type[OtherUsersAgent] = OtherUsersAgent,
    **environment: str,
) -> Iterator[OtherUsersAgent]:
    plane = ControlPlane()
    agent = kind(plane, root, replicator=replicator, HOLDFAST_AGENT_USER=user, **environment)
    try:
        agent.wait_connected()
        yield agent
    finally:
        agent.close()
        plane.close()


def as_user(command: Sequence[str], uid: int = NOBODY, gid: int = GROUP) -> subprocess.CompletedProcess[str]:
    """Run a command as a user with no other rights."""
    return subprocess.run(
        command, check=False, user=uid, group=gid, extra_groups=[], capture_output=True, text=True, cwd="/"
    )

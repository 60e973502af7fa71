"""Directories on a node whose workers run as another user than the agent.

    <agent directory>           passable; its other files and directories are closed to the workers
      w/                        the workers': sockets of flight recorders, error files
      learned/  home/           the workers': lists of imported modules; home directory of a uid that has none
      notes.sock  ft.sock       the workers may send to these sockets
    <memory>/<job>/             passable
      w<local rank>/            the workers': images
    <disk>/<job>/overflow/      passable
      w<local rank>/            the workers': images that do not fit into memory

A directory of the workers has mode 0700 and their uid. Its parent belongs to the agent, so a worker can replace the files in
the directory, but not the directory. The agent and the replicator check every file that they open there by its descriptor
(`open_untrusted`, `holdfast.shards.opening`). *Passable* means mode 0711: a user can open a known name, but cannot list names.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from holdfast.agent.workers.environment import Site
from holdfast.domain import worker as worker_protocol
from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.runtime import freeze
from holdfast.runtime.private import make_passable
from holdfast.runtime.processes.children import running, spawn
from holdfast.runtime.processes.training_user import OPTION, TrainingUser

log = structlog.get_logger("holdfast.agent.workers")

CHECK_TIMEOUT_S = 30.0
OUTPUT_BYTES_MAX = 4096
_SOURCES = Path(worker_protocol.__file__).parents[1]  # of `holdfast.domain` and `holdfast.train`

# argv: paths. Prints the first directory that stops this process on the way to one of them.
_REACH = """\
import os, sys
for path in sys.argv[1:]:
    parts = path.split("/")
    for count in range(2, len(parts) + 1):
        if not os.access("/".join(parts[:count]), os.X_OK):
            sys.exit("/".join(parts[:count]))
"""


def open_untrusted(path: Path, uid: int) -> int:
    """Open a file for reading that user `uid` may have written, in a directory of that user, and return the descriptor.

    Raises OSError, also if the path is not a regular file of that user with one name: a symbolic link, a pipe, a hard link."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == uid and found.st_nlink == 1:
        return fd
    os.close(fd)
    raise PermissionError(f"{path} is not a file of user {uid} alone")


def make_places(site: Site, job: str, local_rank: int) -> None:
    """Create the directories of a worker's images. Raises `HoldfastError`."""
    images, overflow = site.images(job, local_rank), site.overflow(job, local_rank)
    try:
        if site.user is None:
            images.mkdir(parents=True, exist_ok=True)
            return
        for directory in (images.parent, overflow.parent.parent, overflow.parent):
            make_passable(directory)
        for directory in (images, overflow):
            hand_over(directory, site.user)
    except OSError as error:
        raise HoldfastError(f"cannot create the directory {error.filename or images}: {error.strerror}") from error


def prepare(site: Site, user: TrainingUser) -> None:
    """Prepare the directories of an agent that starts: close the files of the agent, and give this user the images of earlier
    workers, which may have run as another user. Raises `HoldfastError`."""
    handed = (site.apart, site.learned, site.home)
    try:
        for path in site.agent_dir.iterdir():
            if not path.is_symlink() and path not in handed:
                _close(path)
        _close(site.agent_dir)
        for root in (site.agent_dir, site.memory_dir, site.disk_dir):
            make_passable(root)
        shutil.rmtree(site.apart, ignore_errors=True)  # sockets and error files of an earlier agent's workers
        for path in handed:
            hand_over(path, user)
    except OSError as error:
        raise HoldfastError(
            f"cannot prepare {error.filename or site.agent_dir} for {user.name}: {error.strerror}"
        ) from error
    for path in (*site.memory_dir.glob("*/w*"), *site.disk_dir.glob("*/overflow/w*")):
        try:
            hand_over(path, user)
        except OSError as error:
            log.warning("images of earlier workers not handed over", path=str(path), reason=str(error))


def hand_over(path: Path, user: TrainingUser) -> None:
    """Give a directory to the user, with the files that belong to its present owner. It is created if it does not exist. Raises
    OSError."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        before = os.fstat(directory).st_uid
        if before != user.uid:
            for name in os.listdir(directory):
                _hand_over_file(name, directory, before, user)
            os.fchown(directory, user.uid, user.gid)
        os.fchmod(directory, 0o700)
    finally:
        os.close(directory)


def _hand_over_file(name: str, directory: int, before: int, user: TrainingUser) -> None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return  # a link, a socket, or a file that has just been deleted
    try:
        found = os.fstat(fd)
        # A link to a file of another user stays that user's.
        if stat.S_ISREG(found.st_mode) and found.st_uid == before and found.st_nlink == 1:
            os.fchown(fd, user.uid, user.gid)
    finally:
        os.close(fd)


def _close(path: Path) -> None:
    found = path.lstat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)


def open_to(path: Path, user: TrainingUser | None) -> None:
    """Allow only the workers and the agent to send to a socket. Raises OSError."""
    if user is not None:
        path.chmod(0o600)
        os.chown(path, user.uid, user.gid)


async def require_reachable(site: Site, user: TrainingUser) -> None:
    """Raises `InvalidSpec` with the first obstacle if the user cannot reach the directories of a worker, the interpreter, or
    Holdfast's modules."""
    paths = (site.agent_dir, site.memory_dir, site.disk_dir, _SOURCES, Path(sys.executable).parent)
    output = os.memfd_create("reachable", os.MFD_CLOEXEC)
    try:
        command = [sys.executable, "-I", "-S", "-c", _REACH, *map(str, paths)]
        child = spawn("a check of the training user", command, output=output, user=user)
        code: int | None = None
        async with running(child, stop_grace_s=0.0):
            with freeze.patience(CHECK_TIMEOUT_S):
                code = await child.wait()
        if code != 0:
            said = os.pread(output, OUTPUT_BYTES_MAX, 0).decode(errors="replace").strip()
            raise InvalidSpec(OPTION, user.name, f"a user who can start training: {_obstacle(said, paths)}")
    finally:
        os.close(output)


def _obstacle(said: str, paths: Iterable[Path]) -> str:
    if said.startswith("/"):
        needed = next((str(path) for path in paths if path.is_relative_to(said)), said)
        return f"{said} cannot be passed, and {needed} is needed. Give it the permission x for others, or use other directories"
    return said or f"the check did not end within {CHECK_TIMEOUT_S:g} s"

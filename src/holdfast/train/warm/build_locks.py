"""Takes over the build locks of `torch.utils.cpp_extension` that killed ranks have left.

Theory. While a rank builds an extension, it holds torch's `FileBaton`: a file `lock` in the build directory, which it deletes
at the end. The other ranks wait until the file is deleted. A killed rank leaves the file, and every later start waits for it
indefinitely.

In a worker the holder therefore writes its identity into the file and locks it with `flock`, which the kernel releases when
the process ends. A rank that gets the `flock` of such a file has the proof that the holder has ended. It becomes the holder and
builds. The proof is valid if the holder ran on this machine since the last boot, or was a rank of an earlier generation of this
job: on a network file system that is mounted with local locks, one machine does not see the `flock` of another.

A file without a holder was created by a process that is not a Holdfast worker, or on a file system without `flock`. Ranks wait
for it as torch does."""

from __future__ import annotations

import fcntl
import inspect
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.file_baton import FileBaton

from holdfast.domain import worker

log = logging.getLogger("holdfast.train")

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
HOLDER_BYTES_MAX: Final = 4096
# The replaced methods with their parameters, and the attributes that the replacements use. They are checked, because in another
# torch these names may have another meaning.
_SIGNATURES: Final = {"try_acquire": (), "release": ()}
_ATTRIBUTES: Final = ("lock_file_path", "fd")


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that builds. `boot`: the kernel's boot id; empty if it cannot be read."""

    job: str
    generation: int
    rank: int
    boot: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Holder:
        try:
            boot = BOOT_ID.read_text().strip()
        except OSError:
            boot = ""
        generation, rank = environ.get(worker.ENV_GENERATION, "0"), environ.get("RANK", "0")
        return cls(environ.get(worker.ENV_JOB, ""), int(generation), int(rank), boot)

    def encode(self) -> bytes:
        return json.dumps({"holdfast": asdict(self)}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Holder | None:
        """Return None for anything that `encode` has not written."""
        try:
            fields = json.loads(raw)["holdfast"]
            return cls(str(fields["job"]), int(fields["generation"]), int(fields["rank"]), str(fields["boot"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def believes_flock_of(self, other: Holder) -> bool:
        """Whether `other` has certainly ended if this rank can get its `flock`."""
        same_machine = bool(self.boot) and self.boot == other.boot
        return same_machine or (self.job == other.job and other.generation < self.generation)


class BuildLocks:
    """The two replaced methods of `FileBaton`, for one rank."""

    def __init__(self, me: Holder) -> None:
        self._me = me

    def try_acquire(self, baton: Any) -> bool:
        """Create the file, or take over the file of an ended rank. Returns whether this rank is now the holder."""
        try:
            baton.fd = os.open(baton.lock_file_path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileExistsError:
            return self._take_over(baton)
        try:
            fcntl.flock(baton.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(baton.fd, self._me.encode())
        except OSError as error:
            log.info("the build lock %s names no holder: %s", baton.lock_file_path, error)
        return True

    @staticmethod
    def release(baton: Any) -> None:
        """Delete the file, then release its `flock`. In the opposite order, the file would look like that of an ended rank."""
        os.remove(baton.lock_file_path)
        if baton.fd is not None:
            os.close(baton.fd)

    def _take_over(self, baton: Any) -> bool:
        """Become the holder of an existing file. The file is not deleted, because a rank that waits for its deletion must not
        continue before the extension is built.

        The `flock` is requested only if the proof would be valid, so that the request does not keep the holder, or another
        rank, from getting it."""
        try:
            fd = os.open(baton.lock_file_path, os.O_RDWR)
        except OSError:  # released in the meantime, or another user's
            return False
        taken = False
        try:
            written = os.read(fd, HOLDER_BYTES_MAX)
            holder = Holder.decode(written)
            if holder is None or not self._me.believes_flock_of(holder):
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            present = os.path.samestat(os.fstat(fd), os.stat(baton.lock_file_path))
            if not present or os.pread(fd, HOLDER_BYTES_MAX, 0) != written:
                return False
            os.pwrite(fd, self._me.encode().ljust(len(written)), 0)  # one write: there always is a holder
            taken = True
        except OSError:  # held, released in the meantime, or without `flock`
            return False
        finally:
            if not taken:
                os.close(fd)
        baton.fd = fd
        log.warning(
            "took over the build lock %s: rank %d of %s, generation %d, ended while it was building the extension",
            baton.lock_file_path,
            holder.rank,
            holder.job,
            holder.generation,
        )
        return True


def watch(environ: Mapping[str, str], baton: type = FileBaton) -> None:
    """Replace the methods of `baton` in a worker that is about to run its script. If the class of this torch is different, log
    a warning and leave it unchanged."""
    if not environ.get(worker.ENV_JOB):
        return
    if differing := _differing(baton):
        log.warning(
            "build locks of killed ranks are not taken over: FileBaton.%s of torch %s is different",
            differing,
            torch.__version__,
        )
        return
    locks = BuildLocks(Holder.of(environ))

    def try_acquire(self: Any) -> bool:
        return locks.try_acquire(self)

    def release(self: Any) -> None:
        locks.release(self)

    baton.try_acquire, baton.release = try_acquire, release  # type: ignore[attr-defined]


def _differing(baton: type) -> str:
    """Return the name of a method or attribute that is not as expected; empty if all are."""
    for name, parameters in _SIGNATURES.items():
        method = getattr(baton, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != parameters:
            return name
    try:
        made = baton(os.devnull)
    except TypeError:
        return "__init__"
    return next((name for name in _ATTRIBUTES if not hasattr(made, name)), "")

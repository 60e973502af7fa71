"""A rank that is killed while it builds an extension leaves torch's lock; the next start takes it over, and only then."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from holdfast.domain import worker
from holdfast.train.warm import build_locks
from holdfast.train.warm.build_locks import Holder

ENVIRON = {worker.ENV_JOB: "gpt", worker.ENV_GENERATION: "2", "RANK": "1"}

# A rank of generation 1. It is killed by the test when it has said that it holds the lock.
BUILDING = """
import os, signal, sys
from torch.utils.file_baton import FileBaton
from holdfast.train.warm import build_locks
build_locks.watch(os.environ)
assert FileBaton(sys.argv[1]).try_acquire()
print("holds", flush=True)
signal.pause()
"""


def baton_of(path: Path, **environ: str) -> Any:
    """A `FileBaton` of its own class in another rank."""

    class Baton(FileBaton):
        pass

    build_locks.watch({**ENVIRON, **environ}, Baton)
    return Baton(str(path))


def killed(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDING, str(path)],
        env={**os.environ, **ENVIRON, worker.ENV_GENERATION: "1", "RANK": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    return process


def test_the_lock_of_a_killed_rank_is_taken_over_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lock"
    with killed(path) as process:
        assert not baton_of(path).try_acquire()  # it is alive
        process.kill()
        process.wait()
    inode = path.stat().st_ino
    first, second = baton_of(path, RANK="0"), baton_of(path, RANK="1")
    with caplog.at_level(logging.WARNING, "holdfast.train"):
        assert first.try_acquire()
    assert "rank 0 of gpt, generation 1, ended while it was building the extension" in caplog.text
    assert not second.try_acquire()
    assert path.stat().st_ino == inode  # whoever waits for its end still waits
    first.release()
    assert not path.exists()
    second.wait()
    assert second.try_acquire()
    second.release()


def test_a_lock_that_names_no_holder_is_waited_for_as_ever(tmp_path: Path) -> None:
    for content in (b"", b"[]", b"{}", b'{"holdfast": {"job": "gpt"}}', b'{"holdfast": 1}', b"\xff", b"[" * 4000):
        path = tmp_path / "lock"
        path.write_bytes(content)
        assert not baton_of(path).try_acquire(), content
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("job", "generation", "boot", "taken"),
    [
        ("gpt", 1, "another machine", True),
        ("gpt", 2, "another machine", False),  # it may be alive, and its flock unseen
        ("gpt", 3, "another machine", False),
        ("other", 1, "another machine", False),
        ("other", 9, "", False),
        ("other", 9, None, True),  # this machine: its flock would be seen
        ("gpt", 2, None, True),
    ],
)
def test_a_free_flock_counts_on_this_machine_and_for_earlier_generations(
    tmp_path: Path, job: str, generation: int, boot: str | None, taken: bool
) -> None:
    path = tmp_path / "lock"
    here = Holder.of(ENVIRON).boot
    assert here
    path.write_bytes(Holder(job, generation, 0, here if boot is None else boot).encode())
    baton = baton_of(path)
    assert baton.try_acquire() is taken
    if taken:
        assert Holder.decode(path.read_bytes()) == Holder.of(ENVIRON)
        baton.release()


def test_a_shorter_name_is_written_over_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(Holder("a-job-with-a-long-name", 1, 12, Holder.of(ENVIRON).boot).encode())
    baton = baton_of(path)
    assert baton.try_acquire()
    assert Holder.decode(path.read_bytes()) == Holder.of(ENVIRON)
    baton.release()


def test_a_file_that_was_replaced_while_it_was_looked_at_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.write_bytes(Holder("gpt", 1, 0, "").encode())
    flock = fcntl.flock

    def replaced(fd: int, operation: int) -> None:
        flock(fd, operation)
        path.unlink()
        path.write_bytes(b"of another rank")

    monkeypatch.setattr(fcntl, "flock", replaced)
    assert not baton_of(path).try_acquire()
    assert path.read_bytes() == b"of another rank"


def test_who_would_not_take_over_does_not_ask_for_the_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder has created the file and not locked it yet; or another rank, which would take over, locks it just now."""

    def refused(fd: int, operation: int) -> None:
        raise AssertionError("asked for the flock")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "lock"
    for content in (b"", Holder("other", 1, 0, "another machine").encode()):
        path.write_bytes(content)
        assert not baton_of(path).try_acquire()


def test_a_file_system_without_flock_locks_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "lock"
    first, second = baton_of(path), baton_of(path)
    assert first.try_acquire()
    assert path.read_bytes() == b""
    assert not second.try_acquire()
    first.release()
    assert not path.exists()


def test_nothing_is_replaced_outside_of_a_worker_or_in_another_class(caplog: pytest.LogCaptureFixture) -> None:
    class Other(FileBaton):
        def release(self, forced: bool = False) -> None: ...

    release = Other.release
    with caplog.at_level(logging.WARNING, "holdfast.train"):
        build_locks.watch(ENVIRON, Other)
    assert Other.release is release
    assert "FileBaton.release" in caplog.text

    class Demanding(FileBaton):
        def __init__(self, lock_file_path: str, owner: str) -> None: ...

    build_locks.watch(ENVIRON, Demanding)
    assert "try_acquire" not in vars(Demanding)

    class Outside(FileBaton):
        pass

    build_locks.watch({"RANK": "0"}, Outside)
    assert "try_acquire" not in vars(Outside)


def test_a_holder_is_written_as_json() -> None:
    holder = Holder("gpt", 2, 1, "b")
    assert json.loads(holder.encode()) == {"holdfast": {"job": "gpt", "generation": 2, "rank": 1, "boot": "b"}}
    assert Holder.decode(holder.encode()) == holder

"""A directory as store: crashes at every write, full disks, foreign files, dead writers, clocks."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast.domain.errors import InvalidSpec, NotFound, OutOfSpace, Unavailable
from holdfast.stores import file as file_store
from holdfast.stores.checksum import crc32c
from holdfast.stores.file import ABANDONED_S, INCOMING, FileStore

KEY = "job/step/object"
OLD, NEW = b"o" * 5000, b"n" * 7000
WRITES = ("mkdir", "open", "fsync", "rename", "link", "unlink")  # every call that changes what another process sees


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def put(root: Path, content: bytes, *, if_absent: bool = False) -> bool:
    return FileStore(root).put(KEY, [content], crc32c=crc32c(content), if_absent=if_absent)


def temporaries(root: Path) -> list[Path]:
    incoming = root / INCOMING
    return list(incoming.iterdir()) if incoming.is_dir() else []


def killed_at_call(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed just before its `number`-th change to the file system. False = it got through."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    code = 1
    try:
        left = number

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*arguments, **options)

            return call

        for name in WRITES:
            setattr(os, name, counted(getattr(os, name)))
        setattr(file_store, "checksum", counted(crc32c))  # noqa: B010  (between any two pieces that are written)
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("before", [None, OLD], ids=["new", "replacing"])
def test_killed_at_every_write(root: Path, tmp_path: Path, if_absent: bool, before: bytes | None) -> None:
    """What is read afterwards is the old object or the new one, whole, and writing again works."""
    expected = {before, before if if_absent and before else NEW}
    survived = 0
    for number in range(100):
        here = tmp_path / f"store-{number}"
        if before is not None:
            put(here, before)
        if not killed_at_call(number, partial(put, here, NEW, if_absent=if_absent)):
            survived = number
            break
        store = FileStore(here)
        found = store.stat(KEY)
        assert (None if found is None else store.read(KEY, 10_000)) in expected
        assert [info.key for info in store.list("")] == ([] if found is None else [KEY])
        assert put(here, NEW)
        assert store.read(KEY, 10_000) == NEW
    assert survived == 0 if if_absent and before else survived > 6  # an object that is there is not even tried
    assert temporaries(here) == []


def test_dead_writers_are_swept(root: Path) -> None:
    assert killed_at_call(7, lambda: put(root, NEW))
    (left,) = temporaries(root)
    put(root, NEW)
    assert temporaries(root) == [left]  # it might be alive: another node's, at this moment
    long_ago = time.time() - ABANDONED_S - 60
    os.utime(left, (long_ago, long_ago))
    put(root, NEW)
    assert temporaries(root) == []


def test_age_is_measured_by_the_file_system_s_clock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed_at_call(7, lambda: put(root, NEW))
    monkeypatch.setattr(time, "time", lambda: 4e9)  # our clock has jumped by decades
    put(root, NEW)
    assert len(temporaries(root)) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("at", ["write", "fsync"])  # NFS tells at fsync
def test_a_full_file_system(root: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: str) -> None:
    put(root, OLD)

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if at == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr("holdfast.stores.file._write", full)
        with pytest.raises(OutOfSpace, match=r"bytes are free there"):
            put(root, NEW)
    assert temporaries(root) == []
    assert FileStore(root).read(KEY, 10_000) == OLD
    assert put(root, NEW)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(root: Path) -> None:
    root.mkdir(mode=0o500)
    with pytest.raises(InvalidSpec, match="may be read and written"):
        put(root, NEW)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_refusals(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    put(root, OLD)
    monkeypatch.setattr("holdfast.stores.file._write", refuse)
    with pytest.raises(InvalidSpec, match="may be read and written"):
        put(root, NEW)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_server_that_is_away(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    put(root, OLD)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Unavailable):
        put(root, NEW)
    assert FileStore(root).read(KEY, 10_000) == OLD


def test_not_mounted_is_not_empty(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "absent" / "store")
    for call in (
        lambda: list(store.list("")),
        lambda: store.stat(KEY),
        lambda: store.read(KEY, 10),
        lambda: store.delete(KEY),
        lambda: put(tmp_path / "absent" / "store", NEW),
    ):
        with pytest.raises(Unavailable, match="mounted"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_empty_is_not_absent(root: Path) -> None:
    assert list(FileStore(root).list("")) == []
    with pytest.raises(NotFound):
        FileStore(root).read(KEY, 10)


def test_a_link_whose_answer_was_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client sends it again, and finds its own."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert put(root, NEW, if_absent=True)
    assert not put(root, OLD, if_absent=True)


def test_a_temporary_that_was_swept_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def gone(self: Path, target: Path) -> Path:
        self.unlink(missing_ok=True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", gone)
    with pytest.raises(Unavailable, match="again and again"):
        put(root, NEW)


def test_empty_directories_go_with_their_last_object(root: Path) -> None:
    put(root, NEW)
    FileStore(root).delete(KEY)
    assert [path.name for path in root.iterdir()] == [INCOMING]


@pytest.fixture
def foreign(root: Path, tmp_path: Path) -> Path:
    put(root, NEW)
    (root / "job" / ".hidden").write_bytes(b"x")
    (root / "job" / "link").symlink_to(tmp_path)
    (root / "job" / "file with spaces").write_bytes(b"x")
    os.mkfifo(root / "job" / "fifo")
    return root


def test_what_others_put_there(foreign: Path) -> None:
    """Hidden files, links and pipes are no objects; a link leads nowhere."""
    store = FileStore(foreign)
    assert [info.key for info in store.list("")] == ["job/file with spaces", KEY]
    assert store.stat("job/fifo") is None
    assert store.stat("job/step") is None  # a directory


def test_a_key_through_a_file(root: Path) -> None:
    put(root, NEW)
    with pytest.raises(NotFound):
        FileStore(root).read(f"{KEY}/below", 10)
    assert FileStore(root).stat(f"{KEY}/below") is None


def test_no_descriptor_leaks(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        put(root, NEW, if_absent=bool(number % 2))
        FileStore(root).read_into(KEY, memoryview(bytearray(100)), 50)
        list(FileStore(root).list(""))
    assert len(os.listdir("/proc/self/fd")) == before

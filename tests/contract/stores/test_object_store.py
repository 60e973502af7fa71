from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import TIMEOUT_S

from holdfast.domain.errors import IntegrityError, InvalidSpec, NotFound
from holdfast.stores import ObjectStore
from holdfast.stores.checksum import of_parts

KEY = "job/a000000000001-s000000000100/p0-0badcafe-10.tensors"
CONTENT = random.Random(1).randbytes(10_007)


def put(store: ObjectStore, key: str, *parts: bytes | memoryview, if_absent: bool = False) -> bool:
    return store.put(key, parts, crc32c=of_parts(parts), if_absent=if_absent)


def read_back(store: ObjectStore, key: str, size: int, offset: int = 0) -> bytes:
    target = bytearray(size)
    store.read_into(key, memoryview(target), offset)
    return bytes(target)


def test_parts_become_one_object(store: ObjectStore) -> None:
    assert put(store, KEY, CONTENT[:10], memoryview(CONTENT)[10:5000], b"", CONTENT[5000:])
    assert store.read(KEY, len(CONTENT)) == CONTENT
    assert read_back(store, KEY, len(CONTENT)) == CONTENT


def test_ranges(store: ObjectStore) -> None:
    put(store, KEY, CONTENT)
    assert read_back(store, KEY, 3000, 7) == CONTENT[7:3007]
    assert read_back(store, KEY, 7, len(CONTENT) - 7) == CONTENT[-7:]
    assert read_back(store, KEY, 0, 3) == b""


@pytest.mark.parametrize(("size", "offset"), [(10_008, 0), (10, 9_998), (5, 20_000), (5_000, 6_000)])
def test_a_range_beyond_the_end(store: ObjectStore, size: int, offset: int) -> None:
    put(store, KEY, CONTENT)
    with pytest.raises(IntegrityError):
        read_back(store, KEY, size, offset)


def test_an_empty_object(store: ObjectStore) -> None:
    put(store, KEY)
    assert store.read(KEY, 0) == b""
    found = store.stat(KEY)
    assert found is not None
    assert found.size == 0


def test_a_small_read_is_bounded(store: ObjectStore) -> None:
    put(store, KEY, CONTENT)
    with pytest.raises(IntegrityError, match="more than the limit of 100"):
        store.read(KEY, 100)


def test_what_is_not_there(store: ObjectStore) -> None:
    for key in (KEY, "job/nothing"):
        with pytest.raises(NotFound):
            store.read(key, 100)
        with pytest.raises(NotFound):
            read_back(store, key, 5000)
        assert store.stat(key) is None
        store.delete(key)
        assert list(store.list(key)) == []


def test_stat(store: ObjectStore) -> None:
    before = time.time() - 2  # a file system's clock is coarse
    put(store, KEY, CONTENT)
    found = store.stat(KEY)
    assert found is not None
    assert (found.key, found.size) == (KEY, len(CONTENT))
    assert found.crc32c in (None, of_parts([CONTENT]))
    assert before < found.updated_at < time.time() + 2


def test_replaced(store: ObjectStore) -> None:
    put(store, KEY, CONTENT)
    assert put(store, KEY, b"other")
    assert store.read(KEY, 100) == b"other"


def test_absent_only(store: ObjectStore) -> None:
    assert put(store, KEY, CONTENT, if_absent=True)
    assert not put(store, KEY, b"other", if_absent=True)
    assert store.read(KEY, len(CONTENT)) == CONTENT
    store.delete(KEY)
    assert put(store, KEY, b"other", if_absent=True)


def test_exactly_one_of_many_writers_wins(opened: Callable[[], ObjectStore]) -> None:
    stores = [opened() for _ in range(6)]
    start = threading.Barrier(len(stores))

    def write(index: int) -> bool:
        start.wait(TIMEOUT_S)
        return put(stores[index], KEY, bytes([index]) * 5000, if_absent=True)

    with ThreadPoolExecutor(len(stores)) as threads:
        won = list(threads.map(write, range(len(stores))))
    assert won.count(True) == 1
    assert stores[0].read(KEY, 5000) == bytes([won.index(True)]) * 5000


def test_wrong_bytes_are_not_stored(store: ObjectStore) -> None:
    with pytest.raises(IntegrityError):
        store.put(KEY, [CONTENT], crc32c=of_parts([CONTENT]) ^ 1)
    assert store.stat(KEY) is None
    assert list(store.list("")) == []


def test_wrong_bytes_replace_nothing(store: ObjectStore) -> None:
    put(store, KEY, CONTENT)
    with pytest.raises(IntegrityError):
        store.put(KEY, [b"other"], crc32c=1)
    assert store.read(KEY, len(CONTENT)) == CONTENT


def test_list_in_the_order_of_keys(store: ObjectStore) -> None:
    keys = ["a/x", "a-1/x", "a/b/c", "a/b-c", "a.x/y", "b/a", "a/b/d", "top", "a/b/c2"]
    for key in keys:
        put(store, key, key.encode())
    assert [found.key for found in store.list("")] == sorted(keys)
    assert [found.key for found in store.list("a/")] == ["a/b-c", "a/b/c", "a/b/c2", "a/b/d", "a/x"]
    assert [found.key for found in store.list("a/b")] == ["a/b-c", "a/b/c", "a/b/c2", "a/b/d"]
    assert [found.key for found in store.list("a/b/c")] == ["a/b/c", "a/b/c2"]
    assert [found.size for found in store.list("top")] == [3]
    assert list(store.list("a/b/cc")) == []
    assert list(store.list("c/")) == []


def test_deleted(store: ObjectStore) -> None:
    put(store, KEY, CONTENT)
    put(store, "job/other", b"x")
    store.delete(KEY)
    store.delete(KEY)
    assert [found.key for found in store.list("")] == ["job/other"]
    with pytest.raises(NotFound):
        store.read(KEY, 10)


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.b", "a b", "a\0b", "a" * 300, "a/" * 600 + "a"]
)
def test_keys_that_could_lead_elsewhere(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidSpec):
        put(store, key, b"x")
    with pytest.raises(InvalidSpec):
        store.delete(key)


def test_pace_is_asked_before_every_piece(store: ObjectStore) -> None:
    asked: list[int] = []
    store.put(KEY, [CONTENT, CONTENT], crc32c=of_parts([CONTENT, CONTENT]), pace=asked.append)
    assert sum(asked) == 2 * len(CONTENT)


def test_a_pace_that_raises_leaves_nothing(store: ObjectStore) -> None:
    class Cancelled(Exception):
        pass

    def pace(_nbytes: int) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        store.put(KEY, [CONTENT], crc32c=of_parts([CONTENT]), pace=pace)
    assert store.stat(KEY) is None
    assert put(store, KEY, CONTENT, if_absent=True)


def test_several_threads(store: ObjectStore) -> None:
    def one(index: int) -> bool:
        key = f"job/{index}"
        put(store, key, CONTENT[index:])
        return read_back(store, key, len(CONTENT) - index) == CONTENT[index:]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(one, range(24)))
    assert len(list(store.list("job/"))) == 24


def test_closing_twice(store: ObjectStore) -> None:
    store.close()
    store.close()

"""Cloud Storage at its worst, on the fake server: what is passing is got over, what is not is said."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from holdfast.domain.errors import IntegrityError, InvalidSpec, NotFound, Unavailable
from holdfast.stores.checksum import of_parts
from holdfast.stores.fake_gcs import FakeGcs
from holdfast.stores.gcs import GcsOptions, GcsStore

MIB = 1 << 20
LARGE = random.Random(1).randbytes(5 * MIB + 3)
SMALL = LARGE[:1000]
OPTIONS = GcsOptions(timeout_s=0.5, deadline_s=20.0, range_bytes=2 * MIB, small_bytes=1 * MIB)
MEDIA = "alt=media"
SESSION = "upload_id="


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs() as server:
        yield server


@pytest.fixture
def store(server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsStore]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
    store = GcsStore("bucket", "runs", OPTIONS)
    yield store
    store.close()


@pytest.fixture
def patient(store: GcsStore) -> Iterator[GcsStore]:
    """Repeats nothing because this machine was slow."""
    store = GcsStore("bucket", "runs", replace(OPTIONS, timeout_s=20.0, deadline_s=60.0))
    yield store
    store.close()


@pytest.fixture
def hasty(store: GcsStore) -> Iterator[GcsStore]:
    """Gives up soon."""
    store = GcsStore("bucket", "runs", replace(OPTIONS, deadline_s=0.6))
    yield store
    store.close()


def put(store: GcsStore, content: bytes, **options: Any) -> bool:
    return store.put("job/object", [content], crc32c=of_parts([content]), **options)


def read_back(store: GcsStore, size: int) -> bytes:
    target = bytearray(size)
    store.read_into("job/object", memoryview(target))
    return bytes(target)


def requests(server: FakeGcs, method: str, part: str) -> int:
    return sum(made == method and part in path for made, path in server.requests)


PASSING: dict[str, dict[str, Any]] = {
    "429": {"status": 429},
    "503": {"status": 503, "times": 2},
    "500": {"status": 500},
    "stall": {"stall_s": 1.0},
    "closed": {"after_bytes": 0},
}


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_writing_gets_over_it(server: FakeGcs, store: GcsStore, kind: str, content: bytes) -> None:
    for method in ("POST", "PUT"):
        server.fault(method=method, **PASSING[kind])
    assert put(store, content)
    assert read_back(store, len(content)) == content


@pytest.mark.parametrize("kind", PASSING)
def test_reading_gets_over_it(server: FakeGcs, store: GcsStore, kind: str) -> None:
    put(store, LARGE)
    for _ in range(2):
        server.fault(method="GET", path_part=MEDIA, **PASSING[kind])
    assert read_back(store, len(LARGE)) == LARGE
    server.fault(method="GET", path_part=MEDIA, **PASSING[kind])
    assert store.read("job/object", len(LARGE)) == LARGE


@pytest.mark.parametrize("kind", ["429", "503", "closed"])
def test_looking_gets_over_it(server: FakeGcs, store: GcsStore, kind: str) -> None:
    put(store, SMALL)
    server.fault(method="GET", **PASSING[kind])
    found = store.stat("job/object")
    assert found is not None
    server.fault(method="GET", **PASSING[kind])
    assert list(store.list("job/")) == [found]
    server.fault(method="DELETE", **PASSING[kind])
    store.delete("job/object")
    assert store.stat("job/object") is None


def test_the_client_library_requests_nothing_in_the_background(
    store: GcsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[str](), threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    put(store, SMALL)
    assert store.stat("job/object") is not None
    assert not [name for name in started if "fetch" in name]


def test_a_broken_upload_goes_on_where_it_broke(server: FakeGcs, patient: GcsStore) -> None:
    sent: list[int] = []
    server.fault(method="PUT", path_part=SESSION, after_bytes=2 * MIB)
    server.fault(method="PUT", path_part=SESSION, after_bytes=0, times=0)
    assert patient.put("job/object", [LARGE[: 3 * MIB], LARGE[3 * MIB :]], crc32c=of_parts([LARGE]), pace=sent.append)
    assert read_back(patient, len(LARGE)) == LARGE
    assert requests(server, "POST", "uploadType=resumable") == 1
    assert sum(sent) < 2 * len(LARGE)


def test_a_broken_download_goes_on_where_it_broke(server: FakeGcs, patient: GcsStore) -> None:
    put(patient, LARGE[: 2 * MIB])
    server.requests.clear()
    server.fault(method="GET", path_part=MEDIA, after_bytes=MIB)
    assert read_back(patient, 2 * MIB) == LARGE[: 2 * MIB]
    assert requests(server, "GET", MEDIA) == 2


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_lost_answer_is_no_failure(server: FakeGcs, store: GcsStore, content: bytes, if_absent: bool) -> None:
    """It was we who wrote it, so the answer is True: otherwise nobody would think that the commit was theirs."""
    path_part = SESSION if content is LARGE else "uploadType"
    server.fault(path_part=path_part, answer_lost=True)
    assert put(store, content, if_absent=if_absent)
    assert not put(store, content, if_absent=True)
    assert read_back(store, len(content)) == content


@pytest.fixture
def in_parts(store: GcsStore) -> Iterator[GcsStore]:
    store = GcsStore("bucket", "runs", replace(OPTIONS, composed_bytes=2 * MIB, part_bytes=MIB))
    yield store
    store.close()


@pytest.fixture
def in_parts_hasty(store: GcsStore) -> Iterator[GcsStore]:
    store = GcsStore("bucket", "runs", replace(OPTIONS, deadline_s=2.0, composed_bytes=2 * MIB, part_bytes=MIB))
    yield store
    store.close()


@pytest.mark.parametrize("kind", PASSING)
def test_parts_get_over_it(server: FakeGcs, in_parts: GcsStore, kind: str) -> None:
    for which in ({"method": "PUT"}, {"path_part": "/compose"}):
        server.fault(**which, **PASSING[kind])
    assert put(in_parts, LARGE, if_absent=True)
    assert not put(in_parts, LARGE, if_absent=True)
    assert read_back(in_parts, len(LARGE)) == LARGE
    assert [name for _, name in server.objects] == ["runs/job/object"]


def test_a_lost_answer_to_a_compose(server: FakeGcs, in_parts: GcsStore) -> None:
    server.fault(path_part="/compose", answer_lost=True)
    assert put(in_parts, LARGE, if_absent=True)
    assert [name for _, name in server.objects] == ["runs/job/object"]


@pytest.mark.parametrize("part", ["part-", "/compose"])
def test_a_part_that_cannot_be_stored(server: FakeGcs, in_parts: GcsStore, in_parts_hasty: GcsStore, part: str) -> None:
    server.fault(path_part=part, status=403, times=1)
    with pytest.raises(InvalidSpec):
        put(in_parts_hasty, LARGE)
    assert server.objects == {}
    server.fault(path_part=part, status=503, times=10_000)
    with pytest.raises(Unavailable):
        put(in_parts_hasty, LARGE)
    server.faults.clear()
    assert put(in_parts, LARGE)
    assert in_parts.read("job/object", len(LARGE)) == LARGE


def test_a_forgotten_session_starts_again(server: FakeGcs, patient: GcsStore) -> None:
    server.fault(method="PUT", path_part=SESSION, after_bytes=2 * MIB)
    server.fault(method="PUT", path_part=SESSION, status=410)
    assert put(patient, LARGE, if_absent=True)
    assert requests(server, "POST", "uploadType=resumable") == 2
    assert read_back(patient, len(LARGE)) == LARGE


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"stall_s": 30.0}, {"after_bytes": 0}], ids=["503", "stall", "closed"]
)
def test_given_up_in_time(server: FakeGcs, store: GcsStore, hasty: GcsStore, fault: dict[str, Any]) -> None:
    put(store, LARGE)
    server.fault(times=10_000, **fault)
    for call in (
        lambda: put(hasty, LARGE),
        lambda: put(hasty, SMALL),
        lambda: read_back(hasty, len(LARGE)),
        lambda: hasty.read("job/object", len(LARGE)),
        lambda: hasty.stat("job/object"),
        lambda: list(hasty.list("")),
        lambda: hasty.delete("job/object"),
    ):
        started = time.monotonic()
        with pytest.raises(Unavailable):
            call()
        assert time.monotonic() - started < 10


def test_nobody_there(store: GcsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    lonely = GcsStore("bucket", "", replace(OPTIONS, deadline_s=0.5))
    for call in (lambda: put(lonely, SMALL), lambda: put(lonely, LARGE), lambda: lonely.stat("job/object")):
        with pytest.raises(Unavailable):
            call()
    lonely.close()


@pytest.mark.parametrize("status", [401, 403])
def test_refused_is_not_tried_again(server: FakeGcs, patient: GcsStore, status: int) -> None:
    server.fault(status=status, times=10_000)
    for call in (
        lambda: put(patient, SMALL),
        lambda: put(patient, LARGE),
        lambda: read_back(patient, 10),
        lambda: list(patient.list("")),
        lambda: patient.delete("job/object"),
    ):
        server.requests.clear()
        with pytest.raises(InvalidSpec):
            call()
        assert sum("/o" in path for _, path in server.requests) == 1  # the library looks at the bucket besides


def test_no_such_bucket(server: FakeGcs, store: GcsStore) -> None:
    """It is the job file that is wrong; an object that is not there would be nothing to worry about."""
    server.missing_buckets.add("bucket")
    for call in (
        lambda: put(store, SMALL),
        lambda: put(store, LARGE),
        lambda: read_back(store, 10),
        lambda: store.read("job/object", 10),
        lambda: list(store.list("")),
    ):
        with pytest.raises(InvalidSpec, match="a bucket that exists"):
            call()


def test_wrong_parts_are_not_composed(server: FakeGcs, in_parts: GcsStore) -> None:
    with pytest.raises(IntegrityError):
        in_parts.put("job/object", [LARGE], crc32c=of_parts([LARGE]) ^ 1)
    assert server.objects == {}


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_bytes_that_change_on_the_way_are_refused(server: FakeGcs, store: GcsStore, content: bytes) -> None:
    """The sum that travels with the upload is the caller's, so the server sees what the wire did."""
    receive = server.store

    def harmed(bucket: str, name: str, body: bytearray, *rest: Any) -> dict[str, Any]:
        body[7] ^= 1
        return receive(bucket, name, body, *rest)

    server.store = harmed  # type: ignore[method-assign, assignment]
    with pytest.raises(IntegrityError):
        put(store, content)
    assert server.objects == {}


def test_a_small_read_is_verified(server: FakeGcs, store: GcsStore, hasty: GcsStore) -> None:
    put(store, SMALL)
    server.rot("bucket", "runs/job/object", 3)
    with pytest.raises(Unavailable, match="checksum"):
        hasty.read("job/object", 10_000)


def test_deleted_while_it_is_read(server: FakeGcs, store: GcsStore) -> None:
    put(store, LARGE)
    server.fault(method="GET", path_part=MEDIA, after_bytes=10, times=3)
    with server.lock:
        kept = dict(server.objects)
    target = memoryview(bytearray(2 * MIB))
    server.objects.clear()
    with pytest.raises(NotFound):
        store.read_into("job/object", target)
    server.objects.update(kept)


def test_nobody_writes_to_the_target_after_a_failure(server: FakeGcs, store: GcsStore) -> None:
    """One range fails for good while others stall: when the call raises, the memory is the caller's again."""
    put(store, LARGE)
    server.fault(method="GET", path_part=MEDIA, stall_s=0.3, times=2)
    server.fault(method="GET", path_part=MEDIA, status=403)
    target = bytearray(len(LARGE))
    with pytest.raises(InvalidSpec):
        store.read_into("job/object", memoryview(target))
    before = bytes(target)
    time.sleep(0.4)  # longer than the others stall: this is what must not matter
    assert bytes(target) == before


def test_connections_are_used_again(server: FakeGcs, store: GcsStore) -> None:
    """A stream that broke is closed, the others are kept: what is open stays bounded."""
    port = int(server.endpoint.rpartition(":")[2])

    def open_connections() -> int:
        peers = [each.raddr for each in psutil.Process().net_connections(kind="tcp4") if each.status == "ESTABLISHED"]
        return sum(bool(peer) and peer[1] == port for peer in peers)

    put(store, LARGE)
    for _ in range(30):
        server.fault(method="GET", path_part=MEDIA, after_bytes=10)
        assert read_back(store, len(LARGE)) == LARGE
    assert open_connections() <= OPTIONS.streams + 2

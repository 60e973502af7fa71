"""A smoke test against an emulator that others wrote. It ignores every precondition, so what hangs on them is tested on our
own fake; here it is about the requests: whether a stranger understands them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import stored

from holdfast.domain.errors import NotFound
from holdfast.stores import layout, transfer
from holdfast.stores.checksum import of_parts
from holdfast.stores.gcs import GcsOptions, GcsStore

emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")

CONTENT = random.Random(2).randbytes(300_000)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsStore]:
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    port = server._api._httpd.socket.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    store = GcsStore(
        "bucket", "runs", GcsOptions(timeout_s=5.0, deadline_s=10.0, small_bytes=100_000, range_bytes=1 << 17)
    )
    yield store
    store.close()
    server.stop()


@pytest.mark.parametrize("size", [10, len(CONTENT)], ids=["small", "resumable"])
def test_there_and_back(store: GcsStore, size: int) -> None:
    content = CONTENT[:size]
    assert store.put("job/object", [content], crc32c=of_parts([content]))
    target = bytearray(size)
    store.read_into("job/object", memoryview(target))
    assert target == content
    assert store.read("job/object", size) == content
    found = store.stat("job/object")
    assert found is not None
    assert (found.size, found.crc32c) == (size, of_parts([content]))
    assert list(store.list("job/")) == [found]
    store.delete("job/object")
    store.delete("job/object")
    with pytest.raises(NotFound):
        store.read("job/object", size)


def test_a_checkpoint(store: GcsStore) -> None:
    checkpoint = stored.save(store, 7, tensor_bytes=200_000)
    assert checkpoint is not None
    assert layout.steps(store, "gpt") == [(1, 7)]
    assert list(transfer.verify(store, layout.load(store, "gpt", 1, 7))) == []
    layout.delete_step(store, "gpt", 1, 7)
    assert layout.survey(store, "gpt") == []

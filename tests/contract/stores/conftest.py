"""Every store under one contract: in memory, a directory, Cloud Storage on the fake server (small and large objects both
ways), each as a factory, because a contract between writers needs two of them."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import servers
from servers import Choice

from holdfast.cli.demo.course import examples
from holdfast.stores import ObjectStore
from holdfast.stores.file import FileStore
from holdfast.stores.gcs import GcsOptions, GcsStore
from holdfast.stores.memory import InMemory

Opened = Callable[[], ObjectStore]


@pytest.fixture(scope="session")
def gcs_endpoint(server_choice: Choice) -> Iterator[str]:
    with servers.gcs_server(server_choice) as endpoint:
        yield endpoint


@pytest.fixture(params=["memory", "file", "plug-in", "gcs", "gcs in ranges", "gcs in parts"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens the same store, once more with every call."""
    stores: list[ObjectStore] = []

    def keep(store: ObjectStore) -> ObjectStore:
        stores.append(store)
        return store

    match request.param:
        case "memory":
            shared = InMemory()
            yield lambda: keep(shared)
        case "file":
            yield lambda: keep(FileStore(tmp_path / "store"))
        case "plug-in":
            monkeypatch.syspath_prepend(str(examples() / "plugins" / "store"))
            example = importlib.import_module("holdfast_example_sqlite")
            yield lambda: keep(example.SqliteStore(tmp_path / "store.db"))
        case kind:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("gcs_endpoint"))
            # the same paths as in production, only at sizes that a test can afford
            sizes = {
                "gcs": GcsOptions(),
                "gcs in ranges": GcsOptions(small_bytes=0, range_bytes=1000),
                "gcs in parts": GcsOptions(small_bytes=0, composed_bytes=2000, part_bytes=700),
            }[kind]
            bucket = f"bucket-{uuid.uuid4().hex}"  # one server for all tests
            yield lambda: keep(GcsStore(bucket, "some/prefix", sizes))
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Opened) -> ObjectStore:
    return opened()

"""What `checkpoint.resume` is found to mean, and what an operator reads when it means nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from stored import save
from supervising import job_body

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.generations import StoredStep
from holdfast.domain.job import JobSpec
from holdfast.domain.mesh import Mesh
from holdfast.log.names import INBOX
from holdfast.stores import layout
from holdfast.stores.checksum import crc32c
from holdfast.stores.file import FileStore
from holdfast.stores.memory import InMemory
from holdfast.supervisor.inbox import InboxEvent
from holdfast.supervisor.resume import resolve
from holdfast.wire import records
from holdfast.wire.jobfile import parse_job

MESH = Mesh.of({"dp": 2, "pp": 2})


def spec(resume: str, **mesh: int) -> JobSpec:
    mesh = mesh or {"dp": 2, "pp": 2}
    nodes = Mesh.of(mesh).world_size
    checkpoint = {"resume": resume}
    return parse_job({"name": "new", "script": "/x.py", "nodes": nodes, "mesh": mesh, "checkpoint": checkpoint})


@pytest.fixture
def store() -> InMemory:
    """Job gpt: step 10 of attempt 1 and 2, step 20 of attempt 1, and a step 30 that was never completed."""
    store = InMemory()
    for attempt, step in ((1, 10), (1, 20), (2, 10)):
        save(store, step, attempt=attempt)
    save(store, 30, attempt=2, ranks=(0, 1))
    return store


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", (2, 10)), ("@20", (1, 20)), ("@10", (2, 10)), ("@1/10", (1, 10))],
)
def test_the_newest_complete_step_or_the_one_that_is_named(
    store: InMemory, wanted: str, found: tuple[int, int]
) -> None:
    assert resolve(spec(f"gs://bucket/gpt{wanted}"), lambda _: store) == StoredStep(*found, MESH, False)


def test_a_job_that_starts_from_step_0_looks_nowhere() -> None:
    assert resolve(parse_job({"name": "new", "script": "/x.py"}), lambda _: pytest.fail("opened")) is None


def test_any_number_of_replicas_will_do(store: InMemory) -> None:
    assert resolve(spec("gs://bucket/gpt", dp=3, pp=2), lambda _: store) is not None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("gpt@30", "expected a complete step of gpt in gs://bucket, newest first: 10 (attempt 2), 20 (attempt 1), 10"),
        ("gpt@3/10", "expected a complete step of gpt in gs://bucket"),
        ("llama", "expected a job with checkpoints in gs://bucket: gpt"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(store: InMemory, wanted: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(said)) as raised:
        resolve(spec(f"gs://bucket/{wanted}"), lambda _: store)
    assert raised.value.field == "checkpoint.resume"


def test_an_empty_store_says_so() -> None:
    with pytest.raises(InvalidSpec, match="there are none in gs://bucket"):
        resolve(spec("gs://bucket/gpt"), lambda _: InMemory())


def test_another_mesh_is_refused(store: InMemory) -> None:
    with pytest.raises(InvalidSpec, match="a checkpoint of the mesh dp 2 × pp 4"):
        resolve(spec("gs://bucket/gpt", dp=2, pp=4), lambda _: store)


def test_a_damaged_manifest_is_passed_over_and_named_when_it_was_asked_for(store: InMemory) -> None:
    key = layout.manifest_key("gpt", 2, 10)
    raw = store.read(key, 1 << 20).replace(b'"step":10', b'"step":11')
    store.delete(key)
    store.put(key, [raw], crc32c=crc32c(raw))
    found = resolve(spec("gs://bucket/gpt"), lambda _: store)
    assert found is not None
    assert (found.attempt, found.step) == (1, 20)
    with pytest.raises(InvalidSpec, match=r"a checkpoint that can be read: .*its own checksum"):
        resolve(spec("gs://bucket/gpt@2/10"), lambda _: store)


@pytest.mark.anyio
async def test_who_submits_hears_at_once_what_is_there(api: Any, tmp_path: Path) -> None:
    save(FileStore(tmp_path), 10)
    body = job_body(nodes=4, mesh={"dp": 2, "pp": 2}, checkpoint={"resume": f"file://{tmp_path}/gpt@7"})
    refused = await api.http.post("/v1/jobs", json=body)
    assert refused.status_code == 422
    [error] = refused.json()["errors"]
    assert error["field"] == "checkpoint.resume"
    assert error["expected"].endswith("newest first: 10 (attempt 1)")

    body["checkpoint"]["resume"] = f"file://{tmp_path}/gpt"
    assert (await api.http.post("/v1/jobs", json=body)).status_code == 202
    [entry] = await api.log.read(INBOX)
    request = records.loads(entry.entry.data, InboxEvent)
    assert request.event.resumed == StoredStep(1, 10, MESH, False)

"""What rank 0 writes into TensorBoard, Weights & Biases and MLflow, read back from their own files; and what the API adds."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from json_server import JsonHandler, serving
from waiting import TIMEOUT_S, wait_until

import holdfast.train as hf
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.integrations import loggers
from holdfast.integrations.loggers.supervisor import Supervisor
from holdfast.supervisor.api import incident_models, job_models
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, RestoreTarget, World

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TWO, FOUR = Mesh.of({"dp": 2}), Mesh.of({"dp": 4})
SOON_S, NEVER_S = 0.01, 3600.0


def a_run(
    *,
    rank: int = 0,
    mesh: Mesh = TWO,
    generation: int = 1,
    restored: int = 0,
    before: Mesh | None = None,
    job: str = "gpt",
) -> hf.Run:
    """The run of one rank, whose checkpoint, if any, is already restored."""
    target = RestoreTarget(step=restored, attempt=generation, path="") if restored else None
    environment = Environment(
        World(mesh, rank, generation), job=job, first_attempt=7 if job else 0, restore=target, previous_mesh=before
    )
    run = hf.Run(
        environment=environment,
        device=torch.device("cpu"),
        notes=Notes(agent="", replicator="", job=job, generation=generation, rank=rank),
        control=Control(None),
        process_group_s=0.0,
    )
    run._restored, run._done = True, restored
    return run


def train(run: hf.Run, steps: int, after: Callable[[int], None] = lambda step: None) -> None:
    for step in range(run.steps_finished, run.steps_finished + steps):
        with run.step(step) as s, run.data_wait():
            s.log(tokens=100)
        after(step + 1)


def incident(number: int, **changes: Any) -> dict[str, Any]:
    """An incident as the API shows it."""
    values: dict[str, Any] = {
        "id": f"inc-{number}", "job": "gpt", "kind": "crash", "cause": "exit code 1", "state": "resolved", "severity": "fault",
        "node": "n3", "rank": 1, "gpu": None, "generation": 1, "new_generation": 2, "decided_by": "policy",
        "action": {"kind": "restart", "reason": "The node is healthy."},
        "fault_at": 100.0, "detected_at": 101.0, "decided_at": None, "prepared_at": None, "first_step_at": 104.5,
        "restored_step": 20, "last_step": 23, "rework_steps": 3, "phases_s": {}, "restored_from": {}, "outcome": "resumed",
        "trace_id": "", "findings": [], "evidence": {}, "walk": [],
    }  # fmt: skip
    return incident_models.Incident(**{**values, **changes}).model_dump(mode="json")


GOODPUT = job_models.Goodput(
    job="gpt", started_at=50.0, wall_s=60.0, useful_s=40.0, unmeasured_s=0.0, badput_s={"rework": 5.0, "restart": 15.0},
    goodput_job=0.66, goodput_paid=None, fault_free_tokens_per_s=1.0, tokens=10, rework_steps=3, world_sizes=[],
    tokens_per_s=[],
).model_dump()  # fmt: skip


@pytest.fixture
def api() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of an API that asks for the token `secret`, and its incidents, newest first."""
    incidents: list[dict[str, Any]] = []

    class Api(JsonHandler):
        def do_GET(self) -> None:  # noqa: N802  # the name of the standard library
            answers: Mapping[str, dict[str, Any]] = {
                "/v1/jobs/gpt?ranks=false": {"tokens_per_s": 512.0, "submitted_at": 50.0},
                "/v1/jobs/gpt/goodput": GOODPUT,
                "/v1/incidents?job=gpt&limit=50": {"items": incidents},
            }
            if self.headers.get("Authorization") != "Bearer secret":
                self.send(401, {})
            else:
                self.send(200 if self.path in answers else 404, answers.get(self.path, {}))

    with serving(Api) as url:
        yield url, incidents


# The loggers are imported by the tests that use them: every process of tests reads this file, and three seconds go into them.


def events(directory: Path) -> EventAccumulator:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory / "holdfast"))
    read.Reload()
    return read


def steps(read: EventAccumulator, tag: str) -> list[int]:
    """The steps of a metric; none if it has not been written yet."""
    return [each.step for each in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []


def texts(read: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(each.step, each.tensor_proto.string_val[0].decode()) for each in read.Tensors(f"{tag}/text_summary")]


def test_tensorboard_shows_the_world_and_what_rank_0_measured(tmp_path: Path) -> None:
    run = a_run()
    with loggers.attach(run, loggers.TensorBoard(tmp_path), every_s=NEVER_S) or pytest.fail("rank 0 logs"):
        train(run, 5)
    read = events(tmp_path)
    assert [each.value for each in read.Scalars("holdfast/world_size")][-1] == 2.0
    assert steps(read, "holdfast/world_size")[-1] == 5
    assert all(each.value > 0 for each in read.Scalars("holdfast/rank0/tokens_per_s"))
    assert not [tag for tag in read.Tags()["scalars"] if "/job/" in tag], "it has received nothing about the job"
    assert "holdfast/rank0/comm_wait_s" not in read.Tags()["scalars"], "nobody measured it: not the same as no wait"
    ((step, text),) = texts(read, "holdfast/changes")
    assert (step, text) == (0, "**Generation 1 started without a checkpoint**\n\nMesh dp 2, 2 ranks.")


def test_after_a_restart_tensorboard_purges_the_repeated_steps_and_shows_the_resize(tmp_path: Path) -> None:
    first = a_run(mesh=FOUR)

    def report(step: int) -> None:
        written = tmp_path / "holdfast"
        wait_until(
            lambda: step in steps(events(tmp_path), "holdfast/world_size") if any(written.glob("*")) else False,
            description=f"step {step} is written",
        )

    with loggers.attach(first, loggers.TensorBoard(tmp_path), every_s=SOON_S) or pytest.fail("rank 0 logs"):
        train(first, 6, report)
    second = a_run(generation=2, restored=3, before=FOUR)
    with loggers.attach(second, loggers.TensorBoard(tmp_path), every_s=NEVER_S) or pytest.fail("rank 0 logs"):
        train(second, 2)
    read = events(tmp_path)
    sizes = [(each.step, each.value) for each in read.Scalars("holdfast/world_size")]
    assert sizes[:3] == [(1, 4.0), (2, 4.0), (3, 4.0)]
    assert sizes[3:] in ([(4, 2.0), (5, 2.0)], [(5, 2.0)]), "steps 4 to 6 of the first generation are purged"
    assert "That checkpoint was saved by mesh dp 4." in texts(read, "holdfast/changes")[-1][1]


def test_the_api_adds_goodput_and_those_incidents_that_led_to_this_generation(
    tmp_path: Path, api: tuple[str, list[dict[str, Any]]]
) -> None:
    url, incidents = api
    incidents += [
        incident(5, state="preparing", generation=2, new_generation=None, first_step_at=None),
        incident(4, generation=2, new_generation=None, restored_step=None, last_step=21, action=None),
        incident(3),
        incident(2, generation=0, new_generation=1),  # logged by the generation before
        incident(1, fault_at=49.0),  # of an earlier submission
    ]
    run = a_run(generation=2, restored=20)
    supervisor = Supervisor(url, "secret", job="gpt", generation=2)
    with loggers.attach(
        run, loggers.TensorBoard(tmp_path), every_s=SOON_S, api_every_s=SOON_S, supervisor=supervisor
    ) or pytest.fail("rank 0 logs"):
        train(run, 1)
        wait_until(
            lambda: (
                any((tmp_path / "holdfast").glob("*")) and "holdfast/incident" in events(tmp_path).Tags()["scalars"]
            ),
            description="the incidents are written",
        )
    read = events(tmp_path)
    assert [(each.step, each.value) for each in read.Scalars("holdfast/incident")] == [(20, 1.0), (21, 1.0)]
    first, second = (text for _, text in texts(read, "holdfast/incidents"))
    assert first.startswith("**Incident inc-3: crash, node n3, rank 1**")
    assert "Recovered 4.5 s after the fault.\n\nSteps repeated: 3." in first
    assert "Action: restart. The node is healthy." in first
    assert "inc-4" in second
    for tag, value in {
        "goodput": 0.66,
        "useful_s": 40.0,
        "badput/rework_s": 5.0,
        "tokens_per_s": 512.0,
    }.items():
        assert read.Scalars(f"holdfast/job/{tag}")[-1].value == pytest.approx(value)


def test_an_api_that_refuses_is_logged_once_and_nothing_is_invented(
    tmp_path: Path, api: tuple[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run()
    asked = threading.Semaphore(0)

    class Counting(Supervisor):
        def read(self, step: int) -> Any:
            asked.release()
            return super().read(step)

    supervisor = Counting(api[0], "wrong", job="gpt", generation=1)
    with loggers.attach(
        run, loggers.TensorBoard(tmp_path), every_s=SOON_S, api_every_s=SOON_S, supervisor=supervisor
    ) or pytest.fail("rank 0 logs"):
        train(run, 1)
        for _ in range(3):
            assert asked.acquire(timeout=TIMEOUT_S)
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == [
        "goodput and incidents are not logged while the Holdfast API cannot be read: HTTP Error 401: Unauthorized"
    ]
    assert not [tag for tag in events(tmp_path).Tags()["scalars"] if "/job/" in tag]


def records(directory: Path) -> list[Any]:
    """The records of one offline run: W&B's file is LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    raw, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        if kind == 0 or at + 7 + length > len(raw):  # not written yet
            break
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made by protobuf at run time
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def test_wandb_gets_its_own_axis_in_the_rows_of_the_script(
    tmp_path: Path, api: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    api[1].append(incident(3))
    run = a_run(generation=2, restored=20)
    theirs = loggers.wandb_run(run, project="gpt", dir=str(tmp_path))
    assert isinstance(theirs, wandb.Run)
    assert theirs.id == "gpt-7", "the submission's, which every generation continues"
    supervisor = Supervisor(api[0], "secret", job="gpt", generation=2)
    rows: list[float] = []
    with loggers.attach(
        run, loggers.Wandb(theirs), every_s=SOON_S, api_every_s=SOON_S, supervisor=supervisor
    ) or pytest.fail("rank 0 logs"):
        train(run, 1)

        def reported() -> bool:
            theirs.log({"loss": 1.0})
            rows.append(1.0)
            return "holdfast/job/goodput" in dict(theirs.summary)

        wait_until(reported, description="a row has the report")
    assert theirs.step == len(rows), "rows are counted by the script's own calls"
    theirs.log({"loss": 2.0})
    theirs.finish()
    wait_until(
        lambda: any(record.WhichOneof("record_type") == "exit" for record in records(tmp_path)),
        description="the end of the run is in its file, which wandb writes in another process",
    )
    written = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records(tmp_path)
        if record.WhichOneof("record_type") == "history"
    ]
    assert [float(row["loss"]) for row in written] == [*rows, 2.0]
    last = {key: value for row in written for key, value in row.items()}
    assert (float(last["holdfast/world_size"]), float(last["holdfast/step"])) == (2.0, 21.0)
    assert float(last["holdfast/incident"]) == 1.0
    assert float(last["holdfast/job/badput/restart_s"]) == 15.0


def test_mlflow_continues_the_run_of_the_submission(
    tmp_path: Path, api: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    api[1].append(incident(3))
    ids = set()
    client = mlflow.MlflowClient(tracking_uri=uri)
    for generation, restored in ((1, 0), (2, 20)):
        run, after = a_run(generation=generation, restored=restored), Recorded()
        after.failing = False
        run_id = loggers.mlflow_run(run, "gpt", tracking_uri=uri)
        assert run_id is not None
        ids.add(run_id)
        supervisor = Supervisor(api[0], "secret", job="gpt", generation=generation)
        sinks = loggers.Mlflow(run_id, tracking_uri=uri), after
        with loggers.attach(run, *sinks, every_s=SOON_S, supervisor=supervisor) or pytest.fail("rank 0 logs"):
            train(run, 1)
            assert after.flushed.wait(TIMEOUT_S), "the first report, with what the API says, was written"
    (run_id,) = ids
    sizes = client.get_metric_history(run_id, "holdfast/world_size")
    assert {each.step for each in sizes} == {1, 21}
    assert [each.step for each in client.get_metric_history(run_id, "holdfast/incident")] == [20]
    assert client.get_run(run_id).data.metrics["holdfast/job/badput/rework_s"] == 5.0
    text = client.list_artifacts(run_id, "holdfast/incidents")
    assert [each.path for each in text] == ["holdfast/incidents/inc-3.md"]
    assert {each.path for each in client.list_artifacts(run_id, "holdfast/changes")} == {
        "holdfast/changes/generation-1.md",
        "holdfast/changes/generation-2.md",
    }
    assert loggers.mlflow_run(a_run(job=""), "gpt", tracking_uri=uri) != run_id, (
        "without an agent no submission is known"
    )


class Recorded:
    """A logger that fails on request."""

    def __init__(self) -> None:
        self.failing = True
        self.entries: list[loggers.Entry] = []
        self.flushed = threading.Event()
        self.tried = threading.Semaphore(0)

    def check(self) -> None: ...
    def open(self, restored_step: int) -> None:
        self.tried.release()
        if self.failing:
            raise OSError("no route to host")

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def entry(self, entry: loggers.Entry) -> None:
        self.entries.append(entry)

    def flush(self) -> None:
        self.flushed.set()

    def close(self) -> None: ...


def test_a_logger_that_fails_does_not_end_the_training_and_its_texts_are_written_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    run, sink = a_run(), Recorded()
    with loggers.attach(run, sink, every_s=SOON_S) or pytest.fail("rank 0 logs"):
        train(run, 2)
        for _ in range(3):
            assert sink.tried.acquire(timeout=TIMEOUT_S)
        sink.failing = False
        assert sink.flushed.wait(TIMEOUT_S)
    assert [entry.id for entry in sink.entries] == ["generation-1"]
    assert [record.message for record in caplog.records] == [
        "Recorded cannot be written: OSError('no route to host'). Training continues"
    ]


def test_before_a_planned_stop_everything_is_written(tmp_path: Path) -> None:
    run, sink = a_run(), Recorded()
    sink.failing = False
    reporter = loggers.attach(run, sink, every_s=NEVER_S)
    assert reporter is not None
    train(run, 3)
    run._leavings.call(hf.Leaving(3, "scale_up: n3 is back"))
    stop = sink.entries[-1]
    assert (stop.step, stop.title, stop.text) == (3, "Planned stop after step 3", "scale_up: n3 is back")
    reporter.close()


def test_other_ranks_do_nothing_and_need_no_logger() -> None:
    run = a_run(rank=1)
    assert loggers.wandb_run(run, project="gpt") is None
    assert loggers.mlflow_run(run, "gpt") is None
    assert loggers.attach(run, loggers.Wandb(None), loggers.Mlflow(None), loggers.TensorBoard("/nowhere")) is None
    assert run._step_callbacks == []


def test_what_cannot_be_used_is_refused_on_rank_0() -> None:
    for sink in (loggers.Wandb(None), loggers.Mlflow(None)):
        with pytest.raises(InvalidSpec, match="on rank 0"):
            loggers.attach(a_run(), sink)
    with pytest.raises(InvalidSpec, match="every_s"):
        loggers.attach(a_run(), Recorded(), every_s=0)
    with pytest.raises(InvalidSpec, match="HOLDFAST_API"):
        Supervisor("file:///etc/passwd", "", job="gpt", generation=1)


def test_the_environment_names_the_api_only_under_an_agent() -> None:
    environ = {"HOLDFAST_API": "http://127.0.0.1:1"}
    assert Supervisor.of_environment(environ, job="gpt", generation=1) is not None
    assert Supervisor.of_environment(environ, job="", generation=0) is None
    assert Supervisor.of_environment({}, job="gpt", generation=1) is None

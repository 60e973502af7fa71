"""Logs, error files and environments: what a worker leaves behind, and what it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.workers.environment import Site, inherited_environment, start_environment, worker_environment
from holdfast.agent.workers.errors import read_error_file
from holdfast.agent.workers.learned import Imports
from holdfast.agent.workers.logs import GENERATIONS_KEPT, TAIL_BYTES, TAIL_LINES, WorkerLogs, open_log, tail
from holdfast.agent.workers.template import TemplateKey
from holdfast.domain.errors import HoldfastError
from holdfast.domain.generations import Placement, ShardKey
from holdfast.domain.job import CheckpointSpec, HangSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Prepare
from holdfast.domain.replication import StagedShard
from holdfast.domain.signals import WorkerError

MIB = 1 << 20


def test_only_the_newest_generations_keep_their_logs(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path)
    for generation in range(1, 13):
        (logs.create("gpt", generation) / "rank-0.log").touch()
    kept = {path.name for path in (tmp_path / "gpt").iterdir()}
    assert kept == {f"g{number}" for number in range(13 - GENERATIONS_KEPT, 13)}  # by number: g9 is older than g10


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a directory should be")
    with pytest.raises(HoldfastError, match=str(tmp_path)):
        WorkerLogs(tmp_path / "logs").create("gpt", 1)
    with pytest.raises(HoldfastError, match="rank-0"):
        open_log(tmp_path / "none" / "rank-0.log")


def test_the_tail_is_bounded_in_lines_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == ()
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail(path) == tuple(f"line {number}" for number in range(1000 - TAIL_LINES, 1000))
    path.write_bytes(b"\xff" * (2 * TAIL_BYTES) + b"\nend\n")
    assert tail(path) == ("end",)
    path.write_text("y" * 2 * TAIL_BYTES)
    assert len(tail(path)[0]) == TAIL_BYTES


def write(path: Path, message: Any) -> Path:
    path.write_text(json.dumps({"message": message}))
    return path


def test_error_files_of_torch_and_of_the_template(tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "/a/train.py", line 12, in main\n    step()\nValueError: bad: loss\n'
    of_torch = {"message": "ValueError: bad: loss", "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"}}
    assert read_error_file(write(tmp_path / "torch", of_torch)) == WorkerError(
        "ValueError", "bad: loss", ("/a/train.py:12 main",), 1700000000.0
    )
    ours = {"type": "torch.distributed.DistBackendError", "message": "peer", "frames": ["/a.py:1 f"], "at": 5.5}
    of_template = {**of_torch, "extraInfo": {"exception": ours, "timestamp": "5"}}
    assert read_error_file(write(tmp_path / "ours", of_template)) == WorkerError(
        "torch.distributed.DistBackendError", "peer", ("/a.py:1 f",), 5.5
    )
    assert read_error_file(write(tmp_path / "bare", "Signal 9 received")) == WorkerError("", "Signal 9 received")


def test_the_last_collectives_come_with_the_exception_and_nonsense_does_not(tmp_path: Path) -> None:
    exception: dict[str, Any] = {"type": "RuntimeError", "message": "gloo", "frames": [], "at": 5.5}
    record = {"message": "x", "extraInfo": {"exception": exception}}
    exception["collectives"] = [["0", 7, "all_reduce"], ["0", -3, "odd"], ["1", 1 << 70, "odd"], ["0", 8, "x" * 1000]]
    found = read_error_file(write(tmp_path / "error", record))
    assert found is not None
    assert (found.call_group, found.call_seq) == (("0", "0"), (7, 8))
    assert found.call[0] == "all_reduce"
    assert len(found.call[1]) < 300
    exception["collectives"] = [["0"], 7]
    found = read_error_file(write(tmp_path / "error", record))
    assert found is not None
    assert (found.type, found.call) == ("RuntimeError", ())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"message": 3}', '{"message": {"message": []}, "x": 1}', '{"message": {}}']
)
def test_a_torn_error_file_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    found = read_error_file(tmp_path / "error.json")
    assert found is None or found.message == "[]"
    assert read_error_file(tmp_path / "none.json") is None


def prepare(**changes: Any) -> Prepare:
    values: dict[str, Any] = {
        "job": "gpt", "generation": 4, "attempt": 3, "mesh": Mesh.of({"dp": 2, "pp": 2}),
        "placement": Placement(slot=1, node="n", first_rank=2, nproc=2), "nnodes": 2,
        "launch": LaunchSpec("/a/train.py", env=(("MINE", "1"), ("RANK", "77"))),
        "checkpoint": CheckpointSpec(interval_steps=20), "hang": HangSpec(), "token": "t", "restore_step": 0,
    }  # fmt: skip
    return Prepare(**{**values, **changes})


SITE = Site(Path("/agent"), Path("/dev/shm/n"), Path("/disk"), Path("/agent/notes.sock"), "/agent/replicator.notes")


def test_a_worker_has_torchruns_environment_and_ours() -> None:
    environment = worker_environment(prepare(), 1, SITE, Path("/agent/e.json"), {"PATH": "/bin"})
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_ERROR_FILE": "/agent/e.json", "OMP_NUM_THREADS": "1",
        "MINE": "1", "PATH": "/bin", "HOLDFAST_MESH": '{"dp": 2, "pp": 2}', "HOLDFAST_IMAGES": "/dev/shm/n/gpt/w1",
        "HOLDFAST_ATTEMPT": "3", "HOLDFAST_FIRST_ATTEMPT": "0", "HOLDFAST_CHECKPOINT_INTERVAL_STEPS": "20",
        "HOLDFAST_IMAGE_FALLBACK_DIR": "/disk/gpt/overflow/w1",
    }  # fmt: skip
    assert expected.items() <= environment.items()
    assert "HOLDFAST_PREVIOUS_MESH" not in environment
    resized = prepare(restore_step=40, restore_mesh=Mesh.of({"dp": 3, "pp": 2}))
    assert worker_environment(resized, 0, SITE, Path("/e"), {})["HOLDFAST_PREVIOUS_MESH"] == '{"dp": 3, "pp": 2}'


def test_start_tells_the_meeting_point_and_the_shard() -> None:
    shard = StagedShard(2, ShardKey(attempt=3, step=40, rank=2), "/dev/shm/n/x", "memory")
    environment = start_environment(prepare(), ("host", 1234), [shard])
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("host", "1234")
    assert json.loads(environment["HOLDFAST_RESTORE"]) == {"step": 40, "attempt": 3, "path": "/dev/shm/n/x"}
    assert "HOLDFAST_RESTORE" not in start_environment(prepare(), ("host", 1), ())


def test_of_several_parts_the_ranks_own_leads() -> None:
    parts = [StagedShard(1, ShardKey(3, 40, rank), f"/shm/{rank}", "memory") for rank in (0, 1)]
    restore = json.loads(start_environment(prepare(), ("host", 1), parts)["HOLDFAST_RESTORE"])
    assert restore == {"step": 40, "attempt": 3, "path": "/shm/1", "paths": ["/shm/0", "/shm/1"]}
    order = prepare(restore_mesh=Mesh.of({"dp": 1, "pp": 2}))
    new_rank = [StagedShard(2, part.shard, part.path, part.source) for part in parts]
    assert json.loads(start_environment(order, ("host", 1), new_rank)["HOLDFAST_RESTORE"])["path"] == "/shm/0"


def test_the_agents_own_settings_stay_with_it() -> None:
    assert inherited_environment({"HOLDFAST_NODE": "n", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_only_what_matters_at_import_needs_another_template() -> None:
    inherited = {"PYTHONPATH": "/lib"}
    plain = TemplateKey.of("/a", (), {"LR": "1", "PYTHONPATH": "/lib", "OMP_NUM_THREADS": "8"}, inherited)
    assert plain == TemplateKey()
    assert TemplateKey.of("/a", (), {"PYTHONPATH": "/other"}, inherited) != plain
    assert TemplateKey.of("/a", ("model",), {}, inherited) == TemplateKey(("model",), ("/a",))
    prepares = TemplateKey.of("/a", ("data:prepare",), {"LR": "1", "PYTHONPATH": "/lib"}, inherited)
    assert prepares.env == (("LR", "1"),), "a prepare function sees what the job sets"
    learned = TemplateKey.of("/a", (), {"LR": "1", "PYTHONPATH": "/lib"}, inherited, Imports(("yaml",)))
    assert learned == TemplateKey(env=(("LR", "1"),), learned=Imports(("yaml",))), (
        "modules that nobody named see the whole environment"
    )

"""Real processes, real kills: a recovered run is the run that was never interrupted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from losses import losses
from train_workers import Workers, elect, elect_parts

from holdfast.domain import worker
from holdfast.shards import Reader
from holdfast.train.dcp import export

SMALL = ["--layers", "2", "--width", "16", "--heads", "2", "--seq", "16", "--global-batch", "12", "--micro-batch", "2"]
STEPS = 24


def gpt(out: Path, *more: str, steps: int = STEPS) -> list[str]:
    return [*SMALL, "--steps", str(steps), "--out", str(out), *more]


def payloads(directory: Path, ranks: int, step: int) -> list[dict[str, bytes]]:
    """The saved tensors of every rank at `step`."""
    found = []
    for rank in range(ranks):
        for path in (directory / f"images-{rank}").glob("*.image"):
            with Reader(path) as shard:
                if shard.key.step == step:
                    found.append({spec.fqn: bytes(view) for spec, view in shard.items()})
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dp 2 from start to end: the reference."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    with Workers(directory, mesh={"dp": 2}, args=gpt(directory), interval_steps=8) as workers:
        assert workers.finish() == [0, 0], workers.log(0)
    return directory


def test_a_killed_rank_costs_time_and_nothing_else(tmp_path: Path, uninterrupted: Path) -> None:
    mesh = {"dp": 2}
    # Long steps: from step 12 to the last there are seconds in which to kill a rank.
    with Workers(tmp_path, mesh=mesh, args=gpt(tmp_path, "--step-s-min", "0.4")) as workers:
        workers.wait_for("step", step=12)
        workers.kill(1)
        workers.end()
    restore = elect(tmp_path, mesh)
    assert 5 <= restore[0]["step"] < STEPS
    with Workers(tmp_path, mesh=mesh, args=gpt(tmp_path), generation=2, interval_steps=8, restore=restore) as workers:
        assert workers.finish() == [0, 0], workers.log(0)
        first = next(note for note in workers.notes if note["type"] == "step")
        assert first["step"] == restore[0]["step"] + 1
    assert losses(tmp_path) == losses(uninterrupted), "bit for bit, every step"
    assert payloads(tmp_path, 2, STEPS) == payloads(uninterrupted, 2, STEPS)
    weights, same = payloads(tmp_path, 2, STEPS)
    assert weights == same, "replicas of one state have identical tensors"


def test_resizes_keep_the_global_batch_and_every_sample(tmp_path: Path, uninterrupted: Path) -> None:
    """dp 2 → 1 → 2. Sums in another order round differently, so losses are close, and the sampler's position is exact."""
    mesh: dict[str, int] = {"dp": 2}
    restore: dict[int, dict[str, Any]] | None = None
    previous: dict[str, int] | None = None
    for generation, (mesh, until) in enumerate([({"dp": 2}, 8), ({"dp": 1}, 16), ({"dp": 2}, STEPS)], 1):
        if previous is not None:
            restore = elect(tmp_path, previous, target=mesh)
            assert restore[0]["step"] == until - 8
        with Workers(
            tmp_path,
            mesh=mesh,
            args=gpt(tmp_path, steps=until),
            generation=generation,
            interval_steps=8,
            restore=restore,
            previous_mesh=previous,
        ) as workers:
            assert set(workers.finish()) == {0}, workers.log(0)
            per_step: dict[int, int] = {}
            for note in workers.notes:
                if note["type"] == "step":
                    per_step[note["step"]] = per_step.get(note["step"], 0) + note["tokens"]
            assert set(per_step.values()) == {12 * 16}, "the global batch in bytes, at every step and every size"
        previous = mesh
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), rel=1e-4)


@pytest.mark.slow
def test_an_optimizer_divided_over_the_replicas_is_dealt_anew_by_a_resize(tmp_path: Path, uninterrupted: Path) -> None:
    """dp 3, killed and restarted, then 2: the weights are on every replica, each has its share of the moments alone."""
    rest: dict[str, Any] = {}
    for generation, (dp, until) in enumerate([(3, 8), (3, 16), (2, STEPS)], 1):
        with Workers(
            tmp_path,
            mesh={"dp": dp},
            args=gpt(tmp_path, "--shard-optimizer", steps=until),
            generation=generation,
            interval_steps=8,
            **rest,
        ) as workers:
            assert set(workers.finish()) == {0}, workers.log(0)
        if generation == 1:
            rest = {"restore": elect(tmp_path, {"dp": 3})}
        else:
            rest = {"restore": elect_parts(tmp_path, {"dp": 3}, target={"dp": 2}), "previous_mesh": {"dp": 3}}
    first, second = payloads(tmp_path, 2, STEPS)
    moments = {name for name in first if "exp_avg" in name}
    assert moments
    assert {name for name in first if first[name] != second[name]} == moments
    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), rel=1e-4)


@pytest.mark.slow
def test_any_layout_trains_the_same_model(tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "pp"
    with Workers(tmp_path, mesh={"dp": 2, "pp": 2}, args=gpt(out, steps=10)) as workers:
        assert set(workers.finish()) == {0}, workers.log(0)
        reporters = {note["rank"] for note in workers.notes if note["type"] == "step" and note["loss"] is not None}
    assert reporters == {1, 3}, "the last stages report"
    expected = {step: loss for step, loss in losses(uninterrupted).items() if step <= 10}
    assert losses(out) == pytest.approx(expected, rel=1e-4)


def test_stop_with_a_save_leaves_one_step_that_all_ranks_have(tmp_path: Path) -> None:
    mesh = {"pp": 2}
    with Workers(tmp_path, mesh=mesh, args=gpt(tmp_path, steps=100_000), interval_steps=0) as workers:
        workers.wait_for("step", step=3)
        with workers.stopped():  # no rank passes the step before it has the order
            at_step = max(note["step"] for note in workers.notes if note["type"] == "step") + 50
            workers.order("checkpoint_now", at_step=at_step)
        workers.wait_for("saved", step=at_step)
        assert {restore["step"] for restore in elect(tmp_path, mesh).values()} == {at_step}
        workers.order("stop", save=False)
        # Whichever rank sees it first leaves; the other, if it waits for it in a collective, fails there.
        assert worker.EXIT_INTERRUPTED in workers.finish()


def test_training_outlives_the_reader_of_its_notes(tmp_path: Path) -> None:
    with Workers(tmp_path, mesh={"dp": 1}, args=gpt(tmp_path, steps=200)) as workers:
        workers.wait_for("step", step=2)
        for gone in tmp_path.glob("notes-*"):
            gone.rename(gone.with_name("moved"))
        assert workers.finish() == [0]
        (tmp_path / "moved").rename(tmp_path / "notes-1")
    assert max(losses(tmp_path)) == 200


def test_the_stages_of_a_pipeline_export_as_one_checkpoint(tmp_path: Path) -> None:
    with Workers(tmp_path, mesh={"pp": 2}, args=gpt(tmp_path / "out", steps=5)) as workers:
        assert workers.finish() == [0, 0], workers.log(0)
    export([Path(restore["path"]) for restore in elect(tmp_path, {"pp": 2}).values()], tmp_path / "plain")
    stages = [torch.load(tmp_path / "out" / f"stage-{stage}.pt") for stage in range(2)]
    wanted = {name: torch.zeros_like(tensor) for stage in stages for name, tensor in stage.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load({"model": wanted}, checkpoint_id=tmp_path / "plain")  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, wanted[name]) for stage in stages for name, tensor in stage.items())

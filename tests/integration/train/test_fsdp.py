"""The FSDP2 example: a recovered run is the uninterrupted one, and a resized one trains the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from losses import losses
from train_workers import EXAMPLES, Workers, elect, elect_parts

SCRIPT = EXAMPLES / "fsdp" / "train.py"
STEPS = 18


def arguments(out: Path, steps: int = STEPS) -> list[str]:
    return ["--layers", "2", "--width", "24", "--heads", "2", "--seq", "16", "--global-batch", "4",
            "--steps", str(steps), "--out", str(out)]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    with Workers(directory, script=SCRIPT, mesh={"dp": 2}, args=arguments(directory)) as workers:
        assert workers.finish() == [0, 0], workers.log(0)
    return losses(directory)


@pytest.mark.slow
def test_a_killed_rank_costs_time_and_nothing_else(tmp_path: Path, uninterrupted: dict[int, float]) -> None:
    mesh = {"dp": 2}
    with Workers(tmp_path, script=SCRIPT, mesh=mesh, args=arguments(tmp_path, 100_000)) as workers:
        workers.wait_for("saved", step=5)
        workers.kill(1)
        workers.end()
    restore = elect(tmp_path, mesh)
    until = max(STEPS, restore[0]["step"] + 3)
    with Workers(
        tmp_path, script=SCRIPT, mesh=mesh, args=arguments(tmp_path, until), generation=2, restore=restore
    ) as workers:
        assert workers.finish() == [0, 0], workers.log(0)
        first = next(note for note in workers.notes if note["type"] == "step")
        assert first["step"] == restore[0]["step"] + 1
    recovered = losses(tmp_path)
    assert {step: recovered[step] for step in uninterrupted} == uninterrupted, "bit for bit, every step"


def test_resizes_put_the_shards_together(tmp_path: Path, uninterrupted: dict[int, float]) -> None:
    """dp 2 → 1 → 2. Sums in another order round differently, so losses are close; the samples are the same."""
    restore: dict[int, dict[str, Any]] | None = None
    previous: dict[str, int] | None = None
    mesh: dict[str, int]
    for generation, (mesh, until) in enumerate([({"dp": 2}, 6), ({"dp": 1}, 12), ({"dp": 2}, STEPS)], 1):
        if previous is not None:
            restore = elect_parts(tmp_path, previous, target=mesh)
            assert restore[0]["step"] == until - 6
        with Workers(
            tmp_path,
            script=SCRIPT,
            mesh=mesh,
            args=arguments(tmp_path, until),
            generation=generation,
            interval_steps=6,
            restore=restore,
            previous_mesh=previous,
        ) as workers:
            assert set(workers.finish()) == {0}, workers.log(0)
        previous = mesh
    assert losses(tmp_path) == pytest.approx(uninterrupted, rel=1e-4)

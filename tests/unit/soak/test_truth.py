"""What the chain job must be at every step, and that a wrong value is found: planted ones are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.soak import truth
from benchmarks.soak.train import Chain
from benchmarks.soak.truth import GLOBAL_BATCH, SAMPLES, StepLog, Stepped, StepReader
from holdfast.domain.mesh import Mesh
from holdfast.train.environment import World


def test_the_closed_form_is_what_adding_every_sample_comes_to() -> None:
    width, position = 8, 1
    a, b = truth.constants(position, width)
    vector = np.zeros(width, dtype=np.uint64)
    sample = 0
    for step in range(1, 200):  # beyond the end of an epoch, and beyond 64 bits
        for _ in range(GLOBAL_BATCH):
            vector += a * np.uint64(sample % SAMPLES) + b
            sample += 1
        assert np.array_equal(vector, truth.chain(position, step, width))


def test_positions_and_steps_never_hold_the_same() -> None:
    vectors = [truth.chain(position, step, 16).tobytes() for position in range(4) for step in range(1, 50)]
    assert len(set(vectors)) == len(vectors)


@dataclass
class OneRank:
    """As much of `hf.Run` as checking needs."""

    rank: int = 1
    generation: int = 3

    @property
    def world(self) -> World:
        return World(Mesh.of({"dp": 2, "pp": 2}), self.rank, self.generation)


def at_step(out: Path, step: int) -> Chain:
    """A job that is right at `step`."""
    job = Chain(OneRank(), out)  # type: ignore[arg-type]
    job.vector.copy_(torch.from_numpy(truth.chain(job.position, step).view("int64")))
    job.data.consumed = step * GLOBAL_BATCH
    job.state |= {"mark": truth.mark(job._run.rank, step), "step": step}
    torch.manual_seed(truth.mix(step))
    return job


def test_a_job_that_is_right_says_nothing(tmp_path: Path) -> None:
    job = at_step(tmp_path, 41)
    job.check(41, "restore")
    job._check_random(41)
    assert truth.read_wrong(tmp_path) == []


def plant_bit(job: Chain) -> None:
    job.vector[4711] ^= 1 << 17


def plant_older_vector(job: Chain) -> None:
    job.vector.copy_(torch.from_numpy(truth.chain(job.position, 40).view("int64")))


def plant_other_position(job: Chain) -> None:
    job.vector.copy_(torch.from_numpy(truth.chain(0, 41).view("int64")))


def plant_skipped_sample(job: Chain) -> None:
    job.data.consumed += 1


def plant_other_ranks_mark(job: Chain) -> None:
    job.state["mark"] = truth.mark(0, 41)


def plant_step(job: Chain) -> None:
    job.state["step"] = 40


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (plant_bit, "vector"),
        (plant_older_vector, "vector"),
        (plant_other_position, "vector"),
        (plant_skipped_sample, "data"),
        (plant_other_ranks_mark, "mark"),
        (plant_step, "step"),
    ],
)
def test_one_wrong_value_is_found_once_and_put_right(tmp_path: Path, plant: object, what: str) -> None:
    job = at_step(tmp_path, 41)
    plant(job)  # type: ignore[operator]
    job.check(41, "restore")
    wrong = truth.read_wrong(tmp_path)
    assert [(each.what, each.rank, each.generation, each.step) for each in wrong] == [(what, 1, 3, 41)]
    if what in ("vector", "data"):
        job.check(41, "step")
        assert len(truth.read_wrong(tmp_path)) == 1


def test_a_generator_that_goes_on_elsewhere_is_found(tmp_path: Path) -> None:
    job = at_step(tmp_path, 41)
    torch.rand(1)  # one number too far
    job._check_random(41)
    assert [each.what for each in truth.read_wrong(tmp_path)] == ["random"]


def test_after_a_resize_another_ranks_own_values_are_no_mistake(tmp_path: Path) -> None:
    job = at_step(tmp_path, 41)
    job.resized = True
    job.state["mark"] = truth.mark(0, 41)
    torch.rand(1)
    job.check(41, "restore")
    job._check_random(41)
    assert truth.read_wrong(tmp_path) == []


def test_steps_are_read_once_and_a_torn_record_waits_for_its_rest(tmp_path: Path) -> None:
    log, reader = StepLog(tmp_path, 2), StepReader(tmp_path)
    first, second = Stepped(1, 4, 2, 10, 5.0), Stepped(1, 4, 2, 11, 5.5)
    log.write(first)
    assert reader.new() == [first]
    assert reader.new() == []
    log.write(second)
    path = tmp_path / "rank-2.steps"
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 3)
    assert reader.new() == []
    path.write_bytes(whole)
    assert reader.new() == [second]

"""A restored run adds the ranks' gradients in the order of the uninterrupted one, in every layout, with more than two ranks.

With two ranks no order shows: a + b is b + a.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_ranks import Options, run

SAID = "sums the gradients of DistributedDataParallel in another order"


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_four_ddp_ranks_sum_in_the_saved_order_from_the_first_step_on(tmp_path: Path) -> None:
    job = run(tmp_path, Options("ddp", {"dp": 4}), saves=(5, 0))
    uninterrupted, restored = job.weights
    assert same(restored, uninterrupted)
    assert SAID not in job.said


def test_an_order_that_is_known_and_not_yet_used_is_restored_and_saved_again(tmp_path: Path) -> None:
    """After the first step, before DDP has built its buckets; then from a restored run, with everything else that differs:
    gradients that accumulate, that are views of the buckets, and a DDP that is made after the restore."""
    job = run(tmp_path, Options("ddp", {"dp": 4}, accumulate=2, views=True, late=True), saves=(1, 2, 0))
    uninterrupted, *restored = job.weights
    assert [same(each, uninterrupted) for each in restored] == [True, True]
    assert SAID not in job.said


def test_ranks_that_start_from_another_ones_shard_set_the_order_with_all_others(tmp_path: Path) -> None:
    """Setting it is collective: a rank that did not take part would stop the run."""
    job = run(tmp_path, Options("ddp", {"dp": 3}, resized={"dp": 4}), saves=(5, 0))
    size = len(job.weights[1]) // 4
    first, *others = (job.weights[1][begin : begin + size] for begin in range(0, 4 * size, size))
    assert all(same(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("ddp", {"dp": 6}),
        ("fsdp2", {"dp": 4}),
        ("fsdp2", {"dp": 6}),
        ("hsdp", {"dp": 2, "shard": 2}),
        ("hsdp", {"dp": 3, "shard": 2}),
        ("pipeline", {"dp": 2, "pp": 2}),
        ("pipeline", {"dp": 3, "pp": 2}),
    ],
    ids=str,
)
def test_every_layout_goes_on_bit_for_bit(tmp_path: Path, layout: str, mesh: dict[str, int]) -> None:
    job = run(tmp_path, Options(layout, mesh), saves=(5, 0))
    uninterrupted, restored = job.weights
    assert same(restored, uninterrupted)
    assert SAID not in job.said


@pytest.mark.slow
def test_what_cannot_be_made_exact_goes_on_and_is_said_once(tmp_path: Path) -> None:
    job = run(tmp_path, Options("ddp", {"dp": 4}, static_graph=True), saves=(5, 0))
    assert job.said.count(SAID) == 4, "once on each rank"
    assert "static_graph=True" in job.said

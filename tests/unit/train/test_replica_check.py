"""Checksums of parameters: every bit counts, nothing else does, and they come when they should."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.train.channels import Notes
from holdfast.train.observing.replica_check import ReplicaCheck, comparable_parameters, digest, word_sum


class Said:
    """The notes that a check sends."""

    def __init__(self) -> None:
        self.checks: list[tuple[int, str, bool]] = []

    def replica_check(self, *, step: int, digest: str, duration_s: float, restored: bool) -> None:
        assert duration_s >= 0
        self.checks.append((step, digest, restored))


def checker(every_steps: int) -> tuple[ReplicaCheck, Said]:
    said = Said()
    return ReplicaCheck(every_steps, cast(Notes, said), rank=0), said


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 20_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]),
    where=st.integers(0, 2**31),
)
def test_every_single_bit_counts(size: int, dtype: torch.dtype, where: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    raw = tensor.view(torch.uint8)
    before = int(word_sum(tensor))
    raw[where % raw.numel()] ^= 1 << (where % (1 if dtype is torch.bool else 8))
    assert int(word_sum(tensor)) != before


def test_the_value_does_not_depend_on_where_the_tensor_lies() -> None:
    buffer = torch.randn(5000)
    for offset in range(4):
        part = buffer[offset : offset + 3001]
        assert digest([part]) == digest([part.clone()])
    square = torch.randn(64, 48)
    assert digest([square.t()]) == digest([square.t().contiguous()])
    assert digest([torch.tensor(1.5)]) != digest([torch.tensor(-1.5)])


def test_equal_rows_in_another_order_are_not_equal() -> None:
    rows = torch.randn(4, 2048)
    assert digest([rows]) != digest([rows.flip(0)])


def test_parameters_of_every_module_count_and_nothing_else() -> None:
    linear, norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
    model = nn.Sequential(linear, norm)
    state: dict[str, Any] = {"step": 3, "parts": {"model": model}, "data": object(), "loose": torch.ones(3)}
    assert len(list(comparable_parameters(state))) == 4
    before = digest(list(comparable_parameters(state)))
    assert norm.running_mean is not None
    norm.running_mean += 1.0  # each replica counts its own batches
    assert digest(list(comparable_parameters(state))) == before
    with torch.no_grad():
        linear.weight[2, 1] += 1e-7
    assert digest(list(comparable_parameters(state))) != before


def test_a_state_without_parameters_has_no_digest() -> None:
    assert digest(list(comparable_parameters({"x": torch.ones(3)}))) == ""


def test_checks_come_with_the_first_step_every_so_often_and_before_every_save() -> None:
    check, said = checker(10)
    state = {"model": nn.Linear(2, 2)}
    for step in range(1, 31):
        check.before_checkpoint(state, step, saving=step == 17)
    assert [step for step, _, _ in said.checks] == [1, 10, 17, 20, 30]
    assert len({digest for _, digest, _ in said.checks}) == 1


def test_what_was_restored_is_checked_at_once() -> None:
    check, said = checker(10)
    state = {"model": nn.Linear(2, 2)}
    check.after_restore(state, 40)
    check.before_checkpoint(state, 41, saving=False)
    assert [(step, restored) for step, _, restored in said.checks] == [(40, True)]


def test_the_cost_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    check, _ = checker(1)
    for step in range(1, 4):
        check.before_checkpoint({"model": nn.Linear(2, 2)}, step, saving=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert "every 1 steps" in line
    assert "ms" in line


def test_off_costs_nothing() -> None:
    check, said = checker(0)
    check.after_restore({}, 3)
    check.before_checkpoint({}, 4, saving=True)
    assert said.checks == []

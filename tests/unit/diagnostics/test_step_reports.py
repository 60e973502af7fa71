"""Step reports that wait and are stored many at a time give the values that storing each on its arrival gives, and the steps of
the job are those that counting each rank gives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import numpy as np
import pytest

from holdfast.diagnostics import steps
from holdfast.diagnostics.detectors.step_reports import _WAITING_ROWS_MAX, StepReports
from holdfast.domain.signals import StepColumns

RANKS, PER_NODE = 256, 8


def report(chance: Random, newest: int) -> StepColumns:
    """A node's report of one or more steps: in order or not, sometimes late, without some ranks, or with an unknown rank."""
    first = chance.randrange(RANKS // PER_NODE) * PER_NODE
    numbers = chance.choice(([newest], [newest], [newest - 1, newest], [newest - 3], [newest + 1, newest - 1]))
    rows = [(first + rank, step) for step in numbers for rank in range(PER_NODE) if chance.random() < 0.97]
    if chance.random() < 0.1:
        chance.shuffle(rows)
    if chance.random() < 0.1:
        rows += chance.choices(rows, k=2)  # the same rank and step twice
    if chance.random() < 0.05:
        rows.append((RANKS + chance.choice((0, 3)), newest))
    rows = rows or [(first, newest)]
    count = len(rows)
    starts = tuple(1000.0 + 10.0 * step + chance.random() for _, step in rows)
    waits = tuple(chance.choice((chance.random(), math.nan)) for _ in rows)
    return StepColumns(
        node=f"n{first}",
        at=1.0,
        job="job",
        generation=1,
        rank=tuple(rank for rank, _ in rows),
        step=tuple(step for _, step in rows),
        started_at=starts,
        ended_at=tuple(start + chance.uniform(1.0, 9.0) for start in starts),
        data_s=tuple(chance.random() for _ in rows),
        stall_s=(0.0,) * count,
        tokens=tuple(chance.randrange(5000) for _ in rows),
        loss=tuple(chance.choice((math.nan, 2.0)) for _ in rows),
        grad_norm=(math.nan,) * count,
        comm_wait_s=chance.choice((waits, ())),
    )


@pytest.mark.parametrize("seed", range(3))
def test_reports_that_wait_give_the_same_columns(seed: int) -> None:
    chance, reports = Random(seed), StepReports(RANKS)
    expected: dict[tuple[int, int], tuple[float, ...]] = {}  # (step, rank) → the values reported last
    closed, stored_early = 0, False
    for newest in range(4, 12):
        for _ in range(chance.randrange(10, 200)):
            item = report(chance, newest)
            reports.collect(item)
            stored_early |= len(reports.open) > 0
            assert all(step > closed for step in reports.open)
            waits = item.comm_wait_s or (math.nan,) * len(item.rank)
            durations = (end - start for start, end in zip(item.started_at, item.ended_at, strict=True))
            values: Iterable[tuple[float, ...]] = zip(waits, item.data_s, item.tokens, durations, strict=True)
            for rank, step, row in zip(item.rank, item.step, values, strict=True):
                if rank < RANKS and step > closed:
                    expected[step, rank] = row
        done, closed = reports.close(newest - 2).columns, newest - 2
        wanted = np.full((4, RANKS), math.nan, np.float32)
        for (step, rank), row in expected.items():
            if step == closed:
                wanted[:, rank] = row
        np.testing.assert_array_equal(done, wanted)
    assert stored_early  # some were stored before their step was closed


def test_what_waits_is_bounded() -> None:
    chance, reports = Random(1), StepReports(RANKS)
    for _ in range(1000):
        reports.collect(report(chance, 5))
        assert reports._waiting_rows <= _WAITING_ROWS_MAX
        assert sum(len(item.step) for item in reports._waiting) == reports._waiting_rows


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_finished_when_each_rank_has_finished_it_or_a_later_one(seed: int) -> None:
    chance, state = Random(seed), steps.StepState()
    steps.follow(state, ("job", 1), RANKS)
    newest_of, tokens = dict.fromkeys(range(RANKS), -1), dict[int, int]()
    finished = 0
    for newest in range(4, 12):
        for _ in range(300):
            item = report(chance, newest)
            before = min(newest_of.values())
            by_step = dict[int, list[int]]()
            for row, step in enumerate(item.step):
                by_step.setdefault(step, []).append(row)
            for step, rows in by_step.items():
                new = [row for row in rows if item.rank[row] < RANKS and step > newest_of[item.rank[row]]]
                for row in new:
                    newest_of[item.rank[row]] = step
                    tokens[step] = tokens.get(step, 0) + item.tokens[row]
            records = steps.fold(state, item)
            done = min(newest_of.values())
            expected = sorted(step for step in tokens if step <= done) if done > before else []
            assert [record.step for record in records] == expected
            for record in records:
                assert record.tokens == tokens.pop(record.step)
            finished += len(records)
    assert finished > 3

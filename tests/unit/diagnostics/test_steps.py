"""Steps of the job from steps of its ranks; host pressure; what the engine adds to a finding."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import replace

from diagnosing import T0, Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import CollectorSilent, HostSample


def test_a_record_when_every_rank_has_finished() -> None:
    fleet = Fleet(nodes=2, ranks_per_node=2)
    fleet.start()
    for rank in fleet.ranks.values():
        rank.step = 1
    first = replace(fleet.columns("n0", [0, 1]), loss=(2.0, math.nan), stall_s=(0.0, 0.3))
    fleet.fold(first)
    assert fleet.records == []
    fleet.now = 1.0
    fleet.fold(replace(fleet.columns("n1", [2, 3]), loss=(4.0, math.nan)))
    (record,) = fleet.records
    assert (record.step, record.world_size, record.tokens, record.loss, record.stall_s) == (1, 4, 400, 3.0, 0.3)
    assert (record.started_at, record.ended_at) == (T0 + 0.5, T0 + 1.0)


def test_a_step_takes_no_longer_because_two_machines_clocks_are_an_hour_apart() -> None:
    fleet = Fleet(nodes=2)
    fleet.start()
    fleet.ranks[0].step = fleet.ranks[1].step = 1
    fleet.fold(fleet.columns("n0", [0]))
    fleet.now = 3600.0
    fleet.fold(fleet.columns("n1", [1]))
    (record,) = fleet.records
    assert record.ended_at - record.started_at == 0.5


def test_repeats_and_unknown_generations_add_nothing() -> None:
    fleet = Fleet(nodes=1)
    fleet.fold(fleet.columns("n0", [0]))
    fleet.start()
    fleet.ranks[0].step = 1
    for _ in range(3):
        fleet.fold(fleet.columns("n0", [0]))
    assert len(fleet.records) == 1


def test_a_dropped_tick_closes_its_step_with_the_next() -> None:
    fleet = Fleet(nodes=2)
    fleet.start()
    fleet.ranks[0].step = fleet.ranks[1].step = 1
    fleet.fold(fleet.columns("n0", [0]))  # n1's is dropped
    fleet.ranks[0].step = fleet.ranks[1].step = 2
    fleet.fold(fleet.columns("n0", [0]))
    fleet.fold(fleet.columns("n1", [1]))
    assert [(record.step, record.tokens) for record in fleet.records] == [(1, 100), (2, 200)]


def test_steps_are_finished_though_some_report_of_every_step_is_dropped() -> None:
    """Of thousands of nodes one is always missing."""
    fleet = Fleet(nodes=5)
    fleet.start()
    for step in range(1, 21):
        for rank in fleet.ranks.values():
            rank.step = step
        for i, node in enumerate(fleet.names):
            if i != step % 5:
                fleet.fold(fleet.columns(node, [i]))
    assert [record.step for record in fleet.records] == list(range(1, 20))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), world=st.integers(1, 8), steps=st.integers(1, 20))
def test_any_interleaving_of_ranks_gives_every_step_once_with_every_token(seed: int, world: int, steps: int) -> None:
    chance = random.Random(seed)
    fleet = Fleet(nodes=world)
    fleet.start()
    while waiting := [rank for rank, state in fleet.ranks.items() if state.step < steps]:
        rank = chance.choice(waiting)
        fleet.ranks[rank].step += 1
        fleet.fold(fleet.columns(f"n{rank}", [rank]))
    assert [record.step for record in fleet.records] == list(range(1, steps + 1))
    assert all(record.tokens == 100 * world for record in fleet.records[-1:])


def test_a_resubmitted_job_counts_its_steps_from_the_start() -> None:
    fleet = Fleet(nodes=2)
    fleet.start()
    fleet.run(until=5.0)
    fleet.stop()
    fleet.now += 3.0
    fleet.records.clear()
    for rank in fleet.ranks.values():
        rank.step = 0
    fleet.submission = "s2"
    fleet.start(1, connect=False)
    fleet.run(until=10.0)
    assert fleet.records[0].step == 1


# ------------------------------------------------------------------ host pressure


def host(at: float, memory: int, disk: int = 10) -> HostSample:
    return HostSample("n0", T0 + at, 1.0, 8, memory, 100, (("/data", disk, 100),))


def test_pressure_is_said_once_until_it_has_cleared() -> None:
    fleet = Fleet(nodes=1)
    for at, memory in enumerate((50, 96, 94, 97, 91, 96, 80, 97)):
        fleet.now = float(at)
        fleet.fold(host(at, memory))
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING, Severity.INFO, Severity.WARNING]
    assert fleet.found[1].contradicts == fleet.found[0].id
    assert "memory" in fleet.found[0].summary


def test_memory_and_disks_are_separate() -> None:
    fleet = Fleet(nodes=1)
    fleet.fold(host(0, 97, disk=99))
    assert {finding.evidence["resource"] for finding in fleet.found} == {"memory", "disk /data"}


def test_a_host_that_reports_no_total_is_no_division_by_zero() -> None:
    fleet = Fleet(nodes=1)
    fleet.fold(HostSample("n0", T0, 1.0, 0, 5, 0, (("/x", 1, 0),)))
    assert fleet.found == []


def test_a_silent_collector_is_said_once_in_a_while() -> None:
    fleet = Fleet(nodes=1)
    for misses in range(3, 20):
        fleet.fold(CollectorSilent("n0", T0 + misses, "kernel_log", misses))
    assert fleet.kinds() == [FindingKind.HOST_PRESSURE]


# ------------------------------------------------------------------ the engine


def test_every_finding_starts_a_valid_trace_that_is_stable() -> None:
    def crash() -> str:
        fleet = Fleet(nodes=2)
        fleet.start()
        fleet.exits(1, signal=9)
        return fleet.only().traceparent

    version, trace, span, flags = crash().split("-")
    assert (version, len(trace), len(span), flags) == ("00", 32, 16, "01")
    assert crash() == crash()


def test_a_storm_of_jobs_stays_bounded() -> None:
    engine = Engine(())
    for number in range(10_000):
        fleet_job = f"job{number}"
        fleet = Fleet(nodes=1, job=fleet_job, mesh=Mesh.of({"dp": 1}))
        engine.fold(fleet.started("n0"), T0 + number)
    assert len(engine._steps.generations) <= 4096
    assert len(engine._roster.on("n0")) <= 64


def test_a_stated_number_of_ranks_takes_no_memory_before_they_report() -> None:
    """A node states the mesh of a generation; nothing else confirms it."""
    fleet = Fleet(nodes=1)
    fleet.start()
    tracemalloc.start()
    for number in range(2, 300):
        mesh = Mesh.of({"dp": 1_000_000})
        fleet.fold(replace(fleet.started("n0"), job=f"job-{number}", mesh=mesh))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 << 20, "of the three that are compared rank by rank, not of 300"

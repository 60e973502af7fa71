"""Stragglers: the slow rank is named whatever the mesh and the noise; what is nobody's fault names nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.diagnostics.detectors import comparison
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.stragglers import Stragglers
from holdfast.diagnostics.roster import RunStarted
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, ObservedSteps, StepColumns

Work = NDArray[np.float64]
T0 = 1_700_000_000.0
NODE = 4


@dataclass
class Job:
    """A job whose ranks work as the test prescribes, in virtual time. `measured`: agents know what a rank waited for others."""

    dims: Mapping[str, int]
    measured: bool = True
    seed: int = 1
    noise: float = 0.01
    settles_s: float = 0.0
    step: int = 0
    now: float = T0
    found: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mesh = Mesh.of(self.dims)
        self.rng = np.random.default_rng(self.seed)
        self.detector = Alone(Stragglers())
        n = self.mesh.world_size
        self.nodes = [tuple(range(i, min(n, i + NODE))) for i in range(0, n, NODE)]
        for i, ranks in enumerate(self.nodes):
            self.tell(GenerationStarted(f"n{i}", self.now, "gpt", 1, self.mesh, ranks, HangSpec(), "", self.settles_s))

    def tell(self, item: GenerationStarted | StepColumns | ObservedSteps | StepRecord | RunStarted) -> None:
        self.found += self.detector.observe(item, self.now)

    def run(
        self,
        steps: int,
        change: Callable[[Work, int], object] = lambda work, step: None,
        *,
        data: Callable[[Work, int], object] = lambda data, step: None,
        network_s: float = 0.02,
        lost: float = 0.0,
    ) -> None:
        for _ in range(steps):
            self.step += 1
            own = 1.0 + self.rng.normal(0, self.noise, self.mesh.world_size)
            change(own, self.step)
            late = np.full(self.mesh.world_size, 0.01)
            data(late, self.step)
            own = own + late
            duration = float(own.max()) + network_s
            for i, ranks in enumerate(self.nodes):
                if self.rng.random() >= lost:
                    self.tell(self.columns(f"n{i}", ranks, own, late, duration))
            self.now += duration
            self.tell(
                StepRecord("gpt", 1, self.step, self.mesh.world_size, self.now - duration, self.now, 0, None, 0.0)
            )

    def columns(self, node: str, ranks: tuple[int, ...], own: Work, late: Work, duration: float) -> StepColumns:
        n = len(ranks)
        return StepColumns(
            node,
            self.now,
            "gpt",
            1,
            ranks,
            (self.step,) * n,
            (self.now,) * n,
            (self.now + duration,) * n,
            tuple(float(late[rank]) for rank in ranks),
            (0.0,) * n,
            (100,) * n,
            (math.nan,) * n,
            (math.nan,) * n,
            tuple(duration - float(own[rank]) for rank in ranks) if self.measured else (),
        )

    def kinds(self) -> list[FindingKind]:
        return [finding.kind for finding in self.found]

    def warnings(self) -> list[Finding]:
        return [finding for finding in self.found if finding.severity is Severity.WARNING]


def slower(rank: int, share: float, start: int = 0) -> Callable[[Work, int], None]:
    def change(work: Work, step: int) -> None:
        if step >= start:
            work[rank] *= 1.0 + share

    return change


@given(st.lists(st.lists(st.floats(0.125, 10, width=32), min_size=2, max_size=9), min_size=1, max_size=1))
def test_the_median_of_others_is_what_its_name_says(rows: list[list[float]]) -> None:
    work = np.asarray(rows, np.float32)
    for i in range(work.shape[1]):
        assert comparison.median_of_others(work)[0][0, i] == pytest.approx(np.median(np.delete(work[0], i)), rel=1e-6)


@pytest.mark.parametrize(
    "dims", [{"dp": 2, "pp": 2}, {"dp": 8}, {"dp": 4, "pp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"pp": 4, "tp": 4}]
)
@pytest.mark.parametrize("share", [0.15, 0.5, 4.0])
def test_a_slow_rank_is_named_in_fifteen_steps(dims: dict[str, int], share: float) -> None:
    job = Job(dims)
    rank = job.mesh.world_size - 2
    job.run(40)
    job.run(15, slower(rank, share))
    (finding,) = job.found
    assert (finding.kind, finding.severity) == (FindingKind.STRAGGLER, Severity.WARNING)
    assert (finding.rank, finding.node) == (rank, f"n{rank // NODE}")
    assert float(finding.evidence["slowdown"]) == pytest.approx(share, rel=0.3)
    assert abs(int(finding.evidence["since_step"]) - 41) <= 1
    assert float(finding.evidence["cost_share_of_step"]) == pytest.approx(share / (1 + share), rel=0.35)
    assert finding.evidence["cause"] == "slow_worker"


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([{"dp": 4, "pp": 2}, {"dp": 16}, {"dp": 2, "pp": 4, "tp": 2}]))
def test_noise_and_hiccups_name_nobody(seed: int, dims: dict[str, int]) -> None:
    job = Job(dims, seed=seed, noise=0.05)

    def hiccup(work: Work, step: int) -> None:
        if step % 9 == 0:
            work[job.rng.integers(len(work))] *= 10

    job.run(60, hiccup)
    assert FindingKind.STRAGGLER not in job.kinds()


def test_uneven_data_reports_imbalance_without_naming_a_rank() -> None:
    job = Job({"dp": 8, "pp": 2})

    def sequences(work: Work, step: int) -> None:
        work.reshape(8, 2)[:] *= 1.0 + np.abs(job.rng.normal(0, 0.2, (8, 1)))

    job.run(60, sequences)
    assert job.kinds() == [FindingKind.IMBALANCE]
    assert (job.found[0].rank, job.found[0].evidence["cause"]) == (None, "data")


def test_a_slow_rank_is_found_below_uneven_data() -> None:
    job = Job({"dp": 8, "pp": 2})

    def both(work: Work, step: int) -> None:
        work.reshape(8, 2)[:] *= 1.0 + np.abs(job.rng.normal(0, 0.2, (8, 1)))
        work[5] *= 1.2

    job.run(25, both)
    assert [f.rank for f in job.found if f.kind is FindingKind.STRAGGLER] == [5]


def test_a_long_last_stage_is_the_stage_s() -> None:
    job = Job({"dp": 4, "pp": 4})

    def head(work: Work, step: int) -> None:
        work.reshape(4, 4)[:, 3] *= 1.5

    job.run(30, head)
    assert job.kinds() == [FindingKind.IMBALANCE]
    assert (job.found[0].evidence["cause"], job.found[0].evidence["stage"]) == ("stage", "3")


def test_a_slow_network_is_the_network_s() -> None:
    job = Job({"dp": 8})
    job.run(40)
    job.run(20, network_s=0.5)
    assert job.kinds() == [FindingKind.SLOW_COLLECTIVE]
    assert job.found[0].rank is None


def test_slow_data_is_distinguished_from_slow_work() -> None:
    job = Job({"dp": 8}, measured=False)
    job.run(40)

    def late(data: Work, step: int) -> None:
        data[3] += 0.4

    job.run(20, data=late)
    (finding,) = job.found
    assert (finding.rank, finding.evidence["cause"]) == (3, "data_loading")
    assert finding.evidence["measured"] == "data wait only"


def test_nothing_is_concluded_from_what_is_not_measured() -> None:
    job = Job({"dp": 8}, measured=False)
    job.run(60, slower(3, 1.0, start=20))
    assert job.found == []


def test_a_rank_without_peers_is_compared_with_its_past() -> None:
    job = Job({"pp": 4})
    job.run(40)
    job.run(15, slower(2, 0.3))
    finding = next(finding for finding in job.found if finding.kind is FindingKind.STRAGGLER)
    assert (finding.rank, finding.evidence["cause"]) == (2, "own_past")


def test_what_flaps_is_said_to_flap_once() -> None:
    job = Job({"dp": 8})
    for _ in range(6):
        job.run(20, slower(3, 0.5))
        job.run(20)
    first, second = job.warnings()
    assert "comes and goes" in second.summary
    assert [finding.contradicts for finding in job.found if finding.severity is Severity.INFO] == [first.id]


def test_what_is_over_is_withdrawn_once() -> None:
    job = Job({"dp": 8})
    job.run(40, slower(3, 0.5))
    (slow,) = job.found
    job.run(60)
    _, over = job.found
    assert (over.kind, over.severity, over.contradicts) == (FindingKind.STRAGGLER, Severity.INFO, slow.id)
    assert (over.node, over.rank, over.generation) == (slow.node, slow.rank, slow.generation)
    job.run(300)
    job.run(40, slower(3, 0.5))
    assert job.found[-1].id == slow.id, "it begins anew"
    assert len(job.found) == 3


def test_what_lasts_is_not_withdrawn_for_a_few_good_steps() -> None:
    job = Job({"dp": 8})
    job.run(40, slower(3, 0.5))
    for _ in range(10):
        job.run(2)
        job.run(20, slower(3, 0.5))
    assert not [finding for finding in job.found if finding.severity is Severity.INFO]


def test_lost_telemetry_withdraws_nothing() -> None:
    job = Job({"dp": 8})
    job.run(40, slower(3, 0.5))
    job.run(60, slower(3, 0.5), lost=0.7)
    assert not [finding for finding in job.found if finding.severity is Severity.INFO]


def test_a_second_slow_rank_of_the_same_node_is_reported() -> None:
    job = Job({"dp": 16})
    job.run(30, slower(5, 0.5))

    def two(work: Work, step: int) -> None:
        work[5] *= 1.5
        work[6] *= 1.4

    job.run(15, two)
    assert [finding.evidence["ranks"] for finding in job.found] == ["5", "5, 6"]


def test_dropped_telemetry_slows_the_verdict_only() -> None:
    job = Job({"dp": 32})
    job.run(40, slower(9, 0.3), lost=0.1)
    assert [finding.rank for finding in job.found] == [9]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1.0, 1e300])
def test_garbage_names_nobody_and_breaks_nothing(garbage: float) -> None:
    job = Job({"dp": 8})
    for _ in range(60):
        job.run(1)
        n = 3
        job.tell(
            StepColumns(
                "n0",
                job.now,
                "gpt",
                1,
                (0, 1, 99_999_999),
                (job.step + 1,) * n,
                (job.now,) * n,
                (job.now + garbage, job.now - 5.0, garbage),
                (garbage,) * n,
                (0.0,) * n,
                (0,) * n,
                (0.0,) * n,
                (0.0,) * n,
                (garbage,) * n,
            )
        )
    assert FindingKind.STRAGGLER not in job.kinds()


def test_pending_telemetry_is_bounded() -> None:
    job = Job({"dp": 4})
    for step in range(2, 2000):
        job.step = step
        job.tell(job.columns("n0", (0, 1, 2, 3), np.ones(4), np.zeros(4), 1.0))
    (run,) = job.detector.state.runs.values()
    assert len(run.reports.open) <= 8


def test_a_job_that_begins_again_is_not_compared_with_its_namesake() -> None:
    job = Job({"dp": 4})
    job.run(20)
    job.tell(RunStarted("gpt"))
    assert not job.detector.state.runs


def test_ranks_are_laid_out_by_stage_and_replica_in_any_order_of_the_mesh() -> None:
    for names in permutations(["pp", "dp", "tp"]):
        mesh = Mesh.of({name: {"pp": 2, "dp": 3, "tp": 4}[name] for name in names})
        grid = comparison.Grid.of(mesh)
        assert grid.ranks.shape == (2, 3, 4)
        for (stage, replica, _), rank in np.ndenumerate(grid.ranks):
            assert (mesh.coords(int(rank))["pp"], mesh.coords(int(rank))["dp"]) == (stage, replica)


@pytest.mark.parametrize(
    ("settles_s", "repeat_s"), [(0.0, 600.0), (590.0, 600.0), (20.0, 20.4), (0.001, 1.0), (9e9, 600.0)]
)
def test_a_rank_that_stays_slow_is_reported_again_when_the_job_wants_to_act(settles_s: float, repeat_s: float) -> None:
    job, step_s = Job({"dp": 8}, settles_s=settles_s), 1.6
    job.run(int(50 + repeat_s / step_s), slower(3, 0.5))
    first, second, *_ = job.found
    assert second.id == first.id
    assert repeat_s <= second.at - first.at <= repeat_s + 2 * step_s
    assert second.ttl_s < second.at - first.at, "the engine lets it through"


# ---------------------------------------------------------------- a script that reports no steps


def observe(
    job: Job,
    blocks: int,
    change: Callable[[Work, int], object] = lambda work, step: None,
    *,
    steps: int = 8,
    shorter: tuple[int, ...] = (),
    lost: float = 0.0,
) -> None:
    """Blocks of `steps` steps on every rank; those in `shorter` report each of them in two halves."""
    n = job.mesh.world_size
    for _ in range(blocks):
        job.step += steps
        own = (0.1 + job.rng.normal(0, 0.001, n)) * steps
        change(own, job.step)
        began, took = job.now, float(own.max()) + 0.02
        job.now += took
        for i, ranks in enumerate(job.nodes):
            if job.rng.random() < lost:
                continue
            rows: list[tuple[int, int, int, float, float, float]] = []
            for rank in ranks:
                parts = 2 if rank in shorter else 1
                for part in range(parts):
                    start, end = began + took * part / parts, began + took * (part + 1) / parts
                    last = job.step - steps + (part + 1) * steps // parts
                    rows.append((rank, last, steps // parts, start, end, (took - float(own[rank])) / parts))
            job.tell(ObservedSteps(f"n{i}", job.now, "gpt", 1, *zip(*rows, strict=True)))


@pytest.mark.parametrize("steps", [1, 8, 512])
def test_a_slow_rank_of_a_script_that_reports_no_steps_is_named(steps: int) -> None:
    job = Job({"dp": 8})
    observe(job, 30, steps=steps)
    assert job.found == []
    observe(job, 15, slower(6, 0.5), steps=steps)
    (finding,) = job.found
    assert (finding.kind, finding.rank, finding.node) == (FindingKind.STRAGGLER, 6, "n1")
    assert float(finding.evidence["slowdown"]) == pytest.approx(0.5, rel=0.3)
    assert finding.cost_share == pytest.approx(0.33, rel=0.3)
    assert finding.evidence["measured"] == "work"
    assert finding.generation == 1


def test_ranks_that_report_in_shorter_blocks_are_not_faster_or_slower() -> None:
    job = Job({"dp": 8})
    observe(job, 60, shorter=(0, 3, 5), lost=0.05)
    assert job.found == []
    observe(job, 20, slower(3, 0.5), shorter=(0, 3, 5))
    assert [(finding.kind, finding.rank) for finding in job.found] == [(FindingKind.STRAGGLER, 3)]


def test_what_is_observed_of_an_earlier_generation_or_another_rank_is_ignored() -> None:
    job = Job({"dp": 4})
    observe(job, 20)
    old = ObservedSteps("n0", job.now, "gpt", 0, (1,), (500,), (1,), (job.now - 90,), (job.now,), (0.0,))
    job.tell(old)
    job.tell(replace(old, generation=1, rank=(99,)))
    job.tell(replace(old, job="other"))
    observe(job, 20)
    assert job.found == []

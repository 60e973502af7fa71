"""A rank's own gradient against its peers': named when it stands out, nobody when all do, nothing in what usually scatters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.gradient_outlier import GradientOutlier
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, StepColumns

T0 = 1_700_000_000.0


def run(norms: Sequence[Sequence[float]], mesh: Mesh | None = None) -> list[Finding]:
    """One norm per rank and step, each rank on its own node."""
    ranks = range(len(norms[0]))
    mesh = mesh or Mesh.of({"dp": len(ranks)})
    detector = Alone(GradientOutlier())
    found: list[Finding] = []
    for rank in ranks:
        detector.observe(GenerationStarted(f"n{rank}", T0, "gpt", 1, mesh, (rank,), HangSpec()), T0)
    for step, by_rank in enumerate(norms, start=1):
        for rank in ranks:
            item = StepColumns(
                f"n{rank}", T0 + step, "gpt", 1, (rank,), (step,), (0.0,), (0.0,), (0.0,), (0.0,), (1,), (math.nan,),
                (math.nan,), (), (by_rank[rank],),
            )  # fmt: skip
            found += detector.observe(item, T0 + step)
    return found


def usual(steps: int = 64, ranks: int = 6, seed: int = 0, scatter: float = 0.2) -> list[list[float]]:
    return np.random.default_rng(seed).lognormal(0.0, scatter, (steps, ranks)).tolist()  # type: ignore[no-any-return]


@settings(max_examples=10)
@given(st.integers(0, 100_000), st.floats(0.01, 0.4))
def test_what_usually_scatters_says_nothing(seed: int, scatter: float) -> None:
    assert run(usual(120, 8, seed, scatter)) == []


def test_a_norm_far_above_its_peers_names_rank_and_node() -> None:
    norms = usual()
    norms[50][4] *= 40
    (finding,) = run(norms)
    assert (finding.kind, finding.severity) == (FindingKind.NUMERICAL, Severity.WARNING)
    assert (finding.rank, finding.node, finding.evidence["step"]) == (4, "n4", "51")


def test_peers_are_those_of_the_position_in_any_order_of_the_mesh() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 4, "tp": 2})
    norms = [[*row[:8], *(1000 * norm for norm in row[8:])] for row in usual(ranks=16)]  # of stage 0 and 1
    assert run(norms, mesh) == []
    norms[50][5] *= 40  # and far below those of the other stage
    (finding,) = run(norms, mesh)
    assert (finding.rank, finding.node) == (5, "n5")


def test_not_a_number_on_one_rank_is_said_from_the_first_step_on() -> None:
    norms = usual(steps=3)
    norms[0][2] = math.inf  # as agents send a NaN
    (finding,) = run(norms)
    assert (finding.rank, finding.evidence["norm"]) == (2, "not a number")


def test_when_everybody_stands_out_it_is_the_data() -> None:
    norms = usual()
    norms[50] = [norm * 40 for norm in norms[50]]
    norms[51] = [math.inf] * 6
    assert run(norms) == []


def test_stages_are_compared_with_their_own_kind() -> None:
    rng = np.random.default_rng(0)
    norms = [[float(rng.lognormal(0, 0.1)) * (100.0 if rank % 2 else 1.0) for rank in range(8)] for _ in range(64)]
    assert run(norms, Mesh.of({"dp": 4, "pp": 2})) == []


def test_two_replicas_and_reports_that_are_missing_say_nothing() -> None:
    norms = usual(ranks=2)
    norms[50][1] *= 1000
    assert run(norms) == []
    norms = usual()
    norms[50] = [math.nan] + [norm * 100 for norm in norms[50][1:]]
    assert run(norms) == []

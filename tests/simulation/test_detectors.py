"""The simulated diagnostics runs production's detectors: the promises about findings find bugs that are planted in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import require_found

from holdfast.diagnostics.detectors import hang, stall, worker_exit
from holdfast.diagnostics.detectors.exit_cause import Cause
from holdfast.diagnostics.detectors.gpu_error import GpuError
from holdfast.diagnostics.detectors.hang import Hang
from holdfast.diagnostics.detectors.liveness import Liveness
from holdfast.diagnostics.detectors.maintenance import Maintenance
from holdfast.diagnostics.detectors.stall import Evidence, Rule
from holdfast.diagnostics.roster import Generation
from holdfast.domain.findings import Finding
from holdfast.sim.scenario import simulate

SEEDS = 60


def _first_rank(generation: Generation, evidence: Evidence, rule: Rule, now: float) -> Finding | None:
    finding = stall.report(generation, evidence, rule, now)
    if finding is None or 0 not in generation.node_of:
        return finding
    return replace(finding, rank=0, node=generation.node_of[0])


# What is planted: (class or module, name, what stands there instead), what the promises say of it, and a seed near which
# they do.
PLANTED: dict[str, tuple[object, str, object, str, int]] = {
    "an exit is not reported": (
        worker_exit.WorkerExit, "_exited", lambda *of: (), "no finding about the worker_crash", 6,
    ),
    "a rank that fails with another counts as the root": (
        worker_exit, "cause_of", lambda exit_: Cause.OWN, "had no fault of its own", 47,
    ),
    "a hang is not reported": (Hang, "_conclude", lambda *of: (), "no finding about the hang", 154),
    "every hang is attributed to the first rank": (hang, "report", _first_rank, "had no fault of its own", 32),
    "a node whose stream broke is not reported": (
        Liveness, "_is_ripe", lambda *of, **how: False, "no finding about the node_lost", 151,
    ),
    "a node that is silent on an open stream is not reported": (
        Liveness, "_find_silent", lambda *of: None, "no finding about the node_lost", 407,
    ),
    "an Xid of one GPU hides those of the others": (
        GpuError, "_is_known", lambda self, node, *of: bool(node.faults), "no finding about the gpu_error", 47,
    ),
    "a notice is not reported": (
        Maintenance, "observe", lambda self, state, *of: (state, ()), "no finding about the maintenance", 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, instead, said, first = PLANTED[bug]
    monkeypatch.setattr(place, name, instead)

    require_found(said, range(first, first + SEEDS), simulate)

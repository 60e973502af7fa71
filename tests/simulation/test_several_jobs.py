"""Several jobs on a fleet that is too small for them: who gets which node. And what goes wrong with that, planted."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import pytest

from holdfast.sim.scenario import SEVERAL_JOBS_FROM, simulate
from holdfast.sim.world import Violation
from holdfast.supervisor.core import loans, spares, upkeep

SEEDS = int(os.environ.get("HOLDFAST_SIM_SEEDS", "600")) // 10
BATCHES = 5
PLANTED_SEEDS = 60


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_promise_holds_beside_other_jobs(batch: int) -> None:
    for seed in range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES):
        try:
            simulate(SEVERAL_JOBS_FROM + seed, tracing=True)
        except Violation as violation:
            message, *trace = violation.args
            tail = "\n".join(trace[-60:])
            pytest.fail(
                f"{tail}\n{message}\nreplay: holdfast simulate --seed {SEVERAL_JOBS_FROM + seed} --trace", pytrace=False
            )


_wanted = upkeep._wanted

# What is planted: (module, function, what it does instead), and what the promises say of it.
PLANTED: dict[str, tuple[ModuleType, str, Callable[..., object], str]] = {
    "spares are reserved, and whoever comes first takes them": (
        spares, "withheld", lambda turn, job: {}, "are reserved for",
    ),
    "equals are asked for replicas, too": (
        loans, "_is_below", lambda other, job: other is not job and not other.phase.finished, "which has no higher priority",
    ),
    "nobody is asked for replicas": (
        loans, "review", lambda turn, job: None, "could run with what others can lend",
    ),
    "what was lent does not come back": (
        upkeep, "_wanted", lambda turn, job: None if job.lent is not None else _wanted(turn, job), "could run . of . replicas",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, instead, said = PLANTED[bug]
    monkeypatch.setattr(module, name, instead)

    def campaign() -> None:
        for seed in range(SEVERAL_JOBS_FROM, SEVERAL_JOBS_FROM + PLANTED_SEEDS):
            simulate(seed)

    with pytest.raises(Violation, match=said):
        campaign()

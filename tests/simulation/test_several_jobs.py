"""Several jobs on a fleet that is too small for them: who gets which node. And what goes wrong with that, planted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from worlds import check_seed, require_found

from holdfast.sim.scenario import SEVERAL_JOBS_FROM, simulate
from holdfast.supervisor.core.changes import loans
from holdfast.supervisor.core.fleet import spares
from holdfast.supervisor.core.handling import job_needs

SEEDS = 3
PLANTED_SEEDS = 5


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_promise_holds_beside_other_jobs(seed: int) -> None:
    check_seed(SEVERAL_JOBS_FROM + seed)


_wanted = job_needs._wanted

# What is planted: (module, function, what it does instead), what the promises say of it, and a seed near which they do.
PLANTED: dict[str, tuple[ModuleType, str, Callable[..., object], str, int]] = {
    "spares are reserved, and whoever comes first takes them": (
        spares, "withheld", lambda turn, job: {}, "are reserved for", 8,
    ),
    "equals are asked for replicas, too": (
        loans, "_is_below", lambda other, job: other is not job and not other.phase.finished, "has no higher priority", 3,
    ),
    "nobody is asked for replicas": (
        loans, "review", lambda turn, job: None, "could run with what others can lend", 21,
    ),
    "what was lent does not come back": (
        job_needs, "_wanted", lambda turn, job: None if job.lent is not None else _wanted(turn, job), "could run . of .", 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, instead, said, first = PLANTED[bug]
    monkeypatch.setattr(module, name, instead)

    require_found(said, range(first, first + PLANTED_SEEDS), lambda seed: simulate(SEVERAL_JOBS_FROM + seed))

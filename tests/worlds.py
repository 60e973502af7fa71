"""Simulated worlds, seed by seed: a broken promise fails the test with the end of its trace, and says how to replay it.

Of each kind of world in which nothing is planted, the tests simulate the first seeds; `make sim` has the others, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from holdfast.sim.scenario import simulate
from holdfast.sim.world import Violation

_TRACED = 60  # lines


def check_seed(seed: int) -> None:
    try:
        simulate(seed, tracing=True)
    except Violation as violation:
        message, *trace = violation.args
        tail = "\n".join(trace[-_TRACED:])
        pytest.fail(f"{tail}\n{message}\nreplay: holdfast simulate --seed {seed} --trace", pytrace=False)


def require_found(said: str, seeds: Iterable[int], simulate: Callable[[int], object]) -> None:
    """What is planted breaks a promise in one of these worlds, and the first broken one is `said`, a pattern."""

    def campaign() -> None:
        for seed in seeds:
            simulate(seed)

    with pytest.raises(Violation, match=said):
        campaign()

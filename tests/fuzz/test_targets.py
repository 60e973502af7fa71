"""A batch of each target from one seed, for each change. `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import pytest
import structlog
from fuzz.runner import run_batch, seed_of
from fuzz.target import Target
from fuzz.targets import TARGETS

from holdfast.supervisor.api.access import ROUTES

SEED = 7
INPUTS = 80


@pytest.fixture(autouse=True)
def quiet() -> None:
    """What is refused is logged, thousands of times."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name.replace("/", ":"))
def test_a_batch_of(target: Target) -> None:
    batch = run_batch(target, seed_of(SEED, target, 0), INPUTS)
    assert batch.inputs >= min(5, INPUTS * target.share), "the strategy makes hardly any inputs"
    assert not batch.finds, "\n\n".join(
        f"{find.error}\n{find.example}\nrepeat it: {find.command}" for find in batch.finds
    )


def test_each_route_is_a_target() -> None:
    assert {f"REST {route}" for route in ROUTES} <= {target.name for target in TARGETS}


def test_each_target_has_a_name_of_its_own() -> None:
    names = [target.name for target in TARGETS]
    assert len(set(names)) == len(names)

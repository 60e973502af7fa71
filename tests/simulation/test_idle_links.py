"""Idle nodes that test the network between them, in hostile worlds. And what goes wrong with that, planted."""

from __future__ import annotations

from types import ModuleType

import pytest
from worlds import check_seed, require_found

from holdfast.sim.scenario import IDLE_LINKS_FROM, simulate
from holdfast.supervisor.core.repair import link_tests
from holdfast.supervisor.core.rules import links

SEEDS = 2
PLANTED_SEEDS = 12


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_promise_holds_while_idle_nodes_test_their_network(seed: int) -> None:
    check_seed(IDLE_LINKS_FROM + seed)


# What is planted: (module, name, what stands there instead), what the promises say of it, and a seed near which they do.
PLANTED: dict[str, tuple[ModuleType, str, object, str, int]] = {
    "one partner is enough to be blamed": (links, "BLAMES_MIN", 1, "and its network is good", 8),
    "nobody is put out": (link_tests, "_judge", lambda *of: None, "and it is in service", 2),
    "nobody comes back": (links, "is_mended", lambda *of: False, "has been good for", 0),
    "all of them may be put out": (link_tests, "OUT_SHARE_MAX", 1.0, "without ranks are out of service", 8),
    "nodes with work are tested": (link_tests, "is_idle", lambda turn, node: node.connected, "has work", 12),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, instead, said, first = PLANTED[bug]
    monkeypatch.setattr(module, name, instead)

    require_found(said, range(first, first + PLANTED_SEEDS), lambda seed: simulate(IDLE_LINKS_FROM + seed))

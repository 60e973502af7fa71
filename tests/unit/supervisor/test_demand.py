"""When a provider is asked for more nodes, for how many, and who it is."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import plugged as packages
import pytest

from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.supervisor import providers
from holdfast.supervisor.core.repair.capacity import Lack
from holdfast.supervisor.providers import MoreNodes, Supplier, asking
from holdfast.supervisor.providers.command import MoreCommand
from holdfast.supervisor.providers.demand import EVERY_S_MAX, Demand, DemandRules

LACK = Lack("", 6, 2, ("llm",))
RULES = DemandRules(after_s=300, every_s=900, nodes_max=16)


def asked(demand: Demand, *lacks: Lack, now: float, breaker_open: bool = False) -> list[int]:
    return [each.wanted for each in demand.due(lacks, breaker_open=breaker_open, now=now)]


def test_what_is_missing_for_a_while_is_asked_for_as_a_number_to_reach() -> None:
    demand = Demand(RULES)
    assert asked(demand, LACK, now=0) == []
    assert asked(demand, LACK, now=299) == []
    (wanted,) = demand.due([LACK], breaker_open=False, now=300)
    assert wanted == MoreNodes("", 8, 2, ("llm",), "2 nodes missing for llm; 6 there")
    assert asked(demand, LACK, now=310) == []


def test_it_is_asked_for_again_less_and_less_often_while_it_lasts() -> None:
    demand = Demand(RULES)
    times = [now for now in range(0, 4 * 86_400, 10) if asked(demand, LACK, now=now)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:4] == [900, 1800, 3600, 7200]
    assert max(gaps) == EVERY_S_MAX


def test_another_number_is_asked_for_after_the_pause() -> None:
    demand = Demand(RULES)
    assert asked(demand, LACK, now=0) == []
    assert asked(demand, LACK, now=300) == [8]
    more = Lack("", 5, 4, ("llm",))
    assert asked(demand, more, now=310) == [], "nodes that fail one after the other are one request"
    assert asked(demand, more, now=1200) == [9]
    assert asked(demand, more, now=2099) == []
    assert asked(demand, more, now=2100) == [9]


def test_who_no_longer_lacks_nodes_begins_anew() -> None:
    demand = Demand(RULES)
    asked(demand, LACK, now=0)
    assert asked(demand, now=290) == []
    assert asked(demand, LACK, now=300) == []
    assert asked(demand, LACK, now=599) == []
    assert asked(demand, LACK, now=600) == [8]


def test_nobody_is_asked_while_the_breaker_is_open_nor_beyond_the_limit() -> None:
    demand = Demand(RULES)
    asked(demand, LACK, now=0)
    assert asked(demand, LACK, now=400, breaker_open=True) == []
    assert asked(demand, LACK, now=410) == [8]
    limited = Demand(DemandRules(after_s=0, nodes_max=7))
    (wanted,) = limited.due([LACK], breaker_open=False, now=0)
    assert (wanted.wanted, wanted.missing) == (7, 1)
    assert wanted.reason == "2 nodes missing for llm; 6 there; 7 nodes are allowed"
    for most in (0, 6):
        assert asked(Demand(DemandRules(after_s=0, nodes_max=most)), LACK, now=0) == []


def test_each_pool_is_asked_for_by_itself() -> None:
    demand = Demand(DemandRules(after_s=0, nodes_max=16))
    lacks = [LACK, Lack("a", 0, 1, tuple(f"j{index}" for index in range(7)))]
    first, second = demand.due(lacks, breaker_open=False, now=0)
    assert (first.pool, second.pool, second.wanted) == ("", "a", 1)
    assert second.reason == "1 node missing for j0, j1, j2, j3, j4 …; 0 there"


# ---------------------------------------------------------------- who is asked


@pytest.mark.anyio
async def test_the_command_gets_each_word_as_it_is() -> None:
    echo = f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))"'
    line = f"{echo} --size={{wanted}} {{pool}} {{missing}} {{jobs}} {{reason}}"
    wanted = MoreNodes("a", 8, 2, ("llm", "eval"), "2 nodes missing {pool}; $(rm -rf /)")
    said = json.loads(await MoreCommand(line).more(wanted))
    assert said == ["--size=8", "a", "2", "llm,eval", wanted.reason]


class Does:
    def __init__(self, outcome: object) -> None:
        self.outcome = outcome

    async def more(self, asked: MoreNodes) -> str:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome  # type: ignore[return-value]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("supplier", "answer"),
    [
        (Does("  resizing\nto 8"), (True, "resizing to 8")),
        (Does(ValueError("quota")), (False, "ValueError: quota")),
        (Does(Unavailable("no answer from the cloud")), (False, "no answer from the cloud")),
    ],
)
async def test_whatever_a_provider_does_is_an_answer(supplier: Supplier, answer: tuple[bool, str]) -> None:
    assert await asking.ask_more(supplier, MoreNodes("", 8, 2, ("llm",), "")) == answer


def test_nobody_is_asked_by_default_and_settings_that_mean_nothing_are_refused() -> None:
    assert providers.supplier(None, "", 0) is None
    assert providers.supplier(None, "", 8) is None
    assert isinstance(providers.supplier(None, "true {wanted}", 8), MoreCommand)
    with pytest.raises(InvalidSpec, match="HOLDFAST_MORE_NODES_MAX"):
        providers.supplier(None, "true", 0)
    with pytest.raises(InvalidSpec, match="HOLDFAST_MORE_COMMAND"):
        providers.supplier(None, "no-such-program-anywhere", 8)


def test_a_plug_in_with_the_method_is_asked_if_nodes_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"holdfast.providers": {"ticket": "acme_demand:Both", "old": "acme_demand:Replaces"}}
    module = (
        "class Replaces:\n    async def replace(self, machine): ...\n"
        "class Both(Replaces):\n    async def more(self, asked): ...\n"
    )
    packages.pretend(tmp_path, "acme", entries, {"acme_demand": module})
    monkeypatch.syspath_prepend(str(tmp_path))
    both, old = providers.build("ticket", ""), providers.build("old", "")
    found: object = providers.supplier(both, "", 8)
    assert found is both
    assert providers.supplier(both, "", 0) is None
    assert providers.supplier(old, "", 8) is None
    assert isinstance(providers.supplier(both, "true", 8), MoreCommand), "the command is the operator's"

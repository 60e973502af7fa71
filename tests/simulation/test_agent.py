"""The simulated agent admits, answers, reports and prepares as production: bugs that are planted in those parts are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from worlds import require_found

from holdfast.agent.connection.admission import UNKNOWN_OUTCOME, Admission, Verdict
from holdfast.agent.connection.ledger import Ledger
from holdfast.agent.connection.outbox import Outbox
from holdfast.agent.connection.reports import Reports
from holdfast.agent.generations import Generations, Preparation
from holdfast.domain.inventories import difference
from holdfast.domain.orders import Hello, Inventory, OrderDone, Prepare
from holdfast.domain.signals import Tick
from holdfast.sim.hostility import Hostility
from holdfast.sim.scenario import simulate

SEEDS = 60

admit, remember, greet, again = Admission.admit, Ledger.remember, Reports.greet, Outbox.again
prepare = Generations.prepare


# ---------------------------------------------------------------- admission and ledger


def _forget_orders_in_progress(self: Admission, *arrived: Any) -> Verdict:
    verdict = admit(self, *arrived)
    self._in_progress.clear()
    return verdict


def _remember_only_answers(self: Ledger, answer: OrderDone) -> None:
    """Planted: the unknown outcome of a reset is not stored before the reset begins."""
    if answer.reason != UNKNOWN_OUTCOME:
        remember(self, answer)


def _remember_nothing(self: Ledger, answer: OrderDone) -> None:
    pass


def _accept_every_epoch(self: Ledger, epoch: int) -> None:
    pass


# ---------------------------------------------------------------- reports and outbox


def _send_once(self: Reports, hello: Hello, inventories: Iterable[Inventory] = ()) -> None:
    """Planted: reports whose acknowledgement was lost are not sent again."""
    self._sent.clear()
    greet(self, hello, inventories)


def _number_from_one(self: Reports, hello: Hello, inventories: Iterable[Inventory] = ()) -> None:
    self._seq = 0
    greet(self, hello, inventories)


def _go_on_with_differences(self: Reports, hello: Hello, inventories: Iterable[Inventory] = ()) -> None:
    """Planted: the first inventory of a session is a difference to the last one of the session before."""
    last = dict(self._last_sent)
    greet(self, hello, inventories)
    self._last_sent = last


def _differ_from_the_first(self: Reports, inventory: Inventory) -> Inventory:
    """Planted: every difference is that to the first inventory of the session, and names the last one."""
    last = self._last_sent.get(inventory.job)
    self._last_sent[inventory.job] = self._seq, last[1] if last else inventory
    return difference(last[1], inventory, base=last[0]) if last else inventory


def _repeat_nothing(self: Outbox) -> tuple[Tick, ...]:
    return ()


def _repeat_with_new_numbers(self: Outbox) -> tuple[Tick, ...]:
    ticks = again(self)
    self._seq += len(ticks)
    return tuple(replace(tick, seq=self._seq - number) for number, tick in enumerate(reversed(ticks)))


# ---------------------------------------------------------------- generations


def _keep_preparing(self: Generations, order: object) -> None:
    """Planted: an order to stop does not end a preparation."""


def _take_all_runs_for_one(self: Generations, order: Prepare, cancel: Callable[[], None]) -> Preparation:
    """Planted: the generations of a job that is submitted again continue those of the run before."""
    self.refuse_older(order.job, order.generation)
    return prepare(self, order, cancel)


FORGETFUL = Hostility(log_all=True, peace_s=120.0)  # the job is submitted again


@pytest.mark.parametrize(
    ("part", "method", "planted", "said", "first", "hostility"),
    [
        (Admission, "admit", _forget_orders_in_progress, r"\(Prepare\) twice", 1, None),
        (Ledger, "remember", _remember_nothing, "twice", 0, None),
        (Ledger, "remember", _remember_only_answers, r"\(ResetGpu\) twice", 135, None),
        (Ledger, "raise_epoch", _accept_every_epoch, "admits .* of epoch", 597, None),
        (Reports, "greet", _send_once, "does not send again", 15, None),
        (Reports, "greet", _number_from_one, "as its report 1, after", 0, None),
        (Reports, "greet", _go_on_with_differences, "sends a difference to its report", 1, None),
        (Reports, "_since_last", _differ_from_the_first, "not the contents of its memory", 8, None),
        (Outbox, "again", _repeat_nothing, "again, which was not read", 18, None),
        (Outbox, "again", _repeat_with_new_numbers, "diagnostics folds .* twice", 70, None),
        (Generations, "stop", _keep_preparing, "has no ranks of it", 18, None),
        (Generations, "prepare", _take_all_runs_for_one, "could not be started", 105, FORGETFUL),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) and not isinstance(value, type) else "",
)
def test_a_bug_that_is_planted_in_the_agent_is_found(
    part: type,
    method: str,
    planted: Callable[..., object],
    said: str,
    first: int,
    hostility: Hostility | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`first`: a seed near which it is found."""
    monkeypatch.setattr(part, method, planted)

    require_found(said, range(first, first + SEEDS), lambda seed: simulate(seed, hostility=hostility))

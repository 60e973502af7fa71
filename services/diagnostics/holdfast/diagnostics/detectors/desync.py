"""Finds the rank whose collective calls differ, if several ranks fail in the same collective. A pure function over their last
calls.

The collectives of a group are numbered on every member. A rank that has skipped a collective, or has called an additional one,
has another number than the other members, or calls another operation with the same number. The call of another rank fails
first. The majority decides: among at least three members whose calls are known, a rank that differs from more than half of them
is out of step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from holdfast.diagnostics.detectors.waiting import EQUAL_SIZES
from holdfast.domain.signals import WorkerExited

_MEMBERS_MIN = 3  # if two members differ, either may be out of step

V = TypeVar("V", int, str)


def odd_one_out(exits: Iterable[WorkerExited]) -> tuple[int, str] | None:
    """Return the rank whose calls differ from the majority's, and how they differ; None if there is no such rank."""
    groups: dict[str, dict[int, dict[int, str]]] = defaultdict(dict)  # group → rank → number → call
    for exit_ in exits:
        if exit_.error is not None:
            for group, seq, call in zip(exit_.error.call_group, exit_.error.call_seq, exit_.error.call, strict=False):
                groups[group].setdefault(exit_.rank, {})[seq] = call
    for name, members in sorted(groups.items()):
        if len(members) >= _MEMBERS_MIN and (found := _odd_in(name, members)) is not None:
            return found
    return None


def _odd_in(group: str, members: Mapping[int, Mapping[int, str]]) -> tuple[int, str] | None:
    shared = set.intersection(*(set(calls) for calls in members.values()))
    for seq in sorted(shared):
        odd, usual = _minority({rank: _comparable(calls[seq]) for rank, calls in members.items()})
        if odd:
            rank = min(odd)
            return rank, f"it called {members[rank][seq]} where most call {usual}, as #{seq} of group {group}"
    newest = {rank: max(calls) for rank, calls in members.items()}
    odd, common = _minority(newest)
    if not odd:
        return None
    rank = min(odd)
    return rank, f"it has entered {newest[rank]} collectives of group {group}, most of the others {common}"


def _comparable(call: str) -> str:
    """Return the call in comparable form: with the sizes only if all members must pass tensors of one size."""
    return call if call.startswith(EQUAL_SIZES) else call.partition(" ")[0]


def _minority(values: Mapping[int, V]) -> tuple[list[int], V | None]:
    """Return the keys whose value differs from the majority's value, and this value; ([], None) if there is no majority."""
    (common, count), *_ = Counter(values.values()).most_common()
    if count * 2 <= len(values):
        return [], None
    return [rank for rank, value in values.items() if value != common], common

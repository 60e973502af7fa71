"""Saying once what is so for long, and saying that it flaps instead of saying it again and again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from holdfast.diagnostics.bounded import Bounded

_KEYS_MAX = 1024  # per table; the oldest is forgotten first
_FLAPS = 3  # a condition that came this often is said to flap, once


class Keyed(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def members(self) -> frozenset[int]: ...


K = TypeVar("K", bound=Keyed)


@dataclass(slots=True)
class _Known:
    said_at: float  # diagnostics' clock, Unix seconds
    members: frozenset[int]
    active: bool = True
    gone_at: int = 0  # position (step, or second) at which it was seen to be over
    times: int = 1


@dataclass(slots=True)
class Recurring:
    """What has been said of one subject. Positions grow: step numbers, or seconds."""

    known: Bounded[str, _Known] = field(default_factory=lambda: Bounded(_KEYS_MAX))

    def news(
        self, conditions: Sequence[K], position: int, now: float, quiet: int, repeat_s: float
    ) -> Iterator[tuple[K, int]]:
        """Those of `conditions`, all that hold now, that are worth a finding, each with how often it has come.

        New, or concerning more than was said: at once. Still there: every `repeat_s`. Back after more than `quiet`: new.
        Back sooner: only when it has come `_FLAPS` times, and then not before it is old news again.
        """
        current = {condition.key for condition in conditions}
        for key, old in self.known.items():
            if old.active and key not in current:
                old.active, old.gone_at = False, position
        for condition in conditions:
            known = self.known.get(condition.key)
            if known is None or (not known.active and position - known.gone_at > quiet):
                self.known[condition.key] = _Known(now, condition.members)
                yield condition, 1
                continue
            came_back, known.active = not known.active, True
            known.times += came_back
            more = not condition.members <= known.members
            if more or (came_back and known.times == _FLAPS) or not 0.0 <= now - known.said_at < repeat_s:
                known.said_at, known.members = now, known.members | condition.members
                yield condition, known.times

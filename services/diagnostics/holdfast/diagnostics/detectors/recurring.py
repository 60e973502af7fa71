"""Reports a lasting condition once, and a flapping one as flapping instead of again and again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from holdfast.diagnostics.bounded import Bounded

_KEYS_MAX = 1024  # per table; the oldest entry is dropped first
_FLAPS = 3  # at its third occurrence a condition is reported as flapping, once


class Keyed(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def members(self) -> frozenset[int]: ...


K = TypeVar("K", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Report(Generic[K]):
    """A report of a condition that is due."""

    condition: K
    times: int  # number of occurrences
    first: int  # position of the first report of this occurrence
    repeat: int  # number of earlier reports of this occurrence


@dataclass(slots=True)
class _Known(Generic[K]):
    condition: K  # as last reported
    reported_at: float  # diagnostics' clock, Unix seconds
    members: frozenset[int]
    active: bool = True
    gone_at: int = 0  # position (step, or second) at which it was first missing
    times: int = 1
    first: int = 0
    repeat: int = 0
    reported_as: int = 1  # the number of occurrences in the newest report
    withdrawn: bool = False


@dataclass(slots=True)
class Recurring(Generic[K]):
    """The reported conditions of one subject. Positions grow; they are step numbers or seconds."""

    known: Bounded[str, _Known[K]] = field(default_factory=lambda: Bounded(_KEYS_MAX))

    def due(
        self,
        conditions: Sequence[K],
        position: int,
        now: float,
        quiet: int,
        repeat_s: float,
        urgent: frozenset[str] = frozenset(),
    ) -> Iterator[Report[K]]:
        """Yield the reports that are due. `conditions`: all conditions that hold now. `urgent`: keys that are due at once.

        A new condition, or a condition with additional members, is due at once. A condition that lasts is due every `repeat_s`.
        A condition that returns after more than `quiet` positions counts as new. A condition that returns sooner is due at its
        occurrence `_FLAPS`, and then every `repeat_s`.
        """
        current = {condition.key for condition in conditions}
        for key, old in self.known.items():
            if old.active and key not in current:
                old.active, old.gone_at = False, position
        for condition in conditions:
            known = self.known.get(condition.key)
            if known is None or (not known.active and position - known.gone_at > quiet):
                self.known[condition.key] = _Known(condition, now, condition.members, first=position)
                yield Report(condition, 1, position, 0)
                continue
            returned, known.active = not known.active, True
            known.times += returned
            more = not condition.members <= known.members or condition.key in urgent
            if more or (returned and known.times == _FLAPS) or not 0.0 <= now - known.reported_at < repeat_s:
                again = known.times == known.reported_as
                known.first, known.repeat = (known.first, known.repeat + 1) if again else (position, 0)
                known.reported_at, known.members = now, known.members | condition.members
                known.condition, known.reported_as, known.withdrawn = condition, known.times, False
                yield Report(condition, known.times, known.first, known.repeat)

    def over(self, position: int, gone: int) -> Iterator[tuple[K, int]]:
        """Yield the conditions that have been missing for `gone` positions, each as last reported, with its number of
        occurrences. Each report is withdrawn once. The absence of a flapping condition does not withdraw it."""
        for known in self.known.values():
            missing = not known.active and position - known.gone_at >= gone
            if missing and not known.withdrawn and known.times < _FLAPS:
                known.withdrawn = True
                yield known.condition, known.reported_as

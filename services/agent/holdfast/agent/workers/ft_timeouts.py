"""Decides whether a rank that reports by `RankMonitorClient` is overdue. Pure: time is an argument, in monotonic seconds.

The intervals are those of nvidia-resiliency-ext's own monitor: the time to the first heartbeat, the time between two
heartbeats, the time that a section has been open, and the time without an open section. The timeout of each interval is, in
this order,

1. set: calculated and sent by the script (`calculate_and_set_…_timeouts`), or set by the job;
2. learned: `factor` times the longest interval, if at least `LEARN_FROM` intervals have ended. It is never less than `least_s`,
   because the length of an evaluation or a save is not known in advance.

An interval without a timeout is never overdue. A timeout that was set applies exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.agent.workers.ft_messages import SECTIONS_MAX, Heartbeat, Section, Timeouts, Update

LEARN_FROM = 3
SAFETY_FACTOR = 5.0


@dataclass(slots=True)
class _Seen:
    """Intervals of one kind that have ended."""

    count: int = 0
    longest_s: float = 0.0

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.longest_s = max(self.longest_s, duration_s)


@dataclass(slots=True)
class Watch:
    """State of one connection. `timeouts`: those that were set. `least_s`: the shortest learned timeout."""

    timeouts: Timeouts
    least_s: float
    began: float
    factor: float = SAFETY_FACTOR
    calculated: bool = False  # the script has sent its timeouts
    beats: int = 0
    _beat_at: float = 0.0
    _outside_since: float = 0.0
    _open: dict[str, float] = field(default_factory=dict)
    _between: _Seen = field(default_factory=_Seen)
    _outside: _Seen = field(default_factory=_Seen)
    _sections: dict[str, _Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._outside_since = self.began

    def fold(self, message: Heartbeat | Section | Update, now: float) -> str:
        """Process a message. Returns the error text of the client's own monitor; "" = no error."""
        match message:
            case Heartbeat():
                if self.beats:
                    self._between.add(now - self._beat_at)
                self.beats += 1
                self._beat_at = now
            case Section(action="open", name=name):
                if name in self._open:
                    return f"Section '{name}' is already open."
                if len(self._open) >= SECTIONS_MAX:
                    return f"More than {SECTIONS_MAX} sections are open."
                if not self._open and self._sections:  # the time before the first section is the script's start
                    self._outside.add(now - self._outside_since)
                self._open[name] = now
            case Section(action="close", name=name):
                if name not in self._open:
                    return f"Section '{name}' is not open."
                self._close(name, now)
            case Section():
                for name in list(self._open):
                    self._close(name, now)
            case Update(heartbeat, sections):
                self._update(heartbeat, sections)
        return ""

    def unheard(self, now: float) -> None:
        """Restart all intervals at `now`, because the agent was frozen before."""
        self.began = max(self.began, now)
        self._beat_at = self._outside_since = now
        self._open = dict.fromkeys(self._open, now)

    def overdue(self, now: float) -> str:
        """Return which interval has exceeded its timeout, for the user; "" = none."""
        return next((f"{what}; {why}" for what, why in self._overdue(now)), "")

    def _overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield (interval, timeout) of overdue intervals. Sections come first, because they are the most specific."""
        spec = self.timeouts
        for name, since in self._open.items():
            learned = self._learned(self._sections.get(name, _Seen()))
            yield from _past(f"section {name!r} has been open", now - since, spec.sections.get(name), self._by, learned)
        if not self.beats:
            yield from _past("the first heartbeat has not arrived", now - self.began, spec.initial, self._by, None)
        else:
            learned = self._learned(self._between)
            yield from _past("no heartbeat has arrived", now - self._beat_at, spec.subsequent, self._by, learned)
        if not self._open:
            learned = self._learned(self._outside)
            outside_s = now - self._outside_since
            yield from _past("no section has been open", outside_s, spec.out_of_section, self._by, learned)

    @property
    def _by(self) -> str:
        return "calculated by the script" if self.calculated else "set for the job"

    def _learned(self, seen: _Seen) -> float | None:
        return None if seen.count < LEARN_FROM else max(self.least_s, self.factor * seen.longest_s)

    def _close(self, name: str, now: float) -> None:
        if name in self._sections or len(self._sections) < SECTIONS_MAX:
            self._sections.setdefault(name, _Seen()).add(now - self._open[name])
        del self._open[name]
        if not self._open:
            self._outside_since = now

    def _update(
        self,
        heartbeat: tuple[float | None, float | None] | None,
        sections: tuple[Mapping[str, float | None], float | None] | None,
    ) -> None:
        old = self.timeouts
        initial, subsequent = (old.initial, old.subsequent) if heartbeat is None else heartbeat
        by_name, outside = (old.sections, old.out_of_section) if sections is None else sections
        self.timeouts = Timeouts(initial, subsequent, {**old.sections, **by_name}, outside)
        self.calculated = True


def _past(
    what: str, duration_s: float, limit_s: float | None, by: str, learned_s: float | None
) -> Iterator[tuple[str, str]]:
    allowed_s, why = (limit_s, by) if limit_s is not None else (learned_s, "learned from earlier ones")
    if allowed_s is not None and duration_s > allowed_s:
        yield f"{what} for {duration_s:.1f} s", f"{allowed_s:.1f} s are allowed ({why})"

"""The conditions under which a node returns that a fault took out of service, and the duration of its hold-down. Pure.

A node that failed is more likely to fail again than any other, most of all soon after its return (offenders.py). Excluded until
an operator acts, however, it is paid for and not used, and most faults end with a reboot, as the driver's own catalogue states.
So a node returns by itself when the condition of its fault is met (`Cure`). It is held down for a time that doubles with each
fault on its record, and is on probation after that.

A loss is no evidence against the hardware: a network partition and a spot machine that was taken look the same. The first
losses within the window (`losses_free`) cost no hold-down, and no hold-down after a loss keeps a job waiting (returns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.evolve import evolve
from holdfast.supervisor.core.rules.links import Expected
from holdfast.supervisor.core.rules.offenders import Fault
from holdfast.supervisor.return_rules import ReturnRules

REBOOTS_MAX = 3  # tries to boot a machine after one fault
REQUESTS_MAX = 3  # for another machine after one fault


class Cure(StrEnum):
    """The condition for the start of the hold-down, the least first."""

    RETURN = "return"  # it has a session again
    STOPPED = "stopped"  # the workers that did not stop have ended
    TESTS = "tests"  # it has passed its pre-flight test
    LINKS = "links"  # network tests with other nodes were good again
    REBOOT = "reboot"  # its machine has rebooted, or is another one
    OPERATOR = "operator"  # an operator has decided


_ORDER = tuple(Cure)


@dataclass(frozen=True, slots=True)
class Reboot:
    """The progress of a boot that Holdfast orders (reboots.py)."""

    tries: int = 0  # boots that were ordered
    ordered_at: float | None = None  # when the boot that is under way was ordered
    waits: str = ""  # what prevents the next one, one clause
    failure: str = ""  # of the last one


@dataclass(frozen=True, slots=True)
class Replacement:
    """The progress of the request for another machine (replacements.py)."""

    tries: int = 0  # requests sent
    request: str = ""  # id of the newest
    asked_at: float | None = None  # when it was sent; None = it is answered; it stays set if the outcome is not known
    waits: str = ""  # what prevents the next one, one clause
    failure: str = ""  # of the last one
    answer: str = ""  # text of the provider's agreement
    agreed_at: float | None = None  # when the provider agreed

    @property
    def under_way(self) -> bool:
        """Whether the machine is being replaced, as far as is known."""
        return self.asked_at is not None or self.agreed_at is not None


@dataclass(frozen=True, slots=True)
class Removal:
    """A fault took the node out of service."""

    cause: str  # the finding's summary
    at: float  # Unix seconds
    cure: Cure
    hardware: bool = False  # there is evidence against its hardware: no job gets it before the hold-down ends
    boot_id: str = ""  # of the machine that failed; empty = not reported
    preflight_at: float = 0.0  # time of the newest tests before the fault, by the node's clock: they no longer count
    tested: bool = False  # it has passed its tests since
    finding: str = ""
    back_at: float | None = None  # when its cure was complete and the hold-down began
    hold_until: float = 0.0
    final: str = ""  # why only an operator brings it back; empty = it returns by itself
    reboot: Reboot | None = None  # set if Holdfast boots its machine
    replacement: Replacement | None = None  # set if another machine was requested
    replace: bool = False  # the mildest recommended remedy is another machine
    expected: Expected | None = None  # for `Cure.LINKS`: what tests must reach while there are too few other results


@dataclass(frozen=True, slots=True)
class Probation:
    since: float  # Unix seconds
    until: float
    cause: str  # of the removal before it

    def covers(self, fault: Fault) -> bool:
        return self.since < fault.at <= self.until


def own(faults: Sequence[Fault]) -> list[Fault]:
    """Faults that are certainly the node's: not possibly the script's, not shared with other nodes, not only its agent's."""
    return [fault for fault in faults if fault.weight >= 1.0 and not fault.shared and not fault.agent_only]


def hold_s(removal: Removal, faults: Sequence[Fault], now: float, rules: ReturnRules) -> float:
    """The duration of the node's hold-down, in seconds."""
    counted = max(1, sum(now - fault.at <= rules.window_s for fault in own(faults)))
    if removal.cure is Cure.RETURN and not removal.hardware:
        counted -= rules.losses_free
    if counted <= 0:
        return 0.0
    return min(rules.hold_s_max, rules.hold_s * 2.0 ** min(counted - 1, 32))


def second_fault(probation: Probation | None, faults: Sequence[Fault]) -> str:
    """Why a node on probation is taken out until an operator acts, as an English clause; empty if it is not."""
    counted = [] if probation is None else [fault for fault in own(faults) if probation.covers(fault)]
    return f"second fault on probation ({counted[-1].incident})" if counted else ""


def merged(old: Removal | None, new: Removal) -> Removal:
    """Combine the removals of a node that has another fault while it is out. The stricter of the two cures that are not
    complete applies, and the hold-down starts again."""
    if old is None or (old.finding and old.finding == new.finding):
        return old or new
    pending = Cure.RETURN if old.back_at is not None else old.cure
    cure = max(pending, new.cure, key=_ORDER.index)
    explains = (old.hardware and not new.hardware) or cure is not new.cure
    return evolve(
        new,
        cause=old.cause if explains else new.cause,
        finding=old.finding if explains else new.finding,
        cure=cure,
        hardware=old.hardware or new.hardware,
        boot_id=new.boot_id if cure is new.cure else old.boot_id,
        final=old.final,
        reboot=old.reboot if old.back_at is None else None,  # one boot cures both
        replacement=old.replacement if old.back_at is None or old.final else None,  # and so does one new machine
        replace=new.replace or (old.replace and old.back_at is None),
        expected=new.expected or old.expected,
    )

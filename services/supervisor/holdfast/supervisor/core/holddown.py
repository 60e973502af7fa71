"""What brings a node back that a fault took out of service, and how long it is held down first. Pure.

A node that failed is more likely to fail again than any other, most of all soon after its return (offenders.py). Left out until
somebody looks, though, it is paid for and not used, and most faults end with a reboot: the driver's own catalogue says so. So a
node comes back by itself once that is done which its fault needs (`Cure`), is held down for a time that doubles with each fault
of its record, and is on probation after that.

A loss is no evidence against the hardware: a network partition and a spot machine that was taken look the same. The first ones
within the window (`losses_free`) cost no hold-down at all, and no hold-down after a loss keeps a job waiting (returns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.evolve import evolve
from holdfast.supervisor.core.links import Expected
from holdfast.supervisor.core.offenders import Fault
from holdfast.supervisor.return_rules import ReturnRules

REBOOTS_MAX = 3  # tries to boot a machine after one fault
REQUESTS_MAX = 3  # for another machine after one fault


class Cure(StrEnum):
    """What must have happened before the hold-down begins, the least first."""

    RETURN = "return"  # it has a session again
    STOPPED = "stopped"  # the workers that did not stop are gone
    TESTS = "tests"  # it has passed its tests of itself
    LINKS = "links"  # tests of the network with other nodes were good again
    REBOOT = "reboot"  # its machine was booted again, or is another one
    OPERATOR = "operator"  # an operator has looked


_ORDER = tuple(Cure)


@dataclass(frozen=True, slots=True)
class Reboot:
    """How far the boot of a machine has come that Holdfast orders (reboots.py)."""

    tries: int = 0  # that were ordered
    ordered_at: float | None = None  # the one that is under way
    waits: str = ""  # what keeps the next one, one clause
    failure: str = ""  # of the last one


@dataclass(frozen=True, slots=True)
class Replacement:
    """How far the request for another machine has come (replacements.py)."""

    tries: int = 0  # requests
    request: str = ""  # the newest
    asked_at: float | None = (
        None  # when it went out; None = it is answered, unlike one that nobody knows the outcome of
    )
    waits: str = ""  # what keeps the next one, one clause
    failure: str = ""  # of the last one
    answer: str = ""  # of who provides machines: another one comes
    agreed_at: float | None = None  # when it was answered so

    @property
    def under_way(self) -> bool:
        """The machine is being replaced, as far as anybody knows."""
        return self.asked_at is not None or self.agreed_at is not None


@dataclass(frozen=True, slots=True)
class Removal:
    """A fault took the node out of service."""

    cause: str  # the finding's summary
    at: float  # Unix seconds
    cure: Cure
    hardware: bool = False  # there is evidence against its hardware: no job gets it before its time
    boot_id: str = ""  # of the machine that failed; empty = its agent does not say
    preflight_at: float = 0.0  # of the newest tests before the fault, by the node's clock: they say nothing any more
    tested: bool = False  # it has passed its tests since
    finding: str = ""
    back_at: float | None = None  # when all had happened that must have
    hold_until: float = 0.0
    final: str = ""  # why only an operator brings it back; empty = it comes back by itself
    reboot: Reboot | None = None  # as far as Holdfast boots its machine
    replacement: Replacement | None = None  # as far as another machine was asked for
    replace: bool = False  # the mildest remedy that was recommended is another machine
    expected: Expected | None = None  # with `Cure.LINKS`: what tests must reach while there are too few other results


@dataclass(frozen=True, slots=True)
class Probation:
    since: float  # Unix seconds
    until: float
    cause: str  # of the removal before it

    def covers(self, fault: Fault) -> bool:
        return self.since < fault.at <= self.until


def own(faults: Sequence[Fault]) -> list[Fault]:
    """Faults that are the node's beyond doubt: neither perhaps the script's, nor others' as well, nor only its agent's."""
    return [fault for fault in faults if fault.weight >= 1.0 and not fault.shared and not fault.agent_only]


def hold_s(removal: Removal, faults: Sequence[Fault], now: float, rules: ReturnRules) -> float:
    """How long the node is held down."""
    counted = max(1, sum(now - fault.at <= rules.window_s for fault in own(faults)))
    if removal.cure is Cure.RETURN and not removal.hardware:
        counted -= rules.losses_free
    if counted <= 0:
        return 0.0
    return min(rules.hold_s_max, rules.hold_s * 2.0 ** min(counted - 1, 32))


def second_fault(probation: Probation | None, faults: Sequence[Fault]) -> str:
    """Why a node that was on probation is sent away, as an English clause; empty when it is not."""
    struck = [] if probation is None else [fault for fault in own(faults) if probation.covers(fault)]
    return f"second fault on probation ({struck[-1].incident})" if struck else ""


def merged(old: Removal | None, new: Removal) -> Removal:
    """A fault of a node that another one has taken out: the worse of the two says what brings it back, as far as that has not
    happened yet, and the hold-down begins anew."""
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
        reboot=old.reboot if old.back_at is None else None,  # one boot ends both
        replacement=old.replacement if old.back_at is None or old.final else None,  # and one new machine
        replace=new.replace or (old.replace and old.back_at is None),
        expected=new.expected or old.expected,
    )

"""What the supervisor should be told of the cluster's machines: the difference between them and what it knows. Pure.

A node of the fleet is the machine of its name, or of the pod of its name where agents share machines. A node that is neither
runs outside of the cluster, or its object has not been seen: nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from holdfast.kubernetes.machines import Cluster, Machine

SCHEDULED_LEAD_S = 3600.0  # maintenance is scheduled weeks ahead: until then the machine is as good as any
RENEW_S = 1200.0  # a notice that still holds is repeated: the supervisor drops it an hour after it was last told
SAME_TIME_S = 60.0  # the start of maintenance may move by so much without being told anew
DELETED = "its machine was deleted from the cluster"


@dataclass(frozen=True, slots=True)
class Known:
    """A node as the supervisor knows it. `event`: of the notice that this bridge has given; empty = none holds."""

    node: str
    event: str = ""
    starts_at: float | None = None  # Unix seconds; None = any moment
    told_at: float = 0.0  # when the notice was last told
    zone: str = ""  # failure domain that the bridge has told; empty = none
    away: bool = False  # it is lost, and no job counts on it


@dataclass(frozen=True, slots=True)
class Announce:
    """The machine of the node will be taken, or may be at any moment (`starts_at` None)."""

    node: str
    event: str
    starts_at: float | None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """It will not be taken after all."""

    node: str


@dataclass(frozen=True, slots=True)
class SetZone:
    node: str
    zone: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The machine is gone for good."""

    node: str
    reason: str


Change = Announce | Withdraw | SetZone | Forget


def changes(cluster: Cluster, fleet: Mapping[str, Known], at: float, *, confirmed: bool) -> list[Change]:
    """Return what is to be told, by node. `confirmed`: the API server has answered within the last minutes, so that notices
    which still hold may be repeated."""
    if cluster.machines is None:
        return []
    by_pod = cluster.machine_of()
    found: list[Change] = []
    for name in sorted(fleet):
        known = fleet[name]
        place = name if name in cluster.machines or name in cluster.deleted else by_pod.get(name, "")
        machine = cluster.machines.get(place)
        if machine is not None:
            event, starts_at = _notice(machine, at)
            if machine.zone and machine.zone != known.zone:
                found.append(SetZone(name, machine.zone))
        elif place in cluster.deleted:
            if known.away:
                found.append(Forget(name, DELETED))
                continue
            event, starts_at = DELETED, None
        else:
            continue
        if event and (not _same(known, event, starts_at) or (confirmed and at - known.told_at >= RENEW_S)):
            found.append(Announce(name, event, starts_at))
        elif known.event and not event:
            found.append(Withdraw(name))
    return found


def words(change: Change) -> str:
    """For people."""
    match change:
        case Announce(event=event, starts_at=None):
            return event
        case Announce(event=event, starts_at=starts_at):
            return f"{event}, at {starts_at:.0f} (Unix seconds)"
        case Withdraw():
            return "the notice is withdrawn"
        case SetZone(zone=zone):
            return f"its failure domain is {zone}"
        case Forget(reason=reason):
            return reason
    assert_never(change)


def _notice(machine: Machine, at: float) -> tuple[str, float | None]:
    """(event, when it starts); event empty = the machine stays."""
    if machine.leaving:
        return f"Kubernetes: {machine.leaving}", None
    if machine.scheduled_at is not None and machine.scheduled_at - at <= SCHEDULED_LEAD_S:
        return "Kubernetes: scheduled maintenance", machine.scheduled_at
    return "", None


def _same(known: Known, event: str, starts_at: float | None) -> bool:
    if known.event != event or (known.starts_at is None) is not (starts_at is None):
        return False
    return known.starts_at is None or starts_at is None or abs(known.starts_at - starts_at) < SAME_TIME_S

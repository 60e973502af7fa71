"""Computes the changes to send to the supervisor: the difference between the cluster's machines and the supervisor's state.
Pure.

A node of the fleet belongs to the machine of the same name or, if agents share machines, to the machine of the pod of the same
name. For other nodes no changes are sent: they run outside of the cluster, or their objects are not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from holdfast.kubernetes.machines import Cluster, Machine

SCHEDULED_LEAD_S = 3600.0  # scheduled maintenance is announced this long before; it is scheduled weeks ahead
RENEW_S = 1200.0  # a valid notice is repeated after this time; the supervisor drops it an hour after the last one
SAME_TIME_S = 60.0  # a change of the start of maintenance by less than this is not sent
DELETED = "its machine was deleted from the cluster"


@dataclass(frozen=True, slots=True)
class Known:
    """A node in the supervisor's state. `event`: event of the valid notice of this bridge; empty = none."""

    node: str
    event: str = ""
    starts_at: float | None = None  # Unix seconds; None = any moment
    notified_at: float = 0.0  # when the notice was last sent
    zone: str = ""  # failure domain that the bridge has sent; empty = none
    away: bool = False  # the node is lost, and no job uses it


@dataclass(frozen=True, slots=True)
class Announce:
    """The machine of the node will be taken away at `starts_at`; None = possibly at any time."""

    node: str
    event: str
    starts_at: float | None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The notice for the node no longer applies."""

    node: str


@dataclass(frozen=True, slots=True)
class SetZone:
    node: str
    zone: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The machine was deleted permanently."""

    node: str
    reason: str


Change = Announce | Withdraw | SetZone | Forget


def changes(cluster: Cluster, fleet: Mapping[str, Known], at: float, *, confirmed: bool) -> list[Change]:
    """Return the changes to send, ordered by node. `confirmed`: the API server has answered within the last minutes, so that
    valid notices may be repeated."""
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
        if event and (not _same(known, event, starts_at) or (confirmed and at - known.notified_at >= RENEW_S)):
            found.append(Announce(name, event, starts_at))
        elif known.event and not event:
            found.append(Withdraw(name))
    return found


def words(change: Change) -> str:
    """Describe a change for people."""
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
    """Return (event, its start); an empty event = the machine stays."""
    if machine.leaving:
        return f"Kubernetes: {machine.leaving}", None
    if machine.scheduled_at is not None and machine.scheduled_at - at <= SCHEDULED_LEAD_S:
        return "Kubernetes: scheduled maintenance", machine.scheduled_at
    return "", None


def _same(known: Known, event: str, starts_at: float | None) -> bool:
    if known.event != event or (known.starts_at is None) is not (starts_at is None):
        return False
    return known.starts_at is None or starts_at is None or abs(known.starts_at - starts_at) < SAME_TIME_S

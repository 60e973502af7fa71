"""Who may call which gRPC method: one table for all services, and the decision on one call. Pure.

A method without a row is refused. Where a row says `Ownership.NODE`, the messages name a node, and it must be the caller's: the
service that reads them asks `Caller.refusal_for`. Without TLS a connection proves no identity, and only the rows' existence and
`local` are checked: the network protects the service then (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from holdfast.runtime.trust.identities import ANY_NAME, Identity, Role


class Ownership(StrEnum):
    """Whether what a caller says is about itself only."""

    NONE = "none"
    NODE = "node"  # for the node of its identity


@dataclass(frozen=True, slots=True)
class Rule:
    """`anybody`: who has a certificate of the CA, with any role or none. `local`: who reaches the service's Unix socket, which
    has the permissions of its directory."""

    roles: frozenset[Role] = frozenset()
    ownership: Ownership = Ownership.NONE
    anybody: bool = False
    local: bool = False


_AGENTS = Rule(frozenset({Role.AGENT}), Ownership.NODE)
_LOCAL = Rule(local=True)
_ANYBODY = Rule(anybody=True)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "/holdfast.v1.Control/Session": _AGENTS,
        "/holdfast.v1.Enrolment/Renew": _AGENTS,
        "/holdfast.v1.Telemetry/Stream": _AGENTS,
        "/holdfast.v1.Replicator/Describe": _LOCAL,
        "/holdfast.v1.Replicator/Configure": _LOCAL,
        "/holdfast.v1.Replicator/Stage": _LOCAL,
        "/holdfast.v1.Replicator/Archive": _LOCAL,
        "/holdfast.v1.Replicator/Retain": _LOCAL,
        "/holdfast.v1.Replicator/WatchInventory": _LOCAL,
        "/holdfast.v1.Replicator/End": _LOCAL,
        "/holdfast.v1.Replicator/Prune": _LOCAL,
        "/holdfast.v1.Replicator/Forget": _LOCAL,
        "/holdfast.v1.Replicator/OpenLink": _LOCAL,
        "/holdfast.v1.Replicator/MeasureLink": _LOCAL,
        "/holdfast.v1.Replicator/CloseLink": _LOCAL,
        "/grpc.health.v1.Health/Check": _ANYBODY,
        "/grpc.health.v1.Health/List": _ANYBODY,
        "/grpc.health.v1.Health/Watch": _ANYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANYBODY,
    }
)


@dataclass(frozen=True, slots=True)
class Accepts:
    """What one end of a connection demands of the other. `fleet`: empty = any. `required`: whether a certificate must have an
    identity; one that has some is held to them in any case."""

    fleet: str = ""
    required: bool = False

    def of_this_fleet(self, identities: tuple[Identity, ...]) -> tuple[Identity, ...]:
        return tuple(each for each in identities if not (self.fleet and each.fleet) or each.fleet == self.fleet)


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a call has come. `identities`: None without TLS, empty for a certificate without any."""

    local: bool = False
    identities: tuple[Identity, ...] | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The identities that a call was admitted with; None: it has not proved any, and did not have to."""

    identities: tuple[Identity, ...] | None = None

    def refusal_for(self, node: str) -> str:
        """Return why the caller may not speak for the node; empty if it may."""
        if self.identities is None or any(each.name in (node, ANY_NAME) for each in self.identities):
            return ""
        return f"the certificate is of {_listed(self.identities)}, and cannot speak for node {node!r}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refusal`: the reason, empty if the call is admitted."""

    refusal: str = ""
    caller: Caller = field(default_factory=Caller)


def decide(method: str, arrival: Arrival, accepts: Accepts, rules: Mapping[str, Rule] = RULES) -> Verdict:
    """Decide on a call of `/package.Service/Method`."""
    rule = rules.get(method)
    if rule is None:
        return Verdict(f"{method} is not in the table of authorization: nobody may call it")
    if rule.anybody:
        return Verdict()
    if rule.local:
        return Verdict("" if arrival.local else f"{method} is for this machine only, through the service's Unix socket")
    if arrival.identities is None:
        return Verdict()
    refusal = refusal_of_roles(arrival.identities, accepts, rule.roles, f"{method} is for")
    if refusal or not arrival.identities:
        return Verdict(refusal)
    mine = accepts.of_this_fleet(arrival.identities)
    fitting = tuple(each for each in mine if each.role in rule.roles)
    return Verdict(caller=Caller(fitting if rule.ownership is Ownership.NODE else None))


def refusal_of_roles(identities: tuple[Identity, ...], accepts: Accepts, roles: frozenset[Role], for_whom: str) -> str:
    """Return why a certificate with these identities has none of the roles; empty if it has one, or need not have any.

    `for_whom`: the begin of a sentence that ends with the roles, `X is for`."""
    wanted = " or ".join(sorted(roles))
    if not identities:
        if not accepts.required:
            return ""
        return (
            f"{for_whom} {wanted}, and the certificate has no identity: it needs a URI "
            f"holdfast://{accepts.fleet or 'FLEET'}/ROLE in its subjectAltName (docs/security.md)"
        )
    mine = accepts.of_this_fleet(identities)
    if not mine:
        return f"the certificate is of {_listed(identities)}, and this is fleet {accepts.fleet!r}"
    if not any(each.role in roles for each in mine):
        return f"{for_whom} {wanted}, and the certificate is of {_listed(mine)}"
    return ""


def _listed(identities: tuple[Identity, ...]) -> str:
    shown = ", ".join(each.uri for each in identities[:4])
    return shown + (f" and {len(identities) - 4} more" if len(identities) > 4 else "")

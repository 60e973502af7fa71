"""Identities in certificates: for which role of which fleet a certificate stands.

They are URIs in the certificate's subjectAltName:

    holdfast://<fleet>/supervisor           holdfast://<fleet>/agent/<node>
    holdfast://<fleet>/diagnostics          holdfast://<fleet>/replicator/<node>
                                            holdfast://<fleet>/operator/<name>

A certificate may have several. The name `*` stands for every name: `agent/*` is for machines that share one certificate, which
can then speak for each other. Names are percent-encoded as in any URI.

Certificates of a SPIFFE issuer (SPIRE, cert-manager) have `spiffe://` URIs. `HOLDFAST_TLS_SPIFFE` says what they stand for:
pairs `pattern=role/name`, separated by commas or white space. `{name}` in a pattern stands for one segment of the path:

    spiffe://example.org/ns/holdfast/sa/supervisor=supervisor, spiffe://example.org/node/{name}=agent/{name}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.fleet import fleet_name

SCHEME, SPIFFE_SCHEME = "holdfast://", "spiffe://"
SPIFFE = "HOLDFAST_TLS_SPIFFE"
ANY_NAME = "*"
URI_CHARS_MAX = 2048  # as SPIFFE
_PLACEHOLDER = "{name}"
_FORM = "pattern=role, for example spiffe://example.org/node/{name}=agent/{name}"


class Role(StrEnum):
    """What a process or a person does in a fleet."""

    SUPERVISOR = "supervisor"
    DIAGNOSTICS = "diagnostics"
    AGENT = "agent"
    REPLICATOR = "replicator"
    OPERATOR = "operator"


# the other roles have one holder, or several equal ones
NAMED = frozenset({Role.AGENT, Role.REPLICATOR, Role.OPERATOR})


@dataclass(frozen=True, slots=True)
class Identity:
    """`name`: of the node or the operator; empty for roles without names. `fleet` is empty only for a `spiffe://` identity at
    a process whose settings do not name its fleet; then it is of any."""

    fleet: str
    role: Role
    name: str = ""

    def stands_for(self, role: Role, name: str = "") -> bool:
        return self.role is role and self.name in (name, ANY_NAME)

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.fleet}/{self.local}"

    @property
    def local(self) -> str:
        """The part after the fleet: `agent/node-1`."""
        return f"{self.role}/{quote(self.name, safe=ANY_NAME)}" if self.name else str(self.role)


@dataclass(frozen=True, slots=True)
class SpiffeRule:
    """Which `spiffe://` URIs stand for which identity."""

    pattern: str
    role: Role
    name: str  # `{name}`: the segment of the URI

    def match(self, uri: str, fleet: str) -> Identity | None:
        wanted, given = self.pattern.split("/"), uri.split("/")
        if len(wanted) != len(given):
            return None
        name = self.name
        for want, have in zip(wanted, given, strict=True):
            if want == _PLACEHOLDER and have and have != ANY_NAME:
                name = have if self.name == _PLACEHOLDER else name
            elif want != have:
                return None
        return Identity(fleet, self.role, name)


def identities_in(uris: Iterable[str], fleet: str, rules: Sequence[SpiffeRule] = ()) -> tuple[Identity, ...]:
    """Return the identities that a certificate with these URIs has; other URIs stand for nothing. `fleet`: of this process, for
    `spiffe://` URIs. Raises `InvalidSpec` for a `holdfast://` URI that is none of the forms above."""
    found: list[Identity] = []
    for uri in uris:
        if uri.startswith(SCHEME):
            found.append(parse_uri(uri))
        elif uri.startswith(SPIFFE_SCHEME) and len(uri) <= URI_CHARS_MAX:
            found += [identity for rule in rules if (identity := rule.match(uri, fleet)) is not None][:1]
    return tuple(dict.fromkeys(found))


def parse_uri(uri: str) -> Identity:
    """Raises `InvalidSpec` with the forms that are valid."""
    fleet, slash, rest = uri.removeprefix(SCHEME).partition("/")
    try:
        if not (uri.startswith(SCHEME) and slash and len(uri) <= URI_CHARS_MAX):
            raise ValueError
        return Identity(fleet_name(fleet), *parse_local(rest))
    except (InvalidSpec, ValueError):
        raise InvalidSpec("identity", uri, f"{SCHEME}FLEET/ and {_ROLES}") from None


def parse_local(text: str) -> tuple[Role, str]:
    """Return role and name of `agent/node-1`. Raises `InvalidSpec`."""
    role, slash, name = text.partition("/")
    try:
        parsed = Role(role)
    except ValueError:
        raise InvalidSpec("identity", text, _ROLES) from None
    named = parsed in NAMED
    decoded = unquote(name)
    disguised = decoded == ANY_NAME and name != ANY_NAME
    if named != bool(slash) or named != bool(name) or "/" in name or disguised or not decoded.isprintable():
        raise InvalidSpec("identity", text, _ROLES)
    return parsed, decoded


def parse_spiffe(text: str) -> tuple[SpiffeRule, ...]:
    """Return the rules of the setting. Raises `InvalidSpec` that names the pair."""
    return tuple(_rule(pair) for pair in re.split(r"[,\s]+", text) if pair)


def _rule(pair: str) -> SpiffeRule:
    pattern, equals, target = pair.rpartition("=")
    if not (equals and pattern.startswith(SPIFFE_SCHEME) and len(pattern) <= URI_CHARS_MAX):
        raise InvalidSpec(SPIFFE, pair, _FORM)
    role, slash, name = target.partition("/")
    segments = pattern.split("/")
    if not segments[2] or segments[2] == _PLACEHOLDER:
        raise InvalidSpec(SPIFFE, pair, f"{_FORM}; with the name of one trust domain")
    if name == _PLACEHOLDER:
        if segments.count(_PLACEHOLDER) != 1 or role not in NAMED:
            raise InvalidSpec(SPIFFE, pair, f"{_FORM}; with {_PLACEHOLDER} as one segment of the path, and in the role")
        return SpiffeRule(pattern, Role(role), name)
    try:
        return SpiffeRule(pattern, *parse_local(f"{role}{slash}{name}"))
    except InvalidSpec as error:
        raise InvalidSpec(SPIFFE, pair, f"{_FORM}; {error.expected}") from None


_ROLES = "supervisor, diagnostics, agent/NODE, replicator/NODE or operator/NAME"

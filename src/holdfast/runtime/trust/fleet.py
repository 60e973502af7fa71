"""Which fleet a process belongs to, and the proof of it at both ends of a connection between agents and services.

Two fleets may meet by accident: on a host that both use, a port that one gave up is taken by the other. Each end therefore
states its fleet, and proves that it has the fleet's *join token*, without sending it:

    agent   → service   fleet, a random number, HMAC-SHA256(token, "agent" + fleet + number)     metadata of the call
    service → agent     fleet, HMAC-SHA256(token, "service" + fleet + the agent's number)        initial metadata

The service refuses a call before it reads a message, and the agent sends none before it has seen the service's proof. Somebody
who only listens on the port of a supervisor learns nothing that helps to join. Somebody who reads the packets on the way can
repeat an agent's introduction: against that, use mutual TLS (`HOLDFAST_TLS_CERT`).

Several tokens may be valid at a time: the first is used to join, all of them admit others (rotation: docs/security.md)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.domain.errors import InvalidSpec, OtherFleet

FLEET, NUMBER, PROOF = "holdfast-fleet", "holdfast-number", "holdfast-proof"
JOIN_TOKEN, JOIN_TOKEN_FILE = "HOLDFAST_JOIN_TOKEN", "HOLDFAST_JOIN_TOKEN_FILE"
JOIN_OPTIONAL = "HOLDFAST_JOIN_OPTIONAL"
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 512
TOKENS_MAX = 8
NUMBER_CHARS_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(rf"[!-~]{{{TOKEN_CHARS_MIN},{TOKEN_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True)
class Membership:
    """`fleet`: its name; empty = of any fleet, for an agent without a configured fleet. `optional`: whether the other end
    may lack a proof; a wrong proof is always refused."""

    fleet: str = ""
    tokens: tuple[str, ...] = field(default=(), repr=False)
    optional: bool = False

    @property
    def demands_proof(self) -> bool:
        return bool(self.tokens) and not self.optional

    def introduce(self) -> Introduction:
        """Return what an agent sends with one call."""
        return Introduction(self, secrets.token_hex(16))

    def admit(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata that answer an introduction. Raises `OtherFleet` with the reason to refuse it."""
        fleet, number, proof = (metadata.get(key, "") for key in (FLEET, NUMBER, PROOF))
        if fleet and fleet != self.fleet:
            raise OtherFleet(f"this is fleet {self.fleet!r}, not {_shown(fleet)}")
        if not proof and self.demands_proof:
            raise OtherFleet(
                f"fleet {self.fleet!r} has a join token: set {JOIN_TOKEN_FILE} or {JOIN_TOKEN} of the agent to it"
            )
        answer = {FLEET: self.fleet}
        if not proof or not self.tokens:
            return answer
        if len(number) > NUMBER_CHARS_MAX:
            raise OtherFleet(f"an introduction's number has at most {NUMBER_CHARS_MAX} characters")
        for token in self.tokens:
            if _is(_proof(token, "agent", fleet, number), proof):
                return answer | {PROOF: _proof(token, "service", self.fleet, number)}
        raise OtherFleet(f"the agent's join token is not the one of fleet {self.fleet!r}")


@dataclass(frozen=True, slots=True)
class Introduction:
    """One call's introduction: `metadata` for the call, `check` for its initial metadata."""

    membership: Membership
    number: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        fleet, tokens = self.membership.fleet, self.membership.tokens
        said = ((FLEET, fleet),) if fleet else ()
        return (
            (*said, (NUMBER, self.number), (PROOF, _proof(tokens[0], "agent", fleet, self.number))) if tokens else said
        )

    def check(self, answer: Mapping[str, str]) -> None:
        """Raises `OtherFleet` if the service is of another fleet, or does not prove that it is of this one."""
        mine, theirs, proof = self.membership.fleet, answer.get(FLEET, ""), answer.get(PROOF, "")
        if mine and theirs and mine != theirs:
            raise OtherFleet(f"this service is of fleet {_shown(theirs)}, not {mine!r}")
        if proof and self.membership.tokens:
            expected = _proof(self.membership.tokens[0], "service", theirs, self.number)
            if not _is(expected, proof):
                raise OtherFleet("this service's join token is not the one of this agent")
        elif self.membership.demands_proof:
            raise OtherFleet(
                f"this service does not prove that it is of fleet {mine or theirs!r}: it has no join token "
                f"({JOIN_TOKEN_FILE}), or is older than join tokens"
            )


def read_tokens(text: str, file: Path | None) -> tuple[str, ...]:
    """Return the tokens of a setting or of a file's lines; none if neither is given. Raises `InvalidSpec`."""
    if file is None:
        return _tokens(JOIN_TOKEN, [text] if text else [])
    if text:
        raise InvalidSpec(JOIN_TOKEN, "set", f"one of {JOIN_TOKEN} and {JOIN_TOKEN_FILE}, not both")
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidSpec(JOIN_TOKEN_FILE, str(file), f"a readable file with a token in a line ({reason})") from error
    tokens = _tokens(f"{JOIN_TOKEN_FILE} ({file})", [line for line in lines if line])
    if not tokens:
        raise InvalidSpec(JOIN_TOKEN_FILE, str(file), "a file with a token in a line; it is empty")
    return tokens


def new_token() -> str:
    return secrets.token_hex(32)


def fleet_name(value: str) -> str:
    """Return a name that is also part of keys in Redis. Raises `InvalidSpec`."""
    if _NAME.fullmatch(value) is None:
        raise InvalidSpec("fleet", value, "1 to 64 letters, digits, '.', '_' or '-'")
    return value


def _tokens(where: str, tokens: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(tokens))
    if len(found) > TOKENS_MAX:
        raise InvalidSpec(where, f"{len(found)} tokens", f"at most {TOKENS_MAX}")
    for token in found:
        if _TOKEN.fullmatch(token) is None:  # never shown, also not if it is wrong
            expected = f"{TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} visible ASCII characters"
            raise InvalidSpec(where, f"a token of {len(token)} characters", expected)
    return found


def _proof(token: str, end: str, fleet: str, number: str) -> str:
    said = "\0".join(("holdfast join 1", end, fleet, number)).encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def _is(expected: str, proof: str) -> bool:
    return hmac.compare_digest(expected.encode(), proof.encode(errors="replace"))  # text must be ASCII for it


def _shown(fleet: str) -> str:
    return repr(fleet) if _NAME.fullmatch(fleet) else "a malformed name"

"""A connection of the client to a peer, and how requests on it are signed and answered."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound, OutOfSpace, Unavailable
from holdfast.domain.generations import ShardSource
from holdfast.replicator.transport import frames

# Error codes of a peer's refusal; the reason is text.
_REFUSALS: dict[str, type[HoldfastError]] = {
    "not_found": NotFound,
    "busy": Conflict,
    "corrupt": IntegrityError,
    "full": OutOfSpace,
}


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A connection after the greeting, with the values for signing messages. `began`: monotonic time; `closing`: what its end
    closes."""

    peer: ShardSource
    sock: socket.socket
    challenge: str
    version: int
    began: float
    closing: ExitStack
    nonce: str = field(default_factory=frames.nonce)

    def close(self) -> None:
        self.closing.close()

    def say(self, message: Mapping[str, Any], token: str) -> None:
        frames.send(self.sock, message, token=token, challenge=self.challenge)

    def ask(self, op: str, job: str, token: str, **fields: object) -> Mapping[str, Any]:
        """Send a request and return the fields of the answer. Raises as `accepted` does."""
        self.say({"op": op, "job": job, **fields, "nonce": self.nonce}, token)
        return self.accepted(token)

    def accepted(self, token: str) -> Mapping[str, Any]:
        """Return the fields of a positive answer. It must be signed, so that only a holder of the token can send shards. A
        refusal needs no signature."""
        answer = frames.receive(self.sock)
        name = f"{self.peer.node} ({self.peer.endpoint})"
        if not answer.fields.get("ok"):
            kind = _REFUSALS.get(str(answer.fields.get("error")), Unavailable)
            raise kind(f"{name} refused: {answer.fields.get('reason', 'no reason given')}")
        if not answer.signed_by(token, self.nonce):
            raise Unavailable(f"{name} does not know this job's token")
        return answer.fields

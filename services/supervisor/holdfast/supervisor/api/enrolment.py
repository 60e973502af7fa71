"""`/v1/invites`, for administrators, and `/v1/enrolment`, with which an invited machine becomes a node.

`/v1/enrolment` asks for no token of the API: a machine that joins has none. It shows the token of its invitation, and only over
TLS. The leader decides whether the invitation is still good, in the order of the requests (`core.invites`); then it is signed
for. An answer that gets lost uses the invitation nevertheless. The key never leaves the machine.
"""

from __future__ import annotations

import hmac
import time
from typing import Annotated

import anyio
import structlog
from fastapi import APIRouter, Request, Response
from pydantic import Field

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, Unavailable
from holdfast.runtime.trust.api_tokens import ApiRole
from holdfast.runtime.trust.authority import CA_DIR
from holdfast.runtime.trust.invitation import CSR_BYTES_MAX, NODE_CHARS_MAX, digest, fingerprint, node_identity
from holdfast.supervisor.api import models
from holdfast.supervisor.api.access import Asking, guarded
from holdfast.supervisor.api.backend import Backend, Commands, Located, Principal, Serving
from holdfast.supervisor.api.models import Model
from holdfast.supervisor.api.problems import RESPONSES, Forbidden
from holdfast.supervisor.core import Invite as Known
from holdfast.supervisor.core.fleet.invites import TTL_S_MAX, USES_MAX, state_of
from holdfast.supervisor.enrolment import Enrolment
from holdfast.supervisor.protocol import InviteMade, InviteRevoked, InviteUsed

ID_CHARS = 12  # of the digest
DONE_TIMEOUT_S = 30.0
DONE_POLL_S = 0.02

log = structlog.get_logger("holdfast.supervisor.api.enrolment")
router = guarded("/v1/invites", tags=["nodes"])
joining = APIRouter(prefix="/v1/enrolment", tags=["nodes"], responses=RESPONSES)


class InviteBody(Model):
    digest: Annotated[
        str, Field(pattern=r"^[0-9a-f]{64}$", description="of the token, which the caller has made and keeps")
    ]
    node: Annotated[str, Field(max_length=NODE_CHARS_MAX, description="whom it is for; empty: any node")] = ""
    uses: Annotated[int, Field(ge=1, le=USES_MAX, description="number of nodes; 1 for the invitation of one")] = 1
    ttl_s: Annotated[float, Field(gt=0, le=TTL_S_MAX, allow_inf_nan=False)] = 3600.0


class InviteUse(Model):
    node: str
    at: Annotated[float, Field(description="Unix seconds")]


class Invite(Model):
    """An invitation. Its token is not known here."""

    id: str
    node: Annotated[str, Field(description="whom it is for; empty: any node")]
    uses: Annotated[int, Field(description="number of nodes that it is for")]
    state: Annotated[str, Field(description="`open`, or how it ended")]
    made_at: Annotated[float, Field(description="Unix seconds")]
    expires_at: Annotated[float, Field(description="Unix seconds")]
    by: Annotated[str, Field(description="name of the administrator's token")]
    used: list[InviteUse]


class Joining(Model):
    """What a machine needs to know before it joins, and who invites it. No secret."""

    fleet: str
    possible: Annotated[bool, Field(description="whether this supervisor can sign certificates")]
    reason: Annotated[str, Field(description="why not; empty: it can")]
    ca: Annotated[str, Field(description="PEM of the CAs that the fleet trusts")]
    ca_sha256: Annotated[str, Field(description="fingerprint of `ca`, as an invitation has it")]
    control_port: Annotated[int, Field(description="where agents reach this supervisor; 0: unknown")]


class JoinBody(Model):
    token: Annotated[str, Field(min_length=1, max_length=200, description="of the invitation")]
    node: Annotated[str, Field(min_length=1, max_length=NODE_CHARS_MAX)]
    csr: Annotated[str, Field(max_length=CSR_BYTES_MAX, description="PKCS #10 in PEM, for the identity of the node")]


class JoinAnswer(Model):
    certificate: Annotated[str, Field(description="PEM, with its chain")]
    ca: Annotated[str, Field(description="PEM of the CAs that the fleet trusts")]
    join_token: Annotated[str, Field(description="of the fleet; empty: it has none")]
    expires_at: Annotated[float, Field(description="of the certificate, Unix seconds")]


# ---------------------------------------------------------------- for administrators


@router.get("")
async def list_invites(backend: Serving) -> models.Page[Invite]:
    """Open invitations, and those that ended within a week; newest first."""
    now = backend.now()
    items = [_shown(each, now) for each in reversed((await backend.picture()).state.invites)]
    return models.Page(items=items, next_cursor=None)


@router.post("", status_code=202)
async def make_invite(body: InviteBody, backend: Serving, commands: Commands, asking: Asking) -> models.Operation:
    """Invite one node, or a number of them. The caller makes the token; only its digest is sent."""
    enrolment = _possible(backend)
    if body.node:
        node_identity(enrolment.issuer.fleet, body.node)
    event = InviteMade(
        time.time(), body.digest[:ID_CHARS], body.digest, body.node, body.uses, body.ttl_s, by=asking.name
    )
    return await commands.command(event)


@router.delete("/{invite}", status_code=202)
async def revoke_invite(invite: str, commands: Commands) -> models.Operation:
    """Nobody joins by it any more. Nodes that have joined stay: `holdfast ca revoke agent/NODE` revokes their certificates."""
    return await commands.command(InviteRevoked(time.time(), invite))


def _shown(invite: Known, now: float) -> Invite:
    return Invite(
        id=invite.id,
        node=invite.node,
        uses=invite.uses,
        state=state_of(invite, now) or "open",
        made_at=invite.made_at,
        expires_at=invite.expires_at,
        by=invite.by,
        used=[InviteUse(node=node, at=at) for node, at in invite.used],
    )


# ---------------------------------------------------------------- for machines that join


@joining.get("")
async def look(backend: Serving) -> Joining:
    """The fleet's CA. Answers without a token: who joins compares its fingerprint with the invitation's."""
    enrolment = backend.enrolment
    if enrolment is None:
        reason = f"this supervisor has no CA ({CA_DIR})"
        return Joining(fleet="", possible=False, reason=reason, ca="", ca_sha256="", control_port=0)
    ca = enrolment.issuer.ca
    return Joining(
        fleet=enrolment.issuer.fleet,
        possible=True,
        reason="",
        ca=ca.decode(errors="replace"),
        ca_sha256=fingerprint(ca),
        control_port=enrolment.control_port,
    )


@joining.post("")
async def join(body: JoinBody, request: Request, response: Response, backend: Serving) -> JoinAnswer:
    """Become a node: a certificate for the key of the request, once for each invitation, or as often as it says."""
    if request.url.scheme != "https":
        raise Forbidden("a machine joins over TLS only; its invitation is worth nothing to who reads this connection")
    enrolment = _possible(backend)
    found = await _invitation(backend, body)
    try:
        enrolment.issuer.check(body.node, body.csr.encode())
    except InvalidSpec as error:
        _log_refusal(found.id, body.node, error)
        raise
    request.state.principal = Principal(f"invitation {found.id}", ApiRole.VIEWER)
    try:
        started = await Located(request, backend, response).command(InviteUsed(time.time(), found.id, body.node))
        await _done(backend, started)
    except HoldfastError as error:
        _log_refusal(found.id, body.node, error)
        raise
    issued = await enrolment.issuer.issue(body.node, body.csr.encode())
    log.info("node joined", node=body.node, invitation=found.id, serial=issued.serial)
    return JoinAnswer(
        certificate=issued.certificate.decode(),
        ca=issued.ca.decode(errors="replace"),
        join_token=enrolment.join_token,
        expires_at=issued.expires_at,
    )


async def _invitation(backend: Backend, body: JoinBody) -> Known:
    """Raises `Forbidden` for a token that no invitation has: nothing that nobody has invited gets into the inbox."""
    shown = digest(body.token)
    for each in (await backend.picture()).state.invites:
        if hmac.compare_digest(each.digest, shown):
            return each
    reason = Forbidden("no invitation has this token; ask for one (holdfast nodes invite)")
    _log_refusal("", body.node, reason)
    raise reason


async def _done(backend: Backend, started: models.Operation) -> None:
    """Wait until the leader has decided. Raises `Conflict` with its reason, or `Unavailable`."""
    operation = started
    with anyio.move_on_after(DONE_TIMEOUT_S):
        while operation.state == "pending":
            await anyio.sleep(DONE_POLL_S)
            operation = await backend.operation(started.id)
    if operation.state == "failed":
        raise Conflict(operation.reason)
    if operation.state == "pending":
        raise Unavailable(
            f"the leader has not decided within {DONE_TIMEOUT_S:.0f} s; see whether the invitation is used now (holdfast nodes "
            "invites list)"
        )


def _possible(backend: Backend) -> Enrolment:
    if backend.enrolment is None:
        raise Conflict(f"this supervisor has no CA, and can invite nobody: set {CA_DIR} (docs/security.md)")
    return backend.enrolment


def _log_refusal(invitation: str, node: str, error: HoldfastError) -> None:
    log.warning("join refused", invitation=invitation, node=node, reason=str(error))

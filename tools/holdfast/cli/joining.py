"""A machine becomes a node by an invitation (`holdfast agent --invite`): what happens before the agent starts.

The token of the invitation is sent once, and only to a server whose certificate is signed by the CA whose fingerprint is in the
invitation. A server that has another CA gets nothing.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, Unavailable
from holdfast.runtime.private import make_private
from holdfast.runtime.trust.api_trust import API_CA, Trust
from holdfast.runtime.trust.enrolled import DIRECTORY, Enrolled, Joined
from holdfast.runtime.trust.identities import Identity
from holdfast.runtime.trust.invitation import Invitation, fingerprint, new_request, node_identity
from holdfast.runtime.trust.tls import CERT, lifetime_of, own_identities, read_pem

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 60.0
ANSWER_BYTES_MAX = 1 << 20
PATH = "/v1/enrolment"


class Lost(Unavailable):
    """The request was sent, and no answer has come: the invitation may be used."""


def joined(own: Path) -> Joined | None:
    """Return the files of an earlier join by invitation in this directory; None if there are none."""
    return Enrolled(own / DIRECTORY).joined


def join(invitation: Invitation, node: str, own: Path, say: Callable[[str], None]) -> Joined:
    """Get a certificate for this node, and keep it in `own`/identity. If there is a valid one, the invitation is not used, so
    that a machine can be started again with the same command. Raises `HoldfastError`."""
    if invitation.node not in ("", node):
        raise InvalidSpec("--node", node, f"{invitation.node}, for whom the invitation is")
    enrolled, identity = Enrolled(own / DIRECTORY), node_identity(invitation.fleet, node)
    if (known := enrolled.joined) is not None:
        if (known.fleet, known.node) != (invitation.fleet, node):
            raise Conflict(
                f"this machine is node {known.node} of fleet {known.fleet}; delete {enrolled.path} to have it join another way"
            )
        if _left_s(enrolled) > 0:
            say(f"{node} has joined fleet {known.fleet} already; the invitation is not used")
            return known
    make_private(enrolled.path)  # what fails here must not use the invitation
    ca, api = _ca_of(invitation, say)
    key, csr = new_request(identity)
    answer = _ask(invitation, node, csr, ca, api)
    certificate, trusted = str(answer["certificate"]).encode(), str(answer["ca"]).encode()
    _check(certificate, trusted, identity, invitation)
    found = Joined(invitation.fleet, node, invitation.control)
    join_token = str(answer.get("join_token") or "")
    enrolled.join(found, certificate=certificate, key=key, ca=trusted, join_token=join_token)
    say(f"{node} has joined fleet {invitation.fleet}; its certificate is in {enrolled.path}, and is renewed there")
    return found


def _left_s(enrolled: Enrolled) -> float:
    path = enrolled.files.cert
    return lifetime_of(read_pem(CERT, path), CERT, path).ends_at - time.time()


def _ca_of(invitation: Invitation, say: Callable[[str], None]) -> tuple[bytes, str]:
    """Return the fleet's CA (PEM), which has the fingerprint in the invitation, and the URL of the supervisor that has sent it.
    Nothing secret is sent, so the server's certificate is not checked yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reasons = []
    for api in invitation.apis:
        try:
            with _client(api, context) as http:
                answer = _json(http.get(PATH), api)
        except httpx.TransportError as error:
            reasons.append(f"{api}: {error or type(error).__name__}")
            continue
        if not answer.get("possible"):
            reasons.append(f"{api}: {answer.get('reason') or 'not a supervisor that can sign certificates'}")
            continue
        ca = str(answer.get("ca", "")).encode()
        if _fingerprint(ca) != invitation.ca:
            raise Conflict(
                f"{api} shows another CA than that of the invitation: it is not the supervisor that has invited this machine, "
                "or the fleet has a new CA since. Nothing was sent to it; ask for another invitation"
            )
        return ca, api
    raise Unavailable(f"no supervisor of the invitation can be joined ({'; '.join(reasons)})")


def _ask(invitation: Invitation, node: str, csr: bytes, ca: bytes, api: str) -> dict[str, object]:
    if os.environ.get(API_CA):  # the API has a certificate of another CA than the fleet's
        trust = Trust.of(os.environ)
        context = trust.context()
    else:
        trust = Trust()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=ca.decode())
    body = {"token": invitation.token, "node": node, "csr": csr.decode()}
    try:
        with _client(api, context) as http:
            return _json(http.post(PATH, json=body), api)
    except httpx.ConnectError as error:
        reason = trust.refusal(error) or str(error)
        raise Unavailable(f"{api}: {reason} (the invitation is not used)") from error
    except httpx.TransportError as error:
        raise Lost(
            f"the connection to {api} broke off ({error or type(error).__name__}); the invitation may be used now, and the "
            "certificate is lost: see holdfast nodes invites list, and ask for another invitation"
        ) from error


def _client(api: str, context: ssl.SSLContext) -> httpx.Client:
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=api.rstrip("/"), verify=context, timeout=timeout, trust_env=False)


def _json(response: httpx.Response, api: str) -> dict[str, object]:
    try:
        answer = response.json() if len(response.content) <= ANSWER_BYTES_MAX else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise Unavailable(f"{api} is not a Holdfast API (HTTP {response.status_code})")
    if not response.is_success:
        raise HoldfastError(f"{api} refuses this machine: {answer.get('detail') or response.status_code}")
    return answer


def _check(certificate: bytes, ca: bytes, identity: Identity, invitation: Invitation) -> None:
    if _fingerprint(ca) != invitation.ca:
        raise Conflict("the answer has another CA than the invitation: it is not used")
    if own_identities(Path("answer"), certificate, identity.fleet, ()) != (identity,):
        raise Conflict(f"the answer is no certificate for {identity.uri}: it is not used")


def _fingerprint(ca: bytes) -> str:
    try:
        return fingerprint(ca)
    except ValueError:
        return ""

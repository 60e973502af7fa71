"""Invitations, with which a machine becomes a node of a fleet, and the requests for certificates that follow.

    holdfast nodes invite           the command makes the token; the supervisor gets its SHA-256 only
    holdfast agent --invite hfi_…   fetches the fleet's CA, compares its fingerprint with that in the invitation, and only then
                                    sends the token, over TLS that this CA has signed, with a request (CSR) for the key that
                                    the machine has made
    the agent, from then on         asks for the next certificate over the mutual TLS of the one that it has

The text of an invitation is `hfi_` and a JSON object in base64url, so that it is one word of a command. It is a secret until it
is used.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.fleet import fleet_name
from holdfast.runtime.trust.identities import ANY_NAME, Identity, Role

if TYPE_CHECKING:  # imported on demand: the agent's command reads an invitation before it needs any cryptography
    from cryptography.hazmat.primitives.asymmetric import ec

PREFIX = "hfi_"
INVITATION_CHARS_MAX = 4096
CSR_BYTES_MAX = 8192
NODE_CHARS_MAX = 253
ENDPOINTS_MAX = 8
TOKEN_BYTES = 32
CURVES = ("secp256r1", "secp384r1")
_FORM = "the word that `holdfast nodes invite` prints, complete"


@dataclass(frozen=True, slots=True)
class Invitation:
    """`apis`: URLs of supervisors; `ca`: SHA-256 of the fleet's CA certificates (`fingerprint`); `control`: endpoints for
    agents, host:port. `node`: whose invitation it is; empty = any."""

    fleet: str
    apis: tuple[str, ...]
    ca: str
    control: tuple[str, ...]
    node: str
    token: str = field(repr=False)

    @property
    def text(self) -> str:
        return PREFIX + urlsafe_b64encode(json.dumps(asdict(self), separators=(",", ":")).encode()).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Raises `InvalidSpec`, without showing the invitation, which is a secret."""
        shown = f"{len(text)} characters"
        if not text.startswith(PREFIX) or len(text) > INVITATION_CHARS_MAX:
            raise InvalidSpec("--invite", shown, _FORM)
        body = text.removeprefix(PREFIX)
        try:
            values: Any = json.loads(urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            fleet, ca, node, token = (str(values[name]) for name in ("fleet", "ca", "node", "token"))
            apis, control = (tuple(map(str, values[name]))[:ENDPOINTS_MAX] for name in ("apis", "control"))
        except (ValueError, binascii.Error, KeyError, TypeError, RecursionError):
            raise InvalidSpec("--invite", shown, _FORM) from None
        if not apis or not control or not all(url.startswith("https://") for url in apis):
            raise InvalidSpec("--invite", shown, f"{_FORM}; this one names no supervisor with TLS")
        return cls(fleet_name(fleet), apis, ca, control, node, token)


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def digest(token: str) -> str:
    """Return the digest under which the supervisor stores a token."""
    return hashlib.sha256(f"holdfast invitation {token}".encode()).hexdigest()


def fingerprint(ca: bytes) -> str:
    """Return the SHA-256 of the certificates in a PEM file, without other text. Raises `ValueError` if there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    found = hashlib.sha256()
    for each in x509.load_pem_x509_certificates(ca):
        found.update(each.public_bytes(Encoding.DER))
    return found.hexdigest()


def node_identity(fleet: str, node: str) -> Identity:
    """Return the identity of a node's agent. Raises `InvalidSpec` for an invalid name, and for the name of every node."""
    if not node or node == ANY_NAME or len(node) > NODE_CHARS_MAX or not node.isprintable() or "/" in node:
        raise InvalidSpec("node", node, f"the name of one node, of at most {NODE_CHARS_MAX} characters")
    return Identity(fleet, Role.AGENT, node)


def new_request(identity: Identity) -> tuple[bytes, bytes]:
    """Make a key and a request for a certificate with this identity. Returns PEM of both, the key first."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity.local[:64])]))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    own = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return own, request.public_bytes(serialization.Encoding.PEM)


def requested_key(csr: bytes, identity: Identity) -> ec.EllipticCurvePublicKey:
    """Return the key of a request, whose sender has proved to have it, if the request asks for this identity and for nothing
    else. Raises `InvalidSpec` with what it asks for."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        if len(csr) > CSR_BYTES_MAX:
            raise ValueError(f"{len(csr)} bytes, at most {CSR_BYTES_MAX}")
        request = x509.load_pem_x509_csr(csr)
        proved, key = request.is_signature_valid, request.public_key()
        extensions = list(request.extensions)
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise InvalidSpec("certificate request", "unreadable", f"a PKCS #10 request in PEM ({error})") from None
    if not proved:
        raise InvalidSpec("certificate request", "not signed by its key", "one that is signed with the key it is for")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise InvalidSpec("certificate request", type(key).__name__, f"a key on one of {', '.join(CURVES)}")
    asked: list[str] = []
    for extension in extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            asked += [str(name.value) for name in extension.value]
        else:
            asked.append(f"extension {extension.oid.dotted_string}")
    if asked != [identity.uri]:
        shown = ", ".join(asked) or "no identity"
        raise InvalidSpec("certificate request", shown, f"one for {identity.uri} and nothing else")
    return key

"""Tokens of an OpenID Connect issuer at the REST API: what is demanded of one, whose it is, and which role it gives.

    header ──► key of the issuer (`oidc_keys`) ──► signature ──► iss, aud, exp, nbf, iat, azp ──► name ──► role

Nothing in a token chooses what it is checked with: algorithms are those of `ALGORITHMS`, keys those that the issuer publishes.
A `kid` only selects among them; `jku`, `jwk`, `x5u` and `x5c` are not read. The library (joserfc) is imported on demand: the
command imports this module for its names.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.domain.hosts import is_protected_url
from holdfast.runtime.trust.api_tokens import OIDC_NAME_PREFIX, ApiRole
from holdfast.runtime.trust.oidc_keys import CA, IssuerKeys, KeyWanted

ISSUER, AUDIENCE = "HOLDFAST_API_OIDC_ISSUER", "HOLDFAST_API_OIDC_AUDIENCE"
ROLES, NAME = "HOLDFAST_API_OIDC_ROLES", "HOLDFAST_API_OIDC_NAME"
SETTINGS = (ISSUER, AUDIENCE, ROLES, NAME, CA)

# Which kind of key each algorithm is verified with. Neither `none` nor HS*: their keys would be no secret.
ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
        **dict.fromkeys(("ES256", "ES384", "ES512"), "EC"),
    }
)
# Of ID tokens and access tokens. Others of the same issuer (logout+jwt, secevent+jwt) may have its name and this audience, too.
TYPES = frozenset({"", "jwt", "application/jwt", "at+jwt", "application/at+jwt"})
TOKEN_CHARS_MAX, HEADER_CHARS_MAX, KID_CHARS_MAX = 16_384, 4096, 256
NAME_CHARS_MAX = 200
RULES_MAX = 100
LEEWAY_S = 30  # by which the clocks of issuer and supervisor may differ
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*")
_ROLE = "|".join(ApiRole)
# One rule, up to what ends it. A value may contain nearly everything, `,` and `=` of a distinguished name included.
_RULE = re.compile(rf'\s*(?:\*|(?P<claim>"[^"]+"|[^\s:"=,*]+):(?P<value>[^\r\n]+?))=(?P<role>{_ROLE})\s*(?:,|\n|$)')


class InvalidToken(HoldfastError):
    """A token that is not accepted; the message says why."""


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Who has `value` in `claim` has the role; without a claim, everybody with a token has it."""

    claim: str
    value: str
    role: ApiRole

    def __str__(self) -> str:
        claim = f'"{self.claim}"' if ":" in self.claim else self.claim
        return f"{claim}:{self.value}={self.role}" if claim else f"*={self.role}"


@dataclass(frozen=True, slots=True)
class OidcRules:
    """`name`: the claim that names who has a token. `ca`: file of the only CA that may have signed the certificate of the
    issuer; None = those of the system."""

    issuer: str
    audiences: tuple[str, ...]
    roles: tuple[RoleRule, ...]
    name: str = "sub"
    ca: Path | None = None

    @classmethod
    def of(cls, *, issuer: str, audience: str, roles: str, name: str = "", ca: Path | None = None) -> OidcRules | None:
        """Read the settings; None if none of them is set. Raises `InvalidSpec` for what is missing or wrong."""
        if not issuer:
            for variable, value in ((AUDIENCE, audience), (ROLES, roles), (NAME, name), (CA, ca)):
                if value:
                    raise InvalidSpec(ISSUER, None, f"the URL of the issuer, because {variable} is set")
            return None
        audiences = tuple(part.strip() for part in audience.split(",") if part.strip())
        if not audiences:
            raise InvalidSpec(AUDIENCE, audience or None, "the audience of accepted tokens: the client ID of this API")
        return cls(require_issuer(issuer), audiences, parse_roles(roles), name.strip() or "sub", ca)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> OidcRules | None:
        """Raises `InvalidSpec`."""
        issuer, audience, roles, name, ca = (environment.get(each, "") for each in SETTINGS)
        return cls.of(issuer=issuer, audience=audience, roles=roles, name=name, ca=Path(ca) if ca else None)


@dataclass(frozen=True, slots=True)
class OidcPerson:
    """Whose a token is. `role`: None = no rule gives one. `expires_at`: Unix seconds."""

    name: str
    role: ApiRole | None
    expires_at: float


@dataclass(frozen=True, slots=True)
class OidcTokens:
    """What recognizes the tokens of one issuer."""

    rules: OidcRules
    keys: IssuerKeys

    async def prepare(self, token: str) -> None:
        """Fetch the issuer's keys, if the token's is not known yet. Raises `Unavailable` if they cannot be had."""
        try:
            wanted = header_of(token)
        except InvalidToken:
            return  # `find` says what is wrong with it
        await self.keys.want(wanted)

    def find(self, token: str, now: float) -> OidcPerson:
        """Return whose a token is, by the keys that are known. `now`: Unix seconds.

        Raises `InvalidToken`, and `Unavailable` if there are no keys of the issuer."""
        claims = _verified(token, self.rules, self.keys, now)
        return OidcPerson(name_of(claims, self.rules), role_of(claims, self.rules.roles), float(claims["exp"]))


def is_token(text: str) -> bool:
    """Whether a text has the form of a signed JWT."""
    return _JWT.fullmatch(text) is not None


def require_issuer(url: str) -> str:
    """Raises `InvalidSpec` for a URL that keys must not be fetched from."""
    expected = "an https:// URL without user, query and fragment (http:// on a loopback address only)"
    if not is_protected_url(url) or urlsplit(url).username is not None or set("?#") & set(url):
        raise InvalidSpec(ISSUER, url, expected)
    return url


def parse_roles(text: str) -> tuple[RoleRule, ...]:
    """Read `CLAIM:VALUE=ROLE` and `*=ROLE`, separated by commas or lines. Raises `InvalidSpec`."""
    expected = f"CLAIM:VALUE=ROLE or *=ROLE, separated by commas; roles: {', '.join(ApiRole)}"
    rules: list[RoleRule] = []
    rest = text.strip()
    while rest:
        if (found := _RULE.match(rest)) is None or len(rules) == RULES_MAX:
            raise InvalidSpec(ROLES, rest, expected if found is None else f"at most {RULES_MAX} rules")
        claim, value = (found["claim"] or "").strip('"'), (found["value"] or "").strip()
        if found["claim"] and not value:
            raise InvalidSpec(ROLES, rest, expected)
        rules.append(RoleRule(claim, value, ApiRole(found["role"])))
        rest = rest[found.end() :].strip()
    if not rules:
        raise InvalidSpec(ROLES, text or None, f"at least one rule: {expected}")
    return tuple(rules)


# ---------------------------------------------------------------- one token


def header_of(token: str) -> KeyWanted:
    """Return which key a token says that it was signed with, which nobody has checked. Raises `InvalidToken`."""
    if len(token) > TOKEN_CHARS_MAX:
        raise InvalidToken(f"it has {len(token)} characters, and at most {TOKEN_CHARS_MAX} are accepted")
    if not is_token(token):
        raise InvalidToken("it is not a signed JWT")
    text, _, _ = token.partition(".")
    if len(text) > HEADER_CHARS_MAX:
        raise InvalidToken("its header is too long")
    try:
        header = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError, binascii.Error):
        raise InvalidToken("its header is not JSON") from None
    if not isinstance(header, dict):
        raise InvalidToken("its header is not a JSON object")
    algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ", "")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise InvalidToken(f"its algorithm {algorithm!r:.40} is none of {', '.join(ALGORITHMS)}")
    if not isinstance(kind, str) or kind.lower() not in TYPES:
        raise InvalidToken(f"its type {kind!r:.40} is not that of an ID token or an access token")
    if kid is not None and not (isinstance(kid, str) and len(kid) <= KID_CHARS_MAX):
        raise InvalidToken(f"its key ID is not a text of at most {KID_CHARS_MAX} characters")
    return KeyWanted(kid, algorithm, ALGORITHMS[algorithm])


def _verified(token: str, rules: OidcRules, keys: IssuerKeys, now: float) -> dict[str, Any]:
    """Return the claims. Raises `InvalidToken` or `Unavailable`."""
    from joserfc import jwt
    from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError
    from joserfc.jws import JWSRegistry

    wanted = header_of(token)
    if (key := keys.find(wanted)) is None:
        which = f"key {wanted.kid!r}" if wanted.kid is not None else "a key that it does not name"
        raise InvalidToken(f"it is signed with {which}, which {rules.issuer} does not publish for {wanted.algorithm}")
    registry = JWSRegistry(algorithms=[wanted.algorithm], strict_check_header=False)
    registry.max_header_length = HEADER_CHARS_MAX
    try:
        claims = jwt.decode(token, key, algorithms=[wanted.algorithm], registry=registry).claims
    except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidToken(f"its signature is not valid ({error})") from None
    demanded = jwt.JWTClaimsRegistry(
        now=int(now),
        leeway=LEEWAY_S,
        iss={"essential": True, "value": rules.issuer},
        aud={"essential": True, "values": list(rules.audiences)},
        exp={"essential": True},
    )
    try:
        demanded.validate(claims)
    except ExpiredTokenError:
        ago_s = max(0, int(now) - int(claims["exp"]))
        raise InvalidToken(f"it has expired, {ago_s} s ago by the clock of this supervisor") from None
    except MissingClaimError as error:
        raise InvalidToken(f"it lacks a claim ({error})") from None
    except InvalidClaimError as error:
        value = claims.get(error.claim)
        if error.claim in ("nbf", "iat") and isinstance(value, int | float) and value > now:
            raise InvalidToken(
                f"it begins to be valid in {value - now:.0f} s ({error.claim}) by the clock of this supervisor, which may "
                f"differ by {LEEWAY_S} s from that of the issuer: correct the clock that is wrong"
            ) from None
        wants = {"iss": rules.issuer, "aud": " or ".join(rules.audiences)}.get(error.claim, "")
        raise InvalidToken(f"its claim {error.claim} is not valid{f': it must be {wants}' if wants else ''}") from None
    _require_bearer(claims, rules)
    return claims


def _require_bearer(claims: Mapping[str, Any], rules: OidcRules) -> None:
    """What no registered check covers. Raises `InvalidToken`."""
    if "azp" in claims and claims["azp"] not in rules.audiences:
        raise InvalidToken(f"it was issued to another client (azp), which {AUDIENCE} does not name")
    if "cnf" in claims:
        raise InvalidToken("it is bound to a key of its owner (cnf), which this API does not ask for")
    if "events" in claims:
        raise InvalidToken("it reports an event and signs nobody in")
    if not 0 <= claims["exp"] <= 1e12:
        raise InvalidToken("its claim exp is not a time")


def name_of(claims: Mapping[str, Any], rules: OidcRules) -> str:
    """Return the name of who has these claims, as jobs and the audit log have it. Raises `InvalidToken`."""
    name = _claim(claims, rules.name)
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name.strip()) == len(name) <= NAME_CHARS_MAX):
        raise InvalidToken(f"its claim {rules.name} ({NAME}) is not a name of 1 to {NAME_CHARS_MAX} visible characters")
    if rules.name == "email" and claims.get("email_verified", True) not in (True, "true"):
        raise InvalidToken("its e-mail address is not verified")
    return OIDC_NAME_PREFIX + name


def role_of(claims: Mapping[str, Any], rules: tuple[RoleRule, ...]) -> ApiRole | None:
    """Return the highest role that a rule gives; None without any."""
    order = list(ApiRole)
    given = [rule.role for rule in rules if not rule.claim or _has(_claim(claims, rule.claim), rule.value)]
    return max(given, key=order.index, default=None)


def _has(claim: object, value: str) -> bool:
    """A claim is a text, or a list of texts; anything else has no value."""
    return claim == value if isinstance(claim, str) else isinstance(claim, list) and value in claim


def _claim(claims: Mapping[str, Any], name: str) -> object:
    """Return a claim by its name, or by its path: `realm_access.roles`."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found

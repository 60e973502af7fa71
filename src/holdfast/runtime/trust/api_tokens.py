"""Tokens of the REST API in a file: who may ask for what. `holdfast tokens` writes it, supervisors read it.

The file is JSON. It has the SHA-256 of each token: a token is 256 random bits, so that no slower digest is needed."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.runtime.files import state_of

TOKENS_FILE = "HOLDFAST_API_TOKENS_FILE"
TOKENS_MAX = 1000
NAME_CHARS_MAX = 64
TIME_MAX = 1e12  # Unix seconds; the largest date that can be shown is before it
PREFIX = "hf_"
OIDC_NAME_PREFIX = "oidc:"  # of names that an OpenID Connect issuer has given: no token in a file has one

log = structlog.get_logger("holdfast.runtime.trust.api_tokens")


class ApiRole(StrEnum):
    """Each may do what those before it may."""

    VIEWER = "viewer"  # read
    SUBMITTER = "submitter"  # submit jobs, and change its own
    OPERATOR = "operator"  # change all jobs and nodes
    ADMIN = "admin"

    def may(self, needed: ApiRole) -> bool:
        order = list(ApiRole)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class ApiToken:
    """`digest`: SHA-256 of the token, hexadecimal. Times are Unix seconds; `expires_at` 0 = never."""

    name: str
    role: ApiRole
    digest: str
    created_at: float
    expires_at: float = 0.0

    def is_over(self, now: float) -> bool:
        return bool(self.expires_at) and now >= self.expires_at


def is_name(text: str) -> bool:
    visible = text.isprintable() and text.strip() == text
    return visible and 0 < len(text) <= NAME_CHARS_MAX and not text.startswith(OIDC_NAME_PREFIX)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens_file(path: Path) -> tuple[ApiToken, ...]:
    """Raises `InvalidSpec` that names the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text())
        return tuple(_token(path, entry) for entry in document["tokens"])
    except OSError as error:
        raise InvalidSpec(TOKENS_FILE, str(path), f"a readable file of `holdfast tokens` ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidSpec(TOKENS_FILE, str(path), f"a file that `holdfast tokens` has written ({error!r})") from None


def text_of(tokens: Iterable[ApiToken]) -> bytes:
    """Content of a file with these tokens."""
    return (json.dumps({"tokens": [asdict(each) for each in tokens]}, indent=1) + "\n").encode()


def added(
    tokens: tuple[ApiToken, ...], name: str, role: ApiRole, now: float, expires_at: float = 0.0
) -> tuple[tuple[ApiToken, ...], str]:
    """Return the tokens with a new one, and the new token, which is written nowhere. Raises `InvalidSpec` or `Conflict`."""
    if not is_name(name):
        raise InvalidSpec(
            "NAME", name, f"1 to {NAME_CHARS_MAX} visible characters, not beginning with {OIDC_NAME_PREFIX}"
        )
    if any(each.name == name for each in tokens):
        raise Conflict(f"there is a token of {name}: revoke it first, or choose another name")
    if len(tokens) >= TOKENS_MAX:
        raise Conflict(f"there are {len(tokens)} tokens, and at most {TOKENS_MAX}: revoke those that nobody needs")
    token = PREFIX + secrets.token_hex(32)
    return (*tokens, ApiToken(name, role, digest_of(token), now, expires_at)), token


def without(tokens: tuple[ApiToken, ...], name: str) -> tuple[ApiToken, ...]:
    """Raises `NotFound`."""
    left = tuple(each for each in tokens if each.name != name)
    if len(left) == len(tokens):
        raise NotFound(f"there is no token of {name}: holdfast tokens list")
    return left


class TokensFile:
    """The tokens in a file, read again when it has changed. Raises `InvalidSpec` if it cannot be used at the start; later the
    tokens before stay valid until it can."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = state_of([path])
        self._tokens = {each.digest: each for each in read_tokens_file(path)}

    def find(self, token: str, now: float) -> ApiToken | None:
        """None for one that is not there, or is over."""
        self._refresh()
        found = self._tokens.get(digest_of(token))
        return None if found is None or found.is_over(now) else found

    def all(self) -> tuple[ApiToken, ...]:
        """Every token, by name. Those that are over are among them."""
        self._refresh()
        return tuple(sorted(self._tokens.values(), key=lambda each: each.name))

    def _refresh(self) -> None:
        if (seen := state_of([self._path])) == self._seen:
            return
        self._seen = seen
        try:
            self._tokens = {each.digest: each for each in read_tokens_file(self._path)}
        except InvalidSpec as error:
            log.warning("tokens not read, those before are valid", reason=str(error))
        else:
            log.info("tokens read", file=str(self._path), tokens=len(self._tokens))


def _token(path: Path, entry: dict[str, Any]) -> ApiToken:
    token = ApiToken(**{**entry, "role": ApiRole(entry["role"])})
    texts = isinstance(token.name, str) and isinstance(token.digest, str) and len(token.digest) == 64
    times = [token.created_at, token.expires_at]
    # A name is written into answers and into the log. No time is after NaN: such a token would never expire.
    if not (texts and is_name(token.name) and all(isinstance(at, int | float) and 0 <= at <= TIME_MAX for at in times)):
        raise InvalidSpec(
            TOKENS_FILE, str(path), f"a file that `holdfast tokens` has written (entry of {token.name!r})"
        )
    return token

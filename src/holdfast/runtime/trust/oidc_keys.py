"""The public keys of an OpenID Connect issuer: discovered, fetched and kept.

    ISSUER/.well-known/openid-configuration ──► jwks_uri ──► keys

They are fetched every hour, and when a token names a key that is not known: at most once in `REFETCH_S`, whatever tokens say.
While the issuer does not answer, the keys before stay valid, for a day at most (`KEPT_S`). What is fetched
is bounded in time, bytes and number, and comes from where the settings say: redirects are not followed.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import httpx
import structlog

from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.domain.hosts import is_loopback, is_protected_url

if TYPE_CHECKING:  # imported on demand, as in `oidc`
    import ssl

    from joserfc.jwk import Key

CA = "HOLDFAST_API_OIDC_CA"
DISCOVERY = "/.well-known/openid-configuration"
REFRESH_S = 3600.0
REFETCH_S = 30.0  # between two attempts for keys that are not known
RETRY_S = 5.0  # the same while there are none at all
KEPT_S = 24 * 3600.0
FETCH_TIMEOUT_S = 5.0  # of both documents together
DOCUMENT_BYTES_MAX = 512 * 1024
KEYS_MAX = 100
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 8192

log = structlog.get_logger("holdfast.runtime.trust.oidc")


@dataclass(frozen=True, slots=True)
class KeyWanted:
    """What a token says of the key that signed it. `kid`: None = nothing; `kind`: `kty` of keys for the algorithm."""

    kid: str | None
    algorithm: str
    kind: str


class IssuerKeys:
    """`ca`: file with the only CA that may have signed the issuer's certificate; None = the CAs of the system.

    `clock`: seconds that only grow."""

    def __init__(self, issuer: str, ca: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer, self._ca, self._clock = issuer, ca, clock
        self._keys: tuple[Key, ...] = ()
        self._fetched_at = self._tried_at = float("-inf")
        self._trouble = "they have not been fetched yet"
        self._one_fetch = anyio.Lock()

    def require_usable(self) -> None:
        """Raises `InvalidSpec` for a file of a CA that cannot be used."""
        self._context()

    def find(self, wanted: KeyWanted) -> Key | None:
        """Return the known key of a token; None if the issuer does not publish it. Raises `Unavailable` without any keys."""
        if not self._current:
            raise self._unavailable()
        fitting = [each for each in self._keys if _fits(each, wanted)]
        if wanted.kid is not None:
            return next((each for each in fitting if each.kid == wanted.kid), None)
        return fitting[0] if len(fitting) == 1 else None

    async def want(self, wanted: KeyWanted) -> None:
        """Fetch the keys if this key is not known, unless they were just fetched. Raises `Unavailable` if that fails."""
        if self._knows(wanted):
            return
        async with self._one_fetch:  # who waited here finds what was fetched
            if not self._knows(wanted) and self._clock() - self._tried_at >= (REFETCH_S if self._keys else RETRY_S):
                await self._fetch()
            if not self._knows(wanted) and self._trouble:
                raise self._unavailable()

    async def keep(self, sleep: Callable[[float], Any] = anyio.sleep) -> None:
        """Fetch the keys now and every hour, until cancelled."""
        while True:
            async with self._one_fetch:
                if self._clock() - self._fetched_at >= REFRESH_S:
                    await self._fetch()
            await sleep(REFETCH_S)

    def _knows(self, wanted: KeyWanted) -> bool:
        return self._current and self.find(wanted) is not None

    @property
    def _current(self) -> bool:
        return bool(self._keys) and self._clock() - self._fetched_at < KEPT_S

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"the keys of the issuer {self._issuer} are not known, so its tokens cannot be checked: {self._trouble}; "
            "ask again in a few seconds, or use a token of `holdfast tokens create`"
        )

    async def _fetch(self) -> None:
        """Keep what could be fetched. What could not leaves the keys as they are."""
        self._tried_at = self._clock()
        try:
            keys = await self._fetched()
        except (Unavailable, InvalidSpec) as error:
            if str(error) != self._trouble:
                log.warning("keys of the OIDC issuer not fetched", issuer=self._issuer, reason=str(error))
            self._trouble = str(error)
            return
        names = sorted(str(each.kid) for each in keys)
        if names != sorted(str(each.kid) for each in self._keys):
            log.info("keys of the OIDC issuer", issuer=self._issuer, keys=names)
        self._keys, self._fetched_at, self._trouble = keys, self._clock(), ""

    async def _fetched(self) -> tuple[Key, ...]:
        """Raises `Unavailable` that names what is wrong."""
        loopback = is_loopback(urlsplit(self._issuer).hostname or "")
        client = httpx.AsyncClient(
            verify=self._context() if self._issuer.startswith("https:") else True,
            follow_redirects=False,
            timeout=FETCH_TIMEOUT_S,
            trust_env=not loopback,
        )
        try:
            with anyio.fail_after(FETCH_TIMEOUT_S):
                async with client:
                    discovered = await _document(client, self._issuer.rstrip("/") + DISCOVERY)
                    where = _keys_at(discovered, self._issuer)
                    return keys_in(await _document(client, where), where)
        except TimeoutError:
            raise Unavailable(f"{self._issuer} did not answer within {FETCH_TIMEOUT_S:g} s") from None

    def _context(self) -> ssl.SSLContext:
        import ssl

        if self._ca is None:
            return httpx.create_ssl_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cafile=self._ca)
        except OSError as error:  # SSLError is one
            expected = f"a PEM file with a CA ({error.strerror or error})"
            raise InvalidSpec(CA, str(self._ca), expected) from error
        return context


async def _document(client: httpx.AsyncClient, url: str) -> Any:
    """Raises `Unavailable`."""
    body = bytearray()
    try:
        async with client.stream(
            "GET", url, headers={"Accept": "application/json", "Accept-Encoding": "identity"}
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                elsewhere = ", and redirects are not followed" if answer.is_redirect else ""
                raise Unavailable(f"{url} answered {answer.status_code}{elsewhere}")
            async for piece in answer.aiter_raw():  # not unpacked: an archive of a few KB may be gigabytes
                body += piece
                if len(body) > DOCUMENT_BYTES_MAX:
                    raise Unavailable(f"{url} answered with more than {DOCUMENT_BYTES_MAX} bytes")
        return json.loads(body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"{url}: {str(error) or type(error).__name__}") from error
    except (ValueError, RecursionError):
        raise Unavailable(f"{url} did not answer with JSON") from None


def _keys_at(discovered: Any, issuer: str) -> str:
    """Return the URL of the keys. Raises `Unavailable` if the document is not the issuer's, or names none that is safe."""
    found = discovered if isinstance(discovered, dict) else {}
    if found.get("issuer") != issuer:
        raise Unavailable(
            f"the document of {issuer}{DISCOVERY} is of the issuer {found.get('issuer')!r:.200}; both must be the same text"
        )
    where = found.get("jwks_uri")
    # An issuer with TLS must not name keys without.
    if not isinstance(where, str) or not is_protected_url(where) or (issuer[:6] == "https:" and where[:6] != "https:"):
        raise Unavailable(f"the document of {issuer}{DISCOVERY} names no https:// URL of keys: {where!r:.200}")
    return where


def keys_in(document: Any, where: str) -> tuple[Key, ...]:
    """Return the keys of a JWK set that can verify signatures; others are left out. Raises `Unavailable` without any."""
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > KEYS_MAX:
        raise Unavailable(f"{where} did not answer with a set of at most {KEYS_MAX} keys")
    keys = tuple(key for each in entries if (key := _key(each)) is not None)
    if not keys:
        raise Unavailable(f"{where} has no key that can verify signatures (RSA of {RSA_BITS_MIN} bits and more, or EC)")
    return keys


def _key(entry: Any) -> Key | None:
    """None for one that cannot verify, is too weak, or is for something else."""
    from joserfc.errors import JoseError
    from joserfc.jwk import import_key

    if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC") or entry.get("use", "sig") != "sig":
        return None
    if not isinstance(entry.get("kid", ""), str):
        return None
    try:
        if entry["kty"] == "RSA" and not RSA_BITS_MIN <= _bits(entry["n"]) <= RSA_BITS_MAX:
            return None
        return import_key(entry)
    except (JoseError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def _bits(number: str) -> int:
    """Return the length of a number that is written as base64url."""
    return int.from_bytes(base64.urlsafe_b64decode(number + "=" * (-len(number) % 4)), "big").bit_length()


def _fits(key: Key, wanted: KeyWanted) -> bool:
    operations = key.get("key_ops")
    return (
        key.key_type == wanted.kind
        and key.get("alg") in (None, wanted.algorithm)
        and (operations is None or "verify" in operations)
    )

"""What it means when Redis does not answer, refuses the connection, or answers with an error, and what to do.

None of these failures but a command that is wrong in itself ends a service: it waits, so that the leader keeps in memory what
an emptied Redis is filled from.
"""

from __future__ import annotations

import re

from redis import exceptions

from holdfast.domain.errors import HoldfastError, RedisAway, Unavailable
from holdfast.log.durability import PRIMARY_ADVICE, SPACE_ADVICE

# The server answers but does not serve now → what to do.
_REPLICA = f"it is a replica: {PRIMARY_ADVICE}"
_RIGHTS = "its user lacks a right: docs/security.md has the users of Redis"
_REFUSALS = {
    "MISCONF": f"it cannot save its data: {SPACE_ADVICE}",
    "READONLY": _REPLICA,
    "UNBLOCKED": _REPLICA,  # it became one during a blocked read
    "LOADING": "it reads its data after a start: wait until it has",
    "BUSY": "a script has run for seconds: wait; if another program has sent it, end it with SCRIPT KILL",
    "MOVED": "another member of its cluster has the data: name that member, or better a Redis without cluster mode, in "
    "HOLDFAST_REDIS_URL",
    "ASK": "its cluster moves data: wait until it has",
    "CLUSTERDOWN": "a part of its cluster is away: bring that back, or wait for the failover",
    "MASTERDOWN": "its primary is away: bring that back, or wait for the failover",
    "TRYAGAIN": "its cluster moves data: wait until it has",
    "NOREPLICAS": "it accepts writes only while replicas are connected: start them, or lower its min-replicas-to-write",
    "NOPERM": _RIGHTS,
    "The user executing the script can't": _RIGHTS,  # Redis 7
}
# In the error of a connection that has failed → what to do.
_BROKEN = {
    "loading the dataset": _REFUSALS["LOADING"],
    "max number of clients reached": "close connections of other programs, or raise its maxclients",
    "[SSL": "renew its certificate, or correct the ssl_ options of HOLDFAST_REDIS_URL; their files are read again for each "
    "connection",
}
_CREDENTIALS = "correct its user and password in HOLDFAST_REDIS_URL, and start the service again"
# Redis' answer to a long command without a password; it says NOAUTH to short ones only.
_UNAUTHENTICATED = "unauthenticated"

_CODE = re.compile("|".join(rf"\b{code}\b" for code in _REFUSALS))
_PIPELINE = re.compile(r"Command # .* of pipeline caused error: [('\"]*", re.DOTALL)
_SCRIPT = re.compile(r" script: [0-9a-f]{40}, on @user_script:.*", re.DOTALL)


class Full(Unavailable):
    """Redis has reached its maxmemory: it rejects writes that grow, and accepts deletions."""


class BadPasswordFile(exceptions.AuthenticationError):
    """The file `password_file` cannot be read."""


def failure(
    address: str, error: BaseException | None, *, password_file: str = "", encrypted: bool = False
) -> HoldfastError:
    """Convert an error of redis-py. Returns `Unavailable` (`RedisAway` without an answer) for all that can pass, otherwise
    `HoldfastError`. `password_file`: where the password is read from; empty = it is in the URL. `encrypted`: TLS was tried."""
    if isinstance(error, BadPasswordFile):
        return Unavailable(f"Redis at {address} cannot be asked: {error}; correct password_file in HOLDFAST_REDIS_URL")
    text = f"{getattr(error, 'status_code', None) or ''} {error}".strip()
    if isinstance(error, exceptions.AuthenticationError) or _UNAUTHENTICATED in text:
        advice = f"write the valid password to {password_file}" if password_file else _CREDENTIALS
        return Unavailable(f"Redis at {address} refuses the credentials ({error}); {advice}")
    if error is None or isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)):
        advice = (
            advice_of_broken(error) or f"check that it is running, and HOLDFAST_REDIS_URL{_other(error, encrypted)}"
        )
        return RedisAway(f"Redis at {address} does not answer ({error}); {advice}")
    if "OOM" in text:
        return Full(
            f"the memory of Redis at {address} is full, so it rejects writes; raise its maxmemory, or delete other data from "
            "this Redis"
        )
    if found := _CODE.search(text):  # anywhere, because an error inside a script is wrapped
        refusal = _without_place(text[found.start() :])
        return Unavailable(f"Redis at {address} does not serve now: {refusal}; {_REFUSALS[found.group()]}")
    return HoldfastError(f"Redis at {address} rejected a command: {text}")


def advice_of_broken(error: BaseException | None) -> str:
    """What to do about a connection that has failed with this error; empty if the error does not tell."""
    return next((advice for part, advice in _BROKEN.items() if part in str(error)), "")


def _other(error: BaseException | None, encrypted: bool) -> str:
    """The other scheme, if the error is what the wrong one of the two leads to: Redis without TLS waits for the end of the
    handshake, and Redis with TLS closes the connection at the first command."""
    if encrypted:
        timed_out = isinstance(error, exceptions.TimeoutError)
        return ", which is redis://… where its port expects no TLS" if timed_out else ""
    closed = any(part in str(error) for part in ("reset by peer", "closed by server"))
    return ", which is rediss://… where its port expects TLS" if closed else ""


def _without_place(refusal: str) -> str:
    """Without the command of a pipeline or the line of a script that Redis refused: the reason is the same."""
    return _SCRIPT.sub("", _PIPELINE.sub("", refusal)).strip(" ()',.\"")

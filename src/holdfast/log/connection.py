"""The connection to Redis: retries and the meaning of each failure.

Only `Connection.call` retries; the retries of redis-py are disabled. If the connection fails, a command is repeated for about
250 ms, then `Unavailable` is raised. After a failed connection it is unknown whether the command was executed, so an
append can be duplicated: consumers are idempotent on `Entry.id`. All other commands here can be repeated safely, a
commit because Redis stores the last one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from holdfast.domain.errors import HoldfastError, InvalidSpec, RedisAway, Unavailable
from holdfast.log import durability

ANSWER_TIMEOUT_S = 2.0  # in addition to the time that a command blocks
RETRY_DELAYS_S = (0.01, 0.05, 0.2)
CONNECTIONS_MAX = 256

LOADING_ADVICE = "it reads its data after a start: wait until it has"

# The server answers but does not serve now → what to do.
_REFUSALS = {
    "MISCONF": "it cannot save its data: free space on its disk, and see its log",
    "READONLY": "it is a replica: name the primary in HOLDFAST_REDIS_URL",
    "LOADING": LOADING_ADVICE,
    "CLUSTERDOWN": "a part of its cluster is away: bring that back, or wait for the failover",
    "MASTERDOWN": "its primary is away: bring that back, or wait for the failover",
    "TRYAGAIN": "its cluster moves data: wait until it has",
    "NOREPLICAS": "it accepts writes only while replicas are connected: start them, or lower its min-replicas-to-write",
    "NOPERM": "its user lacks a right: docs/security.md has the users of Redis",
    "The user executing the script can't": "its user lacks a right: docs/security.md has the users of Redis",  # Redis 7
}
_GONE = ("NOGROUP", "UNBLOCKED")  # UNBLOCKED: the stream of a blocked read was deleted

_PIPELINE = re.compile(r"Command # .* of pipeline caused error: [('\"]*", re.DOTALL)
_SCRIPT = re.compile(r" script: [0-9a-f]{40}, on @user_script:.*", re.DOTALL)

T = TypeVar("T")


class GroupGone(HoldfastError):
    """The stream or its group was deleted, maybe under a blocked read. A subscription creates it again."""


class Full(Unavailable):
    """Redis has reached its maxmemory: it rejects writes that grow, and accepts deletions."""


class Connection:
    """Opened on first use; `redis` is the client whose commands go through `call`."""

    def __init__(self, url: str, *, block_s: float) -> None:
        """`block_s`: the longest that a command will block. Raises `InvalidSpec` for a malformed URL."""
        try:
            self.redis = aioredis.Redis.from_url(
                url,
                protocol=2,  # one shape of answers on every server version
                retry=Retry(NoBackoff(), 0),
                socket_timeout=block_s + ANSWER_TIMEOUT_S,
                socket_connect_timeout=ANSWER_TIMEOUT_S,
                max_connections=CONNECTIONS_MAX,
            )
            pool: Any = self.redis.connection_pool
            pool.make_connection()  # not opened; raises TypeError for an option that is not known
        except (ValueError, TypeError) as error:
            shown = url.rsplit("@", 1)[-1]  # never the password
            raise InvalidSpec("HOLDFAST_REDIS_URL", shown, durability.URL_FORMS) from error
        self._turns = anyio.CapacityLimiter(CONNECTIONS_MAX)  # the pool raises an error where a command could wait
        at: dict[str, Any] = pool.connection_kwargs
        self.address = str(at["path"]) if "path" in at else f"{at.get('host', 'localhost')}:{at.get('port', 6379)}"

    async def call(self, attempt: Callable[[], Awaitable[T]], *, delays_s: Sequence[float] = RETRY_DELAYS_S) -> T:
        """Run one command. Raises `Unavailable` (`RedisAway` without an answer), `GroupGone`, or `HoldfastError` if Redis
        rejects the command permanently."""
        remaining = iter(delays_s)
        while True:
            began_s = anyio.current_time()
            try:
                async with self._turns:
                    return await self._try(attempt)
            except _Broken as error:
                delay_s = next(remaining, None)
                # The library reports a timeout within the handshake of a new connection as a broken connection.
                timed_out = anyio.current_time() - began_s >= ANSWER_TIMEOUT_S
                if delay_s is None or timed_out:
                    raise self._silent(error.__cause__) from error.__cause__
            await anyio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def aclose(self) -> None:
        await self.redis.aclose()

    async def _try(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await attempt()
        except exceptions.AuthenticationError as error:
            raise Unavailable(
                f"Redis at {self.address} refuses the credentials ({error}); {durability.CREDENTIALS_ADVICE}"
            ) from error
        except (exceptions.TimeoutError, TimeoutError) as error:
            raise self._silent(error) from error  # the command has already timed out; retrying would only take longer
        except (exceptions.ConnectionError, OSError) as error:
            raise _Broken from error
        except exceptions.RedisError as error:
            raise self._rejected(error) from error

    def _silent(self, error: BaseException | None) -> RedisAway:
        loading = isinstance(error, exceptions.BusyLoadingError)  # for the library a failed connection
        advice = LOADING_ADVICE if loading else "check that it is running, and HOLDFAST_REDIS_URL"
        return RedisAway(f"Redis at {self.address} does not answer ({error}); {advice}")

    def _rejected(self, error: exceptions.RedisError) -> HoldfastError:
        """Convert an error. Searches the complete text for codes, because an error inside a script is wrapped."""
        text = f"{getattr(error, 'status_code', None) or ''} {error}".strip()
        if any(code in text for code in _GONE):
            return GroupGone(text)
        if "OOM" in text:
            return Full(
                f"the memory of Redis at {self.address} is full, so it rejects writes; raise its maxmemory, or delete other "
                "data from this Redis"
            )
        for code, advice in _REFUSALS.items():
            if code in text:
                refusal = _without_place(text[text.index(code) :])
                return Unavailable(f"Redis at {self.address} does not serve now: {refusal}; {advice}")
        return HoldfastError(f"Redis at {self.address} rejected a command: {text}")


def _without_place(refusal: str) -> str:
    """Without the command of a pipeline or the line of a script that Redis refused: the reason is the same."""
    return _SCRIPT.sub("", _PIPELINE.sub("", refusal)).strip(" ()',.\"")


class _Broken(Exception):
    """The connection failed; see the cause."""

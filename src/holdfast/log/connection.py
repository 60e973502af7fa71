"""The connection to Redis: retries and the meaning of each failure.

Only `Connection.call` retries; the retries of redis-py are disabled. If the connection fails, a command is repeated for about
250 ms, then `Unavailable` is raised. After a failed connection it is unknown whether the command was executed, so an
append can be duplicated: consumers are idempotent on `Entry.id`. All other commands here can be repeated safely, a
commit because Redis stores the last one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from holdfast.domain.errors import HoldfastError
from holdfast.log import redis_url, refusals

ANSWER_TIMEOUT_S = 2.0  # in addition to the time that a command blocks
RETRY_DELAYS_S = (0.01, 0.05, 0.2)
CONNECTIONS_MAX = 256

_GONE = ("NOGROUP", "UNBLOCKED the stream")  # UNBLOCKED: the stream of a blocked read was deleted

T = TypeVar("T")


class GroupGone(HoldfastError):
    """The stream or its group was deleted, maybe under a blocked read. A subscription creates it again."""


class Connection:
    """Opened on first use; `redis` is the client whose commands go through `call`."""

    def __init__(self, url: str, *, block_s: float) -> None:
        """`block_s`: the longest that a command will block. Raises `InvalidSpec` for a malformed URL."""
        self.redis: aioredis.Redis = redis_url.opened(
            aioredis.Redis,
            "HOLDFAST_REDIS_URL",
            url,
            protocol=2,  # one shape of answers on every server version
            retry=Retry(NoBackoff(), 0),
            socket_timeout=block_s + ANSWER_TIMEOUT_S,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            max_connections=CONNECTIONS_MAX,
        )
        self._password_file = redis_url.password_file_of(self.redis)
        self._turns = anyio.CapacityLimiter(CONNECTIONS_MAX)  # the pool raises an error where a command could wait
        at: dict[str, Any] = self.redis.connection_pool.connection_kwargs
        self.address = str(at["path"]) if "path" in at else f"{at.get('host', 'localhost')}:{at.get('port', 6379)}"

    async def call(self, attempt: Callable[[], Awaitable[T]], *, delays_s: Sequence[float] = RETRY_DELAYS_S) -> T:
        """Run one command. Raises `Unavailable` (`RedisAway` without an answer), `GroupGone`, or `HoldfastError` if Redis
        rejects the command permanently."""
        remaining = iter(delays_s)
        cause: BaseException | None = None
        while True:
            began_s = anyio.current_time()
            try:
                async with self._turns:
                    return await self._try(attempt)
            except _Broken as error:
                if not refusals.advice_of_broken(cause):  # the server may close a connection before its answer is read
                    cause = error.__cause__
                delay_s = next(remaining, None)
                # The library reports a timeout within the handshake of a new connection as a broken connection.
                timed_out = anyio.current_time() - began_s >= ANSWER_TIMEOUT_S
                if delay_s is None or timed_out:
                    raise self._failure(cause) from cause
            await anyio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def aclose(self) -> None:
        await self.redis.aclose()

    async def _try(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await attempt()
        except (exceptions.TimeoutError, TimeoutError, exceptions.AuthenticationError) as error:
            raise self._failure(error) from error  # it has timed out, or is refused: retrying would only take longer
        except (exceptions.ConnectionError, OSError) as error:
            raise _Broken from error
        except exceptions.RedisError as error:
            if any(code in f"{getattr(error, 'status_code', None) or ''} {error}" for code in _GONE):
                raise GroupGone(str(error)) from error
            raise self._failure(error) from error

    def _failure(self, error: BaseException | None) -> HoldfastError:
        return refusals.failure(
            self.address, error, password_file=self._password_file, encrypted=redis_url.is_encrypted(self.redis)
        )


class _Broken(Exception):
    """The connection failed; see the cause."""

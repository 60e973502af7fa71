"""The Redis server of the log as a process: the id of its lifetime, and its shutdown for an injected fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from redis import exceptions

from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.log import durability
from holdfast.log.connection import Connection

# Redis first checks that the command exists and that this client may use it, and then its arguments. These arguments are
# invalid in every version, so a syntax error shows that the server would have executed valid ones.
PROBE: Final = ("SHUTDOWN", "NOSAVE", "HOLDFAST-PROBE")
NOW_SINCE: Final = 7  # major version; in earlier versions a shutdown never waits for replicas


class RedisServer:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._redis: Any = connection.redis  # its `execute_command` has no types

    async def lifetime(self) -> str:
        """Return the server's run id, which changes with each start."""
        return str((await self._info("server")).get("run_id", ""))

    async def require_data(self) -> None:
        """Raises `HoldfastError` for a server that holds no data, such as a Sentinel."""
        durability.require_data(await self._info("server"), self._connection.address)

    async def persistence(self) -> Mapping[str, Any]:
        return await self._info("persistence")

    async def why_not_kill(self) -> str:
        """Return why an injected fault must not or cannot shut down this server; "" if it may. Does not shut it down. Raises
        `Unavailable`."""
        persistence = await self.persistence()
        if risk := durability.risk(persistence):
            return f"Redis would not survive it: {risk}; {durability.ADVICE}"
        if persistence.get("loading"):
            return "Redis is still loading its data"
        if (status := persistence.get("aof_last_write_status", "ok")) != "ok":
            return f"Redis would not survive it: the last write to its append-only file failed ({status})"
        try:
            await self._connection.call(lambda: self._redis.execute_command(*PROBE))
        except HoldfastError as error:
            if "syntax error" in str(error).lower():
                return ""
            return f"Redis does not accept SHUTDOWN from this supervisor: {error}"
        return "Redis accepted a SHUTDOWN with an invalid argument; this is not a Redis that the supervisor knows"

    async def kill(self) -> None:
        """Shut the server down without a snapshot and without waiting for replicas. All connections break. Raises
        `HoldfastError` if the server refuses."""
        words = ["SHUTDOWN", "NOSAVE"]
        if await self._major_version() >= NOW_SINCE:
            words.append("NOW")
        try:
            await self._redis.execute_command(*words)
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError):
            return  # a server that has ended does not answer
        except exceptions.RedisError as error:
            raise HoldfastError(f"Redis refused to shut down: {error}") from error
        raise HoldfastError("Redis answered a SHUTDOWN and continues to run")

    async def _major_version(self) -> int:
        major = str((await self._info("server")).get("redis_version", "")).partition(".")[0]
        if not major.isdecimal():
            raise Unavailable("Redis does not report its version")
        return int(major)

    async def _info(self, section: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = await self._connection.call(lambda: self._redis.info(section))
        return answer

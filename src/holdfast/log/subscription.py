"""Reads Redis streams for one consumer, batch by batch, and recovers from lost connections and deleted streams.

Each request for a batch does, in this order:

1. create missing groups;
2. deliver entries that are pending for this consumer (it crashed, or its last answer was lost), immediately;
3. deliver entries that have been pending for `reclaim_after_s`, of a dead consumer or because a handler here failed;
4. deliver new entries; waits for them for up to `block_s`.

After a lost connection it starts over at 1, after a pause that grows and jitters. The same applies to a deleted stream
or group, which is created again from the beginning of the stream, because skipping an unread entry is worse than
reading one twice.

Every delivery counts, including one whose answer was lost and one to a process that crashed. After `deliveries_max` deliveries,
an entry is moved to the dead-letter stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.log import scripts
from holdfast.log.connection import Connection, GroupGone
from holdfast.log.keys import Keys
from holdfast.log.protocol import Delivery, Entry, OnTrouble, ignore
from holdfast.runtime.rpc.backoff import Backoff

PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 0.25
RECLAIM_CHECKS = 5  # looks for abandoned entries per `reclaim_after_s`
CONSUMER_SILENCE_MAX_S = 3600.0

_OWN_BEGIN = "-"
_IDLE_BEGIN = "0-0"
_END = ""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of streams and of waiting."""

    stream_length_max: int  # entries; Redis trims complete nodes, so a stream is slightly longer
    reclaim_after_s: float
    deliveries_max: int
    block_s: float


class Subscription:
    """Call `next_batch` repeatedly. Not for concurrent use."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        limits: Limits,
        *,
        streams: Sequence[str],
        group: str,
        consumer: str,
        batch_max: int,
        start: str,
        on_trouble: OnTrouble = ignore,
    ) -> None:
        self._call = connection.call
        self._redis = connection.redis
        self._keys = keys
        self._limits = limits
        self._streams = streams
        self._group = group
        self._consumer = consumer
        self._count = max(1, batch_max // len(streams))  # Redis counts per stream
        self._start = start
        self._take_pending = connection.redis.register_script(scripts.TAKE_PENDING)
        self._retire_consumers = connection.redis.register_script(scripts.RETIRE_CONSUMERS)
        self._prepared = False
        self._own = dict.fromkeys(streams, _OWN_BEGIN)  # stream → cursor; _END when done
        self._idle = dict.fromkeys(streams, _END)
        self._reclaim_at_s = 0.0
        self._failures = 0
        self._on_trouble = on_trouble
        self._backoff = Backoff(first_s=PAUSE_MIN_S, max_s=PAUSE_MAX_S)
        self._what = f"group {group!r} on {', '.join(streams)}"  # in messages

    async def next_batch(self) -> list[Delivery]:
        """Return the next entries; empty after `block_s` without entries, or while Redis is not reachable."""
        try:
            if not self._prepared:
                await self._prepare()
            batch = await self._own_pending() or await self._abandoned() or await self._new()
        except GroupGone as gone:
            logger.warning("%s: a stream or group was deleted, reading from the beginning (%s)", self._what, gone)
            self._start_over()
            return []
        except Unavailable as error:
            await self._pause(error)
            return []
        if self._failures:
            logger.info("%s: Redis answers again after %d tries", self._what, self._failures)
            self._failures = 0
            self._on_trouble("")
            self._backoff.reset()
        return batch

    # ------------------------------------------------------------------ the four steps

    async def _prepare(self) -> None:
        for key in map(self._keys.stream, self._streams):
            await self._create_group(key)
            await self._retire(key)
        self._prepared = True
        self._start = "0"  # a group that is created again must not skip entries

    async def _create_group(self, key: str) -> None:
        try:
            await self._call(lambda: self._redis.xgroup_create(key, self._group, id=self._start, mkstream=True))
        except HoldfastError as error:
            if "BUSYGROUP" not in str(error):  # it exists already
                raise

    async def _retire(self, key: str) -> None:
        args: list[str | int] = [self._group, round(CONSUMER_SILENCE_MAX_S * 1000)]
        await self._call(lambda: self._retire_consumers(keys=[key], args=args))

    async def _own_pending(self) -> list[Delivery]:
        return await self._pending("own", self._own)

    async def _abandoned(self) -> list[Delivery]:
        if anyio.current_time() >= self._reclaim_at_s:
            self._reclaim_at_s = anyio.current_time() + self._limits.reclaim_after_s / RECLAIM_CHECKS
            self._idle = dict.fromkeys(self._streams, _IDLE_BEGIN)
        return await self._pending("idle", self._idle)

    async def _new(self) -> list[Delivery]:
        wait_s = min(self._limits.block_s, self._reclaim_at_s - anyio.current_time())
        streams: dict[Any, Any] = {self._keys.stream(stream): ">" for stream in self._streams}
        # Without retry: after a lost answer the entries are pending here, and only step 2 finds them soon.
        answer: Any = await self._call(
            lambda: self._redis.xreadgroup(
                self._group, self._consumer, streams, count=self._count, block=max(1, round(wait_s * 1000))
            ),
            delays_s=(),
        )
        batch: list[Delivery] = []
        for key, entries in answer or []:
            batch += await self._decoded(
                self._keys.stream_name(key.decode()), ((position, 1, fields) for position, fields in entries)
            )
        return batch

    # ------------------------------------------------------------------ pending entries

    async def _pending(self, mode: str, cursors: dict[str, str]) -> list[Delivery]:
        """Return pending entries of the first stream that has some; advances the cursors."""
        for stream in self._streams:
            while cursors[stream] != _END:
                cursor, dead, entries = await self._take(mode, stream, cursors[stream])
                cursors[stream] = cursor.decode()
                if dead:
                    self._report_dead(stream, dead, f"delivered {self._limits.deliveries_max} times without success")
                rows = ((position, tries, _paired(fields)) for position, tries, fields in entries)
                if batch := await self._decoded(stream, rows):
                    return batch
        return []

    async def _take(self, mode: str, stream: str, cursor: str) -> Any:
        """Run `TAKE_PENDING` once, without retry, as in `_new`: entries of a lost answer are pending here now."""
        keys = [self._keys.stream(stream), self._keys.dead(stream)]
        args: list[str | int] = [self._group, self._consumer, mode, cursor, self._count]
        args += [
            self._limits.deliveries_max,
            self._limits.stream_length_max,
            round(self._limits.reclaim_after_s * 1000),
        ]
        return await self._call(lambda: self._take_pending(keys=keys, args=args), delays_s=())

    async def _decoded(self, stream: str, rows: Iterable[tuple[bytes, int, Mapping[bytes, bytes]]]) -> list[Delivery]:
        """Decode the rows; undecodable ones are moved to the dead-letter stream at once, because a retry cannot help."""
        batch: list[Delivery] = []
        now_ms: int | None = None
        for position, tries, fields in rows:
            if (delivery := decode(stream, position, fields, tries)) is not None:
                now_ms = await self._now_ms() if now_ms is None else now_ms
                batch.append(aged(delivery, now_ms))
            else:
                await self._dead_letter(stream, position, fields)
        return batch

    async def _now_ms(self) -> int:
        """Return the time of the clock that created the positions, in ms."""
        return milliseconds(await self._call(self._redis.time, delays_s=()))

    async def _dead_letter(self, stream: str, position: bytes, fields: Mapping[bytes, bytes]) -> None:
        async def move() -> None:
            async with self._redis.pipeline(transaction=True) as pipeline:
                entry: dict[Any, Any] = {"position": position, "group": self._group, "deliveries": 1, **fields}
                pipeline.xadd(self._keys.dead(stream), entry, maxlen=self._limits.stream_length_max)
                pipeline.xack(self._keys.stream(stream), self._group, position)
                await pipeline.execute()

        await self._call(move)
        self._report_dead(stream, 1, f"entry {position.decode()} cannot be decoded")

    def _report_dead(self, stream: str, count: int, reason: str) -> None:
        logger.error(
            "%d %s of %s moved to %s.dead: %s", count, "entry" if count == 1 else "entries", stream, stream, reason
        )

    # ------------------------------------------------------------------ trouble

    def _start_over(self) -> None:
        self._prepared = False
        self._own = dict.fromkeys(self._streams, _OWN_BEGIN)

    async def _pause(self, error: Unavailable) -> None:
        self._failures += 1
        self._on_trouble(str(error))
        if self._failures == 1:
            logger.warning("%s: %s; retrying until it is available", self._what, error)
        self._start_over()
        await self._backoff.sleep()


def milliseconds(time: tuple[int, int]) -> int:
    """Return the answer of TIME in ms."""
    seconds, microseconds = time
    return int(seconds) * 1000 + int(microseconds) // 1000


def aged(delivery: Delivery, now_ms: int) -> Delivery:
    """Return the delivery with its age. `now_ms`: by the clock that created its position."""
    return replace(delivery, age_s=max(0, now_ms - int(delivery.position.partition("-")[0])) / 1000)


def decode(stream: str, position: bytes, fields: Mapping[bytes, bytes], deliveries: int) -> Delivery | None:
    """Decode an entry; None if Holdfast did not write it, because a field is missing or is not text."""
    try:
        entry = Entry(
            id=fields[b"id"].decode(),
            type=fields[b"type"].decode(),
            data=fields[b"data"],
            traceparent=fields.get(b"traceparent", b"").decode(),
        )
    except (KeyError, UnicodeDecodeError):
        return None
    return Delivery(stream=stream, position=position.decode(), entry=entry, deliveries=deliveries)


def _paired(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))

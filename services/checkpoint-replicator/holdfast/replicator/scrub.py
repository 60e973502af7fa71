"""Reads stored shards again in the background to find corruption before a restore needs them.

The bytes are read from the medium and not from the page cache, at a limited rate and with low priority. A corrupt copy is
quarantined, reported and removed from the inventory. An intact one comes from a peer, or from the memory of this node by the
plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, IntegrityError
from holdfast.replicator.checksum import require_consistent
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job
from holdfast.replicator.names import label
from holdfast.replicator.tiers.part import aligned_buffer
from holdfast.replicator.transport.client import Client
from holdfast.replicator.view import Held, Tier
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Manifest
from holdfast.stores.checksum import crc32c

log = structlog.get_logger("holdfast.replicator.scrub")

_Due = tuple[str, Held]  # job, shard


class Scrubber:
    """`interval_s`: seconds between two checks of a shard."""

    def __init__(self, engine: Engine, client: Client, *, interval_s: float, pace: Callable[[int], None]) -> None:
        self._engine = engine
        self._client = client
        self._interval_s = interval_s
        self._pace = pace
        self._good_at: dict[_Due, float] = {}  # time of the last verification; the first is that of the write

    async def run(self) -> None:
        """Never returns."""
        while True:
            due, wait_s = self._next()
            if due is None:
                await anyio.sleep(wait_s)
                continue
            await self._check(*due)

    def _next(self) -> tuple[_Due | None, float]:
        """Return the shard to check now, or the seconds until the next one. A shard is verified when it is written, so a new
        shard counts as checked."""
        now = anyio.current_time()
        here = {(job.name, held) for job in self._engine.jobs.values() for held in job.held if held.tier is Tier.DISK}
        self._good_at = {due: self._good_at.get(due, now) for due in here}
        oldest = min(self._good_at, key=lambda due: self._good_at[due], default=None)
        if oldest is None:
            return None, self._interval_s
        wait_s = self._good_at[oldest] + self._interval_s - now
        return (oldest, 0.0) if wait_s <= 0 else (None, wait_s)

    async def _check(self, name: str, held: Held) -> None:
        job = self._engine.jobs.get(name)
        manifest = job.held.get(held) if job else None
        if job is None or manifest is None:
            return
        path = self._engine.tiers.disk.path(name, held.key)
        self._good_at[name, held] = anyio.current_time()
        try:
            await self._engine.threads.scrub(verify_on_medium, path, manifest, self._pace)
        except FileNotFoundError:
            return  # deleted by retention
        except OSError as error:  # the medium cannot be read, which is treated like a wrong byte
            await self._replace(job, held, manifest, f"cannot be read: {error}")
        except IntegrityError as error:
            await self._replace(job, held, manifest, str(error))

    async def _replace(self, job: Job, held: Held, manifest: Manifest, reason: str) -> None:
        await self._engine.quarantine(job, held, f"found while scrubbing: {reason}")
        for peer in job.config.peers if job.config else ():
            try:
                await self._engine.threads.background(
                    self._client.fetch, peer, job.name, job.token, Wanted.like(manifest), self._engine.tiers.disk
                )
            except (HoldfastError, OSError) as error:
                log.info("peer copy rejected", job=job.name, shard=label(held.key), peer=peer.node, reason=str(error))
            else:
                self._engine.arrived(job.name, manifest)
                log.info("corrupt shard replaced", job=job.name, shard=label(held.key), peer=peer.node)
                return


def verify_on_medium(path: Path, manifest: Manifest, pace: Callable[[int], None]) -> None:
    """Raises IntegrityError that names the first span that does not match the manifest, OSError, FileNotFoundError."""
    require_consistent(manifest)
    buffer = aligned_buffer()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the page cache
        for span, expected in zip(manifest.spans, manifest.span_crc32c, strict=True):
            pace(span.size)
            place = buffer[: span.size]
            if os.preadv(fd, [place], span.offset) != span.size or crc32c(place) != expected:
                raise IntegrityError(f"{path} is corrupt in bytes {span.offset} to {span.offset + span.size}")
            # Leave the page cache to training.
            os.posix_fadvise(fd, span.offset, span.size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

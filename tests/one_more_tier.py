"""Declares a node tier that this release does not have, before anything reads the declarations; fails where one of the others
does not know it."""

from __future__ import annotations

from holdfast.domain import tiers
from holdfast.domain.tiers import TierSpec
from holdfast.v1 import types_pb2

FLASH = "flash"


def declare() -> None:
    memory, disk = tiers.NODE_TIERS
    tiers.NODE_TIERS = memory, TierSpec(FLASH, durable=True), disk  # type: ignore[assignment]
    tiers.NEARNESS = {tier.name: place for place, tier in enumerate(tiers.NODE_TIERS)}
    tiers.DURABLE = frozenset(tier.name for tier in tiers.NODE_TIERS if tier.durable)
    types_pb2.Tier = _OneMore()  # type: ignore[assignment, misc]


class _OneMore:
    """The enum of the protocol with one more value, as it is after `make proto`."""

    known = types_pb2.Tier

    def items(self) -> list[tuple[str, int]]:
        return [*self.known.items(), ("TIER_FLASH", 99)]


def check() -> None:
    from fleet import JOB, Fleet, job, running

    from holdfast.cli.checkpoint_rows import rows
    from holdfast.cli.checkpoints import COLUMNS
    from holdfast.domain.evolve import evolve
    from holdfast.domain.generations import Placement, ShardKey, ShardRecord
    from holdfast.domain.mesh import Mesh
    from holdfast.domain.orders import Inventory
    from holdfast.restore import Holder, Segment, elect
    from holdfast.supervisor.api import job_views
    from holdfast.supervisor.core import saved_steps
    from holdfast.supervisor.core.model.turn import Turn
    from holdfast.supervisor.core.saves.retention import newest_everywhere
    from holdfast.wire.control import decode_report, encode_report

    mesh = Mesh((("dp", 2),))

    def shard(tier: str, rank: int, attempt: int = 1) -> ShardRecord:
        return ShardRecord(ShardKey(attempt, 10, rank), mesh, tier, 1, "same")

    inventory = Inventory(JOB, (shard(FLASH, 0), shard("memory", 1)))
    assert decode_report(encode_report(inventory, 1)) == inventory

    # A restore takes it after memory and before the disk.
    nodes = {"a": "disk", "b": FLASH, "c": "memory"}
    holders = [Holder(node, node, "", (shard(tier, 0), shard(tier, 1))) for node, tier in nodes.items()]
    elected = elect([Segment(1)], holders, mesh, (Placement(0, "x", 0, 1), Placement(1, "y", 1, 1)))
    assert [source.node for source in elected.ranks[0].sources] == ["c", "b", "a"]

    # What is there counts as saved, in the catalogue, the API and the command, and retention takes it for durable.
    fleet: Fleet = running(job(dp=2))
    assert fleet.job.generation is not None
    attempt = fleet.job.generation.attempt
    for rank, node in enumerate(fleet.nodes()):
        own, other = shard(FLASH, rank, attempt), shard(FLASH, 1 - rank, attempt)
        fleet.inventory(node, own, evolve(other, owner=fleet.nodes()[1 - rank]))
    [step] = saved_steps(fleet.state, JOB)
    shown = job_views.checkpoint(step).model_dump()
    assert shown["complete"]
    assert shown["tiers"] == {"memory": 0, FLASH: 2, "disk": 0, "store": False}
    assert rows((), [shown])[0][FLASH] == 2
    assert FLASH in COLUMNS
    assert newest_everywhere(Turn(fleet.state, fleet.now), fleet.job) == 10


if __name__ == "__main__":
    declare()
    check()

"""The tiers: where shards are held, nearest first.

A tier of a node is declared once, in `NODE_TIERS`. The enum on the wire, the order in which a restore takes its sources, what
retention counts as durable, and what inventories, the API, the metrics and `holdfast checkpoints` show follow from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of a node: what it holds is in the node's inventory, its own shards and the copies of a peer's."""

    name: str  # `TIER_<NAME>` on the wire
    durable: bool  # outlives the node's processes and a loss of power


# Nearest first. To other nodes, what a node holds in any of these is `PEER`.
NODE_TIERS = (TierSpec("memory", durable=False), TierSpec("disk", durable=True))
NEARNESS: Mapping[str, int] = {tier.name: place for place, tier in enumerate(NODE_TIERS)}
DURABLE = frozenset(tier.name for tier in NODE_TIERS if tier.durable)

PEER, STORE = "peer", "store"  # the tiers beyond the node: another node's, and the object store
TIERS = (*NEARNESS, PEER, STORE)

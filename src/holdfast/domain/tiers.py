"""The tiers that hold shards, nearest first.

A tier of a node is declared once, in `NODE_TIERS`. From it follow the enum on the wire, the order of the sources of a restore,
what retention counts as durable, and what inventories, the API, the metrics and `holdfast checkpoints` show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of a node. The node's inventory lists the shards in it: the node's own, and copies of another node's."""

    name: str  # `TIER_<NAME>` on the wire
    durable: bool  # survives the end of the node's processes and a loss of power


# Nearest first. For other nodes, shards in any of these tiers are in the tier `PEER`.
NODE_TIERS = (TierSpec("memory", durable=False), TierSpec("disk", durable=True))
NEARNESS: Mapping[str, int] = {tier.name: place for place, tier in enumerate(NODE_TIERS)}
DURABLE = frozenset(tier.name for tier in NODE_TIERS if tier.durable)

PEER, STORE = "peer", "store"  # the tiers outside of the node: another node, and the object store
TIERS = (*NEARNESS, PEER, STORE)

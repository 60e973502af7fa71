"""Tests of the network between two nodes without ranks, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """What a test may cost, in each of its two directions."""

    bytes_max: int
    seconds_max: float


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """What the node that began a test has found. With a `failure` nothing else was measured."""

    out_bytes_per_s: float = 0.0  # to the other node, as that one has received it
    in_bytes_per_s: float = 0.0
    round_trip_s: float = 0.0  # the shortest of several
    failure: str = ""  # the other node could not be reached, or data came damaged; one clause


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Let the node that knows `token` test the network with this replicator, once, within `for_s`."""

    token: str
    limits: LinkLimits
    for_s: float


@dataclass(frozen=True, slots=True)
class MeasureLink:
    """Test the network with the replicator at `endpoint`, which was told the same token."""

    node: str
    endpoint: str
    token: str
    limits: LinkLimits

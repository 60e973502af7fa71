"""Values of network tests: tests of the network between two nodes without ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits of a network test, for each of its two directions."""

    bytes_max: int
    seconds_max: float


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """The result of a network test, from the node that began it. With a `failure` nothing else was measured."""

    out_bytes_per_s: float = 0.0  # to the other node, measured there
    in_bytes_per_s: float = 0.0
    round_trip_s: float = 0.0  # the shortest of several round trips
    failure: str = ""  # why the test failed, as a clause: the other node could not be reached, or data arrived damaged


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Allow one network test with this replicator, within `for_s`, to the node that presents `token`."""

    token: str
    limits: LinkLimits
    for_s: float


@dataclass(frozen=True, slots=True)
class MeasureLink:
    """Test the network with the replicator at `endpoint`, which has received the same token (`OpenLink`)."""

    node: str
    endpoint: str
    token: str
    limits: LinkLimits

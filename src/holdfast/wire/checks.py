"""Checks of a job, pre-flight tests and network tests of a node ↔ `holdfast/v1/types.proto`."""

from __future__ import annotations

from holdfast.domain.job import ChecksSpec
from holdfast.domain.links import LinkLimits, LinkMeasured
from holdfast.domain.nodes import Check, Preflight
from holdfast.v1 import types_pb2 as pb
from holdfast.wire.derived import Codec

CHECKS_SPEC = Codec(ChecksSpec, pb.ChecksSpec, "checks")
_CHECK = Codec(Check, pb.Check, "preflight.checks")
PREFLIGHT = Codec(Preflight, pb.Preflight, "preflight", times=["at"], renamed={"duration_s": "took_s"})
LINK_LIMITS = Codec(LinkLimits, pb.LinkLimits, "limits", times=["seconds_max"])
LINK_MEASURED = Codec(
    LinkMeasured, pb.LinkMeasured, "link", times=["out_bytes_per_s", "in_bytes_per_s", "round_trip_s"]
)

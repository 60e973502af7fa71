"""Checks that a job asks for and tests that a node makes of itself ↔ `holdfast/v1/types.proto`."""

from __future__ import annotations

from holdfast.domain.job import ChecksSpec
from holdfast.domain.nodes import Check, Preflight
from holdfast.v1 import types_pb2 as pb
from holdfast.wire.derived import Codec

CHECKS_SPEC = Codec(ChecksSpec, pb.ChecksSpec, "checks")
_CHECK = Codec(Check, pb.Check, "preflight.checks")
PREFLIGHT = Codec(Preflight, pb.Preflight, "preflight", times=["at"])

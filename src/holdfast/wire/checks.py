"""Checks that a job asks for and tests that a node makes of itself ↔ `holdfast/v1/types.proto`."""

from __future__ import annotations

from functools import partial

from holdfast.domain.job import ChecksSpec
from holdfast.domain.nodes import Check, Preflight
from holdfast.v1 import types_pb2 as pb
from holdfast.wire import types
from holdfast.wire.derived import Codec, Through

CHECKS_SPEC = Codec(ChecksSpec, pb.ChecksSpec, "checks")

_CHECK = Codec(Check, pb.Check, "preflight.checks")
PREFLIGHT = Codec(
    Preflight,
    pb.Preflight,
    "preflight",
    through={
        "at": Through(float, partial(types.check_time, field="preflight.at")),
        "checks": Through(
            lambda checks: [_CHECK.encode(check) for check in checks],
            lambda messages: tuple(_CHECK.decode(message) for message in messages),
        ),
    },
)

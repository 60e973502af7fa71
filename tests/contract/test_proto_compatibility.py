"""Releases interoperate: nothing that was once in the protocol is removed, renumbered or retyped."""

from __future__ import annotations

import copy
import json

import proto_shape
import pytest


def baseline() -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = json.loads(proto_shape.BASELINE.read_text())
    return loaded


def test_nothing_recorded_is_lost() -> None:
    assert proto_shape.lost(baseline(), proto_shape.shape()) == []


def test_additions_are_recorded() -> None:
    added = proto_shape.lost(proto_shape.shape(), baseline())
    assert added == [], "new in the protocol: record it with python tests/proto_shape.py"


@pytest.mark.parametrize(
    ("message", "field", "change", "said"),
    [
        ("holdfast.v1.Tick", "seq", None, "Tick.seq was 3 uint64, is gone"),
        ("holdfast.v1.Tick", "seq", "4 uint64", "Tick.seq was 3 uint64, is 4 uint64"),
        ("holdfast.v1.Tick", "seq", "3 string", "Tick.seq was 3 uint64, is 3 string"),
        ("holdfast.v1.Phase", "PHASE_STEP", 9, "PHASE_STEP was 4, is 9"),
    ],
)
def test_the_check_sees_a_removed_renumbered_or_retyped_field(
    message: str, field: str, change: object, said: str
) -> None:
    changed = copy.deepcopy(baseline())
    if change is None:
        del changed[message][field]
    else:
        changed[message][field] = change
    [problem] = proto_shape.lost(baseline(), changed)
    assert said in problem

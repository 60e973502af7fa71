"""Reports as agents of earlier versions have encoded them: each form is read as the values that were encoded.

`reports.txt`: one report a line: its form, and its bytes in base64. Those "without roots" are the first two of the others'.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.domain.generations import ShardKey, ShardPlace, ShardRecord, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import Inventory, OrderDone, Report, WorkersChanged
from holdfast.v1.control_pb2 import AgentMessage
from holdfast.wire.control import decode_report

LINES = [line.split() for line in (Path(__file__).parent / "data" / "reports.txt").read_text().splitlines()]
MESH, EARLIER_MESH = Mesh.of({"dp": 4, "pp": 2}), Mesh.of({"dp": 2})


def shard(step: int, rank: int, tier: str, digest: str, owner: str = "n0", root: str = "") -> ShardRecord:
    mesh = MESH if step == 50 else EARLIER_MESH
    return ShardRecord(ShardKey(7, step, rank), mesh, tier, 100 + rank, digest, owner, root)


OWN = tuple(shard(50, rank, tier, f"d{rank}", root=f"r{rank}") for tier in ("memory", "disk") for rank in range(4))
PEERS = tuple(shard(50, rank, "disk", f"p{rank}", "n1") for rank in (4, 5, 7))
GONE = tuple(ShardPlace(ShardKey(7, 30, rank), "disk") for rank in range(3))
WORKERS = tuple(RunningWorker("gpt", 3, rank, 900 + rank, 1000.5) for rank in (2, 3, 5))
REPORTS: tuple[Report, ...] = (
    Inventory("gpt", (*OWN, *PEERS, shard(40, 1, "disk", "d")), (StoredStep(7, 40, MESH, True),)),
    Inventory("gpt", OWN[4:], base=12, gone=GONE),
    Inventory("gpt"),
    WorkersChanged(4, WORKERS),
    OrderDone("c-1/7", ok=True, at=1001.0, workers=WORKERS, workers_version=4),
)


@pytest.mark.parametrize("form", dict.fromkeys(form for form, _ in LINES))
def test_reports_are_read_in_every_form_that_an_earlier_version_used(form: str) -> None:
    found = [decode_report(AgentMessage.FromString(base64.b64decode(raw))) for each, raw in LINES if each == form]
    expected = REPORTS
    if form.endswith("_without_roots"):
        expected = tuple(
            replace(each, shards=tuple(replace(shard, root="") for shard in each.shards))
            for each in REPORTS[:2]
            if isinstance(each, Inventory)
        )
    assert found == list(expected)

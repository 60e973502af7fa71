"""What is encoded comes back equal, for every message, after a trip through bytes."""

from __future__ import annotations

import dataclasses
import sqlite3
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from values import value_of

from holdfast.agent.connection.ledger import Ledger
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.findings import Finding, StepRecord
from holdfast.domain.generations import Placement, RankRestore, RestoreRun, ShardKey, ShardRecord, ShardSource, joined
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import RunningWorker, ServiceVersions
from holdfast.domain.orders import (
    Hello,
    Inventory,
    Order,
    OrderDone,
    Prepare,
    RanksStepping,
    Report,
    StepReached,
)
from holdfast.domain.replication import (
    CommonCheckpoint,
    Configure,
    EndJob,
    PruneSteps,
    Stage,
    StagedShard,
    Trouble,
    UploadNow,
)
from holdfast.domain.signals import Tick
from holdfast.supervisor.protocol import Command, Event, Record
from holdfast.v1 import control_pb2, replicator_pb2, telemetry_pb2
from holdfast.wire import control, events, retention, shards, telemetry
from holdfast.wire.records import dumps, loads

quick = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("kind", get_args(Order), ids=lambda kind: kind.__name__)
@given(data=st.data(), epoch=st.integers(0, 2**63 - 1))
@quick
def test_order(kind: type, data: st.DataObject, epoch: int) -> None:
    order = data.draw(orders(kind))
    raw = control.encode_order(epoch, "c-1", order).SerializeToString()
    command = control_pb2.SupervisorMessage.FromString(raw).command
    assert (command.epoch, command.command_id) == (epoch, "c-1")
    assert command.traceparent == getattr(order, "traceparent", "")
    assert control.decode_order(command) == order


@st.composite
def orders(draw: st.DrawFn, kind: type) -> Any:
    """For a job whose name can be one; what else is refused is in tests/security."""
    return dataclasses.replace(
        draw(value_of(kind)), job=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True))
    )


def alone(each: RankRestore) -> RestoreRun:
    roots = (each.root,) if each.root else ()
    return RestoreRun(each.rank, each.shard, (each.digest,), each.sources, each.sharing, roots)


@given(
    order=orders(Prepare),
    first=value_of(Placement),
    epoch=st.integers(0, 2**63 - 1),
    in_runs=st.booleans(),
    width=st.integers(1, 3),
    suspected=st.booleans(),
)
@quick
def test_order_of_a_slot(
    order: Prepare, first: Placement, epoch: int, in_runs: bool, width: int, suspected: bool
) -> None:
    """What all slots share and what one has of its own are its order; `in_runs` to agents that take them."""
    of_slot_0 = dataclasses.replace(order, placement=first, restore=(), peers=())
    shared = control.SlotOrders(epoch, of_slot_0)
    restore = joined(map(alone, order.restore), width)
    for _ in range(2):  # what is shared stays as it is
        raw = shared.encode("c-1/7", order.placement, restore, order.peers, in_runs=in_runs, suspected=suspected)
    order = order if suspected else dataclasses.replace(order, suspect_test_s=0.0)
    command = control_pb2.SupervisorMessage.FromString(raw).command
    assert (command.epoch, command.command_id) == (epoch, "c-1/7")
    assert bool(command.prepare.restore_runs) is (in_runs and bool(order.restore))
    assert control.decode_order(command) == order


def test_runs_are_as_long_as_ranks_restore_alike_and_none_is_of_two_nodes() -> None:
    here, there = (ShardSource(node, f"{node}:1") for node in ("n0", "n1"))
    ranks = [RankRestore(rank, ShardKey(7, 50, rank), f"d{rank}", (here if rank < 6 else there,)) for rank in range(8)]
    found = joined(map(alone, ranks), 4)
    assert [(run.rank, len(run.digests), run.sources) for run in found] == [
        (0, 4, (here,)),
        (4, 2, (here,)),
        (6, 2, (there,)),
    ]
    assert list(chain.from_iterable(found)) == ranks


@pytest.mark.parametrize("kind", get_args(Report), ids=lambda kind: kind.__name__)
@given(data=st.data())
@quick
def test_report(kind: type, data: st.DataObject) -> None:
    report = data.draw(value_of(kind).filter(_has_identity))
    raw = control.encode_report(report, 7).SerializeToString()
    message = control_pb2.AgentMessage.FromString(raw)
    assert message.seq == 7
    assert control.decode_report(message) == report


def test_a_digest_with_a_comma_is_refused_by_the_receiver_and_not_by_the_sender() -> None:
    """It comes from a file, and must not end the agent's session."""
    shard = ShardRecord(ShardKey(1, 2, 0), Mesh.of({"dp": 1}), "disk", 1, "a,b", "n0")
    message = control.encode_report(Inventory("gpt", (shard,)), 1)
    with pytest.raises(MalformedMessage, match="has not 1 values"):
        control.decode_report(message)


def _has_identity(report: Report) -> bool:
    return not isinstance(report, Hello) or bool(report.facts.node and report.facts.incarnation)


@given(tick=value_of(Tick), goodbye=st.booleans())
@settings(max_examples=60, deadline=None)
def test_tick(tick: Tick, goodbye: bool) -> None:
    raw = telemetry.encode_tick(tick, goodbye=goodbye).SerializeToString()
    message = telemetry_pb2.Tick.FromString(raw)
    decoded = telemetry.decode_tick(message)
    assert message.goodbye is goodbye
    assert [signal.at for signal in decoded.signals] == [signal.at for signal in tick.signals]
    assert sorted(map(repr, decoded.signals)) == sorted(map(repr, tick.signals))
    assert dataclasses.replace(decoded, signals=()) == dataclasses.replace(tick, signals=())


@given(finding=value_of(Finding).filter(lambda finding: finding.id))
@quick
def test_finding(finding: Finding) -> None:
    assert events.decode_finding(events.encode_finding(finding)) == finding


@given(record=value_of(StepRecord), steps=st.lists(st.integers(1, 2**31), min_size=1, max_size=5, unique=True))
@quick
def test_steps(record: StepRecord, steps: list[int]) -> None:
    records = [dataclasses.replace(record, step=step) for step in steps]
    assert events.decode_steps(events.encode_steps(records)) == records


REQUESTS: dict[type, tuple[Any, Any, Any]] = {
    Configure: (shards.encode_configure, shards.decode_configure, replicator_pb2.ConfigureRequest),
    Stage: (shards.encode_stage, shards.decode_stage, replicator_pb2.StageRequest),
    UploadNow: (shards.encode_archive, shards.decode_archive, replicator_pb2.ArchiveRequest),
    CommonCheckpoint: (retention.encode_retain, retention.decode_retain, replicator_pb2.RetainRequest),
    EndJob: (retention.encode_end, retention.decode_end, replicator_pb2.EndRequest),
    PruneSteps: (retention.encode_prune, retention.decode_prune, replicator_pb2.PruneRequest),
}


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@quick
def test_request_to_a_replicator(kind: type, data: st.DataObject) -> None:
    encode, decode, message = REQUESTS[kind]
    request = data.draw(value_of(kind).filter(lambda value: value.job))
    assert decode(message.FromString(encode(request).SerializeToString())) == request
    with pytest.raises(MalformedMessage, match=r"\.job: missing"):
        decode(encode(dataclasses.replace(request, job="")))


@given(
    staged=st.lists(value_of(StagedShard), max_size=3).map(tuple),
    inventory=value_of(Inventory).map(lambda held: dataclasses.replace(held, base=0, gone=())),
    troubles=st.lists(value_of(Trouble), max_size=3).map(tuple),
)
@quick
def test_answers_of_a_replicator(
    staged: tuple[StagedShard, ...], inventory: Inventory, troubles: tuple[Trouble, ...]
) -> None:
    raw = shards.encode_staged(staged).SerializeToString()
    assert shards.decode_staged(replicator_pb2.StageResponse.FromString(raw)) == staged
    raw = shards.encode_inventory(inventory, troubles).SerializeToString()
    message = replicator_pb2.ReplicatorInventory.FromString(raw)
    assert (shards.decode_inventory(message), shards.decode_troubles(message)) == (inventory, troubles)


@given(saved=value_of(CommonCheckpoint).filter(lambda saved: saved.job))
@quick
def test_saved_by_all(saved: CommonCheckpoint) -> None:
    raw = retention.encode_saved_by_all(3, saved).SerializeToString()
    message = control_pb2.SupervisorMessage.FromString(raw).saved_by_all
    assert (message.epoch, retention.decode_saved_by_all(message)) == (3, saved)


@given(
    steps=st.lists(value_of(StepReached), max_size=3).map(tuple),
    first=st.lists(value_of(RanksStepping), max_size=3).map(tuple),
    cut_s=st.sampled_from([0.0, 0.5, 86_400.0]),
    versions=st.builds(ServiceVersions, st.text(max_size=9), st.text(max_size=9)),
)
@quick
def test_beat(
    steps: tuple[StepReached, ...], first: tuple[RanksStepping, ...], cut_s: float, versions: ServiceVersions
) -> None:
    said = control.encode_beat(1.5, 7, steps, telemetry_cut_s=cut_s, first_steps=first, versions=versions)
    raw = said.SerializeToString()
    assert control.decode_versions(control_pb2.AgentMessage.FromString(raw).beat) == versions
    beat = control_pb2.AgentMessage.FromString(raw).beat
    assert (beat.at, beat.workers_version, control.decode_steps_reached(beat)) == (1.5, 7, steps)
    assert control.decode_telemetry_cut_s(beat) == cut_s
    assert control.decode_first_steps(beat) == first


@pytest.mark.parametrize("cut_s", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_beat_with_a_duration_that_is_none_is_of_a_node_whose_telemetry_arrives(cut_s: float) -> None:
    assert control.decode_telemetry_cut_s(control_pb2.Beat(telemetry_cut_s=cut_s)) == 0.0


@given(answer=value_of(OrderDone))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_agents_ledger(tmp_path: Path, answer: OrderDone) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.remember(answer)
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.answer(answer.command_id) == answer


@pytest.mark.parametrize("with_later_fields", [True, False])
def test_the_ledger_of_an_earlier_agent_is_read(tmp_path: Path, with_later_fields: bool) -> None:
    """Recorded: what agents wrote before the records' codec did, and the ones before `restored_from` and `restored_bytes`."""
    later = ', "restored_from": [["peer", 2]], "unrestorable": false, "restored_bytes": [["peer", 4096]]'
    recorded = (
        '{"command_id": "c-9", "ok": true, "reason": "", "master": "n0:29400", "at": 1758000000.25, '
        '"phases_s": [["stop", 0.5], ["fork", 0.25]], '
        '"workers": [{"job": "gpt", "generation": 3, "rank": 0, "pid": 41, "since": 1758000000.0}, '
        '{"job": "gpt", "generation": 3, "rank": 1, "pid": 42, "since": 0.0}]'
        + (later if with_later_fields else "")
        + "}"
    )
    with Ledger(tmp_path / "ledger"):
        pass
    with sqlite3.connect(tmp_path / "ledger") as database:
        database.execute("INSERT INTO answer (command_id, answer) VALUES ('c-9', ?)", (recorded,))
    database.close()
    workers = (RunningWorker("gpt", 3, 0, 41, 1758000000.0), RunningWorker("gpt", 3, 1, 42))
    phases = (("stop", 0.5), ("fork", 0.25))
    expected = OrderDone("c-9", True, "", "n0:29400", 1758000000.25, phases, workers)
    if with_later_fields:
        expected = dataclasses.replace(expected, restored_from=(("peer", 2),), restored_bytes=(("peer", 4096),))
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.answer("c-9") == expected


@pytest.mark.parametrize(
    ("union", "kind"),
    [(union, kind) for union in (Event, Record, Command) for kind in get_args(union)],
    ids=lambda part: getattr(part, "__name__", ""),
)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_record(union: Any, kind: type, data: st.DataObject) -> None:
    value = data.draw(value_of(kind))
    raw = dumps(value, union)
    assert loads(raw, union) == value
    assert dumps(loads(raw, union), union) == raw

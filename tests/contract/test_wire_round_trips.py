"""What is encoded comes back equal, for every message, after a trip through bytes."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from values import value_of

from holdfast.domain.findings import Finding, StepRecord
from holdfast.domain.generations import RankRestore, ShardKey, ShardSource, runs
from holdfast.domain.orders import Hello, Inventory, Order, Prepare, Report, Start
from holdfast.domain.replication import Configure, SavedByAll, Stage, StagedShard, Trouble
from holdfast.domain.signals import Tick
from holdfast.supervisor.protocol import Command, Event, Record
from holdfast.v1 import control_pb2, replicator_pb2, telemetry_pb2
from holdfast.wire import control, events, retention, shards, telemetry
from holdfast.wire.records import dumps, loads

pytestmark = pytest.mark.timeout(60)
quick = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("kind", get_args(Order), ids=lambda kind: kind.__name__)
@given(data=st.data(), epoch=st.integers(0, 2**63 - 1))
@quick
def test_order(kind: type, data: st.DataObject, epoch: int) -> None:
    order = data.draw(value_of(kind))
    raw = control.encode_order(epoch, "c-1", order, "00-trace").SerializeToString()
    command = control_pb2.SupervisorMessage.FromString(raw).command
    if isinstance(order, Prepare | Start) and not order.traceparent:
        order = dataclasses.replace(order, traceparent="00-trace")
    assert (command.epoch, command.command_id) == (epoch, "c-1")
    assert command.traceparent == getattr(order, "traceparent", "00-trace")
    assert control.decode_order(command) == order


@given(order=value_of(Prepare), epoch=st.integers(0, 2**63 - 1), in_runs=st.booleans(), width=st.integers(1, 3))
@quick
def test_order_of_a_slot(order: Prepare, epoch: int, in_runs: bool, width: int) -> None:
    """What all slots share and what one has of its own are its order; `in_runs` to agents that take them."""
    shared = control.encode_order(epoch, "", dataclasses.replace(order, restore=(), peers=()), "00-trace")
    restore = runs(order.restore, width)
    message = control.encode_slot(shared, "c-1/7", order.placement, restore, order.peers, in_runs=in_runs)
    raw = message.SerializeToString()
    assert raw == message.SerializeToString(), "what is shared stays as it is"
    command = control_pb2.SupervisorMessage.FromString(raw).command
    assert (command.epoch, command.command_id) == (epoch, "c-1/7")
    assert bool(command.prepare.restore_runs) is (in_runs and bool(order.restore))
    assert control.decode_order(command) == dataclasses.replace(order, traceparent=order.traceparent or "00-trace")


def test_runs_are_as_long_as_ranks_restore_alike_and_none_is_of_two_nodes() -> None:
    here, there = (ShardSource(node, f"{node}:1") for node in ("n0", "n1"))
    ranks = [RankRestore(rank, ShardKey(7, 50, rank), f"d{rank}", (here if rank < 6 else there,)) for rank in range(8)]
    found = runs(ranks, 4)
    assert [(run.rank, len(run.digests), run.sources) for run in found] == [
        (0, 4, (here,)),
        (4, 2, (here,)),
        (6, 2, (there,)),
    ]
    assert list(chain.from_iterable(found)) == ranks


@pytest.mark.parametrize("kind", get_args(Report), ids=lambda kind: kind.__name__)
@given(data=st.data(), columns=st.booleans())
@quick
def test_report(kind: type, data: st.DataObject, columns: bool) -> None:
    report = data.draw(value_of(kind).filter(_has_identity))
    raw = control.encode_report(report, 7, "00-trace", columns=columns).SerializeToString()
    message = control_pb2.AgentMessage.FromString(raw)
    assert (message.seq, message.traceparent) == (7, "00-trace")
    assert control.decode_report(message) == report


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


@given(configure=value_of(Configure).filter(lambda request: request.job))
@quick
def test_configure(configure: Configure) -> None:
    raw = shards.encode_configure(configure).SerializeToString()
    assert shards.decode_configure(replicator_pb2.ConfigureRequest.FromString(raw)) == configure


@given(
    stage=value_of(Stage).filter(lambda request: request.job),
    staged=st.lists(value_of(StagedShard), max_size=3).map(tuple),
    inventory=st.builds(Inventory, job=value_of(str), shards=value_of(Inventory).map(lambda held: held.shards)),
    troubles=st.lists(value_of(Trouble), max_size=3).map(tuple),
)
@quick
def test_stage_and_inventory(
    stage: Stage, staged: tuple[StagedShard, ...], inventory: Inventory, troubles: tuple[Trouble, ...]
) -> None:
    raw = shards.encode_stage(stage).SerializeToString()
    assert shards.decode_stage(replicator_pb2.StageRequest.FromString(raw)) == stage
    raw = shards.encode_staged(staged).SerializeToString()
    assert shards.decode_staged(replicator_pb2.StageResponse.FromString(raw)) == staged
    raw = shards.encode_inventory(inventory, troubles).SerializeToString()
    message = replicator_pb2.ReplicatorInventory.FromString(raw)
    assert (shards.decode_inventory(message), shards.decode_troubles(message)) == (inventory, troubles)


@given(saved=value_of(SavedByAll).filter(lambda saved: saved.job))
@quick
def test_saved_by_all(saved: SavedByAll) -> None:
    raw = retention.encode_saved_by_all(3, saved).SerializeToString()
    assert retention.decode_saved_by_all(control_pb2.SupervisorMessage.FromString(raw).saved_by_all) == saved
    raw = retention.encode_retain(saved).SerializeToString()
    assert retention.decode_retain(replicator_pb2.RetainRequest.FromString(raw)) == saved


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

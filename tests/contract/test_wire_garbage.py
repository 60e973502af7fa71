"""What no correct peer sends is refused with the field's name; it never becomes a default and never raises anything else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from values import value_of

from holdfast.domain.errors import HoldfastError, IncompatibleVersion, MalformedMessage
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.signals import GenerationStarted, GenerationStopped, RankProgress, Tick, WorkerExited
from holdfast.supervisor.protocol import Event
from holdfast.v1 import control_pb2, events_pb2, replicator_pb2, telemetry_pb2
from holdfast.wire import control, events, shards, telemetry, types
from holdfast.wire.records import loads


def tick(**parts: Any) -> telemetry_pb2.Tick:
    return telemetry_pb2.Tick(node="n1", incarnation="i", seq=1, at=1.0, protocol_version=PROTOCOL_VERSION, **parts)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tick(steps=[{"at": 1, "rank": [0, 1], "step": [3]}]), "steps"),
        (tick(progress=[{"at": 1, "rank": [0], "step": [3], "phase": []}]), "progress"),
        (tick(gpus=[{"at": 1, "gpu": [0], "uuid": []}]), "gpus"),
        (tick(generation_started=[{"at": 1, "hang": {}}]), "generation_started.mesh"),
        (
            tick(generation_started=[{"at": 1, "mesh": {"dims": [{"name": "dp", "size": 1}]}}]),
            "generation_started.hang",
        ),
        (tick(kernel_lines=[{"at": float("nan"), "text": "x"}]), "KernelLine.at"),
        (telemetry_pb2.Tick(protocol_version=PROTOCOL_VERSION, seq=1), "tick"),
    ],
)
def test_bad_tick_names_the_field(message: telemetry_pb2.Tick, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        telemetry.decode_tick(message)
    assert caught.value.field == field


@pytest.mark.parametrize("phase", [0, 99])
def test_unknown_phase_is_an_error_not_a_default(phase: int) -> None:
    one = {"rank": [0], "step": [1], "phase_at": [1.0], "process_state": ["R"], "cpu_s": [0.1], "collective_seq": [1]}
    with pytest.raises(MalformedMessage, match=r"progress\.phase: \d+ is not a Phase known here"):
        telemetry.decode_tick(tick(progress=[{"at": 1, **one, "phase": [phase]}]))


def test_a_tick_lists_no_more_members_of_groups_than_a_detector_has_time_for() -> None:
    """200 rows of a few bytes each took 8 s."""
    n = 200
    members = [f"0-{999_999 - row}" for row in range(n)]
    zeros, words = [0] * n, ["x"] * n
    rows = {"rank": zeros, "group": words, "members": members, "kind": words, "sizes": words, "peer": zeros}
    message = tick(standstills=[{"at": 1, "rows": {**rows, "entered": zeros, "pending": zeros}}])
    with pytest.raises(MalformedMessage, match=r"standstills\.rows\.members: more than 2000000 ranks in all groups"):
        telemetry.decode_tick(message)


def test_unequal_columns_are_listed_with_their_lengths() -> None:
    with pytest.raises(MalformedMessage, match="rank 2, step 1, started_at 0"):
        telemetry.decode_tick(tick(steps=[{"at": 1, "rank": [0, 1], "step": [3]}]))


def test_unequal_columns_do_not_leave_the_agent() -> None:
    broken = RankProgress("n1", 1.0, "j", 1, (0, 1), (1,), (), (), (), (), ())
    with pytest.raises(MalformedMessage, match="columns of unequal length"):
        telemetry.encode_tick(Tick("n1", "i", 1, 1.0, (broken,)))


def test_a_tick_carries_one_nodes_signals() -> None:
    with pytest.raises(ValueError, match="of node 'other' in a tick of 'n1'"):
        telemetry.encode_tick(Tick("n1", "i", 1, 1.0, (GenerationStopped("other", 1.0, "j", 1),)))


def test_another_protocol_version_is_named_on_both_sides() -> None:
    message = tick()
    message.protocol_version = 99
    with pytest.raises(IncompatibleVersion, match=rf"n1.*version 99.*speaks {PROTOCOL_VERSION}"):
        telemetry.decode_tick(message)


def test_signals_come_back_in_order_of_time_and_a_stop_before_its_exits() -> None:
    stopped = GenerationStopped("n1", 2.0, "j", 1)
    exited = WorkerExited("n1", 2.0, "j", 1, 0, 10, None, 9, 3, expected=True)
    started = GenerationStarted("n1", 3.0, "j", 2, Mesh.of({"dp": 1}), (0,), HangSpec())
    message = telemetry.encode_tick(Tick("n1", "i", 1, 3.0, (started, exited, stopped)))
    assert telemetry.decode_tick(message).signals == (stopped, exited, started)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"\xff\xff", "Finding"),
        (events_pb2.Finding(kind="FINDING_KIND_HANG").SerializeToString(), "finding.id"),
        (events_pb2.Finding(id="x").SerializeToString(), "finding.kind"),
        (events_pb2.Finding(id="x", kind="FINDING_KIND_HANG").SerializeToString(), "finding.severity"),
    ],
)
def test_bad_finding(raw: bytes, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        events.decode_finding(raw)
    assert caught.value.field == field


def test_steps_of_two_generations_make_two_entries() -> None:
    records = [StepRecord("j", generation, 1, 2, 1.0, 2.0, 5, None, 0.0) for generation in (1, 1, 2)]
    with pytest.raises(ValueError, match="one job, generation and world size"):
        events.encode_steps(records)
    assert [events.decode_steps(entry.data) for entry in events.step_entries(records)] == [records[:2], records[2:]]
    assert events.step_entries([]) == []


def test_one_finding_has_one_entry_id_and_the_same_fault_found_again_another() -> None:
    first = Finding("f", FindingKind.HANG, Severity.ERROR, 1.0, 0.5, "s", traceparent="00-t")
    again = Finding("f", FindingKind.HANG, Severity.ERROR, 2.0, 0.5, "s")
    assert events.finding_entry(first) == events.finding_entry(first)
    assert events.finding_entry(first).traceparent == "00-t"
    assert events.finding_entry(first).id != events.finding_entry(again).id


@pytest.mark.parametrize("message", [control_pb2.AgentMessage(seq=3), control.encode_beat(1.0)])
def test_a_message_without_a_report(message: control_pb2.AgentMessage) -> None:
    with pytest.raises(MalformedMessage, match="report"):
        control.decode_report(message)


ONE_SHARD: dict[str, Any] = {
    "ranks": [0], "attempts": [1], "steps": [1], "meshes": [{"dims": [{"name": "dp", "size": 1}]}], "mesh_of": [0],
    "tiers": [1], "sizes": [1], "digests": [""], "owners": ["n"], "owner_of": [0],
}  # fmt: skip
RUNS: dict[str, Any] = {"meshes": ONE_SHARD["meshes"], "owners": ["n"], "tiers": [1]}
ONE_RUN: dict[str, Any] = {"attempt": 1, "step": 1, "tier": 1, "rank": 4, "width": 2, "sizes": [1], "digests": "a,b"}
BAD_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"mesh": 1}, "rank 4 has a mesh, an owner or a tier that is not known"),
    ({"owner": 1}, "an owner"),
    ({"tier": 9}, "a tier"),
    ({"width": 3}, "rank 4 has not 3 values of each kind"),
    ({"width": 0}, "not 0 values"),
    ({"width": 2**32 - 1}, "not 4294967295 values"),
    ({"roots": "r"}, "not 2 values"),
    ({"sizes": []}, "not 2 values"),
    ({"sizes": [1, 2, 3]}, "not 2 values"),
    ({"digests": "a,b,c"}, "not 2 values"),
]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"inventory": {"columns": {"ranks": [0, 1], "attempts": [1, 2, 3]}}}, "shards: 3 entries for 2"),
        ({"inventory": {"columns": ONE_SHARD | {"tiers": [9]}}}, r"shards\.tiers: 9 is not a tier known here"),
        (
            {"inventory": {"columns": ONE_SHARD | {"mesh_of": [4]}}},
            "shards: 4 is not a place among 1",
        ),
        *[
            ({"inventory": {"columns": RUNS | {"runs": [ONE_RUN | wrong]}}}, rf"shards\.runs: .*{why}")
            for wrong, why in BAD_RUNS
        ],
        ({"inventory": {"columns": RUNS | {"ranks": [0], "runs": [ONE_RUN]}}}, "shards: rows and runs in one report"),
        ({"inventory": {"columns": RUNS}}, "shards: 1 entries for 0"),  # as a reader that does not know runs finds them
        ({"workers_changed": {"columns": {"ranks": [0]}}}, "workers: 0 entries for 1"),
        (
            {
                "order_done": {
                    "columns": {"ranks": [0], "jobs": ["j"], "generations": [1], "pids": [1], "since": [float("nan")]}
                }
            },
            r"worker\.since: not all are times",
        ),
    ],
)
def test_columns_that_do_not_fit_together(report: dict[str, Any], why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        control.decode_report(control_pb2.AgentMessage(**report))


def test_a_command_without_an_order_or_with_half_of_one() -> None:
    with pytest.raises(MalformedMessage, match="'c-1' has none"):
        control.decode_order(control_pb2.Command(command_id="c-1"))
    with pytest.raises(MalformedMessage, match=r"prepare\.mesh: missing"):
        control.decode_order(control_pb2.Command(prepare=control_pb2.Prepare(job="j")))


def test_a_tier_from_the_future() -> None:
    message = replicator_pb2.ReplicatorInventory(
        job="j", shards=[{"key": {}, "mesh": {"dims": [{"name": "dp", "size": 1}]}}]
    )
    with pytest.raises(MalformedMessage, match=r"shard\.tier: 0 is not a tier known here \(memory, disk\)"):
        shards.decode_inventory(message)


@given(raw=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_our_own_errors(raw: bytes) -> None:
    for decode in (events.decode_finding, events.decode_steps, lambda data: loads(data, Event)):
        _only_ours(decode, raw)


@given(value=value_of(Tick), cut=st.integers(0, 400), flip=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_ticks_raise_nothing_but_our_own_errors(value: Tick, cut: int, flip: int, byte: int) -> None:
    raw = bytearray(telemetry.encode_tick(value).SerializeToString())
    if flip < len(raw):
        raw[flip] = byte
    for damaged in (bytes(raw), bytes(raw[:cut])):
        _only_ours(lambda data: telemetry.decode_tick(types.parse(telemetry_pb2.Tick, data)), damaged)


def _only_ours(decode: Any, raw: bytes) -> None:
    try:
        decode(raw)
    except HoldfastError:
        pass

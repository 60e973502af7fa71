"""Messages between agents, services and replicators, and records in streams and snapshots."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fleet import Fleet, job
from fuzz.mutations import damaged, documents, dumped, json_texts
from fuzz.target import Target
from garbage import messages
from google.protobuf.message import Message
from hypothesis import strategies as st
from pydantic_core import from_json
from values import value_of

from holdfast.domain.errors import HoldfastError, IncompatibleVersion, MalformedMessage, NotFound, Unavailable
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.orders import OrderDone
from holdfast.log import subscription
from holdfast.log.protocol import Delivery, Entry
from holdfast.replicator.jobs import Remembered
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.strangers import Strangers
from holdfast.supervisor import inbox
from holdfast.supervisor.leader import intake, snapshot
from holdfast.supervisor.policies.script import Question
from holdfast.supervisor.published import PolicyAsked, Published
from holdfast.v1 import control_pb2, events_pb2, replicator_pb2, telemetry_pb2
from holdfast.wire import control, events, gpus, links, records, shards, telemetry, types, worker_logs

DATA = Path(__file__).parents[1] / "contract" / "data"
TOKEN = "secret-of-the-job"


def _messages(kind: type[Message], **fixed: Any) -> Callable[[], st.SearchStrategy[bytes]]:
    """Messages of this type whose fields have strange values, as bytes, and damaged ones."""

    def made() -> st.SearchStrategy[bytes]:
        fields = messages(kind.DESCRIPTOR)
        whole = fields.map(lambda given: kind(**{**given, **fixed}).SerializeToString())
        return st.one_of(whole, whole, damaged(whole))

    return made


def _decoded(kind: type[Message], decode: Callable[[Any], object]) -> Callable[[bytes], object]:
    return lambda raw: decode(types.parse(kind, raw))


def _reports(raw: bytes) -> None:
    """An entry of reports: each is refused on its own."""
    for each in control.decode_reports(raw):
        try:
            each.decode()
        except MalformedMessage:
            continue


def _report(message: control_pb2.AgentMessage) -> None:
    """What a supervisor does with a message of a session, and a leader with the event in its inbox."""
    if message.WhichOneof("report") == "beat":
        control.decode_steps_reached(message.beat)
    else:
        control.encode_report(control.decode_report(message), 1).SerializeToString()


def _tick(message: telemetry_pb2.Tick) -> None:
    """A decoded tick can be written again: nothing is let in that cannot leave."""
    telemetry.encode_tick(telemetry.decode_tick(message)).SerializeToString()


def _finding(raw: bytes) -> None:
    events.finding_entry(events.decode_finding(raw))


# ---------------------------------------------------------------- streams and snapshots


def _record(kind: Any) -> Callable[[], st.SearchStrategy[bytes]]:
    """Records of values of the type, damaged as JSON and as bytes."""

    def made() -> st.SearchStrategy[bytes]:
        whole = value_of(kind).map(lambda value: records.dumps(value, kind))
        return st.one_of(whole, damaged(whole), damaged(whole), json_texts({"_": "NodeGone", "at": 1.0}))

    return made


def _loaded(kind: Any) -> Callable[[bytes], object]:
    """What is read can be written, and read again."""
    return lambda raw: records.loads(records.dumps(records.loads(raw, kind), kind), kind)


@cache
def _parts() -> dict[str, bytes]:
    """The snapshot of a small fleet with a job that runs."""
    snapshot.prepare()
    fleet = Fleet(4, snapshots=False)
    fleet.submit(job(3))
    fleet.run()
    changes = snapshot.changes(None, fleet.state)
    return {name: raw for name, raw in changes.items() if raw is not None}


def _snapshots() -> st.SearchStrategy[dict[str, bytes]]:
    parts = _parts()
    names = sorted(parts)
    renamed = st.tuples(
        st.sampled_from(names), st.sampled_from(["", "/", ":", "nodes/", "jobs/x:spec", "outbox/c:slot", "timers/"])
    )

    def replaced(pair: tuple[str, bytes]) -> dict[str, bytes]:
        return {**parts, pair[0]: pair[1]}

    def edited(name: str) -> st.SearchStrategy[bytes]:
        raw = parts[name]
        tree = from_json(raw) if raw[:1] in b"[{" else None
        return damaged(st.just(raw)) if tree is None else st.one_of(documents(tree).map(dumped), damaged(st.just(raw)))

    one = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), edited(name))).map(replaced)
    less = st.sets(st.sampled_from(names), max_size=3).map(
        lambda gone: {n: raw for n, raw in parts.items() if n not in gone}
    )
    moved = renamed.map(lambda pair: {**parts, pair[1]: parts[pair[0]]})
    return st.one_of(one, one, less, moved)


def _entries() -> st.SearchStrategy[list[Delivery]]:
    """Entries of every stream that a leader reads, with anything in them."""
    named = st.tuples(
        st.sampled_from(["findings", "steps", "inbox"]),
        st.sampled_from([inbox.REPORTS, "OperatorRequest", "NodeGone", ""]),
        st.one_of(
            _messages(control_pb2.Reports)(),
            _messages(events_pb2.Finding)(),
            _messages(events_pb2.StepRecords)(),
            _record(inbox.InboxEvent)(),
        ),
    )
    one = named.map(
        lambda it: Delivery(stream=it[0], position="1-1", entry=Entry(id="e", type=it[1], data=it[2]), deliveries=1)
    )
    return st.lists(one, min_size=1, max_size=3)


def _taken(batch: list[Delivery]) -> None:
    """A leader reads a batch and never fails: what is malformed is put aside, and can be."""
    for delivery, _ in intake.take(batch, 1000.0).poison:
        intake.dead_letter_entry(delivery)


def _fields() -> st.SearchStrategy[dict[bytes, bytes]]:
    keys = st.sampled_from([b"id", b"type", b"data", b"traceparent", b"x", b"\xff"])
    return st.dictionaries(keys, st.binary(max_size=20), max_size=5)


# ---------------------------------------------------------------- replicators


def _requests() -> st.SearchStrategy[tuple[bytes, bool]]:
    """Bytes of a peer's first message, and whether it ends the connection after them."""
    valid = {
        "op": "get",
        "job": "llm",
        "attempt": 1,
        "step": 20,
        "rank": 3,
        "from": 0,
        "spans": [0, 1],
        "version": 2,
        "nonce": "0" * 32,
    }

    def framed(parts: tuple[bytes, bytes, int, bool]) -> bytes:
        body, signature, wrong, magic = parts
        envelope = signature[:64].ljust(64, b"-") + body
        return (b"HFD1" if magic else b"HFD2") + max(0, len(envelope) + wrong).to_bytes(4, "big") + envelope

    sizes = st.sampled_from([0] * 8 + [-1, 1, -70, 1 << 20, 1 << 30])
    whole = st.tuples(json_texts(valid, [valid]), st.binary(max_size=70), sizes, st.integers(0, 9).map(bool)).map(
        framed
    )
    return st.tuples(st.one_of(whole, whole, damaged(whole)), st.just(True))


def _received(given: tuple[bytes, bool]) -> None:
    """As a replicator receives it: from a peer that may stop in the middle."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        try:
            theirs.sendall(given[0])
        except BlockingIOError:
            pass  # more than the kernel holds: the rest is cut off
        theirs.shutdown(socket.SHUT_WR)
        got = frames.receive_request(ours, "c" * 32, lambda _: TOKEN, Strangers(), within_s=5.0)
    for read in (
        frames.decode_key,
        lambda fields: frames.whole_number(fields, "from"),
        lambda fields: frames.wanted_spans(fields, 9),
    ):
        try:
            read(got.fields)
        except MalformedMessage:
            continue
    got.signed_by(TOKEN, "c" * 32)


OURS = (HoldfastError,)
TARGETS = (
    Target("wire report", _messages(control_pb2.AgentMessage), _decoded(control_pb2.AgentMessage, _report), OURS),
    Target("wire reports", _messages(control_pb2.Reports), _reports, OURS),
    Target("wire order", _messages(control_pb2.Command), _decoded(control_pb2.Command, control.decode_order), OURS),
    Target(
        "wire tick",
        _messages(telemetry_pb2.Tick, protocol_version=PROTOCOL_VERSION, node="n"),
        _decoded(telemetry_pb2.Tick, _tick),
        OURS,
        share=0.5,
    ),
    Target("wire finding", _messages(events_pb2.Finding), _finding, OURS),
    Target("wire steps", _messages(events_pb2.StepRecords), events.decode_steps, OURS),
    Target(
        "wire log request",
        _messages(control_pb2.ReadLog),
        _decoded(control_pb2.ReadLog, worker_logs.decode_request),
        OURS,
    ),
    Target(
        "wire log answer",
        _messages(control_pb2.LogRead),
        _decoded(control_pb2.LogRead, worker_logs.decode_answer),
        (MalformedMessage, NotFound),
    ),
    Target("wire gpus", _messages(control_pb2.GpusRead), _decoded(control_pb2.GpusRead, gpus.decode_answer), OURS),
    Target(
        "wire inventory",
        _messages(replicator_pb2.ReplicatorInventory),
        _decoded(replicator_pb2.ReplicatorInventory, lambda m: (shards.decode_inventory(m), shards.decode_troubles(m))),
        OURS,
    ),
    Target(
        "wire staged",
        _messages(replicator_pb2.StageResponse),
        _decoded(replicator_pb2.StageResponse, shards.decode_staged),
        OURS,
    ),
    Target(
        "wire link",
        _messages(replicator_pb2.MeasureLinkResponse),
        _decoded(replicator_pb2.MeasureLinkResponse, links.decode_measured),
        OURS,
    ),
    Target("record inbox", _record(inbox.InboxEvent), _loaded(inbox.InboxEvent), (MalformedMessage,), share=0.5),
    Target("record published", _record(Published), _loaded(Published), (MalformedMessage,), share=0.5),
    Target("record job", _record(JobSpec), _loaded(JobSpec), (MalformedMessage,)),
    Target("record answer of an agent", _record(OrderDone), _loaded(OrderDone), (MalformedMessage,)),
    Target("record question", _record(PolicyAsked), _loaded(PolicyAsked), (MalformedMessage,), share=0.5),
    Target("record question to a script", _record(Question), _loaded(Question), (MalformedMessage,), share=0.5),
    Target("record job of a replicator", _record(Remembered), _loaded(Remembered), (MalformedMessage,)),
    Target("snapshot", _snapshots, snapshot.load, (MalformedMessage,), share=0.3),
    Target("stream of a leader", _entries, _taken, share=0.5),
    Target("stream fields", _fields, lambda fields: subscription.decode("inbox", b"1-1", fields, 1)),
    Target("transfer request", _requests, _received, (MalformedMessage, IncompatibleVersion, Unavailable)),
)

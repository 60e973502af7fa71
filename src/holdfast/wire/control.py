"""The control protocol: orders and reports ↔ `holdfast/v1/control.proto`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Protocol, get_args

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import Placement, RestoreRun, ShardSource
from holdfast.domain.job import CheckpointSpec, EnvSource, LaunchSpec
from holdfast.domain.names import is_job_name
from holdfast.domain.nodes import PROTOCOL_VERSION, RunningWorker, ServiceVersions, TemplateState, WorkerEnded
from holdfast.domain.orders import (
    Announced,
    CheckLink,
    CheckpointNow,
    FirstStepsRecorded,
    Hello,
    Inventory,
    Order,
    OrderDone,
    Prepare,
    PrepareTemplate,
    RanksFinished,
    RanksStarted,
    RanksStepping,
    RebootNode,
    Report,
    ResetGpu,
    RestartAgent,
    StepReached,
    WorkersChanged,
)
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import checks, report_columns, types  # noqa: F401  # with the codecs of parts
from holdfast.wire.derived import Codec, Instead, Through

_SPECS_MAX = 64  # generations whose orders are sent at the same time

# ---------------------------------------------------------------- parts

_ENV_SOURCE = Codec(EnvSource, pb.EnvSource, "env_from")
_LAUNCH = Codec(LaunchSpec, pb.LaunchSpec, "launch")
_CHECKPOINT = Codec(CheckpointSpec, pb.CheckpointSpec, "checkpoint")
_PLACEMENT = Codec(Placement, pb.Placement, "placement")
_WORKER = Codec(RunningWorker, pb.RunningWorker, "worker", times=["since"])
_ENDED = Codec(WorkerEnded, pb.WorkerEnded, "ended", times=["ago_s"])
_TEMPLATE = Codec(TemplateState, pb.Template, "template")
_ANNOUNCED = Codec(Announced, pb.Announced, "announced")
_STEP_REACHED = Codec(StepReached, pb.StepReached, "steps")
_STARTED = Codec(RanksStarted, pb.RanksStarted, "started")
_FIRST_STEPS_RECORDED = Codec(FirstStepsRecorded, pb.FirstStepsRecorded, "first_steps_recorded")
_SHARDS = Instead("columns", report_columns.decode_shards, report_columns.encode_shards)
_GONE = Instead("gone_runs", report_columns.decode_places, report_columns.encode_places)
_WORKERS = Instead("columns", report_columns.decode_workers, report_columns.encode_workers)
MESSAGES: Mapping[type, str] = {PrepareTemplate: "Warm"}  # messages with another name, which earlier versions know


def _codecs(union: Any, special: Mapping[type, Mapping[str, Any]]) -> Mapping[type, Codec[Any, Any]]:
    """Return the codec of each member of `union`. The message has the member's name (or that of `MESSAGES`), the field of the
    envelope has this name in snake case, and a `traceparent` is a field of the envelope. `special`: further arguments of
    `Codec`."""
    codecs = {}
    for kind in get_args(union):
        apart = [each.name for each in fields(kind) if each.name == "traceparent"]
        message = MESSAGES.get(kind, kind.__name__)
        label = re.sub(r"(?<=.)([A-Z])", r"_\1", message).lower()
        codecs[kind] = Codec(kind, getattr(pb, message), label, apart=apart, **special.get(kind, {}))
    return codecs


# ---------------------------------------------------------------- supervisor → agent

_ORDERS = _codecs(
    Order,
    {
        Prepare: {
            "through": {
                "launch": Through(lru_cache(_SPECS_MAX)(_LAUNCH.encode), _LAUNCH.decode),  # the same for every node
            },
            "instead": {"restore": Instead("restore_runs", types.decode_runs)},  # written by `SlotOrders`
        },
        CheckpointNow: {"renamed": {"to_object_store": "far"}},
    },
)
_OF_THE_NODE = (ResetGpu, RebootNode, RestartAgent, CheckLink)  # the job's name may be empty
_ORDER_IN: Mapping[str | None, Codec[Any, Any]] = {codec.label: codec for codec in _ORDERS.values()}


def encode_welcome(
    epoch: int, supervisor: str, diagnostics: Iterable[str], peers: Iterable[str] = ()
) -> pb.SupervisorMessage:
    """Return the first answer in a control session. `diagnostics`: endpoints for telemetry, best first; `peers`: replicators of
    some other nodes, with which the agent can test its network."""
    return pb.SupervisorMessage(
        welcome=pb.Welcome(
            epoch=epoch,
            supervisor=supervisor,
            protocol_version=PROTOCOL_VERSION,
            diagnostics=list(diagnostics),
            peers=list(peers),
            inventory_differences=True,
            answers_beats=True,
            columns=True,
            workers_in_answers=True,
            starts_in_beats=True,
            shard_runs=True,
            first_steps_in_beats=True,
            shard_shapes=True,
        )
    )


def encode_peers(endpoints: Iterable[str]) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(peers=pb.Peers(endpoints=list(endpoints)))


def encode_ack(seq: int) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(ack=pb.ReportAck(seq=seq))


def encode_heard() -> pb.SupervisorMessage:
    return pb.SupervisorMessage(heard=pb.Heard())


def encode_first_steps_recorded(recorded: FirstStepsRecorded) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(first_steps_recorded=_FIRST_STEPS_RECORDED.encode(recorded))


decode_first_steps_recorded = _FIRST_STEPS_RECORDED.decode


def encode_order(epoch: int, command_id: str, order: Order) -> pb.SupervisorMessage:
    """Return the message of an order with the leader's `epoch`."""
    codec = _ORDERS[type(order)]
    message = pb.SupervisorMessage()
    command = message.command
    command.epoch, command.command_id = epoch, command_id
    command.traceparent = getattr(order, "traceparent", "")
    getattr(command, codec.label).CopyFrom(codec.encode(order))
    return message


class SlotOrders:
    """Encodes the orders of a broadcast as bytes. What the slots have in common is encoded once: parsers merge an embedded
    message that occurs several times, so the order of a slot is the common bytes and those of the slot."""

    def __init__(self, epoch: int, order: Order) -> None:
        """`order`: that of any slot."""
        message = encode_order(epoch, "", order)
        if isinstance(order, Prepare):
            for own in ("placement", "restore", "restore_runs", "peers"):
                message.command.prepare.ClearField(own)
        self._shared = message.SerializeToString()
        self._prepares = isinstance(order, Prepare)
        if self._prepares:
            message.command.prepare.suspect_test_s = 0.0
        self._unsuspected = message.SerializeToString()
        self._own = pb.SupervisorMessage()  # filled again for each slot, if its order has no part of its own but the id

    def encode(
        self,
        command_id: str,
        placement: Placement,
        restore: Iterable[RestoreRun] = (),
        peers: Iterable[ShardSource] = (),
        *,
        in_runs: bool,
        suspected: bool = True,
    ) -> bytes:
        """Return the order of one slot, a `SupervisorMessage`. `in_runs`: the agent accepts runs. `suspected`: the node tests
        itself, if suspects are tested."""
        own = self._own
        if self._prepares:
            prepare = {
                "placement": _PLACEMENT.tree(placement),
                "restore_runs": [types.RESTORE_RUN.tree(run) for run in restore] if in_runs else (),
                "restore": () if in_runs else map(types.RANK_RESTORE.encode, chain.from_iterable(restore)),
                "peers": [types.SHARD_SOURCE.tree(peer) for peer in peers],
            }
            own = pb.SupervisorMessage(command={"prepare": prepare})
        own.command.command_id = command_id
        return (self._shared if suspected else self._unsuspected) + own.SerializeToString()


def decode_order(command: pb.Command) -> Order:
    """Return the order in a command; its epoch, id and traceparent are fields of the command. Raises `MalformedMessage`, also
    for a job whose name cannot be part of a path, because agents create and delete directories of jobs."""
    kind = command.WhichOneof("order")
    codec = _ORDER_IN.get(kind)
    if kind is None or codec is None:
        raise MalformedMessage("command.order", f"command {command.command_id!r} has none that is known here")
    order: Order = codec.decode(getattr(command, kind), *([command.traceparent] if codec.apart else []))
    if not (is_job_name(order.job) or (not order.job and isinstance(order, _OF_THE_NODE))):
        raise MalformedMessage(f"command.{kind}.job", f"{order.job[:200]!r} is not a valid name of a job")
    return order


# ---------------------------------------------------------------- agent → supervisor

_REPORTS = _codecs(
    Report,
    {
        # The version is not checked here, because the session rejects another one with a message that names both sides.
        Hello: {"inline": ["facts"], "named": ["node", "incarnation"]},
        OrderDone: {
            "renamed": {"phases_s": "phases", "restored_from": "restored"},
            "instead": {"workers": _WORKERS},
            "times": ["at"],
        },
        RanksStepping: {"renamed": {"phases_s": "phases"}, "times": ["at"]},
        RanksFinished: {"times": ["at"]},
        Inventory: {"instead": {"shards": _SHARDS, "gone": _GONE}},
        WorkersChanged: {"instead": {"workers": _WORKERS}},
    },
)
_REPORT_IN: Mapping[str | None, Codec[Any, Any]] = {codec.label: codec for codec in _REPORTS.values()}

_VERSION_MAX = 100  # characters
_CUT_S_MAX = 10 * 366 * 86_400.0  # for which telemetry may be cut: more is no duration


def encode_beat(
    at: float,
    workers_version: int = 0,
    steps: Iterable[StepReached] = (),
    started: Iterable[RanksStarted] = (),
    *,
    telemetry_cut_s: float = 0.0,
    first_steps: Iterable[RanksStepping] = (),
    versions: ServiceVersions = ServiceVersions(),
) -> pb.AgentMessage:
    """Return a heartbeat, which is neither numbered nor acknowledged."""
    beat = pb.Beat(
        at=at,
        workers_version=workers_version,
        steps=[_STEP_REACHED.encode(each) for each in steps],
        started=[_STARTED.encode(each) for each in started],
        telemetry_cut_s=telemetry_cut_s,
        first_steps=[_REPORTS[RanksStepping].encode(each) for each in first_steps],
        diagnostics_version=versions.diagnostics,
        replicator_version=versions.replicator,
    )
    return pb.AgentMessage(beat=beat)


def decode_steps_reached(beat: pb.Beat) -> tuple[StepReached, ...]:
    return tuple(map(_STEP_REACHED.decode, beat.steps))


def decode_started(beat: pb.Beat) -> tuple[RanksStarted, ...]:
    return tuple(map(_STARTED.decode, beat.started)) if beat.started else ()


def decode_first_steps(beat: pb.Beat) -> tuple[RanksStepping, ...]:
    """Return the first steps that the node repeats until they are recorded. Raises `MalformedMessage`."""
    return tuple(map(_REPORTS[RanksStepping].decode, beat.first_steps)) if beat.first_steps else ()


def decode_telemetry_cut_s(beat: pb.Beat) -> float:
    """Return how long the node's telemetry has not been acknowledged; 0 = it is acknowledged. A value that cannot be a duration
    counts as 0."""
    cut_s = beat.telemetry_cut_s
    return cut_s if 0.0 < cut_s <= _CUT_S_MAX else 0.0


def decode_versions(beat: pb.Beat) -> ServiceVersions:
    return ServiceVersions(beat.diagnostics_version[:_VERSION_MAX], beat.replicator_version[:_VERSION_MAX])


class Reported(NamedTuple):  # created in a third of the time of a frozen dataclass; an incident needs thousands
    """A report as received, with the control session of its sender."""

    at: float
    node: str
    incarnation: str
    session: int
    message: bytes

    def decode(self) -> tuple[int, Report]:
        """Return (number, report). Raises `MalformedMessage`."""
        message = types.parse(pb.AgentMessage, self.message)
        return message.seq, decode_report(message)


class Origin(Protocol):
    """When and in which control session a report was received."""

    @property
    def at(self) -> float: ...
    @property
    def node(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def session(self) -> int: ...


def encode_received(origins: Iterable[Origin], messages: Iterable[bytes]) -> bytes:
    """Encode reports, as the bytes that arrived, for an entry of the inbox."""
    encoded = pb.Reports()
    add = encoded.reports.add  # writing in place takes half the time of creating messages by a codec, which are copied
    for each, message in zip(origins, messages, strict=True):
        add(at=each.at, node=each.node, incarnation=each.incarnation, session=each.session, message=message)
    return encoded.SerializeToString()


def encode_reports(reports: Iterable[Reported]) -> bytes:
    """The inverse of `decode_reports`."""
    reports = tuple(reports)
    return encode_received(reports, [each.message for each in reports])


def decode_reports(raw: bytes) -> list[Reported]:
    """Decode a list of reports. Raises `MalformedMessage` if it is not a list; each report is checked by its own `decode`."""
    message = types.parse(pb.Reports, raw)
    return [Reported(each.at, each.node, each.incarnation, each.session, each.message) for each in message.reports]


def encode_report(report: Report, seq: int) -> pb.AgentMessage:
    """Encode a report with number `seq` (from 1, per incarnation)."""
    codec = _REPORTS[type(report)]
    message = pb.AgentMessage(seq=seq)
    getattr(message, codec.label).CopyFrom(codec.encode(report))
    return message


def decode_report(message: pb.AgentMessage) -> Report:
    """Return the report in a message. Raises `MalformedMessage` if there is none; check for heartbeats with `WhichOneof`
    first."""
    kind = message.WhichOneof("report")
    codec = _REPORT_IN.get(kind)
    if kind is None or codec is None:
        raise MalformedMessage("report", f"message {message.seq} carries {kind or 'none that is known here'}")
    report: Report = codec.decode(getattr(message, kind))
    return report

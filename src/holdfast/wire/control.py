"""The control protocol: orders and reports ↔ `holdfast/v1/control.proto`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, get_args

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import Placement
from holdfast.domain.job import CheckpointSpec, LaunchSpec
from holdfast.domain.nodes import PROTOCOL_VERSION, RunningWorker, TemplateState, WorkerEnded
from holdfast.domain.orders import (
    CheckpointNow,
    Hello,
    Inventory,
    Order,
    OrderDone,
    Prepare,
    Prune,
    RanksFinished,
    RanksStepping,
    Report,
    SetInterval,
    Start,
    StepReached,
    Stop,
    Tested,
    Warm,
    WorkersChanged,
)
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import checks, types  # noqa: F401  # with the codecs of parts
from holdfast.wire.derived import Codec, Through

_SPECS_MAX = 64  # generations whose orders go out at the same time

# ---------------------------------------------------------------- parts

_LAUNCH = Codec(LaunchSpec, pb.LaunchSpec, "launch")
_CHECKPOINT = Codec(CheckpointSpec, pb.CheckpointSpec, "checkpoint")
_PLACEMENT = Codec(Placement, pb.Placement, "placement")
_WORKER = Codec(RunningWorker, pb.RunningWorker, "worker", times=["since"])
_ENDED = Codec(WorkerEnded, pb.WorkerEnded, "ended", times=["ago_s"])
_TEMPLATE = Codec(TemplateState, pb.Template, "template")
_STEP_REACHED = Codec(StepReached, pb.StepReached, "steps")


# ---------------------------------------------------------------- supervisor → agent

_ORDERS: Mapping[type, Codec[Any, Any]] = {
    codec.domain: codec
    for codec in (
        Codec(Warm, pb.Warm, "warm"),
        Codec(
            Prepare,
            pb.Prepare,
            "prepare",
            apart=["traceparent"],  # the command carries it
            through={
                "launch": Through(lru_cache(_SPECS_MAX)(_LAUNCH.encode), _LAUNCH.decode),  # the same for every node
            },
        ),
        Codec(Start, pb.Start, "start", apart=["traceparent"]),
        Codec(Stop, pb.Stop, "stop"),
        Codec(CheckpointNow, pb.CheckpointNow, "checkpoint_now"),
        Codec(SetInterval, pb.SetInterval, "set_interval"),
        Codec(Prune, pb.Prune, "prune"),
    )
}
_ORDER_IN: Mapping[str | None, Codec[Any, Any]] = {codec.label: codec for codec in _ORDERS.values()}


def encode_welcome(
    epoch: int, supervisor: str, diagnostics: Iterable[str], peers: Iterable[str] = ()
) -> pb.SupervisorMessage:
    """The first answer on a session. `diagnostics`: endpoints for telemetry, best first; `peers`: some other nodes'
    replicators, for the agent to test its network with."""
    return pb.SupervisorMessage(
        welcome=pb.Welcome(
            epoch=epoch,
            supervisor=supervisor,
            protocol_version=PROTOCOL_VERSION,
            diagnostics=list(diagnostics),
            peers=list(peers),
            inventory_differences=True,
            answers_beats=True,
        )
    )


def encode_ack(seq: int) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(ack=pb.ReportAck(seq=seq))


def encode_heard() -> pb.SupervisorMessage:
    return pb.SupervisorMessage(heard=pb.Heard())


def encode_order(epoch: int, command_id: str, order: Order, traceparent: str = "") -> pb.SupervisorMessage:
    """An order under the leader's `epoch`. An order that carries its own traceparent keeps it."""
    codec = _ORDERS[type(order)]
    message = pb.SupervisorMessage()
    command = message.command
    command.epoch, command.command_id = epoch, command_id
    command.traceparent = (getattr(order, "traceparent", "") if codec.apart else "") or traceparent
    getattr(command, codec.label).CopyFrom(codec.encode(order))
    return message


def decode_order(command: pb.Command) -> Order:
    """The order inside; its epoch, id and traceparent are the command's own fields. Raises `MalformedMessage`."""
    kind = command.WhichOneof("order")
    codec = _ORDER_IN.get(kind)
    if kind is None or codec is None:
        raise MalformedMessage("command.order", f"command {command.command_id!r} has none that is known here")
    order: Order = codec.decode(getattr(command, kind), *([command.traceparent] if codec.apart else []))
    return order


# ---------------------------------------------------------------- agent → supervisor

_REPORTS: Mapping[type, Codec[Any, Any]] = {
    codec.domain: codec
    for codec in (
        # The version is not checked here: the session refuses a foreign one with a message that names both sides.
        Codec(Hello, pb.Hello, "hello", inline=["facts"], named=["node", "incarnation"]),
        Codec(
            OrderDone,
            pb.OrderDone,
            "order_done",
            renamed={"phases_s": "phases", "restored_from": "restored"},
            times=["at"],
        ),
        Codec(RanksStepping, pb.RanksStepping, "ranks_stepping", renamed={"phases_s": "phases"}, times=["at"]),
        Codec(RanksFinished, pb.RanksFinished, "ranks_finished", times=["at"]),
        Codec(Inventory, pb.Inventory, "inventory"),
        Codec(WorkersChanged, pb.WorkersChanged, "workers_changed"),
        Codec(Tested, pb.Tested, "tested"),
    )
}
_REPORT_IN: Mapping[str | None, Codec[Any, Any]] = {codec.label: codec for codec in _REPORTS.values()}

if missing := {*get_args(Order), *get_args(Report)} ^ {*_ORDERS, *_REPORTS}:
    raise TypeError(f"orders and reports without a codec: {missing}")


def encode_beat(at: float, workers_version: int = 0, steps: Iterable[StepReached] = ()) -> pb.AgentMessage:
    """A sign of life; not numbered and not acknowledged."""
    reached = [_STEP_REACHED.encode(each) for each in steps]
    return pb.AgentMessage(beat=pb.Beat(at=at, workers_version=workers_version, steps=reached))


def decode_steps_reached(beat: pb.Beat) -> tuple[StepReached, ...]:
    return tuple(map(_STEP_REACHED.decode, beat.steps))


def encode_report(report: Report, seq: int, traceparent: str = "") -> pb.AgentMessage:
    """A report numbered `seq` (from 1, per incarnation)."""
    codec = _REPORTS[type(report)]
    message = pb.AgentMessage(seq=seq, traceparent=traceparent)
    getattr(message, codec.label).CopyFrom(codec.encode(report))
    return message


def decode_report(message: pb.AgentMessage) -> Report:
    """The report inside. Raises `MalformedMessage` when there is none: look for beats with `WhichOneof` first."""
    kind = message.WhichOneof("report")
    codec = _REPORT_IN.get(kind)
    if kind is None or codec is None:
        raise MalformedMessage("report", f"message {message.seq} carries {kind or 'none that is known here'}")
    report: Report = codec.decode(getattr(message, kind))
    return report

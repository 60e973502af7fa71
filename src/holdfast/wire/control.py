"""The control protocol: orders and reports ↔ `holdfast/v1/control.proto`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import assert_never

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import Placement, RestoreRun, ShardSource
from holdfast.domain.job import CheckpointSpec, ChecksSpec, HangSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import PROTOCOL_VERSION, NodeFacts, RunningWorker, TemplateState, WorkerEnded
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
from holdfast.wire import types
from holdfast.wire.checks import CHECKS_SPEC, PREFLIGHT

_SPECS_MAX = 64  # generations whose orders go out at the same time

# ---------------------------------------------------------------- supervisor → agent


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
            columns=True,
        )
    )


def encode_ack(seq: int) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(ack=pb.ReportAck(seq=seq))


def encode_heard() -> pb.SupervisorMessage:
    return pb.SupervisorMessage(heard=pb.Heard())


def encode_order(epoch: int, command_id: str, order: Order, traceparent: str = "") -> pb.SupervisorMessage:
    """An order under the leader's `epoch`. An order that carries its own traceparent keeps it."""
    command = pb.Command(epoch=epoch, command_id=command_id, traceparent=traceparent)
    match order:
        case Warm():
            command.warm.CopyFrom(pb.Warm(job=order.job, launch=_encode_launch(order.launch)))
        case Prepare():
            command.prepare.CopyFrom(_encode_prepare(order))
            command.traceparent = order.traceparent or traceparent
        case Start():
            command.start.CopyFrom(pb.Start(job=order.job, generation=order.generation, master=order.master))
            command.traceparent = order.traceparent or traceparent
        case Stop():
            command.stop.CopyFrom(
                pb.Stop(
                    job=order.job,
                    generation=order.generation,
                    grace_s=order.grace_s,
                    forget=order.forget,
                    ended=order.ended,
                )
            )
        case CheckpointNow():
            command.checkpoint_now.CopyFrom(
                pb.CheckpointNow(job=order.job, generation=order.generation, at_step=order.at_step, far=order.far)
            )
        case SetInterval():
            command.set_interval.CopyFrom(
                pb.SetInterval(
                    job=order.job,
                    generation=order.generation,
                    from_step=order.from_step,
                    interval_steps=order.interval_steps,
                )
            )
        case Prune():
            command.prune.CopyFrom(pb.Prune(job=order.job, steps=types.encode_saved_steps(order.steps)))
        case _:
            assert_never(order)
    return pb.SupervisorMessage(command=command)


def encode_slot(
    shared: pb.SupervisorMessage,
    command_id: str,
    placement: Placement,
    restore: Iterable[RestoreRun] = (),
    peers: Iterable[ShardSource] = (),
    *,
    in_runs: bool,
) -> pb.SupervisorMessage:
    """The order of one slot. `shared`: `encode_order` of what all slots' orders have in common. `in_runs`: as the agent takes
    them."""
    message = pb.SupervisorMessage()
    message.CopyFrom(shared)
    message.command.command_id = command_id
    if message.command.HasField("prepare"):
        prepare = message.command.prepare
        prepare.placement.CopyFrom(_encode_placement(placement))
        if in_runs:
            prepare.restore_runs.extend(types.encode_runs(restore))
        else:
            prepare.restore.extend(types.encode_restores(chain.from_iterable(restore)))
        prepare.peers.extend(types.encode_sources(peers))
    return message


def decode_order(command: pb.Command) -> Order:
    """The order inside; its epoch, id and traceparent are the command's own fields. Raises `MalformedMessage`."""
    match command.WhichOneof("order"):
        case "warm":
            return Warm(job=command.warm.job, launch=_decode_launch(command.warm.launch))
        case "prepare":
            return _decode_prepare(command.prepare, command.traceparent)
        case "start":
            start = command.start
            return Start(
                job=start.job, generation=start.generation, master=start.master, traceparent=command.traceparent
            )
        case "stop":
            stop = command.stop
            return Stop(
                job=stop.job, generation=stop.generation, grace_s=stop.grace_s, forget=stop.forget, ended=stop.ended
            )
        case "checkpoint_now":
            now = command.checkpoint_now
            return CheckpointNow(job=now.job, generation=now.generation, at_step=now.at_step, far=now.far)
        case "set_interval":
            change = command.set_interval
            return SetInterval(
                job=change.job,
                generation=change.generation,
                from_step=change.from_step,
                interval_steps=change.interval_steps,
            )
        case "prune":
            return Prune(job=command.prune.job, steps=types.decode_saved_steps(command.prune.steps))
        case _:
            raise MalformedMessage("command.order", f"command {command.command_id!r} has none that is known here")


def _encode_prepare(order: Prepare) -> pb.Prepare:
    message = pb.Prepare()
    message.CopyFrom(
        _encode_specs(order.mesh, order.launch, order.checkpoint, order.hang, order.restore_mesh, order.checks)
    )
    rest = pb.Prepare(
        job=order.job,
        generation=order.generation,
        attempt=order.attempt,
        placement=_encode_placement(order.placement),
        nnodes=order.nnodes,
        token=order.token,
        restore_step=order.restore_step,
        restore=types.encode_restores(order.restore),
        peers=types.encode_sources(order.peers),
        self_test=order.self_test,
        first_attempt=order.first_attempt,
    )
    message.MergeFrom(rest)
    return message


def _encode_placement(placement: Placement) -> pb.Placement:
    return pb.Placement(
        slot=placement.slot, node=placement.node, first_rank=placement.first_rank, nproc=placement.nproc
    )


@lru_cache(_SPECS_MAX)
def _encode_specs(
    mesh: Mesh,
    launch: LaunchSpec,
    checkpoint: CheckpointSpec,
    hang: HangSpec,
    restore_mesh: Mesh | None,
    checks: ChecksSpec,
) -> pb.Prepare:
    """The large parts of the order that are the same for every node of a generation."""
    return pb.Prepare(
        mesh=types.encode_mesh(mesh),
        launch=_encode_launch(launch),
        checkpoint=_encode_checkpoint(checkpoint),
        hang=types.encode_hang(hang),
        restore_mesh=types.encode_mesh(restore_mesh) if restore_mesh else None,
        checks=CHECKS_SPEC.encode(checks),
    )


def _decode_prepare(message: pb.Prepare, traceparent: str) -> Prepare:
    for part in ("placement", "launch", "checkpoint", "hang"):
        if not message.HasField(part):
            raise MalformedMessage(f"prepare.{part}", "missing")
    placement = message.placement
    restore_mesh = (
        types.decode_mesh(message.restore_mesh, "prepare.restore_mesh") if message.HasField("restore_mesh") else None
    )
    return Prepare(
        job=message.job,
        generation=message.generation,
        attempt=message.attempt,
        mesh=types.decode_mesh(message.mesh, "prepare.mesh"),
        placement=Placement(
            slot=placement.slot, node=placement.node, first_rank=placement.first_rank, nproc=placement.nproc
        ),
        nnodes=message.nnodes,
        launch=_decode_launch(message.launch),
        checkpoint=_decode_checkpoint(message.checkpoint),
        hang=types.decode_hang(message.hang),
        token=message.token,
        restore_step=message.restore_step,
        restore_mesh=restore_mesh,
        restore=types.decode_restores(message.restore)
        or tuple(chain.from_iterable(types.decode_runs(message.restore_runs))),
        peers=types.decode_sources(message.peers),
        traceparent=traceparent,
        checks=CHECKS_SPEC.decode(message.checks),
        self_test=message.self_test,
        first_attempt=message.first_attempt,
    )


def _encode_checkpoint(spec: CheckpointSpec) -> pb.CheckpointSpec:
    return pb.CheckpointSpec(
        interval_steps=spec.interval_steps,
        keep=spec.keep,
        interval_min_s=spec.interval_min_s,
        interval_max_s=spec.interval_max_s,
        store=spec.store,
        store_interval_s=spec.store_interval_s,
        store_keep=spec.store_keep,
    )


def _decode_checkpoint(message: pb.CheckpointSpec) -> CheckpointSpec:
    return CheckpointSpec(
        interval_steps=message.interval_steps,
        keep=message.keep,
        interval_min_s=message.interval_min_s,
        interval_max_s=message.interval_max_s,
        store=message.store,
        store_interval_s=message.store_interval_s,
        store_keep=message.store_keep,
    )


def _encode_launch(launch: LaunchSpec) -> pb.LaunchSpec:
    return pb.LaunchSpec(
        script=launch.script,
        args=launch.args,
        cwd=launch.cwd,
        env=[pb.EnvVar(name=name, value=value) for name, value in launch.env],
        preload=launch.preload,
    )


def _decode_launch(message: pb.LaunchSpec) -> LaunchSpec:
    return LaunchSpec(
        script=message.script,
        args=tuple(message.args),
        cwd=message.cwd,
        env=tuple((variable.name, variable.value) for variable in message.env),
        preload=tuple(message.preload),
    )


# ---------------------------------------------------------------- agent → supervisor


def encode_beat(at: float, workers_version: int = 0, steps: Iterable[StepReached] = ()) -> pb.AgentMessage:
    """A sign of life; not numbered and not acknowledged."""
    reached = [pb.StepReached(job=each.job, generation=each.generation, step=each.step) for each in steps]
    return pb.AgentMessage(beat=pb.Beat(at=at, workers_version=workers_version, steps=reached))


def decode_steps_reached(beat: pb.Beat) -> tuple[StepReached, ...]:
    return tuple(StepReached(each.job, each.generation, each.step) for each in beat.steps)


@dataclass(frozen=True, slots=True)
class Reported:
    """A report as it came, and in whose session."""

    at: float
    node: str
    incarnation: str
    session: int
    message: bytes

    def decode(self) -> tuple[int, Report]:
        """(number, report). Raises `MalformedMessage`."""
        message = types.parse(pb.AgentMessage, self.message)
        return message.seq, decode_report(message)


def encode_reports(reports: Iterable[Reported]) -> bytes:
    """For an entry of the inbox."""
    message = pb.Reports()
    add = message.reports.add
    for each in reports:
        add(at=each.at, node=each.node, incarnation=each.incarnation, session=each.session, message=each.message)
    return message.SerializeToString()


def decode_reports(raw: bytes) -> list[Reported]:
    """Raises `MalformedMessage` when it is no list of reports; what is wrong with one of them shows when that is decoded."""
    message = types.parse(pb.Reports, raw)
    return [Reported(each.at, each.node, each.incarnation, each.session, each.message) for each in message.reports]


def encode_report(report: Report, seq: int, traceparent: str = "", *, columns: bool = False) -> pb.AgentMessage:
    """A report numbered `seq` (from 1, per incarnation). `columns`: to supervisors that take shards and workers so."""
    message = pb.AgentMessage(seq=seq, traceparent=traceparent)
    match report:
        case Hello():
            message.hello.CopyFrom(_encode_hello(report))
        case OrderDone():
            message.order_done.CopyFrom(
                pb.OrderDone(
                    command_id=report.command_id,
                    ok=report.ok,
                    reason=report.reason,
                    master=report.master,
                    at=report.at,
                    phases=_encode_phases(report.phases_s),
                    workers=() if columns else _encode_workers(report.workers),
                    columns=_encode_worker_columns(report.workers) if columns and report.workers else None,
                    unrestorable=report.unrestorable,
                    restored=[pb.Restored(source=source, shards=count) for source, count in report.restored_from],
                    restored_bytes=[
                        pb.RestoredBytes(source=where, bytes=size) for where, size in report.restored_bytes
                    ],
                )
            )
        case RanksStepping():
            message.ranks_stepping.CopyFrom(
                pb.RanksStepping(
                    job=report.job,
                    generation=report.generation,
                    ranks=report.ranks,
                    step=report.step,
                    at=report.at,
                    phases=_encode_phases(report.phases_s),
                )
            )
        case RanksFinished():
            message.ranks_finished.CopyFrom(
                pb.RanksFinished(job=report.job, generation=report.generation, ranks=report.ranks, at=report.at)
            )
        case Inventory():
            message.inventory.CopyFrom(
                pb.Inventory(
                    job=report.job,
                    shards=[] if columns else [types.encode_shard_record(shard) for shard in report.shards],
                    columns=types.encode_shards(report.shards) if columns and report.shards else None,
                    stored=types.encode_stored(report.stored),
                    base=report.base,
                    gone=types.encode_places(report.gone),
                )
            )
        case WorkersChanged():
            message.workers_changed.CopyFrom(
                pb.WorkersChanged(
                    version=report.version,
                    workers=() if columns else _encode_workers(report.workers),
                    columns=_encode_worker_columns(report.workers) if columns and report.workers else None,
                    ended=_encode_ended(report.ended),
                    template=_encode_template(report.template),
                )
            )
        case Tested():
            message.tested.CopyFrom(pb.Tested(preflight=PREFLIGHT.encode(report.preflight)))
        case _:
            assert_never(report)
    return message


def decode_report(message: pb.AgentMessage) -> Report:
    """The report inside. Raises `MalformedMessage` when there is none: look for beats with `WhichOneof` first."""
    match message.WhichOneof("report"):
        case "hello":
            return _decode_hello(message.hello)
        case "order_done":
            done = message.order_done
            return OrderDone(
                command_id=done.command_id,
                ok=done.ok,
                reason=done.reason,
                master=done.master,
                at=types.check_time(done.at, "order_done.at"),
                phases_s=_decode_phases(done.phases),
                workers=_decode_workers(done),
                unrestorable=done.unrestorable,
                restored_from=tuple((restored.source, restored.shards) for restored in done.restored),
                restored_bytes=tuple((restored.source, restored.bytes) for restored in done.restored_bytes),
            )
        case "ranks_stepping":
            stepping = message.ranks_stepping
            return RanksStepping(
                job=stepping.job,
                generation=stepping.generation,
                ranks=tuple(stepping.ranks),
                step=stepping.step,
                at=types.check_time(stepping.at, "ranks_stepping.at"),
                phases_s=_decode_phases(stepping.phases),
            )
        case "ranks_finished":
            finished = message.ranks_finished
            return RanksFinished(
                job=finished.job,
                generation=finished.generation,
                ranks=tuple(finished.ranks),
                at=types.check_time(finished.at, "ranks_finished.at"),
            )
        case "inventory":
            inventory = message.inventory
            return Inventory(
                job=inventory.job,
                shards=types.decode_shards(inventory.columns)
                if inventory.HasField("columns")
                else tuple(types.decode_shard_record(shard) for shard in inventory.shards),
                stored=types.decode_stored(inventory.stored),
                base=inventory.base,
                gone=types.decode_places(inventory.gone),
            )
        case "workers_changed":
            changed = message.workers_changed
            return WorkersChanged(
                changed.version,
                _decode_workers(changed),
                _decode_ended(changed.ended),
                _decode_template(changed.template) if changed.HasField("template") else None,
            )
        case "tested":
            return Tested(PREFLIGHT.decode(message.tested.preflight))
        case kind:
            raise MalformedMessage("report", f"message {message.seq} carries {kind or 'none that is known here'}")


def _encode_hello(hello: Hello) -> pb.Hello:
    facts = hello.facts
    return pb.Hello(
        node=facts.node,
        incarnation=facts.incarnation,
        hostname=facts.hostname,
        address=facts.address,
        zone=facts.zone,
        capacity=facts.capacity,
        replicator_endpoint=facts.replicator_endpoint,
        agent_pid=facts.agent_pid,
        directory=facts.directory,
        kernel_log=facts.kernel_log,
        version=facts.version,
        protocol_version=facts.protocol_version,
        disk_dir=facts.disk_dir,
        restore_runs=facts.restore_runs,
        running=_encode_workers(hello.running),
        preflight=PREFLIGHT.encode(hello.preflight) if hello.preflight is not None else None,
        workers_version=hello.workers_version,
        ended=_encode_ended(hello.ended),
        template=_encode_template(hello.template),
    )


def _decode_hello(message: pb.Hello) -> Hello:
    # The version is not checked here: the session refuses a foreign one with a message that names both sides.
    if not message.node or not message.incarnation:
        raise MalformedMessage("hello", "a node name and an incarnation are required")
    facts = NodeFacts(
        node=message.node,
        incarnation=message.incarnation,
        hostname=message.hostname,
        address=message.address,
        zone=message.zone,
        capacity=message.capacity,
        replicator_endpoint=message.replicator_endpoint,
        agent_pid=message.agent_pid,
        directory=message.directory,
        kernel_log=message.kernel_log,
        version=message.version,
        protocol_version=message.protocol_version,
        disk_dir=message.disk_dir,
        restore_runs=message.restore_runs,
    )
    return Hello(
        facts=facts,
        running=_decode_worker_rows(message.running),
        preflight=PREFLIGHT.decode(message.preflight) if message.HasField("preflight") else None,
        workers_version=message.workers_version,
        ended=_decode_ended(message.ended),
        template=_decode_template(message.template) if message.HasField("template") else None,
    )


def _encode_workers(workers: Iterable[RunningWorker]) -> list[pb.RunningWorker]:
    return [
        pb.RunningWorker(
            job=worker.job, generation=worker.generation, rank=worker.rank, pid=worker.pid, since=worker.since
        )
        for worker in workers
    ]


def _encode_worker_columns(workers: Sequence[RunningWorker]) -> pb.WorkerColumns:
    return pb.WorkerColumns(
        ranks=[worker.rank for worker in workers],
        jobs=types.short([worker.job for worker in workers]),
        generations=types.short([worker.generation for worker in workers]),
        pids=types.short([worker.pid for worker in workers]),
        since=types.short([worker.since for worker in workers]),
    )


def _decode_workers(message: pb.OrderDone | pb.WorkersChanged) -> tuple[RunningWorker, ...]:
    if not message.HasField("columns"):
        return _decode_worker_rows(message.workers)
    columns, field = message.columns, "workers"
    count = len(columns.ranks)
    jobs, generations = types.column(columns.jobs, count, field), types.column(columns.generations, count, field)
    pids, since = types.column(columns.pids, count, field), types.column(columns.since, count, field)
    if not all(map(math.isfinite, columns.since)):
        raise MalformedMessage("worker.since", "not all are times")
    return tuple(map(RunningWorker, jobs, generations, columns.ranks, pids, since))


def _decode_worker_rows(messages: Iterable[pb.RunningWorker]) -> tuple[RunningWorker, ...]:
    return tuple(
        RunningWorker(
            job=message.job,
            generation=message.generation,
            rank=message.rank,
            pid=message.pid,
            since=types.check_time(message.since, "worker.since"),
        )
        for message in messages
    )


def _encode_template(template: TemplateState | None) -> pb.Template | None:
    if template is None:
        return None
    return pb.Template(jobs=template.jobs, ready=template.ready, failure=template.failure)


def _decode_template(message: pb.Template) -> TemplateState:
    return TemplateState(tuple(message.jobs), message.ready, message.failure)


def _encode_ended(ended: Iterable[WorkerEnded]) -> list[pb.WorkerEnded]:
    return [
        pb.WorkerEnded(
            job=each.job,
            generation=each.generation,
            rank=each.rank,
            exit_code=each.exit_code,
            signal=each.signal,
            ago_s=each.ago_s,
        )
        for each in ended
    ]


def _decode_ended(messages: Iterable[pb.WorkerEnded]) -> tuple[WorkerEnded, ...]:
    return tuple(
        WorkerEnded(
            job=message.job,
            generation=message.generation,
            rank=message.rank,
            exit_code=message.exit_code if message.HasField("exit_code") else None,
            signal=message.signal if message.HasField("signal") else None,
            ago_s=types.check_time(message.ago_s, "ended.ago_s"),
        )
        for message in messages
    )


def _encode_phases(phases_s: Iterable[tuple[str, float]]) -> list[pb.PhaseTime]:
    return [pb.PhaseTime(name=name, seconds=seconds) for name, seconds in phases_s]


def _decode_phases(messages: Iterable[pb.PhaseTime]) -> tuple[tuple[str, float], ...]:
    return tuple((message.name, message.seconds) for message in messages)

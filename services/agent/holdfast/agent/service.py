"""The agent's composition root: builds and connects all parts. The environment is read only here.

The loops, and what their end means:

    session    ─┐                      reports to the supervisor, orders from it
    uplink     ─┤ loops that never return: if one does, the agent exits with an error, and its workers with it
    pool       ─┤                      worker templates, workers, their messages and logs
    replicator ─┤
    collectors ─┘ restarted one by one; none of them ends the agent
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import time
import uuid
from collections.abc import Mapping
from functools import partial

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent import preflight, preflight_checks, tracing
from holdfast.agent.collectors import build_all, nvml
from holdfast.agent.collectors.protocol import Surroundings, keep_collecting
from holdfast.agent.descriptors import Descriptors
from holdfast.agent.directory import MARK, claimed
from holdfast.agent.executor import Executor
from holdfast.agent.ledger import Ledger
from holdfast.agent.node import Node, Outcome
from holdfast.agent.outbox import Outbox
from holdfast.agent.replicator import LocalReplicator, NoReplicator, Replicator, ReplicatorPlaces
from holdfast.agent.reports import Reports
from holdfast.agent.session import Session
from holdfast.agent.settings import AgentSettings
from holdfast.agent.uplink import Uplink
from holdfast.agent.workers.environment import Site, inherited_environment
from holdfast.agent.workers.pool import WorkerPool
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import Hello, Order, Prepare, Report, Warm
from holdfast.domain.replication import Trouble
from holdfast.domain.signals import CheckpointTrouble, NodeSignal
from holdfast.runtime import freeze, metrics, ready, telemetry
from holdfast.runtime.service import guarded
from holdfast.v1.control_pb2 import AgentMessage
from holdfast.wire.control import encode_beat


async def serve(settings: AgentSettings) -> None:
    """Run one node until cancelled. Raises `HoldfastError` for what the operator can put right."""
    structlog.contextvars.bind_contextvars(node=settings.node)  # in every line of this process
    descriptors = Descriptors()
    with (
        claimed(settings.agent_dir, settings.memory_dir, settings.disk_dir),
        Ledger(settings.agent_dir / "agent.db") as ledger,
    ):
        async with anyio.create_task_group() as tasks:
            await _run(settings, ledger, descriptors, tasks)


async def _run(settings: AgentSettings, ledger: Ledger, descriptors: Descriptors, tasks: TaskGroup) -> None:
    incarnation = uuid.uuid4().hex
    inherited = {**inherited_environment(os.environ), MARK: str(settings.agent_dir)}
    workers_ended = anyio.Event()

    # What happens here, on its way out; the two ends are made below, since each needs to ask the parts between.
    def emit(signal: NodeSignal) -> None:
        preflights.watch(signal)
        uplink.emit(tracing.begun(signal))

    def report(what: Report) -> None:
        session.report(what)

    def in_trouble(job: str, what: Trouble) -> None:
        emit(CheckpointTrouble(settings.node, what.since, job, what.kind.value, what.place, what.reason))

    def hello() -> Hello:
        tested = preflights.newest if settings.preflight_every_s else None
        workers = pool.worker_set
        facts = _facts(settings, incarnation, replicator.endpoint)
        return Hello(facts, pool.running(), tested, workers.version, workers.ended, workers.template)

    def beat() -> AgentMessage:
        return encode_beat(time.time(), pool.worker_set.version, pool.steps())

    async def carry_out(order: Order) -> Outcome:
        if isinstance(order, Prepare | Warm):
            descriptors.require()
        if isinstance(order, Prepare):
            preflights.make_way()
            preflights.know_peers(peer.endpoint for peer in order.peers)
        return await node.carry_out(order)

    places = _places(settings)
    pool = WorkerPool(
        node=settings.node,
        address=settings.address,
        site=Site(
            agent_dir=settings.agent_dir,
            memory_dir=settings.memory_dir,
            disk_dir=settings.disk_dir,
            notes=settings.agent_dir / "notes.sock",
            replicator_notes=str(places.notes) if settings.replicator else "",
        ),
        inherited=inherited,
        emit=emit,
        report=report,
        ended=workers_ended,
        assume_started_after_s=settings.assume_started_after_s,
    )
    replicator: Replicator = NoReplicator()
    if settings.replicator:  # its own settings are in the environment as well, and pass through
        replicator = LocalReplicator(places, {**os.environ, MARK: str(settings.agent_dir)}, report, in_trouble)
    collectors = build_all(_surroundings(settings, descriptors))
    directories = (settings.agent_dir, settings.disk_dir, settings.memory_dir)
    preflights = preflight.Preflights(
        node=settings.node,
        every_s=settings.preflight_every_s,
        gpus=settings.gpus,
        watches_gpus=any(collector.name == nvml.NvmlCollector.name for collector in collectors),
        test_devices=pool.test_devices,
        test_disk=partial(anyio.to_thread.run_sync, preflight_checks.disk, directories, abandon_on_cancel=True),
        is_idle=lambda: not pool.running(),
        emit=emit,
        report=report,
        path=settings.agent_dir / preflight.FILE,
    )
    node = Node(pool, replicator, pool.site, self_test=preflights.on_suspicion)
    executor = Executor(
        tasks=tasks,
        ledger=ledger,
        carry_out=carry_out,
        report=report,
    )
    outbox = Outbox(settings.node, incarnation)
    telemetry.observe(metrics.TELEMETRY_DROPPED, lambda: outbox.dropped + pool.notes_lost, what="signals")
    uplink = Uplink(
        outbox,
        standing=pool.standing,
        sample=pool.sample,
        lost=lambda: pool.notes_lost,
        last_words=workers_ended,
        tls=settings.tls,
    )
    session = Session(
        endpoints=settings.endpoints,
        hello=hello,
        inventories=lambda: replicator.inventories,
        executor=executor,
        reports=Reports(),
        on_diagnostics=uplink.use,
        on_peers=preflights.know_peers,
        on_saved_by_all=replicator.retain,
        beat=beat,
        tls=settings.tls,
    )
    guarded(tasks, "freezes", partial(freeze.watch, lambda _: pool.unheard(time.time())))
    guarded(tasks, "file descriptors", descriptors.run)
    guarded(tasks, "workers", pool.run)
    guarded(tasks, "telemetry", uplink.run)
    if settings.preflight_every_s:
        guarded(tasks, "pre-flight", preflights.run)
    for collector in collectors:
        guarded(tasks, f"collector {collector.name}", partial(keep_collecting, collector, settings.node, emit))
    if isinstance(replicator, LocalReplicator):
        await tasks.start(replicator.run, name="checkpoint-replicator")
        guarded(tasks, "replicator away", replicator.withdraw_when_away)
    guarded(tasks, "control session", session.run)
    ready.announce(settings.ready_file, _announcement(settings, incarnation, replicator))
    await anyio.sleep_forever()


def _facts(settings: AgentSettings, incarnation: str, replicator_endpoint: str) -> NodeFacts:
    return NodeFacts(
        restore_runs=True,
        node=settings.node,
        incarnation=incarnation,
        hostname=socket.gethostname(),
        address=settings.address,
        zone=settings.zone or settings.node,
        capacity=settings.capacity,
        replicator_endpoint=replicator_endpoint,
        agent_pid=os.getpid(),
        directory=str(settings.agent_dir),
        disk_dir=str(settings.disk_dir.absolute()) if settings.replicator else "",
        kernel_log=str(settings.kernel_log),
        version=importlib.metadata.version("holdfast"),
    )


def _announcement(settings: AgentSettings, incarnation: str, replicator: Replicator) -> Mapping[str, str]:
    return {"node": settings.node, "incarnation": incarnation, "replicator": replicator.endpoint}


def _places(settings: AgentSettings) -> ReplicatorPlaces:
    return ReplicatorPlaces(
        node=settings.node,
        agent_dir=settings.agent_dir,
        memory_dir=settings.memory_dir,
        disk_dir=settings.disk_dir,
        listen=f"{settings.address}:{settings.replicator_port}",
    )


def _surroundings(settings: AgentSettings, descriptors: Descriptors) -> Surroundings:
    return Surroundings(
        node=settings.node,
        agent_dir=settings.agent_dir,
        memory_dir=settings.memory_dir,
        disk_dir=settings.disk_dir,
        kernel_log=settings.kernel_log,
        gpus=settings.gpus,
        nvml_replay=settings.nvml_replay,
        infiniband=settings.infiniband,
        nic_exclude=tuple(part.strip() for part in settings.nic_exclude.split(",") if part.strip()),
        nvrx_path=settings.nvrx_path,
        maintenance_file=settings.maintenance_file,
        maintenance_url=settings.maintenance_url,
        files_left=descriptors.left,
    )

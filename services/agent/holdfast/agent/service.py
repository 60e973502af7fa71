"""The agent's composition root: builds and connects all parts. The environment is read only here.

What happens on the node goes up, orders come down:

    collectors, pool, preflights ── signals ──► emit ──► outbox ── uplink ──► diagnostics
    pool, replicator, preflights, executor ── reports ──► report ── session ──► supervisor
    supervisor ── session ── orders ──► executor ──► carry_out ──► node ──► pool, replicator

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent import tracing
from holdfast.agent.checks import preflight, preflight_checks
from holdfast.agent.checks.active_ports import ActivePorts
from holdfast.agent.checks.link_tests import LinkTests
from holdfast.agent.checks.suspect_tests import SuspectTests
from holdfast.agent.collectors import infiniband, nvml, nvrx
from holdfast.agent.collectors.maintenance import metadata_url
from holdfast.agent.collectors.protocol import Collector, Pausable, Surroundings, keep_collecting
from holdfast.agent.collectors.registry import build_all
from holdfast.agent.connection.certificate import CertificateRenewal
from holdfast.agent.connection.executor import Executor
from holdfast.agent.connection.ledger import Ledger
from holdfast.agent.connection.log_reads import LogReads
from holdfast.agent.connection.outbox import Outbox
from holdfast.agent.connection.reports import Reports
from holdfast.agent.connection.session import Session
from holdfast.agent.connection.uplink import Uplink
from holdfast.agent.directory import MARK, claimed
from holdfast.agent.gpus.gpu_devices import GpuDevices
from holdfast.agent.gpus.gpu_meters import GpuMeters
from holdfast.agent.gpus.gpu_reset import GpuResets
from holdfast.agent.gpus.gpu_states import GpuStates
from holdfast.agent.host.descriptors import Descriptors
from holdfast.agent.host.leaving import Leaving
from holdfast.agent.host.machine import boot_id, machine_id
from holdfast.agent.host.reboot import Reboots
from holdfast.agent.host.restart import Restart, Restarts
from holdfast.agent.injection.faults import Faults
from holdfast.agent.node import Node
from holdfast.agent.outcome import Outcome
from holdfast.agent.rank_measurements import RankMeasurements
from holdfast.agent.replicator import LocalReplicator, NoReplicator, Replicator, ReplicatorPlaces
from holdfast.agent.settings import AgentSettings
from holdfast.agent.workers import apart
from holdfast.agent.workers.environment import Site, inherited_environment
from holdfast.agent.workers.pool import WorkerPool
from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.nodes import Check, NodeFacts, ServiceVersions
from holdfast.domain.orders import Hello, Order, Prepare, PrepareTemplate, Report
from holdfast.domain.replication import Trouble
from holdfast.domain.signals import CheckpointTrouble, NicSample, NodeSignal
from holdfast.runtime import freeze, ready
from holdfast.runtime.processes.training_user import TrainingUser, training_user
from holdfast.runtime.service import Farewell, guarded
from holdfast.runtime.telling import metrics, telemetry
from holdfast.runtime.trust.expiry import OwnExpiry
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.invitation import node_identity
from holdfast.wire.control import encode_beat

log = structlog.get_logger("holdfast.agent")

_READS_GPUS = (nvml.NvmlCollector, nvrx.NvrxCollector)  # they have the devices open


async def serve(settings: AgentSettings, farewell: Farewell | None = None, restart: Restart | None = None) -> None:
    """Run one node until cancelled. Raises `HoldfastError` for problems that the operator can correct.

    `restart`: called if the process is to start again after its end; None = it cannot, and orders to do so are refused."""
    structlog.contextvars.bind_contextvars(node=settings.node)  # in every line of this process
    user = training_user(settings.agent_user)
    descriptors = Descriptors()
    with claimed(settings.agent_dir, settings.memory_dir, settings.disk_dir, passable=user is not None):
        _log_user(user, settings.agent_user)
        if user is None:
            await _serve(settings, user, descriptors, farewell, restart)
            return
        apart.prepare(_site(settings, user), user)
        await apart.require_reachable(_site(settings, user), user)
        with _own_files():
            await _serve(settings, user, descriptors, farewell, restart)


@contextmanager
def _own_files() -> Iterator[None]:
    """Create files that other users cannot read, here and in the replicator, because workers may pass their directories."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)  # the process may begin again


async def _serve(
    settings: AgentSettings,
    user: TrainingUser | None,
    descriptors: Descriptors,
    farewell: Farewell | None,
    restart: Restart | None,
) -> None:
    with Ledger(settings.agent_dir / "agent.db") as ledger:
        async with anyio.create_task_group() as tasks:
            agent = Agent(settings, ledger, descriptors, tasks, restart, user)
            if farewell is not None:
                farewell.say = agent.leave
            await agent.run()


class Agent:
    """The parts of one node, made in the order in which signals pass them, then orders. `tasks` has their loops."""

    def __init__(
        self,
        settings: AgentSettings,
        ledger: Ledger,
        descriptors: Descriptors,
        tasks: TaskGroup,
        restart: Restart | None = None,
        user: TrainingUser | None = None,
    ) -> None:
        self._settings, self._descriptors, self._tasks = settings, descriptors, tasks
        self._incarnation = uuid.uuid4().hex
        membership = settings.membership
        tls = settings.tls_as(Role.AGENT, name=settings.node)
        marked = {MARK: str(settings.agent_dir)}
        places, site = _places(settings), _site(settings, user)
        workers_ended = anyio.Event()

        self._pool = WorkerPool(
            node=settings.node,
            address=settings.address,
            site=site,
            inherited={**inherited_environment(os.environ, site), **marked},
            emit=self._emit,
            report=self._report,
            ended=workers_ended,
            assume_started_after_s=settings.assume_started_after_s,
            log_bytes_max=settings.log_bytes_max,
        )
        self._replicator: Replicator = NoReplicator()
        if settings.replicator:  # its own settings are in the environment as well, and pass through
            self._replicator = LocalReplicator(
                places,
                {**os.environ, **marked, telemetry.ENV_METRICS_LISTEN: settings.replicator_metrics_listen}
                | _readers(user),
                self._report,
                self._in_trouble,
            )
        self._gpu_meters, self._gpu_states = GpuMeters(), GpuStates()
        self._collectors = build_all(_surroundings(settings, descriptors))
        self._ports = ActivePorts(_reading_ports(settings))
        self._preflights = preflight.Preflights(
            node=settings.node,
            every_s=settings.preflight_every_s,
            gpus=settings.gpus,
            watches_gpus=any(collector.name == nvml.NvmlCollector.name for collector in self._collectors),
            test_devices=self._pool.test_devices,
            test_disk=self._test_disk,
            test_ports=self._ports.check,
            is_idle=lambda: not self._pool.running(),
            emit=self._emit,
            report=self._report,
            path=settings.agent_dir / preflight.FILE,
        )
        self._outbox = Outbox(settings.node, self._incarnation)
        self._uplink = Uplink(
            self._outbox,
            standing=self._pool.standing,
            sample=self._pool.sample,
            lost=lambda: self._pool.notes_lost,
            last_words=workers_ended,
            membership=membership,
            tls=tls,
        )

        self._readers = [Pausable(self._collecting(each)) for each in self._collectors if isinstance(each, _READS_GPUS)]
        self._resets = GpuResets(
            settings.resets,
            devices=GpuDevices(settings.gpu_devices),
            workers=self._pool.running,
            quiet=self._without_readers,
            held=self._preflights.held,
            test=self._preflights.after_reset,
        )
        self._suspect_tests = SuspectTests(
            tasks,
            test_devices=self._pool.test_quickly,
            test_disk=self._test_disk_quickly,
            test_ports=self._ports.check,
            gpus_are_real=settings.nvml_replay is None,
            failed=self._preflights.failed,
        )
        self._reboots = Reboots(settings.reboot_command, settings.node, self._pool.running)
        self._restarts = Restarts(settings.node, tasks, self._pool.running, restart)
        self._link_tests = LinkTests(
            settings.node,
            tasks,
            lambda: self._replicator,
            is_idle=lambda: not self._pool.running() and not self._node.is_preparing,
        )
        self._faults = Faults(
            self._pool,
            settings.kernel_log,
            disk_dir=settings.disk_dir,
            memory_dir=settings.memory_dir,
            agent_dir=settings.agent_dir,
            fill_bytes_max=int(settings.fault_fill_gib_max * 2**30),
            rules=settings.machine_faults,
        )
        self._node = Node(
            self._pool,
            self._replicator,
            self._pool.site,
            self_test=self._preflights.on_suspicion,
            test_suspect=self._suspect_tests.make,
            reset_gpus=self._resets.carry_out,
            reboot=self._reboots.carry_out,
            restart=self._restarts.carry_out,
            check_link=self._link_tests.carry_out,
            inject=self._faults.inject,
        )
        executor = Executor(
            tasks=tasks,
            ledger=ledger,
            carry_out=self._carry_out,
            report=self._report,
            workers_version=self._pool.worker_set.version_for_answer,
        )
        self._session = Session(
            endpoints=settings.endpoints,
            hello=self._hello,
            inventories=lambda: self._replicator.inventories,
            executor=executor,
            reports=Reports(),
            on_diagnostics=self._uplink.use,
            on_peers=self._preflights.know_peers,
            on_present_peers=self._preflights.replace_peers,
            on_saved_by_all=self._replicator.retain,
            beat=lambda first_steps: encode_beat(
                time.time(),
                self._pool.worker_set.version,
                self._pool.steps(),
                self._pool.begun(),
                telemetry_cut_s=self._uplink.cut_s(),
                first_steps=first_steps,
                versions=ServiceVersions(self._uplink.version, self._replicator.version),
            ),
            log_reads=LogReads(settings.agent_dir / "logs"),
            read_gpus=self._gpu_states.newest,
            read_ranks=RankMeasurements(self._pool.newest_running, self._gpu_states.newest).read,
            membership=membership,
            tls=tls,
        )

        self._own_expiry = OwnExpiry(tls) if tls is not None else None
        self._renewal: CertificateRenewal | None = None
        if settings.identity_dir is not None and tls is not None:
            identity = node_identity(settings.fleet or tls.accepts.fleet, settings.node)
            self._renewal = CertificateRenewal(settings.identity_dir, settings.endpoints, identity, tls)

    # ------------------------------------------------------------------ on the way up

    def _emit(self, signal: NodeSignal) -> None:
        self._gpu_meters.watch(signal)
        self._gpu_states.watch(signal)
        self._preflights.watch(signal)
        self._resets.watch(signal)
        self._suspect_tests.watch(signal)
        self._ports.watch(signal)
        self._uplink.emit(tracing.begun(signal))

    def _report(self, report: Report) -> None:
        self._session.report(report)

    def _in_trouble(self, job: str, trouble: Trouble) -> None:
        kind, at = trouble.kind.value, trouble.since
        self._emit(CheckpointTrouble(self._settings.node, at, job, kind, trouble.place, trouble.reason))

    def _hello(self) -> Hello:
        tested = self._preflights.newest if self._settings.preflight_every_s else None
        workers = self._pool.worker_set
        facts = _facts(
            self._settings,
            self._incarnation,
            self._replicator.endpoint,
            resets_gpus=self._resets.possible,
            reboots=self._reboots.possible,
            restarts=self._restarts.possible,
        )
        return Hello(facts, self._pool.running(), tested, workers.version, workers.ended, workers.template)

    # ------------------------------------------------------------------ on the way down

    async def _carry_out(self, order: Order) -> Outcome:
        if isinstance(order, Prepare | PrepareTemplate):
            self._descriptors.require()
            self._reboots.require_up()
            self._restarts.require_staying()
        if isinstance(order, Prepare):
            self._link_tests.make_way()
            await self._resets.finished()
            self._link_tests.make_way()  # a test that began while the resets were awaited
            self._preflights.make_way()
            self._preflights.know_peers(peer.endpoint for peer in order.peers)
        return await self._node.carry_out(order)

    # ------------------------------------------------------------------ loops

    async def leave(self) -> None:
        """Between SIGTERM and the end: returns when nothing here is needed any more, or the grace is over."""
        node, grace_s, handover_s = (
            self._settings.node,
            self._settings.termination_grace_s,
            self._settings.handover_s,
        )
        copies = lambda: self._replicator.copying  # noqa: E731
        leaving = Leaving(
            node, self._incarnation, grace_s, handover_s, workers=self._pool.running, copies=copies, emit=self._emit
        )
        await leaving.carry_out()

    async def run(self) -> None:
        """Until cancelled."""
        settings, tasks = self._settings, self._tasks
        telemetry.observe(
            metrics.TELEMETRY_DROPPED, lambda: self._outbox.dropped + self._pool.notes_lost, what="signals"
        )
        guarded(tasks, "freezes", partial(freeze.watch, lambda _: self._pool.unheard(time.time())))
        guarded(tasks, "file descriptors", self._descriptors.run)
        guarded(tasks, "workers", self._pool.run)
        guarded(tasks, "telemetry", self._uplink.run)
        guarded(tasks, "injected faults", self._faults.run)
        if self._renewal is not None:
            guarded(tasks, "certificate", self._renewal.run)
        if self._own_expiry is not None:
            guarded(tasks, "expiry of the certificate", self._own_expiry.run)
        if settings.preflight_every_s:
            guarded(tasks, "pre-flight", self._preflights.run)
        for collector in self._collectors:
            if not isinstance(collector, _READS_GPUS):
                guarded(tasks, f"collector {collector.name}", self._collecting(collector))
        for reader in self._readers:
            guarded(tasks, "reader of GPUs", reader.run)
        if isinstance(self._replicator, LocalReplicator):
            await tasks.start(self._replicator.run, name="checkpoint-replicator")
            guarded(tasks, "replicator away", self._replicator.withdraw_when_away)
        guarded(tasks, "control session", self._session.run)
        endpoint = self._replicator.endpoint
        ready.announce(
            settings.ready_file, {"node": settings.node, "incarnation": self._incarnation, "replicator": endpoint}
        )
        await anyio.sleep_forever()

    def _collecting(self, collector: Collector) -> Callable[[], Awaitable[None]]:
        return partial(keep_collecting, collector, self._settings.node, self._emit)

    @asynccontextmanager
    async def _without_readers(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for reader in self._readers:
                await stack.enter_async_context(reader.paused())
            yield

    async def _test_disk(self) -> Check:
        return await anyio.to_thread.run_sync(preflight_checks.disk, self._directories, abandon_on_cancel=True)

    async def _test_disk_quickly(self) -> Check:
        return await anyio.to_thread.run_sync(preflight_checks.disk_answers, self._directories, abandon_on_cancel=True)

    @property
    def _directories(self) -> tuple[Path, ...]:
        return self._settings.agent_dir, self._settings.disk_dir, self._settings.memory_dir


def _reading_ports(settings: AgentSettings) -> Callable[[], Awaitable[NicSample]] | None:
    if not settings.infiniband.is_dir():
        return None
    ports = infiniband.Ports(settings.node, settings.infiniband, _patterns(settings.nic_exclude))
    return partial(anyio.to_thread.run_sync, ports.sample, abandon_on_cancel=True)


def _facts(
    settings: AgentSettings,
    incarnation: str,
    replicator_endpoint: str,
    *,
    resets_gpus: bool,
    reboots: bool,
    restarts: bool,
) -> NodeFacts:
    return NodeFacts(
        restore_runs=True,
        resets_gpus=resets_gpus,
        node=settings.node,
        incarnation=incarnation,
        hostname=socket.gethostname(),
        address=settings.address,
        zone=settings.zone or settings.node,
        capacity=settings.capacity,
        replicator_endpoint=replicator_endpoint,
        agent_pid=os.getpid(),
        directory=str(settings.agent_dir),
        # without the symbolic link of a local stack, which ends with the stack; its checkpoints do not
        disk_dir=str(settings.disk_dir.resolve()) if settings.replicator else "",
        kernel_log=str(settings.kernel_log),
        version=importlib.metadata.version(DISTRIBUTION),
        boot_id=boot_id(settings.boot_id_file),
        machine_id=machine_id(settings.machine_id_file),
        reboots=reboots,
        restarts=restarts,
        tests_links=settings.replicator and settings.link_tests,
        pool=settings.pool,
        agrees_on_saves=True,
    )


def _log_user(user: TrainingUser | None, asked: str) -> None:
    """Log the user as which training runs, unless the agent itself runs as an ordinary user."""
    if user is not None:
        log.info("training runs as another user", user=user.name, uid=user.uid, gid=user.gid, groups=user.groups)
    elif os.geteuid() == 0 and not asked:
        log.warning(
            "training runs as root, and can read this agent's keys",
            remedy="holdfast agent --user NAME runs it as another user; --user root accepts this",
        )


def _readers(user: TrainingUser | None) -> dict[str, str]:
    """Return the replicator's settings for workers of another user."""
    if user is None:
        return {}
    return {"HOLDFAST_REPLICATOR_WORKER_UID": str(user.uid), "HOLDFAST_REPLICATOR_WORKER_GID": str(user.gid)}


def _site(settings: AgentSettings, user: TrainingUser | None) -> Site:
    return Site(
        agent_dir=settings.agent_dir,
        memory_dir=settings.memory_dir,
        disk_dir=settings.disk_dir,
        notes=settings.agent_dir / "notes.sock",
        replicator_notes=str(_places(settings).notes) if settings.replicator else "",
        user=user,
    )


def _places(settings: AgentSettings) -> ReplicatorPlaces:
    return ReplicatorPlaces(
        node=settings.node,
        agent_dir=settings.agent_dir,
        memory_dir=settings.memory_dir,
        disk_dir=settings.disk_dir,
        listen=f"{settings.address}:{settings.replicator_port}",
    )


def _patterns(listed: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in listed.split(",") if part.strip())


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
        nic_exclude=_patterns(settings.nic_exclude),
        nvrx_path=settings.nvrx_path,
        maintenance_file=settings.maintenance_file,
        maintenance_url=metadata_url(settings.maintenance_url),
        files_left=descriptors.left,
    )

"""A real agent process under a control plane that the test plays: real gRPC, real template, real forks."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
from waiting import wait_until
from warm_processes import STACK, WarmProcess, warm

from holdfast.domain.generations import Placement
from holdfast.domain.inventories import changed
from holdfast.domain.job import CheckpointSpec, HangSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import (
    FirstStepsRecorded,
    Hello,
    Inventory,
    Order,
    OrderDone,
    Prepare,
    RanksStarted,
    RanksStepping,
    Report,
    Start,
)
from holdfast.domain.replication import CommonCheckpoint
from holdfast.domain.signals import NodeSignal, Tick
from holdfast.runtime.trust.fleet import FLEET
from holdfast.shards import peek
from holdfast.v1 import control_pb2, telemetry_pb2
from holdfast.v1.control_pb2_grpc import add_ControlServicer_to_server
from holdfast.v1.telemetry_pb2_grpc import add_TelemetryServicer_to_server
from holdfast.wire.control import (
    decode_first_steps,
    decode_report,
    decode_started,
    encode_ack,
    encode_first_steps_recorded,
    encode_heard,
    encode_order,
    encode_welcome,
)
from holdfast.wire.retention import encode_saved_by_all
from holdfast.wire.telemetry import decode_tick

START_TIMEOUT_S = 120.0
SLEEPER = "import time\nprint('running', flush=True)\ntime.sleep(600)\n"  # a script without steps
ANSWER_TIMEOUT_S = 120.0  # before it answers Prepare, an agent may have to make a template twice

R = TypeVar("R", bound=Report)
S = TypeVar("S", bound=NodeSignal)

FLEET_METADATA = ((FLEET, "main"),)  # before the first message: an agent waits for it, for a moment


class ControlPlane:
    """Supervisor and diagnostics in one: records what the agent says, acknowledges it, sends the orders of the test."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.refuse = ""  # a supervisor that is not the leader says so
        self.acknowledge_ticks = True
        self.records_first_steps = True  # False: it does not confirm those in beats
        self.first_steps: list[RanksStepping] = []  # as beats have repeated them; `reports` has each only once
        self.started: set[RanksStarted] = set()  # generations that beats have named
        self.reports: list[Report] = []
        self.beats = 0
        self.differences = 0  # inventories that arrived as differences; `reports` has them complete
        self.ticks: list[Tick] = []
        self.goodbyes = 0
        self.sessions = 0
        self._end_telemetry = False
        self._downstream: queue.Queue[control_pb2.SupervisorMessage | None] | None = None
        self._ids = itertools.count(1)
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        add_ControlServicer_to_server(self, self._server)  # type: ignore[arg-type]
        add_TelemetryServicer_to_server(self, self._server)  # type: ignore[arg-type]
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        if self._downstream is not None:
            self._downstream.put(None)
        self._server.stop(0).wait()
        self._pool.shutdown()

    def restart_telemetry(self) -> None:
        """End the telemetry stream from this side; the agent opens another one."""
        self._end_telemetry = True

    def drop_session(self) -> None:
        """End the control stream from this side."""
        assert self._downstream is not None
        self._downstream.put(None)

    # ------------------------------------------------------------------ what the agent calls

    def Session(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        context.send_initial_metadata(FLEET_METADATA)
        if self.refuse:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
        downstream: queue.Queue[control_pb2.SupervisorMessage | None] = queue.Queue()
        self._downstream = downstream
        self.sessions += 1
        threading.Thread(target=self._hear, args=(requests, downstream), daemon=True).start()
        yield encode_welcome(self.epoch, "test", [self.endpoint])
        while (message := downstream.get()) is not None:
            yield message

    def _hear_first_steps(self, first_steps: Iterable[RanksStepping], downstream: queue.Queue[Any]) -> None:
        for each in first_steps:
            if each not in self.first_steps:
                self.reports.append(each)
            self.first_steps.append(each)
            if self.records_first_steps:
                downstream.put(encode_first_steps_recorded(FirstStepsRecorded(each.job, each.generation)))

    def _hear(self, requests: Iterator[Any], downstream: queue.Queue[Any]) -> None:
        held: dict[str, tuple[int, Inventory]] = {}  # by job, the session's last: number, complete
        try:
            for message in requests:
                if message.WhichOneof("report") == "beat":
                    self.beats += 1
                    self.started.update(decode_started(message.beat))
                    downstream.put(encode_heard())
                    self._hear_first_steps(decode_first_steps(message.beat), downstream)
                    continue
                report = decode_report(message)
                if isinstance(report, Inventory):
                    if report.base:
                        number, last = held[report.job]
                        assert report.base == number
                        self.differences += 1
                        report = changed(last.shards, report)
                    held[report.job] = (message.seq, report)
                self.reports.append(report)
                downstream.put(encode_ack(message.seq))
        except grpc.RpcError:
            pass  # the agent was killed: that is what some tests are about
        finally:
            downstream.put(None)

    def Stream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        context.send_initial_metadata(FLEET_METADATA)
        try:
            for message in requests:
                self.ticks.append(decode_tick(message))
                self.goodbyes += message.goodbye
                if self._end_telemetry:
                    self._end_telemetry = False
                    return
                if self.acknowledge_ticks:
                    yield telemetry_pb2.TickAck(seq=message.seq)
        except grpc.RpcError:
            return

    # ------------------------------------------------------------------ what tests use

    def send(self, order: Order, *, command_id: str = "", epoch: int | None = None) -> str:
        assert self._downstream is not None, "no agent has connected"
        command_id = command_id or f"c{next(self._ids)}"
        self._downstream.put(encode_order(self.epoch if epoch is None else epoch, command_id, order))
        return command_id

    def tell(self, word: CommonCheckpoint, *, epoch: int | None = None) -> None:
        assert self._downstream is not None, "no agent has connected"
        self._downstream.put(encode_saved_by_all(self.epoch if epoch is None else epoch, word))

    def answers(self, command_id: str) -> list[OrderDone]:
        return [r for r in self.reports if isinstance(r, OrderDone) and r.command_id == command_id]

    def ask(self, order: Order, *, command_id: str = "", epoch: int | None = None) -> OrderDone:
        """Send an order and wait for its answer."""
        known = len(self.answers(command_id)) if command_id else 0
        command_id = self.send(order, command_id=command_id, epoch=epoch)
        wait_until(
            lambda: len(self.answers(command_id)) > known,
            description=f"the answer to {type(order).__name__}",
            timeout_s=ANSWER_TIMEOUT_S,
        )
        return self.answers(command_id)[-1]

    def all_of(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports if isinstance(report, kind)]

    def signals(self, kind: type[S]) -> list[S]:
        return [signal for tick in list(self.ticks) for signal in tick.signals if isinstance(signal, kind)]

    def wait_for(
        self, kind: type[R], matching: Callable[[R], bool] = lambda _: True, timeout_s: float = START_TIMEOUT_S
    ) -> R:
        return wait_until(
            lambda: next((r for r in self.all_of(kind) if matching(r)), None),
            description=f"a {kind.__name__}",
            timeout_s=timeout_s,
        )

    def wait_for_signal(
        self, kind: type[S], matching: Callable[[S], bool] = lambda _: True, timeout_s: float = START_TIMEOUT_S
    ) -> S:
        return wait_until(
            lambda: next((s for s in self.signals(kind) if matching(s)), None),
            description=f"a {kind.__name__}",
            timeout_s=timeout_s,
        )


class Agent:
    """One agent process in its own directories, killed whole at the end."""

    view: tuple[str, ...] = ()  # that its processes have of the file system, as for `warm`

    def __init__(self, plane: ControlPlane, root: Path, *, replicator: bool = False, **environment: str) -> None:
        self.plane = plane
        self.root = root
        self.directory = root / "agent"
        self.memory = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
        self.kernel_log = root / "kernel.log"
        self.kernel_log.touch()
        self._environment = {
            "HOLDFAST_SUPERVISOR": plane.endpoint,
            "HOLDFAST_NODE": "node-0",
            "HOLDFAST_AGENT_DIR": str(self.directory),
            "HOLDFAST_MEMORY_DIR": str(self.memory),
            "HOLDFAST_DISK_DIR": str(root / "disk"),
            "HOLDFAST_KERNEL_LOG": str(self.kernel_log),
            "HOLDFAST_CAPACITY": "4",
            "HOLDFAST_REPLICATOR": str(replicator).lower(),
            "HOLDFAST_ASSUME_STARTED_AFTER_S": "0.5",
            "HOLDFAST_TERMINATION_GRACE_S": "0",
            "HOLDFAST_PREFLIGHT_EVERY_S": "0",  # a test that wants them says so
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.process = self._start()

    def _start(self) -> WarmProcess:
        environment = {**os.environ, **self._environment}
        with (self.root / "agent.log").open("ab") as output:
            # Its templates and its replicator are forks, too, where their environment allows it.
            return warm(STACK, self.view).start(
                ["holdfast.agent"], Path.cwd(), environment, output.fileno(), output.fileno()
            )

    def wait_connected(self) -> Hello:
        return self.plane.wait_for(Hello, lambda hello: hello.facts.agent_pid == self.process.pid, START_TIMEOUT_S)

    def restart(self) -> Hello:
        self.process = self._start()
        return self.wait_connected()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def running(self, word: str) -> list[int]:
        """Pids of its living descendants whose command line has `word` as one of its words."""
        found = []
        for child in self.descendants():
            try:
                found += [child.pid] if word in child.cmdline() else []
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def log(self) -> str:
        return (self.root / "agent.log").read_text(errors="replace")

    def worker_log(self, job: str, generation: int, rank: int) -> str:
        return (self.directory / "logs" / job / f"g{generation}" / f"rank-{rank}.log").read_text()

    def worker_lines(self, job: str, generation: int, rank: int) -> str:
        """The log, once its last line is whole; before that, nothing. A `print` may reach the file in several writes."""
        said = self.worker_log(job, generation, rank)
        return said if said.endswith("\n") else ""

    def close(self) -> None:
        family = [self.process.pid]
        if self.process.poll() is None:
            family += [child.pid for child in self.descendants()]
            self.process.kill()
        self.process.wait()
        for pid in family[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.memory, ignore_errors=True)


@contextmanager
def running_agent(root: Path, *, replicator: bool = False, **environment: str) -> Iterator[Agent]:
    plane = ControlPlane()
    agent = Agent(plane, root, replicator=replicator, **environment)
    try:
        agent.wait_connected()
        yield agent
    finally:
        agent.close()
        plane.close()


def script(root: Path, name: str, text: str) -> str:
    path = root / f"{name}.py"
    path.write_text(text)
    return str(path)


def prepare_order(
    job: str, path: str, *, generation: int = 1, nproc: int = 1, token: str = "secret", **launch: Any
) -> Prepare:
    return Prepare(
        job=job,
        generation=generation,
        attempt=generation,
        mesh=Mesh.of({"dp": nproc}),
        placement=Placement(0, "node-0", 0, nproc),
        nnodes=1,
        launch=LaunchSpec(script=path, **launch),
        checkpoint=CheckpointSpec(),
        hang=HangSpec(),
        token=token,
        restore_step=0,
    )


def start_job(plane: ControlPlane, order: Prepare) -> OrderDone:
    """Prepare and start; returns the answer to `Prepare`."""
    prepared = plane.ask(order)
    assert prepared.ok, prepared.reason
    start = Start(order.job, order.generation, prepared.master)
    command = plane.send(start)

    def answered() -> bool:
        plane.send(start, command_id=command)  # heartbeats answer it, unless it failed or is repeated
        return bool(plane.answers(command))

    wait_until(answered, description="the answer to Start", timeout_s=ANSWER_TIMEOUT_S)
    started = plane.answers(command)[-1]
    assert started.ok, started.reason
    return prepared


def newest_in_memory(agent: Agent, job: str, ranks: int) -> int:
    """The newest step of which every rank has a complete image."""
    steps = []
    for rank in range(ranks):
        headers = [peek(path) for path in (agent.memory / job / f"w{rank}").glob("*.image")]
        steps.append({header.stamp.key.step for header in headers if header is not None and header.stamp is not None})
    return max(set.intersection(*steps))


def read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data

"""A simulated node: production's rules of an agent, and workers that are modelled in all respects that the supervisor can
observe.

Orders pass production's `Admission`, whose answers are in production's `Ledger`; reports wait in production's `Reports`. The
node's shards are its replicator's (`replicator`).
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from holdfast.agent.connection.admission import Admission, Record
from holdfast.agent.connection.ledger import ANSWERS_MAX, Ledger
from holdfast.agent.connection.reports import Reports
from holdfast.agent.generations import Generations, Preparation
from holdfast.agent.outcome import FailedTests, Outcome, answer_of
from holdfast.domain import orders
from holdfast.domain.errors import Conflict, HoldfastError, NotFound, Unavailable
from holdfast.domain.nodes import NodeFacts, Preflight, RunningWorker, WorkerEnded
from holdfast.domain.orders import Order, Report
from holdfast.replicator.view import Held, View
from holdfast.sim import releases, traces
from holdfast.sim.clocks import Clock
from holdfast.sim.cohort import Cohort
from holdfast.sim.links import Links
from holdfast.sim.releases import EarlierReports, Release
from holdfast.sim.replicator import Replicator
from holdfast.sim.reporting import Reporting
from holdfast.sim.resets import Resets
from holdfast.sim.returns import LOOK_S, TESTED_EVERY_S, Returns
from holdfast.sim.store import Store
from holdfast.sim.suspects import SelfTests
from holdfast.sim.workers import Workers
from holdfast.sim.world import Violation, World
from holdfast.supervisor.protocol import Send

GATHER_S = 0.2  # changes of the workers within this time are sent in one report
JOB = "job"
RESET_LOOK_S = 0.5

# Receives the result of an order, once. An order whose result never comes is not answered.
Done = Callable[[Outcome | HoldfastError], None]


class Surroundings(Protocol):
    """The interface of the world that a node uses."""

    def deliver(self, agent: Agent, session: int, seq: int, report: Report) -> None: ...
    def beat(self, agent: Agent, session: int, first_steps: Sequence[orders.RanksStepping]) -> None: ...
    def neighbour(self, node: str) -> Agent | None: ...
    def replicator_of(self, node: str) -> Replicator | None: ...
    def is_deleting(self, job: str, view: Callable[[], View], deleted: Held, node: str) -> None: ...
    def has_saved(self, job: str, node: str) -> None: ...
    def workers_changed(self, agent: Agent) -> None: ...
    def gpus_reset(self, agent: Agent, failure: str) -> None: ...
    def booting(self, agent: Agent) -> None: ...
    def failed_tests(self, agent: Agent) -> None: ...
    @property
    def store(self) -> Store | None: ...
    @property
    def sharded(self) -> bool: ...


class Agent:
    def __init__(
        self,
        world: World,
        around: Surroundings,
        name: str,
        zone: str,
        capacity: int,
        *,
        release: Release | None = None,
        orders_kept: int = ANSWERS_MAX,
        record: Record | None = None,
    ) -> None:
        """`release`: by default that of the name. `orders_kept`: number of orders that the ledger and the promises about
        orders remember. `record`: replaces the ledger."""
        self.world, self.around, self.name, self.zone, self.capacity = world, around, name, zone, capacity
        self.release = releases.of_node(name) if release is None else release
        self._orders_kept = orders_kept
        self.clock = Clock(world)
        self.life = 0
        self.incarnation = ""  # of this life
        self.alive = False
        self.control_cut = False  # partitions
        self.telemetry_cut = False
        self.session = 0  # 0 = none
        self._begin_reports()
        self.epoch_seen = 0  # for the invariant: the highest epoch of an order that arrived
        if record is None:
            # The contents of the ledger, on disk. A garbage collection in another thread may close it.
            database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            weakref.finalize(self, database.close)
            self._read_record: Callable[[], Record] = lambda: Ledger(Path(name), database, answers_max=orders_kept)
        else:
            self._read_record = lambda: record
        self.record = self._read_record()
        self.admission = Admission(self.record)
        self.executed: dict[str, int] = {}  # for the invariant: how often each order took effect
        self.orders: dict[str, Order] = {}  # by id
        self.generations = Generations()
        self.stops_missed = 0  # the newest generation whose Stop order was lost
        self.workers: Workers | None = None
        self.version = 0  # of the set of workers, as last changed
        self.reported = 0  # version that was last reported
        self.cohort: Cohort[Agent] | None = None  # in which another agent may stand for this one
        self.replicator = Replicator(world, around, name, self.clock.now, self.report)
        self.resets = Resets()  # outcomes of GPU resets
        self.resets_gpus = False  # whether the agent has a command for resets
        self.resetting = False
        self.returns: Returns | None = None  # outcomes of pre-flight tests; None = no tests, no boot id in the facts
        self.suspicions = SelfTests()  # outcomes of tests as a suspect
        self.links: Links | None = None  # outcomes of network tests; None = not supported
        self.expects = ""  # token of the network test that this node waits for
        self.boots = 1  # boots of its machine
        self.machine = 1  # number of its machine, which changes with every replacement
        self.preflight = Preflight()
        self.busy = True  # since its last tests
        self.tested_at = 0.0
        self.slow_share = 0.02  # fraction of Prepare orders that take longer than their timeout
        self.patience_s = 5.0  # the timeout of Prepare orders

    # ------------------------------------------------------------ life and death

    def boot(self) -> None:
        if self.alive:
            return  # it was started in the meantime
        self.life += 1
        self.incarnation = f"{self.name}-life{self.life}"
        self.alive = True
        self.session = 0
        self._begin_reports()
        self.generations = Generations()
        self.version = self.reported = 1
        for command_id in self.admission.in_progress:  # unanswered; may be executed again, except resets and reboots
            if not isinstance(self.orders[command_id], orders.ResetGpu | orders.RebootNode):
                self.executed.pop(command_id, None)
        self.record = self._read_record()
        self.admission = Admission(self.record)
        self.resetting = False
        self.expects = ""
        self.workers = None
        self.replicator.start()
        self.world.say(f"{self.name} boots ({self.incarnation})")
        if self.returns is not None:
            self.preflight, self.busy = Preflight(), True
            self._test_itself()

    def _begin_reports(self, seq: int = 0, version: int = 0) -> None:
        """`seq`: number of the last report that was sent; `version`: of the set of workers in it."""
        self.reports = Reports() if self.release is Release.THIS else EarlierReports()
        self.reports._seq = seq
        self._reporting = Reporting(self.name, seq, version)

    @property
    def _tests_are_old(self) -> bool:
        return self.world.now >= self.tested_at + TESTED_EVERY_S

    def _test_itself(self) -> None:
        """Test the node when it has been busy, when its last tests failed, and periodically: a result may have been lost."""
        assert self.returns is not None
        if self.workers is not None and self.workers.living:
            self.busy = True
        elif (
            self.workers is None
            and not self.resetting
            and (self.busy or self.preflight.failures or self._tests_are_old)
        ):
            self.preflight, self.busy = self.returns.tests(self.clock.now()), False
            self.tested_at = self.world.now
            self.report(orders.Tested(self.preflight))
        self.world.after(LOOK_S, self._unless_ended(self._test_itself))

    def die(self, *, machine: bool, disk: bool = False) -> None:
        """End the agent and all its workers. `machine`: also lose the memory; `disk`: also lose the disk."""
        self.alive = False
        self.session = 0
        self.workers = None
        self.replicator.stop()
        if machine:
            self.replicator.lose_memory()
            self.boots += 1
            if self.returns is not None:  # a boot resets the GPUs
                self.around.gpus_reset(self, "")
        if disk:
            self.replicator.lose_disk()
        self.around.workers_changed(self)

    # ------------------------------------------------------------ cohorts

    @property
    def represented_by(self) -> Agent:
        """The agent that stands for this one: the leader of its cohort, or itself."""
        return self if self.cohort is None else self.cohort.leader

    @property
    def shown_version(self) -> int:
        """The version of the set of workers in this node's heartbeats."""
        return self.version if self.cohort is None else self.cohort.version_of(self.name)

    @property
    def stands_for(self) -> Collection[str]:
        """The nodes of which this agent is the representative, unless another agent stands for it."""
        return (self.name,) if self.cohort is None else (self.name, *self.cohort.followers)

    @property
    def settled(self) -> bool:
        """Whether nothing is in progress, or on its way to or from the supervisor."""
        is_idle = not (self.admission.in_progress or self.generations.is_preparing or self.resetting)
        is_reported = not (self.reports._waiting or self.reports._sent or self.reports._in_beats)
        return bool(self.session) and is_idle and is_reported and self.version == self.reported

    @property
    def last_report(self) -> int:
        return self._reporting.last

    def continue_as(
        self, other: Agent, sends: Sequence[Send], answers: Iterable[orders.OrderDone], seq: int, version: int
    ) -> None:
        """Take the state of `other`, which is settled and has stood for this agent, with what was ordered and answered here.
        `seq`: number of the last report. `version`: of the set of workers."""
        prepare, theirs = sends[0].order, other.workers
        assert isinstance(prepare, orders.Prepare)
        assert theirs is not None
        self.admission.greet(other.admission.epoch)
        self.epoch_seen = other.epoch_seen
        for send in sends:
            self.orders[send.command_id], self.executed[send.command_id] = send.order, 1
            self._forget_oldest()
        for answer in answers:
            self.admission.finish(answer, lambda _: version)
        self._begin_reports(seq, version)
        self.generations.over(self.generations.prepare(prepare, lambda: None))
        self.version = self.reported = version
        self.workers = Workers(prepare, theirs.started, theirs.ready, step=theirs.step)
        self.replicator.configure(prepare)

    # ------------------------------------------------------------ reports

    def connect(self, session: int) -> None:
        self.session = session
        tested = self.preflight if self.returns is not None else None
        hello = orders.Hello(self.facts(), self.running, tested, self.version, self.ended)
        self.reports.greet(hello, [self.replicator.inventory(job) for job in sorted(self.replicator.jobs) or [JOB]])
        self._reporting.begin()
        self._send()
        self._reporting.begun()

    def report(self, report: Report) -> None:
        self.reports.add(report)
        if self.session:
            self._send()

    def _send(self) -> None:
        while (numbered := self.reports.take()) is not None or self.reports.wants_beat:
            if numbered is None:
                self.beat()
                continue
            job = numbered.report.job if isinstance(numbered.report, orders.Inventory) else ""
            self._reporting.sent(numbered, self.replicator.files(job))
            self.around.deliver(self, self.session, numbered.seq, numbered.report)

    def beat(self) -> None:
        """Send the first steps that are not recorded, if there are any: the other values of heartbeats are read."""
        if first_steps := self.reports.in_beat():
            self._reporting.beat(first_steps)
            self.around.beat(self, self.session, first_steps)

    def recorded(self, job: str, generation: int) -> None:
        self.reports.recorded(job, generation)
        self._reporting.recorded(job, generation)

    def acknowledged(self, seq: int) -> None:
        self.reports.acknowledge(seq)
        self._reporting.acknowledged(seq)

    @property
    def running(self) -> tuple[RunningWorker, ...]:
        """The living workers of this node."""
        workers = self.workers
        if workers is None:
            return ()
        job, number = workers.order.job, workers.order.generation
        return tuple(RunningWorker(job, number, rank, 1, self.clock.now()) for rank in workers.living)

    @property
    def ended(self) -> tuple[WorkerEnded, ...]:
        """The exits of ranks that ended without an order to stop."""
        workers = self.workers
        if workers is None or not workers.started:
            return ()
        job, number = workers.order.job, workers.order.generation
        badly = (WorkerEnded(job, number, rank, signal=9) for rank in sorted(workers.dead))
        return (*badly, *(WorkerEnded(job, number, rank, exit_code=0) for rank in sorted(workers.done)))

    @property
    def steps(self) -> tuple[orders.StepReached, ...]:
        """The newest steps in this node's heartbeats."""
        workers = self.workers
        if workers is None or not workers.started or not workers.step:
            return ()
        return (_reached(workers.order.job, workers.order.generation, workers.step),)

    @property
    def begun(self) -> tuple[orders.RanksStarted, ...]:
        """The generation that this node's heartbeats name as started: it has not stepped yet."""
        workers = self.workers
        if workers is None or not workers.started or workers.step or self.release is Release.ANSWERS_START:
            return ()
        return (orders.RanksStarted(workers.order.job, workers.order.generation),)

    def workers_changed(self) -> None:
        """Record a change of the set of workers. The training notices it at once, the supervisor gets a report after
        `GATHER_S`."""
        self.version += 1
        self.around.workers_changed(self)
        self.world.after(GATHER_S, self._unless_ended(self._report_workers))

    def _report_workers(self) -> None:
        if self.version != self.reported:
            self.reported = self.version
            self.report(orders.WorkersChanged(self.version, self.running, self.ended))

    def facts(self) -> NodeFacts:
        return NodeFacts(
            self.name,
            self.incarnation,
            self.name,
            self.name,
            self.zone,
            self.capacity,
            f"{self.name}:1",
            1,
            "/",
            "/kmsg",
            resets_gpus=self.resets_gpus,
            boot_id="" if self.returns is None else f"{self.name}-boot{self.boots}",
            machine_id="" if self.returns is None else f"{self.name}-machine{self.machine}",
            reboots=self.returns is not None and self.returns.ordered,
            tests_links=self.links is not None,
            agrees_on_saves=self.release is Release.THIS,
        )

    # ------------------------------------------------------------ orders

    def receive(self, epoch: int, command_id: str, order: Order) -> None:
        if not self.alive:
            return
        known = self.orders.setdefault(command_id, order)
        if known is not order and known != order:
            raise Violation(
                f"{self.name} is given {order} under the id {command_id}, which was {self.orders[command_id]}"
            )
        is_over, self.epoch_seen = epoch < self.epoch_seen, max(epoch, self.epoch_seen)
        verdict = self.admission.admit(epoch, command_id, order, self.clock.now())
        if is_over:  # the sender's session has ended, so it gets no answer
            if not verdict.refused:
                raise Violation(
                    f"{self.name} admits {command_id} of epoch {epoch}, after an order of {self.epoch_seen}"
                )
            return
        if verdict.answer is not None:
            self.report(verdict.answer)
        if not verdict.execute:
            return
        self._forget_oldest()
        self.executed[command_id] = self.executed.get(command_id, 0) + 1
        if self.executed[command_id] > 1 and not isinstance(order, orders.PrepareTemplate):
            # Only an order that was unanswered when the agent ended may be executed again, by the restarted agent.
            raise Violation(f"{self.name} executed {command_id} ({type(order).__name__}) twice")
        if self.world.tracing:
            self.world.say(f"{self.name} executes {command_id} {traces.of_order(order)}")

        def done(result: Outcome | HoldfastError) -> None:
            answer = self.admission.finish(answer_of(command_id, result, self.clock.now()), self._version_for_answer)
            in_beat = isinstance(order, orders.Start) and self.release is not Release.ANSWERS_START
            if not (in_beat and answer.ok):
                self.report(answer)

        try:
            self._carry_out(order, done)
        except HoldfastError as error:
            done(error)

    def _forget_oldest(self) -> None:
        """Drop the oldest order beyond `orders_kept`, unless it is in progress."""
        if len(self.orders) > self._orders_kept:
            oldest = next(iter(self.orders))
            if oldest not in self.admission.in_progress:
                del self.orders[oldest]
                self.executed.pop(oldest, None)

    def _version_for_answer(self, workers: Sequence[RunningWorker]) -> int:
        if self.ended:
            return 0
        self.reported = self.version
        return self.version

    def _carry_out(self, order: Order, done: Done) -> None:
        match order:
            case orders.Prepare():
                self._prepare(order, done)
            case orders.Start():
                self._start(order)
                done(Outcome())
            case orders.Stop():
                self._stop(order)
                self.world.soon(0.001, 0.1, self._unless_ended(lambda: done(Outcome())))
            case orders.CheckpointNow(stage=orders.SaveStage.PROPOSED.value):
                self._workers_of(order)
                self.world.soon(0.001, 0.1, self._unless_ended(lambda: self._vote(order, done)))
            case orders.CheckpointNow(stage=orders.SaveStage.VOID.value):
                self._workers_of(order).proposed.discard(order.at_step)
                done(Outcome())
            case orders.CheckpointNow():
                if order.to_object_store:
                    self.replicator.upload(order.job, order.generation, order.at_step)
                if not order.to_object_store or self.workers is not None:  # they may have saved this step and ended
                    self._workers_of(order).save(order)
                done(Outcome())
            case orders.SetInterval():
                self._workers_of(order).change_interval(order)
                done(Outcome())
            case orders.Inject():
                raise Conflict("not modelled: the simulator causes its own faults")
            case orders.Prune():
                self.replicator.prune(order.job, frozenset(order.steps))
                done(Outcome())
            case orders.PrepareTemplate():
                done(Outcome())
            case orders.ResetGpu():
                self._reset(done)
            case orders.RebootNode():
                self._reboot(done)
            case orders.CheckLink():
                self._check_link(order, done)
            case orders.RestartAgent():
                raise Violation(f"{self.name} gets an order to restart its agent, which no operator has requested")

    def _vote(self, order: orders.CheckpointNow, done: Done) -> None:
        """Its ranks read the proposal between two steps."""
        try:
            self._workers_of(order).propose(order.at_step)
        except HoldfastError as error:
            done(error)
        else:
            done(Outcome())

    def _workers_of(self, order: orders.CheckpointNow | orders.SetInterval | orders.Start) -> Workers:
        self.generations.refuse_older(order.job, order.generation)
        mine = self.workers
        if mine is None or (mine.order.job, mine.order.generation) != (order.job, order.generation):
            raise NotFound(f"generation {order.generation} of {order.job} has no workers on {self.name}")
        return mine

    def _refuse_with_workers(self) -> None:
        if self.workers is not None and self.workers.living:
            raise Conflict("workers run on this node")

    def _reboot(self, done: Done) -> None:
        assert self.returns is not None
        self._refuse_with_workers()
        match self.returns.reboot():
            case "fails":
                raise Unavailable("the command failed")
            case "does nothing":
                done(Outcome())
            case "takes the answer with it":
                self.around.booting(self)
            case _:
                done(Outcome())
                self.around.booting(self)

    def _check_link(self, order: orders.CheckLink, done: Done) -> None:
        """Test the network. The test is cancelled if one of the two nodes gets work before its end."""
        if self.links is None:
            raise Violation(f"{self.name} gets an order to test its network, which it does not support")
        if self.workers is not None or self.generations.is_preparing or self.resetting:
            raise Conflict("it has work")
        if not order.endpoint:
            self.expects = order.token
            done(Outcome())
            return
        partner = self.around.neighbour(order.partner)

        def end() -> None:
            assert self.links is not None
            waits = partner is not None and partner.alive and partner.expects == order.token
            if self.workers is not None or partner is None or not waits:
                done(Conflict("the test was ended"))
            else:
                done(Outcome(link=self.links.measured(self.name, partner.name, self.world.now)))

        self.world.soon(*self.links.takes_s, self._unless_ended(end))

    def _reset(self, done: Done) -> None:
        if self.resetting:  # resets run one after the other
            self.world.after(RESET_LOOK_S, self._unless_ended(lambda: self._reset(done)))
            return
        try:
            self._refuse_with_workers()
        except Conflict as error:
            done(error)
            return
        seconds, failure = self.resets.outcome()
        self.resetting = True

        def end() -> None:
            self.resetting = False
            self.around.gpus_reset(self, failure)
            done(Unavailable(failure) if failure else Outcome())

        self.world.after(seconds, self._unless_ended(end))

    def _prepare(self, order: orders.Prepare, done: Done) -> None:
        if self.resetting:
            self.world.after(RESET_LOOK_S, self._unless_ended(lambda: self._prepare(order, done)))
            return

        begun: list[Preparation] = []  # empty after its end: otherwise these functions would be garbage with a cycle

        def end(result: Outcome | HoldfastError) -> None:
            self.generations.over(begun.pop())
            done(result)

        try:
            preparation = self.generations.prepare(order, lambda: end(self.generations.overtaken(order)))
        except Conflict as error:
            done(error)
            return
        begun.append(preparation)
        if self.workers is not None and self.workers.order.job != order.job and self.workers.living:
            raise Violation(f"{self.name} is to run {order.job}, and still runs {self.workers.order.job}")
        self.expects = ""
        self.workers = Workers(order)
        self.workers_changed()
        slow = self.world.chance.random() < self.slow_share
        delay_s = (
            self.world.chance.uniform(1.2, 1.8) * self.patience_s if slow else self.world.chance.uniform(0.02, 0.3)
        )
        tested = None
        if order.suspect_test_s and self.suspicions.faults:
            duration_s, tested = self.suspicions.outcome(order.suspect_test_s, self.clock.now())
            delay_s = duration_s if tested.failures else max(delay_s, duration_s)

        def prepared() -> None:
            if not self.generations.is_current(preparation):
                return
            result = self._prepared(order, tested)
            if isinstance(result, HoldfastError):
                self.workers = None
                self.workers_changed()
            end(result)

        self.world.after(delay_s, self._unless_ended(prepared))

    def _prepared(self, order: orders.Prepare, tested: Preflight | None) -> Outcome | HoldfastError:
        workers = self.workers
        if workers is None or workers.order is not order:
            raise Violation(
                f"{self.name} prepares generation {order.generation} of {order.job}, and has no ranks of it"
            )
        if tested is not None and tested.failures:
            self.world.say(f"{self.name} fails its tests as a suspect")
            self.around.failed_tests(self)
            return FailedTests(self.name, tested)
        try:
            self.replicator.configure(order)
            self.replicator.stage(order.job, order.restore)
        except HoldfastError as error:
            return error
        workers.ready = True
        self.workers_changed()
        return Outcome(master=f"{self.name}:{order.generation}", workers=self.running, tested=tested)

    def _start(self, order: orders.Start) -> None:
        workers = self._workers_of(order)
        if not workers.ready:
            raise Conflict(f"generation {order.generation} is not prepared")
        workers.started = True
        self.around.workers_changed(self)

    def _stop(self, order: orders.Stop) -> None:
        self.generations.stop(order)
        mine = self.workers.order if self.workers is not None else None
        if mine is not None and mine.job == order.job and mine.generation <= order.generation:
            self.workers = None
            self.workers_changed()
        if order.forget:
            self.generations.forget(order.job)
            self.replicator.forget(order.job)
        elif order.ended:
            self.replicator.end(order.job, order.generation)

    def _unless_ended(self, action: Callable[[], None]) -> Callable[[], None]:
        life = self.life

        def run() -> None:
            if self.alive and self.life == life:
                action()

        return run

    # ------------------------------------------------------------ ranks and shards

    @property
    def ranks(self) -> range:
        return self.workers.order.placement.ranks if self.workers else range(0)

    def stepped(self, step: int) -> None:
        assert self.workers is not None
        order = self.workers.order
        self.report(orders.RanksStepping(order.job, order.generation, tuple(self.ranks), step, self.clock.now()))

    def crashed(self, rank: int) -> None:
        assert self.workers is not None
        self.workers.dead.add(rank)
        self.workers_changed()

    def finished(self) -> None:
        assert self.workers is not None
        self.workers.done.update(self.ranks)
        self.workers_changed()
        order = self.workers.order
        self.report(orders.RanksFinished(order.job, order.generation, tuple(self.ranks), self.clock.now()))

    def save(self, step: int, ranks: Iterable[int]) -> tuple[int, ...]:
        """Save the shards of these ranks. Returns the ranks that could. If the node ends in between, the checkpoint stays
        incomplete."""
        assert self.workers is not None
        order = self.workers.order
        sharded, mesh = self.around.sharded, order.mesh
        return self.replicator.save(
            order, step, ranks, lambda rank: f"{step}/{rank if sharded else mesh.position_of(rank)}"
        )


@lru_cache(maxsize=8)
def _reached(job: str, generation: int, step: int) -> orders.StepReached:
    """The same step is in the heartbeats of all nodes."""
    return orders.StepReached(job, generation, step)

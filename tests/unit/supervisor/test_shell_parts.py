"""The parts of the shell by themselves: timers, the inbox, intake and fold, what a bug in the core may not do, policies."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog.testing
from fleet import job, running
from supervising import crash, facts, job_body
from waiting import FREEZING_TIME, VIRTUAL_TIME, freeze

from holdfast.domain.errors import Conflict, InvalidSpec, MalformedMessage, NotFound, Unavailable
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind, StepRecord
from holdfast.domain.incidents import ActionKind
from holdfast.domain.job import PolicySpec
from holdfast.domain.orders import Prepare, RanksStepping
from holdfast.log.memory import MemoryLog
from holdfast.log.names import EVENTS, FINDINGS, INBOX, STEPS, SUPERVISOR_GROUP
from holdfast.log.protocol import Delivery, Entry, Usage
from holdfast.runtime import freeze as freezes
from holdfast.supervisor.agents.beats import DIFFERS_S, UNHEARD_S
from holdfast.supervisor.agents.sessions import Refused, Sessions
from holdfast.supervisor.api.server import bind
from holdfast.supervisor.core import Config, Job, Node, State
from holdfast.supervisor.inbox import REPORTS, REPORTS_MAX, InboxWriter, gone_entry, request_entry
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.fold import Folder
from holdfast.supervisor.leader.intake import Input, take
from holdfast.supervisor.leader.term import BEATS_S
from holdfast.supervisor.leader.timers import Timers
from holdfast.supervisor.policies.runner import DEFAULT, PolicyRunner
from holdfast.supervisor.policies.script import sample_incidents, sample_job
from holdfast.supervisor.protocol import (
    BreakerResetRequested,
    FindingArrived,
    JobPhase,
    JobStopRequested,
    JobSubmitted,
    LeaderStarted,
    NodeGone,
    NodeReported,
    PolicyChangeRequested,
    ResizeRequested,
    Send,
    SetTimer,
    StepsCompleted,
    TimerFired,
)
from holdfast.supervisor.published import OperationDone
from holdfast.supervisor.requests import OperatorEvent, OperatorRequest, check, fingerprint
from holdfast.supervisor.telemetry import log_memory
from holdfast.supervisor.timers import RetryDue
from holdfast.wire import records
from holdfast.wire.control import Reported, decode_reports, encode_report, encode_reports
from holdfast.wire.events import step_entries
from holdfast.wire.jobfile import parse_job

pytestmark = pytest.mark.anyio
virtual = pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])


# ---------------------------------------------------------------- timers


@virtual
async def test_timers_fire_in_order_and_once() -> None:
    begin = anyio.current_time()
    timers = Timers(anyio.current_time)
    fired: list[tuple[str, float]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run, lambda timer: fired.append((str(timer), round(anyio.current_time() - begin, 3))))
        for name, after_s in (("late", 30.0), ("replaced", 1.0), ("early", 2.0), ("cancelled", 3.0), ("past", -5.0)):
            timers.set(RetryDue(name), begin + after_s)
        timers.set(RetryDue("replaced"), begin + 7.0)
        timers.cancel(RetryDue("cancelled"))
        await anyio.sleep(60)
        tasks.cancel_scope.cancel()
    assert fired == [("retry:past", 0.0), ("retry:early", 2.0), ("retry:replaced", 7.0), ("retry:late", 30.0)]


@virtual
async def test_a_timer_follows_a_clock_that_is_set() -> None:
    shift = [0.0]
    timers = Timers(lambda: anyio.current_time() + shift[0])
    fired: list[float] = []
    begin = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run, lambda _: fired.append(anyio.current_time() - begin))
        timers.set(RetryDue("x"), begin + 100)
        await anyio.sleep(10)
        shift[0] = 85.0
        await anyio.sleep(20)
        tasks.cancel_scope.cancel()
    assert fired == [pytest.approx(15.0, abs=0.6)]


@virtual
async def test_timers_wait_for_what_was_said_while_the_leader_did_not_run() -> None:
    timers = Timers(anyio.current_time)
    fired: list[tuple[str, float]] = []
    begin = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run, lambda timer: fired.append((str(timer), round(anyio.current_time() - begin, 3))))
        timers.set(RetryDue("one"), begin + 10.0)
        timers.set(RetryDue("two"), begin + 11.0)
        timers.set(RetryDue("gone"), begin + 5.0)
        timers.cancel(RetryDue("gone"))
        await anyio.sleep(9.0)
        timers.postpone(2.5)
        await anyio.sleep(20)
        tasks.cancel_scope.cancel()
    assert fired == [("retry:one", 12.5), ("retry:two", 13.5)]


@pytest.mark.parametrize("anyio_backend", [FREEZING_TIME], ids=["freezing"])
async def test_an_agent_is_not_silent_because_the_leader_did_not_run() -> None:
    sessions = Sessions(1, InboxWriter(MemoryLog()), anyio.current_time)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(freezes.watch)
        await anyio.sleep(0.1)
        sessions.open(facts("a"), "peer-1")
        freeze(2.5)
        await anyio.sleep(0.5)
        with pytest.raises(Refused, match="another agent bears the name a and is alive"):
            sessions.open(facts("a", "i2"), "peer-2")
        await anyio.sleep(2.0)
        sessions.open(facts("a", "i2"), "peer-2")
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------- the inbox


class LossyLog(MemoryLog):
    """Refuses the first appends."""

    failures = 3

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("away")
        return await super().append(stream, *entries)


@virtual
async def test_reports_wait_for_a_log_that_is_away_and_keep_their_order() -> None:
    log = LossyLog()
    written: list[int] = []
    inbox = InboxWriter(log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inbox.run)
        for number in range(600):
            inbox.put(Entry(str(number), "t", b""), partial(written.append, number))
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    assert written == list(range(600))
    assert [delivery.entry.id for delivery in await log.read(INBOX)] == [str(number) for number in written]


def stepping(node: str, seq: int) -> tuple[NodeReported, bytes]:
    report = RanksStepping("gpt", 1, (0, 1), seq, 5.0, (("restore", 0.25),))
    return NodeReported(1.0, node, "i1", seq, report, 7), encode_report(report, seq).SerializeToString()


@virtual
async def test_reports_that_wait_together_are_one_entry_which_every_leader_reads_alike() -> None:
    log, order = MemoryLog(), list[int]()
    inbox = InboxWriter(log)
    reports = [stepping(f"n{number}", number) for number in range(1, 151)]
    gone = NodeGone(2.0, "n99", "i1", 7)
    for number, (event, raw) in enumerate(reports):
        if number == 99:
            inbox.put(gone_entry(gone), partial(order.append, -1))
        inbox.report(event, raw, partial(order.append, number))
    await inbox.write()
    answer = [*(event for event, _ in reports[:99]), gone, *(event for event, _ in reports[99:])]
    assert order == [*range(99), -1, *range(99, 150)]
    deliveries = await log.read(INBOX)
    assert len(deliveries) == -(-99 // REPORTS_MAX) + 1 + -(-51 // REPORTS_MAX), (
        "the end of a session is an entry of its own"
    )
    for decoded in (inbox.decoded, lambda _: None):  # as kept by who wrote them, and by a leader who did not
        assert [each.event for each in take(deliveries, 9.0, decoded).inputs] == answer
    assert inbox.decoded(deliveries[0].entry.id) is None, "kept until it is read"


def test_a_report_that_cannot_be_read_or_folded_is_set_aside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [stepping(f"n{number}", number)[1] for number in range(1, 4)]
    raw = encode_reports(Reported(1.0, f"n{n}", "i1", 7, message) for n, message in enumerate([b"\xff", *said], 1))
    intake = take([delivery(INBOX, Entry("x/1", REPORTS, raw))], 9.0)
    assert [each.event.seq for each in intake.inputs if isinstance(each.event, NodeReported)] == [1, 2, 3]

    def buggy(turn: Any, events: Sequence[NodeReported]) -> None:
        if any(event.seq == 2 for event in events):
            raise RuntimeError("a bug")

    monkeypatch.setattr("holdfast.supervisor.core.node_reports.on_reports", buggy)
    folder = Folder(State(), 5)
    folded = folder.dead_letter(folder.fold(intake.inputs, 9.0), intake.poison)
    dead = [each for _, entry in folded.dead for each in decode_reports(entry.data)]
    assert sorted(each.message for each in dead) == sorted([b"\xff", said[1]])
    garbage = take([delivery(INBOX, Entry("x/2", REPORTS, b"\xff"))], 9.0)
    assert folder.dead_letter(folder.fold([], 9.0), garbage.poison).dead == (
        (INBOX + ".dead", Entry("x/2", REPORTS, b"\xff")),
    )


# ---------------------------------------------------------------- intake and fold


def delivery(stream: str, entry: Entry, number: int = 1) -> Delivery:
    return Delivery(stream, f"{number}-0", entry)


def submit(name: str = "gpt", operation: str = "op-1") -> OperatorRequest:
    event = JobSubmitted(1.0, parse_job(job_body(name=name)), "token")
    return OperatorRequest(operation, event, fingerprint(event))


@virtual
async def test_a_cut_that_a_beat_tells_goes_on_until_a_beat_tells_no_more() -> None:
    open_sessions = Sessions(1, InboxWriter(MemoryLog()), anyio.current_time)
    session = open_sessions.open(facts("n1"), "somewhere")
    assert open_sessions.telemetry_cut_s("n1") is None
    session.beat(1, (), telemetry_cut_s=7.0)
    await anyio.sleep(2.0)
    assert open_sessions.telemetry_cut_s("n1") == 9.0
    session.beat(1, ())
    assert open_sessions.telemetry_cut_s("n1") is None
    session.beat(1, (), telemetry_cut_s=7.0)
    open_sessions.leave(session)
    assert open_sessions.telemetry_cut_s("n1") is None


@virtual
async def test_a_session_that_the_state_does_not_show_is_ended_within_seconds() -> None:
    """Its Hello was acknowledged and is lost: a node that nobody knows of may run what nobody knows of. Sooner than for any
    other report, and in time for a second Hello before the node counts as one that did not come back."""
    open_sessions = Sessions(1, InboxWriter(MemoryLog()), anyio.current_time)
    unknown, earlier, late, known = (open_sessions.open(facts(node), "somewhere") for node in ("n1", "n2", "n3", "n4"))
    for each in (unknown, earlier, late, known):
        each.beat(1, ())
    of_an_earlier_session = replace(earlier.said, session=earlier.number - 1)
    reported = {"n2": of_an_earlier_session, "n3": replace(late.said, version=0), "n4": known.said}
    ended_s: dict[str, float] = {}
    begun_s = anyio.current_time()
    for _ in range(5):
        open_sessions.compare(reported.get)
        for each in (unknown, earlier, late, known):
            if each.renewed:
                ended_s.setdefault(each.node, anyio.current_time() - begun_s)
        await anyio.sleep(BEATS_S)
    assert ended_s == {"n1": UNHEARD_S, "n2": UNHEARD_S, "n3": DIFFERS_S}
    assert max(ended_s.values()) < Config().session_s


def test_steps_are_coalesced_to_the_newest_of_each_generation() -> None:
    records = [StepRecord("gpt", g, s, 2, 10.0 * s, 10.0 * s + 4, 7, None, 0.0) for g in (1, 2) for s in (3, 1, 2)]
    batch = [delivery(STEPS, each, n) for n, each in enumerate(step_entries(records))]
    intake = take(batch, 99.0)
    assert [each.event for each in intake.inputs] == [
        StepsCompleted(99.0, "gpt", g, 3, ended_at=34.0, tokens=21, step_s=4.0, pace_s=10.0) for g in (1, 2)
    ]
    assert intake.positions == {STEPS: [each.position for each in batch]}


def test_what_cannot_be_read_is_acknowledged_and_buried() -> None:
    good = crash("gpt", 1, "n1", 0)
    batch = [delivery(FINDINGS, Entry("x", "?", b"\xff"), 1), delivery(FINDINGS, good, 2)]
    intake = take(batch, 99.0)
    assert [type(each.event) for each in intake.inputs] == [FindingArrived]
    folder = Folder(State(), 5)
    folded = folder.dead_letter(folder.fold(intake.inputs, 99.0), intake.poison)
    commit = folder.commit(folded, intake.positions)
    assert (FINDINGS + ".dead", batch[0].entry) in commit.append
    assert commit.acknowledge == {(FINDINGS, SUPERVISOR_GROUP): ["1-0", "2-0"]}


def test_an_event_that_the_core_cannot_take_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(turn: Any, finding: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("holdfast.supervisor.core.handling.findings.on_finding", buggy)
    bad = delivery(FINDINGS, crash("gpt", 1, "n1", 0))
    inputs = [Input(FindingArrived(1.0, None), bad), Input(submit())]  # type: ignore[arg-type]
    folded = Folder(State(), 5).fold(inputs, 99.0)
    assert folded.dead == ((FINDINGS + ".dead", bad.entry),)
    assert "gpt" in folded.state.jobs


def test_a_request_said_twice_is_folded_once_and_a_refused_one_says_why() -> None:
    folder = Folder(State(), 5)
    folded = folder.fold([Input(submit()), Input(submit()), Input(submit(operation="op-2"))], 99.0)
    answers = {record.operation: record for record in folded.published if isinstance(record, OperationDone)}
    assert len([record for record in folded.published if isinstance(record, OperationDone)]) == 2
    assert answers["op-1"].ok
    assert not answers["op-2"].ok
    assert "gpt is pending" in answers["op-2"].reason


def test_the_state_is_kept_only_when_it_is_announced_and_written_only_when_it_changed() -> None:
    folder = Folder(State(), 5)
    folded = folder.fold([Input(submit())], 99.0)
    assert folder.state == State()
    folder.keep(folded)
    assert folder.state is folded.state
    idle = folder.fold([Input(TimerFired(99.0, RetryDue("nobody")))], 99.5)
    assert not idle.changed
    assert folder.commit(idle, {INBOX: ["1-0"]}).snapshot == {}
    assert [name for name, _ in folder.commit(folded, {}).append] == [EVENTS] * len(folded.published)


@pytest.mark.parametrize("changing", [False, True])
def test_a_snapshot_of_an_earlier_version_is_replaced_by_the_first_commit(changing: bool) -> None:
    """Its rows have everything in them, and its orders say what they have in common each for itself."""
    fleet = running(job(dp=3), spares=1)
    fleet.train(10, save=True)
    if changing:
        fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    state = fleet.state
    parts = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    assert snapshot.is_current(parts)
    old = {name: raw for name, raw in parts.items() if ":" not in name.rpartition("/")[2] or name.startswith("timers/")}
    old["format"] = b"2"
    old |= {f"nodes/{name}": _with_holds(records.dumps(node, Node), state, node) for name, node in state.nodes.items()}
    old.pop("live/job")
    old |= {f"jobs/{name}": records.dumps(each, Job) for name, each in state.jobs.items()}
    for name in [name for name in old if name.partition("/")[0] in ("broadcasts", "unanswered")]:
        del old[name]
    sends = {send.command_id: send for send in state.sends()}
    old |= {f"outbox/{name}": records.dumps(send, Send) for name, send in sends.items()}
    assert not snapshot.is_current(old)
    assert snapshot.load(parts) == state
    assert snapshot.load(old) == evolve(state, broadcasts={}, unanswered={}, outbox=sends)
    folder = Folder(snapshot.load(old), 5, obsolete=[*old, "outbox/gone"])
    folded = folder.fold([Input(LeaderStarted(fleet.now, 5))], fleet.now)
    after = dict(old)
    for name, raw in folder.commit(folded, {}).snapshot.items():
        after.pop(name, None)
        if raw is not None:
            after[name] = raw
    assert snapshot.is_current(after)
    assert snapshot.load(after) == folded.state
    assert set(after) == {name for name, raw in snapshot.changes(None, folded.state).items() if raw is not None}
    assert sum(isinstance(send.order, Prepare) for send in sends.values()) == (3 if changing else 0)
    if changing:  # the change goes on with the orders as they were sent
        fleet.state = snapshot.load(old)
        fleet.run()
        assert fleet.job.phase is JobPhase.RUNNING


def test_the_text_of_a_policy_is_written_once() -> None:
    policy = PolicySpec("mine.py", "# a word\n" * 6000)
    fleet = running(evolve(job(dp=2), policy_source=policy.source, policy=policy.name))
    before = fleet.state
    fleet.train(10, save=True)
    parts = snapshot.changes(before, fleet.state)
    assert "jobs/job" in parts
    assert sum(len(raw or b"") for raw in parts.values()) < 20_000
    whole = {name: raw for name, raw in snapshot.changes(None, fleet.state).items() if raw is not None}
    assert snapshot.load(whole).jobs["job"].spec.policy_spec == policy
    after = fleet.state
    fleet.fold(PolicyChangeRequested(fleet.now, "job", PolicySpec("other.py", "x = 1\n")))
    parts = snapshot.changes(after, fleet.state)
    assert b"other.py" in (parts["jobs/job:spec"] or b"")
    assert snapshot.load(whole | {name: raw for name, raw in parts.items() if raw}) == fleet.state


@pytest.mark.parametrize("parts", [{"": b"{}"}, {"nodes/n1": b"{}"}, {"format": b"1"}])
def test_a_snapshot_of_the_first_version_is_refused(parts: dict[str, bytes]) -> None:
    with pytest.raises(MalformedMessage, match=r"snapshot\.format: '1', and this version reads 2 to 9"):
        snapshot.load(parts)
    assert snapshot.load({}) == State()


def test_a_snapshot_that_lacks_a_part_or_is_of_a_newer_version_is_refused() -> None:
    parts = {name: raw for name, raw in snapshot.changes(None, running(job(dp=2)).state).items() if raw is not None}
    with pytest.raises(MalformedMessage, match=r"snapshot\.format: '10', and this version reads 2 to 9"):
        snapshot.load(parts | {"format": b"10"})
    del parts["jobs/job:spec"]
    with pytest.raises(MalformedMessage, match=r"snapshot\.jobs/job: a part of the row is missing .*'spec'"):
        snapshot.load(parts)


def test_a_snapshot_from_before_reports_were_counted_apart_is_read() -> None:
    """Format 2: a node's row has its workers, and the number of its newest report."""
    fleet = running(job(dp=3))
    fleet.all_live()
    state = fleet.state
    parts = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    old = {name: raw for name, raw in parts.items() if not name.startswith("heard/") and ":workers" not in name}
    for name, node in state.nodes.items():
        assert node.workers
        row = _with_holds(records.dumps(evolve(node, inventory={}), Node), state, node)
        old[f"nodes/{name}"] = _with_last_seq(row, state.last_seq(node))
    old |= {f"jobs/{name}": records.dumps(each, Job) for name, each in state.jobs.items()}
    old["format"] = b"2"
    assert not snapshot.is_current(old)
    loaded = snapshot.load(old)
    assert loaded == state
    assert loaded.last_seq(loaded.nodes["n1"]) == state.last_seq(state.nodes["n1"]) > 1


def _with_holds(row: bytes, state: State, node: Node) -> bytes:
    return row[:-1] + b',"holds":' + json.dumps(state.live_on(node)).encode() + b"}"


def _with_last_seq(row: bytes, number: int) -> bytes:
    return row[:-1] + b',"last_seq":%d}' % number


def test_the_number_of_a_report_in_a_row_of_an_earlier_version_is_kept() -> None:
    """A node that has not reported since format 2 has it in its row. All parts are written again, the number with them."""
    state = running(job(dp=3)).state
    parts = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    assert snapshot.is_current(parts)
    old = {name: raw for name, raw in parts.items() if not name.startswith("heard/")}
    for name, node in state.nodes.items():
        old[f"nodes/{name}"] = _with_last_seq(old[f"nodes/{name}"], state.last_seq(node))
    assert snapshot.load(old) == state
    assert not snapshot.is_current(old)
    newer = {**parts, "nodes/n1": _with_last_seq(parts["nodes/n1"], 1)}
    assert snapshot.load(newer) == state, "the row of an earlier version has an older number"


SLOT = b"""{"node":"n%d","job":"gpt","generation":2,"placement":{"slot":%d,"node":"n%d","first_rank":%d,"nproc":1},
    "restore":[{"rank":%d,"shard":{"attempt":1001,"step":10,"rank":%d},"digest":"d","sources":
    [{"node":"n%d","endpoint":"n%d:1","job":""}],"sharing":[]}],"peers":[{"node":"n9","endpoint":"n9:1","job":""}]}"""
SHARED = b"""{"job":"gpt","generation":2,"attempt":1002,"mesh":{"dims":[["dp",2]]},"placement":{"slot":0,"node":"n0",
    "first_rank":0,"nproc":1},"nnodes":2,"launch":{"script":"t.py"},"checkpoint":{},"hang":{},"token":"t","restore_step":10,
    "restore_mesh":{"dims":[["dp",2]]},"restore":[],"peers":[],"traceparent":"","checks":{},"self_test":false,
    "first_attempt":1001}"""


def test_orders_that_an_earlier_version_wrote_by_slots_are_read() -> None:
    """Format 2, as recorded: what the slots' orders share stood in one part, and each slot in one."""
    parts = {f"outbox/c-{slot}:slot": SLOT % ((slot,) * 8) for slot in range(2)} | {"jobs/gpt:prepare": SHARED}
    outbox = snapshot.load({"format": b"2", **parts}).outbox
    for slot in range(2):
        order = outbox[f"c-{slot}"].order
        assert isinstance(order, Prepare)
        assert (order.placement.node, order.token, order.restore[0].shard.rank) == (f"n{slot}", "t", slot)
        assert order.peers[0].node == "n9"


def test_the_cores_time_never_runs_backwards() -> None:
    folder = Folder(State(), 5)
    folder.keep(folder.fold([Input(submit())], 99.0))
    folded = folder.fold([Input(submit("other", "op-2"))], 50.0)
    assert all(record.at == 99.0 for record in folded.published)
    assert all(command.due >= 99.0 for command in folded.commands if isinstance(command, SetTimer))


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (ResizeRequested(1.0, "nope", 2, "r"), NotFound),
        (ResizeRequested(1.0, "gpt", 3, "r"), InvalidSpec),
        (JobStopRequested(1.0, "nope", "r"), NotFound),
        (JobSubmitted(1.0, parse_job(job_body()), "t"), Conflict),
        (BreakerResetRequested(1.0, "r"), None),
    ],
)
def test_what_rules_a_request_out(event: OperatorEvent, error: type[Exception] | None) -> None:
    state = Folder(State(), 5).fold([Input(submit())], 99.0).state
    if error is None:
        check(state, event)
    else:
        with pytest.raises(error):
            check(state, event)


def test_equal_requests_have_equal_fingerprints() -> None:
    spec = parse_job(job_body())
    assert fingerprint(JobSubmitted(1.0, spec, "a")) == fingerprint(JobSubmitted(2.0, spec, "b"))
    assert fingerprint(JobStopRequested(1.0, "a", "r")) != fingerprint(JobStopRequested(1.0, "a", "r", save=False))
    assert request_entry(submit()).id == "op-1"


# ---------------------------------------------------------------- policies


async def test_a_script_decides_and_its_failures_fall_back_to_the_default(tmp_path: Path) -> None:
    name = str(tmp_path / "policy.py")
    quick = PolicySpec(
        name, "from holdfast.policy import stop\ndef decide(incident, job):\n    return stop('always')\n"
    )
    slow = PolicySpec(name, "import time\ndef decide(incident, job):\n    time.sleep(60)\n")
    incident = sample_incidents()[0]
    job = sample_job(incident)
    policies = PolicyRunner()
    try:
        await policies.check(quick)
        action, decided_by = await policies.decide(quick, incident, job)
        assert (action.kind, decided_by) == (ActionKind.STOP, name)
        began = time.monotonic()
        action, decided_by = await policies.decide(slow, incident, job)
        assert time.monotonic() - began < 20
        assert action.kind is ActionKind.RESTART
        assert decided_by.startswith(f"{DEFAULT}, because the script failed: {name}")
        with pytest.raises(InvalidSpec, match="policy"):
            await policies.check(PolicySpec(str(tmp_path / "none.py")))
        assert await policies.decide(PolicySpec(), incident, job) == (action, DEFAULT)
    finally:
        await policies.aclose()


def test_a_port_in_use_is_said_so() -> None:
    with bind("127.0.0.1:0") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"{port}.*in use"):
            bind(f"127.0.0.1:{port}")
    with pytest.raises(InvalidSpec, match="host:port"):
        bind("nowhere")


# ---------------------------------------------------------------- the log's memory


@virtual
async def test_a_log_that_fills_up_is_said_once_each_time() -> None:
    readings, said, troubles = [79, 80, 99, 101, 50, 85], list[int](), list[str]()

    class Filling(MemoryLog):
        async def usage(self) -> Usage:
            said.append(len(lines))  # up to the reading before
            troubles.append(room.trouble)
            if not readings:
                tasks.cancel_scope.cancel()
                await anyio.lowlevel.checkpoint()
            used = readings.pop(0)
            return Usage(used, 100, full=used > 100)

    with structlog.testing.capture_logs() as lines:
        async with anyio.create_task_group() as tasks:
            room = log_memory.Room(Filling())
            tasks.start_soon(room.watch)
    assert said == [0, 0, 1, 1, 1, 1, 2]
    assert troubles == ["", "", "", "", log_memory.FULL, "", ""]
    assert lines[0]["log_level"] == "warning"
    assert "it uses 80% of" in lines[0]["reason"]

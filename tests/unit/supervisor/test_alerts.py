"""Alerts: what is one, where it goes, and that an address that is slow, gone or mad harms nobody else."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import anyio
import httpx
import pytest
from waiting import VIRTUAL_TIME, wait_until_async

from holdfast.domain.errors import HoldfastError, InvalidSpec, Unavailable
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState
from holdfast.log.memory import MemoryLog
from holdfast.log.names import EVENTS
from holdfast.log.protocol import Entry
from holdfast.supervisor.alerts.alert import TEXT_CHARS_MAX, Alert, Level, Topic, alert_of
from holdfast.supervisor.alerts.outage import AFTER_S, Outage
from holdfast.supervisor.alerts.sender import QUEUE_MAX, RATE_MAX, RATE_S, RETRY_FOR_S, Address, Alerts
from holdfast.supervisor.alerts.targets import SIGNATURE, Webhook, notifiers
from holdfast.supervisor.protocol import IncidentChanged, JobChanged, JobPhase, Noted
from holdfast.supervisor.published import Published
from holdfast.supervisor.settings import SupervisorSettings
from holdfast.wire import records

ALL = frozenset(Topic)
CRASH = Incident(
    "i-1", "llm", "worker_crash", "Rank 3 on n1 was killed by SIGKILL after step 90.", IncidentState.RESOLVED, 2,
    node="n1", action=Action(ActionKind.RESTART, "seen once"), severity="error",
    fault_at=100.0, detected_at=100.1, decided_at=100.2, first_step_at=100.75, outcome="generation 3 steps from step 80 on",
)  # fmt: skip


def alert(number: int = 1) -> Alert:
    return Alert(f"a{number}", 100.0, Topic.FAILED, Level.ERROR, f"alert {number}", "why")


# ---------------------------------------------------------------- what is an alert


@pytest.mark.parametrize(
    ("phase", "title"),
    [
        (JobPhase.FAILED, "llm has failed"),
        (JobPhase.WAITING, "llm cannot run"),
        (JobPhase.SUSPENDED, "llm is suspended"),
        (JobPhase.COMPLETED, "llm is completed"),
        (JobPhase.RUNNING, None),
        (JobPhase.STOPPED, None),
    ],
)
def test_the_states_of_a_job(phase: JobPhase, title: str | None) -> None:
    found = alert_of(JobChanged(5.0, "llm", phase, "no node has room"), ALL)
    assert (found.title if found else None) == title
    assert found is None or (found.text, found.job) == ("no node has room", "llm")


def test_an_incident_is_one_alert_when_it_is_over() -> None:
    for state in IncidentState:
        found = alert_of(IncidentChanged(101.0, replace(CRASH, state=state)), ALL)
        assert (found is not None) == (state is IncidentState.RESOLVED)
    found = alert_of(IncidentChanged(101.0, CRASH), ALL)
    assert found is not None
    assert (found.topic, found.level, found.incident, found.node) == (Topic.INCIDENT, Level.WARNING, "i-1", "n1")
    assert found.title == "llm: worker_crash, restart, 0.8 s from fault to first step"
    assert found.text.splitlines() == [
        "Rank 3 on n1 was killed by SIGKILL after step 90.",
        "restart: seen once",
        "generation 3 steps from step 80 on",
    ]


@pytest.mark.parametrize(
    ("kind", "topic"), [(ActionKind.NOTIFY, Topic.NOTIFY), (ActionKind.IGNORE, None), (ActionKind.WAIT, None)]
)
def test_warnings(kind: ActionKind, topic: Topic | None) -> None:
    """What led to no change is an alert only if the policy says so."""
    warned = replace(CRASH, kind="straggler", severity="warning", action=Action(kind, "too little"), first_step_at=None)
    found = alert_of(IncidentChanged(101.0, warned), ALL)
    assert (found.topic if found else None) is topic


def test_the_breaker_and_other_notes() -> None:
    found = alert_of(Noted(7.0, "breaker", "open: 9 of 10 nodes failed"), ALL)
    assert found is not None
    assert found.title == "circuit breaker open"
    assert alert_of(Noted(7.0, "n1", "ignored: …"), ALL) is None
    lost = alert_of(Noted(8.0, "redis", "Redis has lost all data"), ALL)
    assert lost is not None
    assert (lost.topic, lost.level, lost.text) == (Topic.REDIS, Level.ERROR, "Redis has lost all data")


def test_topics_that_were_not_chosen_and_texts_without_end() -> None:
    failed = JobChanged(5.0, "llm", JobPhase.FAILED, "x" * 10_000)
    assert alert_of(failed, {Topic.WAITING}) is None
    found = alert_of(failed, {Topic.FAILED})
    assert found is not None
    assert len(found.text) == TEXT_CHARS_MAX


# ---------------------------------------------------------------- a webhook


def webhook(answer: Callable[[httpx.Request], httpx.Response], secret: str = "s3cret") -> Webhook:
    transport = httpx.MockTransport(answer)
    url = "https://user:pass@ops.example.com/hooks/T0KEN"
    return Webhook(url, secret=secret, source="/holdfast/main", link="http://h:8470", transport=transport)


async def test_a_webhook_gets_a_signed_cloud_event() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(204)

    found = alert_of(IncidentChanged(101.0, CRASH), ALL)
    assert found is not None
    await webhook(answer).send(found)
    [request] = requests
    event = json.loads(request.content)
    assert request.headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    assert (event["specversion"], event["type"], event["id"]) == ("1.0", "dev.holdfast.incident", "i-1:incident")
    assert (event["source"], event["time"]) == ("/holdfast/main", "1970-01-01T00:01:41+00:00")
    assert event["data"]["title"] == found.title
    assert event["data"]["link"] == "http://h:8470/#/incidents/i-1"
    values = dict(part.split("=", 1) for part in request.headers[SIGNATURE].split(","))
    expected = hmac.new(b"s3cret", values["t"].encode() + b"." + request.content, hashlib.sha256).hexdigest()
    assert values["v1"] == expected
    await webhook(answer, secret="").send(found)
    assert SIGNATURE not in requests[1].headers


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, Unavailable), (503, Unavailable), (429, Unavailable), (404, HoldfastError), (302, HoldfastError)],
)
async def test_what_a_webhook_answers(status: int, error: type[HoldfastError]) -> None:
    with pytest.raises(HoldfastError, match=f"https://ops.example.com answered {status}") as raised:
        await webhook(lambda _: httpx.Response(status)).send(alert())
    assert isinstance(raised.value, Unavailable) == (error is Unavailable)
    assert "T0KEN" not in str(raised.value) + webhook(lambda _: httpx.Response(200)).name
    assert "pass" not in str(raised.value)


async def test_a_webhook_that_is_not_reached_may_be_later() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    with pytest.raises(Unavailable, match=r"https://ops\.example\.com: no route"):
        await webhook(answer).send(alert())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:apprise")
@pytest.mark.parametrize("url", ["", "ops.example.com", "https://", "no-such-scheme://secret-token"])
def test_an_address_that_nobody_takes_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        notifiers([url], lambda _: webhook(lambda _: httpx.Response(200)))
    assert "secret-token" not in str(raised.value)


# ---------------------------------------------------------------- Apprise


class Inbox(BaseHTTPRequestHandler):
    """What Apprise's own service `json://` posts to."""

    status = 200
    received: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        return


@pytest.mark.filterwarnings("ignore::DeprecationWarning:apprise")
@pytest.mark.parametrize("status", [200, 500])
async def test_apprise_delivers(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "status", status)
    monkeypatch.setattr(Inbox, "received", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Inbox) as serving:
        thread = Thread(target=serving.serve_forever)
        thread.start()
        try:
            url = f"json://127.0.0.1:{serving.server_port}/secret-token"
            [notifier] = notifiers([url], lambda _: pytest.fail("it is no webhook"))
            assert notifier.name == "json://"
            if status == 200:
                await notifier.send(alert())
            else:
                with pytest.raises(Unavailable, match=r"json://: Apprise could not deliver"):
                    await notifier.send(alert())
        finally:
            serving.shutdown()
            thread.join()
    [posted] = Inbox.received
    assert (posted["title"], posted["message"], posted["type"]) == ("alert 1", "why", "failure")


# ---------------------------------------------------------------- queues, rates, retries


@dataclass
class Recorder:
    """A notifier that fails on request."""

    name: str = "recorder"
    failures: Iterator[Exception | None] = field(default_factory=lambda: iter(()))
    sent: list[Alert] = field(default_factory=list)
    tried: int = 0

    async def send(self, alert: Alert) -> None:
        self.tried += 1
        if (failure := next(self.failures, None)) is not None:
            raise failure
        self.sent.append(alert)


class Stubborn(Recorder):
    """Never takes the first alert."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self._failure = failure

    async def send(self, alert: Alert) -> None:
        if alert.id == "a1":
            raise self._failure
        await super().send(alert)


VIRTUAL = pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME])
pytestmark = pytest.mark.anyio


@VIRTUAL
async def test_an_alert_is_sent_again_until_it_arrives() -> None:
    recorder = Recorder(failures=iter([Unavailable("gone"), Unavailable("gone"), None]))
    address = Address(recorder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(address.run)
        address.offer(alert())
        await wait_until_async(lambda: recorder.sent, description="the alert", timeout_s=RETRY_FOR_S, poll_s=0.1)
        tasks.cancel_scope.cancel()
    assert recorder.tried == 3


@VIRTUAL
@pytest.mark.parametrize(
    "failure", [HoldfastError("no such hook"), ZeroDivisionError("a plug-in's"), Unavailable("for ever")], ids=str
)
async def test_an_alert_that_cannot_be_sent_holds_up_no_other_for_ever(failure: Exception) -> None:
    recorder = Stubborn(failure)
    address = Address(recorder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(address.run)
        address.offer(alert(1))
        address.offer(alert(2))
        await wait_until_async(
            lambda: recorder.sent, description="the second alert", timeout_s=2 * RETRY_FOR_S, poll_s=1.0
        )
        tasks.cancel_scope.cancel()
    assert [each.id for each in recorder.sent] == ["a2"]


@VIRTUAL
async def test_a_flood_is_summed_up() -> None:
    recorder = Recorder()
    address = Address(recorder, clock=lambda: 100.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(address.run)
        for number in range(RATE_MAX + 30):
            address.offer(alert(number))
        held = "what was held back"
        await wait_until_async(
            lambda: len(recorder.sent) > RATE_MAX, description=held, timeout_s=2 * RATE_S, poll_s=1.0
        )
        tasks.cancel_scope.cancel()
    titles = [each.title for each in recorder.sent]
    assert titles[:RATE_MAX] == [f"alert {number}" for number in range(RATE_MAX)]
    assert titles[RATE_MAX:] == ["30 more alerts were held back"]


async def test_a_queue_has_an_end() -> None:
    recorder = Recorder()
    address = Address(recorder, clock=lambda: 100.0)
    for number in range(QUEUE_MAX + 5):
        address.offer(alert(number))
    await address.farewell()
    assert recorder.sent[0].id == "a5"
    assert recorder.sent[-1].title == "5 more alerts were held back"
    assert len(recorder.sent) == QUEUE_MAX + 1


# ---------------------------------------------------------------- from the stream


def entry(record: Published) -> Entry:
    return Entry("e", type(record).__name__, records.dumps(record, Published))


async def test_each_alert_is_sent_by_one_supervisor_to_every_address() -> None:
    log = MemoryLog(block_s=0.01)
    received = {name: (Recorder(f"{name}-1"), Recorder(f"{name}-2")) for name in ("a", "b")}
    async with anyio.create_task_group() as tasks:
        for name, recorders in received.items():
            tasks.start_soon(Alerts(log, recorders, ALL, consumer=name).run)
        count = 0

        async def all_arrived() -> bool:
            nonlocal count
            count += 1
            await log.append(EVENTS, entry(JobChanged(float(count), "llm", JobPhase.FAILED, "why")))
            return all(sum(len(each[i].sent) for each in received.values()) >= 5 for i in (0, 1))

        await wait_until_async(all_arrived, description="five alerts at every address")
        tasks.cancel_scope.cancel()
    for i in (0, 1):
        ids = [each.id for recorders in received.values() for each in recorders[i].sent]
        assert len(ids) == len(set(ids)), "none twice"


async def test_what_cannot_be_read_is_left_out() -> None:
    log, recorder = MemoryLog(block_s=0.01), Recorder()

    async def arrived() -> bool:
        await log.append(
            EVENTS, Entry("g", "JobChanged", b"garbage"), entry(JobChanged(1.0, "llm", JobPhase.FAILED, "why"))
        )
        return bool(recorder.sent)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Alerts(log, [recorder], ALL, consumer="a").run)
        await wait_until_async(arrived, description="the alert behind it")
        tasks.cancel_scope.cancel()


async def test_a_test_alert_goes_to_every_address_and_says_what_went_wrong() -> None:
    good, bad = Recorder("https://good"), Recorder("https://bad", iter([HoldfastError("it answered 404")]))
    outcome = await Alerts(MemoryLog(), [good, bad], ALL, consumer="a").test(alert())
    assert outcome == {"1: https://good": "", "2: https://bad": "it answered 404"}
    assert good.sent == [alert()]


# ---------------------------------------------------------------- settings


def settings(tmp_path: Path, **changes: object) -> SupervisorSettings:
    return SupervisorSettings(redis_url="redis://x", data_dir=tmp_path, **changes)  # type: ignore[arg-type]


def test_addresses_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("# ours\n\nhttps://b/\n  slack://c/ \n")
    found = settings(tmp_path, alert_urls="https://a/ mailto://x", alert_urls_file=tmp_path / "urls")
    assert found.alert_addresses == ("https://a/", "mailto://x", "https://b/", "slack://c/")
    assert "https://a/" not in repr(found)
    with pytest.raises(InvalidSpec, match="HOLDFAST_ALERT_URLS_FILE"):
        _ = settings(tmp_path, alert_urls_file=tmp_path / "none").alert_addresses


def test_topics(tmp_path: Path) -> None:
    assert settings(tmp_path).alerts_about == ALL - {Topic.COMPLETED, Topic.TEST}
    assert settings(tmp_path, alert_topics="failed, waiting").alerts_about == {Topic.FAILED, Topic.WAITING}
    with pytest.raises(InvalidSpec, match=r"topics of failed, waiting, .*breaker"):
        _ = settings(tmp_path, alert_topics="failed,everything").alerts_about


def test_an_outage_of_redis_is_one_alert_and_its_end_another() -> None:
    outage, refused = Outage("sup-1"), "Redis at 127.0.0.1:1 is full; make room"
    assert outage.seen(refused, 0.0, 1000.0) is None
    assert outage.seen("", 30.0, 1030.0) is None, "a short one is none"
    assert outage.seen(refused, 40.0, 1040.0) is None
    assert outage.seen(refused, 39.0 + AFTER_S, 5.0) is None, "by no clock that jumps"
    alert = outage.seen(refused, 40.0 + AFTER_S, 1100.0)
    assert alert is not None
    assert (alert.topic, alert.level, alert.title) == (
        Topic.REDIS,
        Level.ERROR,
        "supervisor sup-1 cannot act on faults",
    )
    assert refused in alert.text
    assert outage.seen(refused, 400.0, 1400.0) is None
    over = outage.seen("", 401.0, 1401.0)
    assert over is not None
    assert (over.level, over.title) == (Level.INFO, "supervisor sup-1 can act on faults again")
    assert outage.seen("", 402.0, 1402.0) is None

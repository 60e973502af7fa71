"""`/v1/fleet` and the columns: one answer for a page, whatever the size of the fleet."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fleet import Fleet, asked_to_end, job, running

from benchmarks.core import running_job
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind, StepRecord
from holdfast.domain.nodes import ServiceVersions
from holdfast.supervisor.api import node_views
from holdfast.supervisor.core.rules.holddown import Probation
from holdfast.supervisor.history import accounts
from holdfast.supervisor.history.accounts import Accounts, Wanted
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.picture import Picture
from holdfast.supervisor.protocol import JobStopRequested, NodeCordonRequested

pytestmark = pytest.mark.anyio

START = 1000.0  # of a Fleet's time


async def show(api: Any, fleet: Fleet) -> None:
    """What the core has made of `fleet`, and its history."""
    api.picture = Picture(fleet.state, leading=True)
    entries = [EventEntry(f"{n}-0", record) for n, record in enumerate(fleet.records, 1)]
    await api.history.add_events(entries, "0")


async def get(api: Any, path: str) -> Any:
    answer = await api.http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def steps_of(name: str, count: int, *, start: float = START, step_s: float = 1.0) -> list[StepRecord]:
    return [
        StepRecord(name, 1, n, 3, start + step_s * (n - 1), start + step_s * n, 300, 5.0 - n / 100, 0.0)
        for n in range(1, count + 1)
    ]


async def test_an_empty_fleet_is_an_answer(api: Any) -> None:
    shown = await get(api, "/v1/fleet")
    assert shown["jobs"] == shown["incidents"] == []
    assert set(shown["nodes"].values()) == {0}
    assert shown["breaker"]["state"] == "closed"
    nodes = await get(api, "/v1/fleet/nodes")
    assert nodes["node"] == []


async def test_what_is_saved_of_each_job(api: Any) -> None:
    assert (await get(api, "/v1/fleet/checkpoints"))["jobs"] == []
    fleet = running(job(dp=3, interval=10), spares=1, saved=10)
    fleet.submit(job(dp=2, name="later"))
    await show(api, fleet)
    saved, waiting = (await get(api, "/v1/fleet/checkpoints"))["jobs"]
    assert (saved["job"], saved["ranks"], saved["complete"], saved["incomplete"]) == ("job", 3, 1, 0)
    assert (saved["newest"]["step"], saved["newest"]["complete"], saved["interval"]["steps"]) == (10, True, 10)
    assert (saved["store"], saved["stored_step"]) == ("", None)
    assert saved["newest"] == (await get(api, "/v1/jobs/job/checkpoints"))["items"][0]
    assert (waiting["job"], waiting["newest"], waiting["saved_at"], waiting["complete"]) == ("later", None, None, 0)


async def test_the_fleet_has_jobs_nodes_incidents_and_goodput_in_one_answer(api: Any) -> None:
    fleet = running(job(dp=3, interval=10), spares=1, saved=10)
    fleet.fold(NodeCordonRequested(fleet.now, "n3", cordoned=True, reason="fan"))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    await show(api, fleet)
    await api.history.add_steps(steps_of("job", 100), "0")
    shown = await get(api, "/v1/fleet")
    [row] = shown["jobs"]
    assert (row["name"], row["ranks"], row["node_count"], row["nodes"]) == ("job", 3, 3, [])
    assert row["checkpoint_step"] == 10
    assert row["checkpoint_at"] == pytest.approx(fleet.now, abs=5)
    assert not row["finished"]
    assert shown["nodes"] == {"active": 3, "cordoned": 1, "spare": 0, "left": 0, "lost": 0}
    assert shown["incidents_open"] == 1
    assert row["incident"]["id"] == shown["incidents"][0]["id"]
    spent = row["goodput"]
    assert spent["useful_s"] + sum(spent["badput_s"].values()) == pytest.approx(spent["wall_s"])
    assert len(row["trend"]["index"]) == len(row["trend"]["tokens_per_s"])


async def test_finished_jobs_come_last_and_say_so(api: Any) -> None:
    fleet = Fleet(2)
    for name in ("a", "b"):
        fleet.about = name
        fleet.submit(job(dp=1, name=name))
        fleet.run()
    fleet.fold(JobStopRequested(fleet.now, "a", "enough", save=False))
    fleet.answer_orders()
    await show(api, fleet)
    rows = (await get(api, "/v1/fleet"))["jobs"]
    assert [(row["name"], row["finished"]) for row in rows] == [("b", False), ("a", True)]


async def test_nodes_are_columns_of_one_length(api: Any) -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.fold(NodeCordonRequested(fleet.now, "n2", cordoned=True, reason="fan 2 is loud"))
    await show(api, fleet)
    shown = await get(api, "/v1/fleet/nodes")
    columns = {name: column for name, column in shown.items() if name != "at"}
    assert {len(column) for column in columns.values()} == {3}
    assert columns["node"] == ["n0", "n1", "n2"]
    assert columns["job"] == ["job", "job", ""]
    assert columns["state"] == ["active", "active", "cordoned"]
    assert "fan 2 is loud" in columns["reason"][2]


# ---------------------------------------------------------------- ranks


async def ranks_by_state(api: Any) -> dict[str, list[int]]:
    shown = await get(api, "/v1/jobs/job/ranks")
    assert len(shown["node"]) == len(shown["state"]) == len(shown["age_s"])
    named: dict[str, list[int]] = {}
    for rank, state in enumerate(shown["state"]):
        named.setdefault(shown["states"][state], []).append(rank)
    return named


async def test_a_rank_is_alive_only_if_its_agent_says_so(api: Any) -> None:
    fleet = running(job(dp=4, nproc=2))
    await show(api, fleet)
    assert await ranks_by_state(api) == {"unreported": [0, 1, 2, 3]}
    fleet.workers("n0", 0, 1)
    fleet.workers("n1", 2)
    await show(api, fleet)
    assert await ranks_by_state(api) == {"alive": [0, 1, 2], "absent": [3]}


async def test_a_rank_that_an_incident_names_is_a_suspect_and_the_others_of_its_node_are_not(api: Any) -> None:
    fleet = running(job(dp=4, nproc=2))
    fleet.all_live()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=3)
    await show(api, fleet)
    named = await ranks_by_state(api)
    assert named["suspect"] == [3]
    assert named["starting"] == [0, 1, 2], "the next generation has no processes yet"


async def test_the_ranks_of_a_lost_node_are_lost(api: Any) -> None:
    fleet = running(job(dp=4, nproc=2), decide=False)
    fleet.all_live()
    fleet.lose("n1")
    await show(api, fleet)
    assert await ranks_by_state(api) == {"alive": [0, 1], "lost": [2, 3]}


async def test_why_a_node_is_away_says_what_to_do_and_a_goodbye_is_no_loss(api: Any) -> None:
    fleet = running(job(dp=3), spares=2)
    fleet.lose("n1")
    asked_to_end(fleet, "n4")
    fleet.gone("n4")
    fleet.wait(30.0)
    await show(api, fleet)
    shown = {each["node"]: (each["state"], each["reason"]) for each in (await get(api, "/v1/nodes"))["items"]}
    assert (shown["n1"][0], shown["n4"][0]) == ("lost", "left")
    assert "check its power, network and agent" in shown["n1"][1]
    assert shown["n4"][1].startswith("left: its agent was asked to end")


async def test_the_step_goes_on_while_diagnostics_reports_none(api: Any) -> None:
    fleet = running(job(dp=2))
    fleet.all_live()
    fleet.train(40)
    fleet.beat(90)
    await show(api, fleet)
    assert (await get(api, "/v1/jobs/job"))["step"] == 89
    assert fleet.view.step == 89
    fleet.train(95)
    await show(api, fleet)
    assert (await get(api, "/v1/jobs/job"))["step"] == 95


async def test_a_node_whose_telemetry_is_cut_is_shown_as_such_since_when(api: Any) -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "a fan is replaced"))
    now = time.time()
    cut_s = {"n0": 90.0, "n1": 5.0}
    versions = {"n0": ServiceVersions("0.2.0", "0.0.9")}
    api.picture = Picture(
        fleet.state,
        leading=True,
        at=now,
        telemetry_cut_s=cut_s.get,
        versions_of=lambda name: versions.get(name, ServiceVersions()),
    )
    n0, n1, n2 = (await get(api, "/v1/nodes"))["items"]
    assert [each["telemetry_cut_since"] for each in (n0, n1, n2)] == [pytest.approx(now - 90.0), now - 5.0, None]
    assert n0["reason"].startswith("no telemetry of it has reached diagnostics since ")
    assert n1["reason"].startswith("cordoned by an operator: a fan is replaced; no telemetry of it has reached")
    assert n2["reason"] == ""
    shown = [(each["diagnostics_version"], each["replicator_version"]) for each in (n0, n1)]
    assert shown == [("0.2.0", "0.0.9"), ("", "")]
    assert "no telemetry" in (await get(api, "/v1/fleet/nodes"))["reason"][0]


async def test_a_cordon_is_shown_although_the_node_is_on_probation(api: Any) -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.fold(NodeCordonRequested(fleet.now, "n0", True, "a fan is replaced"))
    probation = Probation(time.time(), time.time() + 3600.0, "Node n0 is lost")
    node = evolve(fleet.state.nodes["n0"], probation=probation)
    reason = node_views.reason_of_node(Picture(fleet.state, leading=True), node, time.time())
    assert reason.startswith("cordoned by an operator: a fan is replaced; on probation until ")


async def test_a_job_that_is_over_has_no_ranks_and_one_that_is_unknown_is_not_found(api: Any) -> None:
    fleet = running(job(dp=2))
    fleet.fold(JobStopRequested(fleet.now, "job", "enough", save=False))
    fleet.answer_orders()
    await show(api, fleet)
    shown = await get(api, "/v1/jobs/job/ranks")
    assert shown["state"] == shown["node"] == shown["nodes"] == []
    for path in ("/v1/jobs/none/ranks", "/v1/jobs/none/timeline"):
        assert (await api.http.get(path)).status_code == 404


async def test_100_000_ranks_are_one_answer_of_two_megabytes(api: Any) -> None:
    api.picture = Picture(running_job(12_500), leading=True)
    answer = await api.http.get("/v1/jobs/llm/ranks")
    shown = answer.json()
    assert len(shown["state"]) == 100_000
    assert {shown["states"][state] for state in shown["state"]} == {"alive"}
    assert [shown["nodes"][shown["node"][rank]] for rank in (0, 8, 99_999)] == ["n0", "n1", "n12499"]
    assert len(answer.content) < 2_000_000
    assert len((await api.http.get("/v1/fleet/nodes")).content) < 2_000_000
    fleet = await api.http.get("/v1/fleet")
    assert fleet.json()["jobs"][0]["ranks"] == 100_000
    assert len(fleet.content) < 10_000, "no list of nodes or ranks in a summary"


async def test_a_job_without_its_ranks_is_small(api: Any) -> None:
    fleet = running(job(dp=4))
    await show(api, fleet)
    whole, bare = await get(api, "/v1/jobs/job"), await get(api, "/v1/jobs/job?ranks=false")
    assert len(whole["ranks"]) == 4
    assert bare == whole | {"ranks": []}


# ---------------------------------------------------------------- time


async def test_a_time_line_has_steps_classes_generations_and_incidents(api: Any) -> None:
    fleet = running(job(dp=3), saved=10)
    await api.history.add_steps(steps_of("job", 50), "0")
    fleet.now = START + 52.0
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.now = START + 60.0
    fleet.fold(JobStopRequested(fleet.now, "job", "enough", save=False))
    fleet.answer_orders()
    await show(api, fleet)
    shown = await get(api, "/v1/jobs/job/timeline")
    assert shown["until"] == pytest.approx(START + 60.0)
    assert shown["step"][-1] == 50
    assert shown["tokens_per_s"] == [pytest.approx(300)] * len(shown["step"])
    assert shown["loss"][0] > shown["loss"][-1]
    spans = shown["spans"]
    assert spans["begin"][1:] == spans["end"][:-1], "no moment is in two classes, or in none"
    assert (spans["begin"][0], spans["end"][-1]) == (START, pytest.approx(START + 60.0))
    assert {"useful", "rework", "recover"} <= set(spans["kind"])
    [mark] = shown["incidents"]
    assert mark["kind"] == "worker_crash"
    assert {each["generation"] for each in shown["generations"]} == {1, 2}


async def test_a_time_line_is_bounded_however_many_steps_there_are(api: Any) -> None:
    fleet = running(job(dp=3))
    await show(api, fleet)
    await api.history.add_steps(steps_of("job", 20_000), "0")
    shown = await get(api, "/v1/jobs/job/timeline")
    assert len(shown["at"]) == len(shown["loss"]) == len(shown["step"]) <= 800
    assert len(json.dumps(shown)) < 100_000


# ---------------------------------------------------------------- accounts


class Counting:
    """A history that counts how often it is asked for a run."""

    def __init__(self, history: Any) -> None:
        self._history, self.runs = history, 0

    async def run(self, name: str) -> Any:
        self.runs += 1
        return await self._history.run(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._history, name)


async def test_however_often_lists_are_asked_for_a_ledger_is_computed_once(api: Any) -> None:
    fleet = running(job(dp=3))
    await show(api, fleet)
    history: Any = Counting(api.history)
    kept, wanted = Accounts(history, time.time), [Wanted("job", START, finished=False)]
    first = await kept.of(wanted)
    for _ in range(10):
        assert await kept.of(wanted) == first
    assert history.runs == 1
    assert await kept.of([Wanted("job", START + 1, finished=False)]) != {}, "another run of the name is another account"
    assert history.runs == 2


async def test_an_answer_that_has_spent_its_time_leaves_the_rest_to_the_next(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(2)
    for name in ("a", "b"):
        fleet.about = name
        fleet.submit(job(dp=1, name=name))
        fleet.run()
    await show(api, fleet)
    monkeypatch.setattr(accounts, "BUDGET_S", 0.0)
    kept = Accounts(api.history, time.time)
    wanted = [Wanted("a", START, finished=False), Wanted("b", START, finished=False)]
    sizes = [len(await kept.of(wanted)) for _ in range(3)]
    assert sizes == [1, 2, 2]

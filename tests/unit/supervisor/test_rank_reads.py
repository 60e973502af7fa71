"""What the agents of a job are asked about its ranks: few at a time, until a deadline, once for all who look."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
from fleet import Fleet, job, running
from waiting import VIRTUAL_TIME

from holdfast.domain.errors import Conflict, MalformedMessage, NotFound
from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import Generation
from holdfast.domain.rank_reads import MeasuredRanks, RaisedError
from holdfast.domain.signals import WorkerError
from holdfast.supervisor.agents import rank_measuring
from holdfast.supervisor.agents.ask_many import ask_each, nodes_to_ask
from holdfast.supervisor.agents.rank_measuring import FRESH_S, KEPT_S, RankMeasuring
from holdfast.supervisor.api import rank_views, ranks
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.picture import Picture

pytestmark = pytest.mark.anyio
MakeApi = Callable[..., Awaitable[Any]]


# ---------------------------------------------------------------- who is asked


def test_repeated_rounds_reach_every_node_once() -> None:
    nodes = [f"n{n}" for n in range(12_500)]
    asked_at: dict[str, float] = {}
    for turn in range(13):  # 12,500 nodes by 1,024
        chosen = nodes_to_ask(nodes, asked_at, 1024)
        assert len(set(chosen)) == 1024
        asked_at |= dict.fromkeys(chosen, float(turn))
    assert len(asked_at) == 12_500


def test_the_first_round_is_spread_over_the_job() -> None:
    nodes = [f"n{n}" for n in range(12_500)]
    places = sorted(int(name[1:]) for name in nodes_to_ask(nodes, {}, 1024))
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) <= 3 * 12_500 / 1024, "no part of the mesh stays dark"


def test_a_small_job_is_asked_whole() -> None:
    assert nodes_to_ask(["a", "b"], {"a": 5.0}, 2) == ["a", "b"]


async def test_few_are_asked_at_the_same_time_and_the_silent_are_left_out() -> None:
    asking, most = 0, 0

    async def ask(node: str) -> str:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await anyio.lowlevel.checkpoint()
        asking -= 1
        if node == "n3":
            raise Conflict("no answer within 3 s")
        if node == "n4":
            raise NotFound("not connected")
        if node == "n5":
            raise MalformedMessage("ranks_read", "nonsense")
        return node

    answers = await ask_each([f"n{n}" for n in range(40)], ask, at_once=4)
    assert most == 4
    assert set(answers) == {f"n{n}" for n in range(40)} - {"n3", "n4", "n5"}


@pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])
async def test_one_deadline_for_all() -> None:
    async def ask(node: str) -> str:
        if node != "quick":
            await anyio.sleep_forever()
        return node

    with anyio.fail_after(5):
        assert await ask_each(["quick", *(f"n{n}" for n in range(500))], ask, deadline_s=0.05) == {"quick": "quick"}


# ---------------------------------------------------------------- measurements


def placed(fleet: Fleet) -> Generation:
    generation = fleet.job.generation
    assert generation is not None
    return generation


class Agents:
    """Every node answers for its ranks, but for those in `silent`."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.asked = generation, list[str]()
        self.silent: set[str] = set()
        self.raised: dict[str, tuple[RaisedError, ...]] = {}

    async def read_ranks(self, node: str, job: str) -> MeasuredRanks:
        self.asked.append(node)
        if node in self.silent:
            raise Conflict("no answer")
        await anyio.lowlevel.checkpoint()
        placement = self.generation.placement_of(node)
        assert placement is not None
        return MeasuredRanks(
            self.generation.number,
            tuple(placement.ranks),
            tuple(10.0 + rank for rank in placement.ranks),
            tuple(math.nan for _ in placement.ranks),
            tuple(60.04 for _ in placement.ranks),
        )

    async def read_errors(self, node: str, job: str, generation: int) -> tuple[RaisedError, ...]:
        self.asked.append(node)
        if node in self.silent:
            raise NotFound("not connected")
        return self.raised.get(node, ())


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_ten_viewers_cost_what_one_costs() -> None:
    agents, clock = Agents(placed(running(job(dp=3), spares=0))), Clock()
    measuring = RankMeasuring(clock)

    async def look() -> None:
        assert len(await measuring.of(agents, "job", 1.0, agents.generation)) == 3

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(look)
    assert len(agents.asked) == 3
    clock.now_s += FRESH_S
    await look()
    assert len(agents.asked) == 6, "and what is older is asked for again"


async def test_a_viewer_that_goes_away_does_not_keep_the_next_one_from_asking() -> None:
    agents, clock = Agents(placed(running(job(dp=3), spares=0))), Clock()
    measuring = RankMeasuring(clock)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await measuring.of(agents, "job", 1.0, agents.generation)
    assert len(await measuring.of(agents, "job", 1.0, agents.generation)) == 3


async def test_a_node_that_falls_silent_is_not_known_any_more() -> None:
    agents, clock = Agents(placed(running(job(dp=3), spares=0))), Clock()
    measuring = RankMeasuring(clock)
    await measuring.of(agents, "job", 1.0, agents.generation)
    agents.silent = {agents.generation.nodes[1]}
    clock.now_s += FRESH_S
    answers = await measuring.of(agents, "job", 1.0, agents.generation)
    assert set(answers) == set(agents.generation.nodes) - agents.silent


async def test_a_large_job_is_asked_in_parts_and_old_parts_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_measuring, "NODES_MAX", 2)
    agents, clock = Agents(placed(running(job(dp=5), spares=0))), Clock()
    measuring = RankMeasuring(clock)
    sizes = []
    for _ in range(3):
        sizes.append(len(await measuring.of(agents, "job", 1.0, agents.generation)))
        clock.now_s += FRESH_S
    assert sizes == [2, 4, 5]
    clock.now_s += KEPT_S
    assert len(await measuring.of(agents, "job", 1.0, agents.generation)) == 2


async def test_a_new_generation_and_a_new_run_of_the_name_begin_anew() -> None:
    agents = Agents(placed(running(job(dp=3), spares=0)))
    measuring = RankMeasuring(Clock())
    await measuring.of(agents, "job", 1.0, agents.generation)
    later = replace(agents.generation, number=agents.generation.number + 1)
    assert await measuring.of(agents, "job", 1.0, later) == {}, "these agents still run the generation before"
    assert len(await measuring.of(agents, "job", 2.0, agents.generation)) == 3


async def show(api: Any, fleet: Fleet) -> None:
    api.picture = Picture(fleet.state, leading=True)
    entries = [EventEntry(f"{n}-0", record) for n, record in enumerate(fleet.records, 1)]
    await api.history.add_events(entries, "0")


async def test_every_rank_is_listed_and_unknown_values_are_null(make_api: MakeApi) -> None:
    fleet = running(job(dp=3), spares=0)
    agents = Agents(placed(fleet))
    api = await make_api(agents=agents)
    await show(api, fleet)
    agents.silent = {agents.generation.node_of(1)}
    reported = (await api.http.get("/v1/jobs/job/ranks/measurements")).json()
    assert (reported["generation"], reported["nodes"], reported["answered"]) == (agents.generation.number, 3, 2)
    assert reported["step_s"] == [10.0, None, 12.0]
    assert reported["wait_s"] == [None] * 3
    assert reported["temperature_c"] == [60.0, None, 60.0]
    assert (await api.http.get("/v1/jobs/other/ranks/measurements")).status_code == 404


async def test_without_a_generation_nobody_is_asked_and_without_sessions_it_says_so(make_api: MakeApi) -> None:
    fleet = Fleet(0)
    fleet.submit(job(dp=3))
    agents = Agents(placed(running(job(dp=3), spares=0)))
    api = await make_api(agents=agents)
    await show(api, fleet)
    reported = (await api.http.get("/v1/jobs/job/ranks/measurements")).json()
    assert (reported["step_s"], reported["nodes"], agents.asked) == ([], 0, [])


def test_an_agent_s_word_about_ranks_of_others_counts_for_nothing() -> None:
    generation = placed(running(job(dp=3), spares=0))
    liar = MeasuredRanks(generation.number, (0, 1, 2, 99), (7.0,) * 4, (1.0,) * 4, (50.0,) * 4)
    reported = rank_views.measurements(
        "job", generation, {generation.node_of(1): rank_measuring.Measured(3.0, liar)}, 1000.0
    )
    assert reported.step_s == [None, 7.0, None]
    assert reported.oldest_s == 3.0


# ---------------------------------------------------------------- exceptions


def raised(generation: int, rank: int, text: str, at: float = 0.0) -> tuple[RaisedError, ...]:
    return (RaisedError(generation, rank, WorkerError("ValueError", text, ("train.py:7 main",), at)),)


async def test_the_rank_of_the_incident_is_the_first_failure_whatever_the_clocks_say(make_api: MakeApi) -> None:
    fleet = running(job(dp=3), spares=0)
    agents = Agents(placed(fleet))
    number, now = agents.generation.number, fleet.now
    fleet.find(FindingKind.WORKER_CRASH, agents.generation.node_of(2), rank=2)
    agents.raised = {
        agents.generation.node_of(0): raised(number, 0, "connection closed by peer", now - 9),
        agents.generation.node_of(2): raised(number, 2, "loss is not finite", now),
    }
    api = await make_api(agents=agents)
    await show(api, fleet)
    reported = (await api.http.get("/v1/jobs/job/errors")).json()
    assert [(each["rank"], each["message"]) for each in reported["errors"]] == [
        (2, "loss is not finite"), (0, "connection closed by peer"),
    ]  # fmt: skip
    assert (reported["decided_by"], reported["generation"], reported["answered"]) == ("incident", number, 3)
    assert agents.asked[0] == agents.generation.node_of(2), "the node of the incident is asked first"


async def test_without_an_incident_the_time_decides_and_the_bound_holds(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ERROR_NODES_MAX", 2)
    fleet = running(job(dp=3), spares=0)
    agents = Agents(placed(fleet))
    number, now = agents.generation.number, fleet.now
    agents.raised = {
        agents.generation.node_of(rank): raised(number, rank, f"text {rank}", now - rank) for rank in range(3)
    }
    api = await make_api(agents=agents)
    await show(api, fleet)
    reported = (await api.http.get("/v1/jobs/job/errors")).json()
    assert ([each["rank"] for each in reported["errors"]], reported["decided_by"]) == ([1, 0], "time")
    assert (reported["nodes"], reported["asked"], reported["incident"]) == (3, 2, "")


async def test_what_an_earlier_run_of_the_name_has_left_does_not_count(make_api: MakeApi) -> None:
    fleet = running(job(dp=3), spares=0)
    agents = Agents(placed(fleet))
    first, second = agents.generation.node_of(0), agents.generation.node_of(1)
    agents.raised = {first: raised(agents.generation.number, 0, "old", 12.0), second: raised(70, 1, "old", fleet.now)}
    api = await make_api(agents=agents)
    await show(api, fleet)
    reported = (await api.http.get("/v1/jobs/job/errors")).json()
    assert (reported["errors"], reported["generation"], reported["decided_by"]) == ([], 0, "")
    assert (await api.http.get("/v1/jobs/job/errors?generation=70")).status_code == 422
    assert (await api.http.get("/v1/jobs/other/errors")).status_code == 404

"""Faults on a schedule: the schedule itself, and what is said to have become of each fault."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import pytest

from holdfast.cli.chaos import Campaign, parse_mix, schedule
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, Unavailable
from holdfast.domain.faults import FaultKind

MIX = {FaultKind.CRASH: 3, FaultKind.HANG: 1, FaultKind.XID: 0}


def test_the_gaps_are_exponential_and_the_kinds_as_the_mix_says() -> None:
    faults = list(islice(schedule(7, 1200.0, MIX), 20_000))
    gaps = [each.after_s for each in faults]
    assert statistics.fmean(gaps) == pytest.approx(1200.0, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1200.0, rel=0.05), "as long as the mean: no memory"
    kinds = [each.kind for each in faults]
    assert kinds.count(FaultKind.CRASH) / len(kinds) == pytest.approx(0.75, abs=0.02)
    assert FaultKind.XID not in kinds
    assert all(0 <= each.pick < 1 for each in faults)


def test_the_seed_is_the_schedule() -> None:
    first, again, other = (list(islice(schedule(seed, 60.0, MIX), 20)) for seed in (7, 7, 8))
    assert first == again != other
    turned = dict(reversed(MIX.items()))
    assert list(islice(schedule(7, 60.0, turned), 20)) == first, "in whatever order the kinds are named"


def test_a_mix_is_kinds_with_weights() -> None:
    assert parse_mix("crash=3, node_loss=1,xid=0") == {
        FaultKind.CRASH: 3,
        FaultKind.NODE_LOSS: 1,
        FaultKind.XID: 0,
    }


@pytest.mark.parametrize(
    "text", ["", "crash", "crash=", "crash=-1", "crash=0", "flood=1", "crash=1,crash=2", "crash=1001"]
)
def test_another_mix_is_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(InvalidSpec, match=r"the kinds are crash, .* lossy_link, clock_jump, redis_kill, leader_kill"):
        parse_mix(text)


Respond = Callable[["World", str, int], dict[str, Any] | None]


@dataclass
class World:
    """A job in virtual time. `respond` answers a fault with an incident, `recovers_s` later every rank steps again."""

    respond: Respond
    chaos: bool = True
    recovers_s: float = 5.0
    ends_at: float = float("inf")
    away: tuple[float, float] = (0.0, 0.0)
    refuses: Exception | None = None
    now: float = 1000.0
    opened: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[float, str, int]] = field(default_factory=list)
    interrupt_at: float = float("inf")
    reported: list[dict[str, Any]] = field(default_factory=list)
    details: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    epoch: int = 17
    redis: str = "r-1"
    generation: int = 1
    stuck_at: float = float("inf")  # no rank steps from then on

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.interrupt_at:
            raise KeyboardInterrupt

    def _reachable(self) -> None:
        if self.away[0] <= self.now < self.away[1]:
            raise Unavailable("no supervisor")

    def _open(self) -> list[dict[str, Any]]:
        return [each for each in self._incidents() if each["state"] != "resolved" and each["state"] != "failed"]

    def job(self, name: str) -> dict[str, Any]:
        self._reachable()
        phase = "completed" if self.now >= self.ends_at else "preparing" if self._open() else "running"
        if any(each["state"] == "failed" for each in self._incidents()):
            phase = "failed"
        current = self._open()
        return {
            "phase": phase,
            "incident": current[0] if current else None,
            "step": 10 + int(min(self.now, self.stuck_at) - 1000.0),
            "generation": self.generation,
            "spec": {"chaos": self.chaos},
            "ranks": [{"rank": rank, "node": f"n{rank}"} for rank in range(3)],
        }

    def _incidents(self) -> list[dict[str, Any]]:
        seen = []
        for each in self.opened:
            if each["detected_at"] <= self.now:
                over = each["detected_at"] + self.recovers_s <= self.now
                state = each["ends"] if over else "preparing"
                stepped = each["detected_at"] + self.recovers_s if over and each["ends"] == "resolved" else None
                seen.append({**each, "state": state, "first_step_at": stepped})
        return list(reversed(seen))

    def incidents(self, job: str | None = None) -> Iterator[dict[str, Any]]:
        self._reachable()
        return iter(self._incidents())

    def findings(self, job: str | None = None, node: str | None = None) -> Iterator[dict[str, Any]]:
        return iter([each for each in reversed(self.reported) if each["node"] == node and each["at"] <= self.now])

    def version(self) -> dict[str, Any]:
        self._reachable()
        return {"epoch": self.epoch, "event_log": self.redis}

    def inject_fault(
        self,
        name: str,
        kind: str,
        rank: int,
        for_s: float,
        xid: int,
        *,
        loss_percent: float | None = None,
        offset_s: float | None = None,
    ) -> dict[str, Any]:
        self.details.append((kind, loss_percent, offset_s))
        self.asked.append((self.now, kind, rank))
        if self.refuses is not None:
            raise self.refuses
        if (incident := self.respond(self, kind, rank)) is not None:
            self.opened.append(incident)
        return {}


def found(after_s: float = 1.0, kind: str = "worker_crash", ends: str = "resolved") -> Respond:
    def respond(world: World, fault: str, rank: int) -> dict[str, Any]:
        return {
            "id": f"i-{len(world.opened)}",
            "kind": kind,
            "action": {"kind": "restart"},
            "detected_at": world.now + after_s,
            "ends": ends,
        }

    return respond


def campaign(
    world: World,
    *,
    for_s: float = 600.0,
    every_s: float = 60.0,
    seed: int = 7,
    kind: FaultKind = FaultKind.CRASH,
) -> Campaign:
    return Campaign(
        api=world,
        job="gpt",
        seed=seed,
        every_s=every_s,
        mix={kind: 1},
        for_s=for_s,
        last_s=30.0,
        xid=94,
        say=lambda _: None,
        clock=world.clock,
        sleep=world.sleep,
    )


def test_every_fault_has_its_incident_and_its_times() -> None:
    world = World(found())
    mine = campaign(world)
    mine.run()
    assert mine.ended_by == "the time is over"
    assert 3 <= len(mine.faults) <= 25
    assert {each.outcome for each in mine.faults} == {"survived"}
    assert [each.incident for each in mine.faults] == [f"i-{number}" for number in range(len(mine.faults))]
    assert {(each.found_as, each.action) for each in mine.faults} == {("worker_crash", "restart")}
    assert {(each.found_after_s, each.steps_after_s) for each in mine.faults} == {(1.0, 6.0)}
    assert mine.report()["counts"] == {"survived": len(mine.faults)}


def test_the_same_seed_hits_the_same_ranks() -> None:
    worlds = World(found()), World(found(), recovers_s=7.0)
    for world in worlds:
        campaign(world).run()
    ranks = [[rank for _, _, rank in world.asked] for world in worlds]
    shorter = min(map(len, ranks))
    assert ranks[0][:shorter] == ranks[1][:shorter]
    assert len(set(ranks[0])) == 3


def test_a_fault_waits_until_the_one_before_it_is_over() -> None:
    world = World(found(), recovers_s=50.0)
    campaign(world, every_s=5.0).run()
    times = [at for at, _, _ in world.asked]
    assert min(later - earlier for earlier, later in pairwise(times)) >= 50.0


def test_a_fault_that_waits_for_long_is_said_once() -> None:
    world = World(found(), recovers_s=150.0)
    said: list[str] = []
    mine = campaign(world, every_s=5.0, for_s=400.0)
    mine.say = said.append
    mine.run()
    late = [line for line in said if "waits" in line]
    assert late[0].startswith("the next fault has been due for 6")
    assert late[0].endswith(" s and waits: the job is preparing, and an incident is open")
    assert len(late) <= len(mine.faults)


def test_a_planned_change_is_nobodys_answer() -> None:
    world = World(found(kind="repair"))
    mine = campaign(world, for_s=100.0)
    mine.run()
    assert {each.outcome for each in mine.faults} == {"not found"}


def test_a_fault_that_nothing_answers_is_not_found_and_the_next_one_comes() -> None:
    world = World(lambda *_: None)
    mine = campaign(world, every_s=10.0)
    mine.run()
    assert {each.outcome for each in mine.faults} == {"not found"}
    assert len(mine.faults) >= 5


def test_a_warning_that_opens_no_incident_is_found_and_survived() -> None:
    def respond(world: World, fault: str, rank: int) -> None:
        for after_s, node, job in (
            (-9, rank, "gpt"),
            (3, rank + 1, "gpt"),
            (4, rank, "other"),
            (5, rank, "gpt"),
            (6, rank, ""),
        ):
            reported = {"id": f"f-{len(world.reported)}", "kind": "straggler", "node": f"n{node}", "job": job}
            world.reported.append({**reported, "at": world.now + after_s})

    world = World(respond)
    mine = campaign(world, for_s=300.0)
    mine.run()
    assert {(each.outcome, each.found_as, each.found_after_s) for each in mine.faults} == {
        ("survived", "straggler", 5.0)
    }
    assert [each.finding for each in mine.faults] == [f"f-{5 * number + 3}" for number in range(len(mine.faults))]
    assert {each.steps_after_s for each in mine.faults} == {None}, "it never stopped"


def test_a_job_that_fails_has_not_survived_and_ends_it() -> None:
    world = World(found(ends="failed"))
    mine = campaign(world)
    mine.run()
    assert [each.outcome for each in mine.faults] == ["not survived"]
    assert mine.ended_by == "the job is failed"


def test_a_job_that_completes_ends_it() -> None:
    world = World(found(), ends_at=1200.0)
    mine = campaign(world)
    mine.run()
    assert mine.ended_by == "the job is completed"
    assert world.asked[-1][0] < 1200.0


def test_a_control_plane_that_is_away_for_a_while_ends_nothing() -> None:
    world = World(found(), away=(1100.0, 1200.0))
    mine = campaign(world)
    mine.run()
    assert mine.ended_by == "the time is over"
    assert not [at for at, _, _ in world.asked if 1100 <= at < 1200]
    assert {each.outcome for each in mine.faults} == {"survived"}


def test_ctrl_c_ends_it_with_the_table() -> None:
    world = World(found(), recovers_s=30.0)
    probe = World(found(), recovers_s=30.0)
    campaign(probe).run()
    world.interrupt_at = probe.asked[1][0] + 5.0
    mine = campaign(world)
    mine.run()
    assert mine.ended_by == "interrupted"
    assert [each.outcome for each in mine.faults] == ["survived", "open"]


def test_a_refusal_is_in_the_table_with_its_reason() -> None:
    world = World(found(), refuses=Conflict("n1, which runs rank 1, is not connected"))
    mine = campaign(world, for_s=200.0)
    mine.run()
    assert {(each.outcome, each.refused) for each in mine.faults} == {
        ("refused", "n1, which runs rank 1, is not connected")
    }


def test_a_job_that_does_not_allow_faults_is_left_alone() -> None:
    world = World(found(), chaos=False)
    with pytest.raises(Conflict, match="`chaos: true`"):
        campaign(world).run()
    assert world.asked == []


# ---------------------------------------------------------------- faults of the control plane


def ends(leader: bool = True, redis: bool = False, away_s: float = 5.0, stuck: bool = False, **job: Any) -> Respond:
    """The API is away; then there is another leader, another Redis."""

    def respond(world: World, fault: str, rank: int) -> dict[str, Any] | None:
        world.away = (world.now, world.now + away_s)
        world.epoch += leader
        world.redis = f"r-{len(world.asked) + 1}" if redis else world.redis
        for name, value in job.items():
            setattr(world, name, value)
        world.stuck_at = world.now if stuck else world.stuck_at
        return None

    return respond


@pytest.mark.parametrize(
    ("kind", "respond", "found_as"),
    [
        (FaultKind.LEADER_KILL, ends(), "new_leader"),
        (FaultKind.REDIS_KILL, ends(redis=True), "redis_restarted"),
        (FaultKind.REDIS_KILL, ends(leader=False, redis=True, away_s=0.3), "redis_restarted"),
    ],
)
def test_a_control_plane_that_comes_back_under_a_job_that_steps_is_survived(
    kind: FaultKind, respond: Respond, found_as: str
) -> None:
    world = World(respond)
    mine = campaign(world, kind=kind)
    mine.run()
    assert len(mine.faults) >= 3
    assert {(each.outcome, each.found_as, each.rank, each.node) for each in mine.faults} == {
        ("survived", found_as, None, "")
    }
    for each in mine.faults:
        assert each.found_after_s is not None
        assert each.steps_after_s is not None
        assert each.found_after_s < each.steps_after_s <= each.found_after_s + 2.0


@pytest.mark.parametrize(
    ("kind", "respond", "outcome"),
    [
        (FaultKind.LEADER_KILL, ends(leader=False), "not found"),
        (FaultKind.REDIS_KILL, ends(redis=False), "not found"),
        (FaultKind.LEADER_KILL, ends(generation=2), "not survived"),
        (FaultKind.LEADER_KILL, found(), "not survived"),
        (FaultKind.LEADER_KILL, ends(away_s=1e6), "not survived"),
    ],
    ids=["no other leader", "no other Redis", "the job was restarted", "an incident", "no API"],
)
def test_what_did_not_happen_or_disturbed_the_job_is_not_survived(
    kind: FaultKind, respond: Respond, outcome: str
) -> None:
    world = World(respond)
    mine = campaign(world, kind=kind, for_s=90.0, every_s=40.0)
    mine.run()
    assert mine.faults[0].outcome == outcome


def test_ranks_that_do_not_step_after_it_are_not_survived_yet() -> None:
    world = World(ends(stuck=True))
    mine = campaign(world, kind=FaultKind.LEADER_KILL, for_s=200.0)
    mine.run()
    assert [each.found_as for each in mine.faults] == ["new_leader"]
    assert [each.outcome for each in mine.faults] == ["open"], "it has not failed, and it has not stepped"


def test_a_leader_that_refuses_is_in_the_table_at_once() -> None:
    world = World(ends(), refuses=HoldfastError("this supervisor does not allow leader_kill"))
    mine = campaign(world, kind=FaultKind.LEADER_KILL, every_s=20.0, for_s=200.0)
    mine.run()
    assert len(mine.faults) >= 4, "none of them waited for what cannot come"
    assert {(each.outcome, each.refused) for each in mine.faults} == {
        ("refused", "this supervisor does not allow leader_kill")
    }


def test_an_answer_that_was_lost_with_the_leader_is_no_refusal() -> None:
    def respond(world: World, fault: str, rank: int) -> None:
        world.epoch += 1
        raise Unavailable("no Holdfast API answers")

    world = World(respond)
    mine = campaign(world, kind=FaultKind.LEADER_KILL, for_s=100.0)
    mine.run()
    assert mine.faults
    assert {(each.outcome, each.refused) for each in mine.faults} == {("survived", "")}


# ---------------------------------------------------------------- faults that nothing has to show


def test_lost_packets_and_a_clock_that_jumps_are_survived_when_the_job_steps_on() -> None:
    for kind, details in ((FaultKind.LOSSY_LINK, (12.5, None)), (FaultKind.CLOCK_JUMP, (None, -90.0))):
        world = World(lambda *_: None)
        mine = campaign(world, kind=kind)
        mine.loss_percent, mine.offset_s = 12.5, -90.0
        mine.run()
        assert {each.outcome for each in mine.faults} == {"survived"}
        assert set(world.details) == {(kind.value, *details)}


def test_a_job_that_stands_still_has_not_survived_what_nothing_shows() -> None:
    world = World(lambda *_: None, stuck_at=1000.0)
    mine = campaign(world, kind=FaultKind.LOSSY_LINK, for_s=200.0)
    mine.run()
    assert [each.outcome for each in mine.faults] == ["open"]


def test_what_the_fault_has_no_use_for_is_not_sent() -> None:
    world = World(found())
    campaign(world).run()
    assert set(world.details) == {("crash", None, None)}

"""Jobs beside jobs: who gets a free node, which spares are reserved, and who gives up a replica for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import Fleet, job

from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import LOAN, Action, ActionKind, Incident
from holdfast.domain.orders import Prepare
from holdfast.policy import check, hot_swap, ignore, scale_down, wait
from holdfast.supervisor.core import Job, waits_for
from holdfast.supervisor.core.fleet.spares import reserved_for
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import BreakerResetRequested, JobPhase, JobStopRequested, LeaderStarted

LOW, HIGH = "low", "high"


class Fleets(Fleet):
    """Several jobs."""

    def start(self, name: str, dp: int, *, priority: int = 0, spares: int = 0, min_dp: int = 1, pp: int = 1) -> None:
        """Submit it; if there are nodes for it, it runs with a checkpoint at step 20."""
        self.submit(replace(job(dp, pp, min_dp=min_dp, name=name), priority=priority, spares=spares))
        if self.of(name).phase is not JobPhase.PENDING:
            self.go(name)

    def of(self, name: str) -> Job:
        return self.state.jobs[name]

    def go(self, name: str) -> None:
        """Its change ends: it runs, and saves."""
        self.about = name
        self.run()
        self.train(self.job.progress.step + 20, save=True)

    def dp(self, name: str) -> int:
        """Replicas that run; 0 = it does not run."""
        generation = self.of(name).generation
        return generation.mesh.dp if generation and self.of(name).phase is JobPhase.RUNNING else 0

    def has(self, name: str) -> set[str]:
        generation = self.of(name).generation
        assert generation is not None
        return set(generation.nodes)

    def loans(self) -> list[Incident]:
        incidents = [*self.state.closed, *self.state.incidents.values()]
        return [incident for incident in incidents if incident.kind == LOAN]

    def give(self, name: str) -> None:
        """The lender saves at the step that it was asked for, and goes on without what it gives."""
        step = self.save_for(name)
        self.now += 0.1
        self.answer_orders()
        self.step_all(step + 1)

    def save_for(self, name: str) -> int:
        """Every rank saves at the step that a planned change of this job waits for."""
        self.about = name
        planned = self.job.planned
        assert planned is not None
        self.train(planned.at_step, save=True)
        return planned.at_step

    def stop(self, name: str) -> None:
        self.fold(JobStopRequested(self.now, name, "enough", save=False))
        self.answer_orders()

    def waits_for(self, name: str) -> str:
        return waits_for(self.state, self.of(name))

    def reserved(self, name: str) -> tuple[str, ...]:
        return reserved_for(Turn(self.state, self.now), self.of(name))


def lending(*, low_dp: int = 3, min_dp: int = 1, decide: bool = True) -> Fleets:
    """`low` has all nodes, and `high`, which needs one, has waited long enough to ask for it."""
    fleet = Fleets(low_dp, decide=decide)
    fleet.start(LOW, low_dp, min_dp=min_dp)
    fleet.start(HIGH, 1, priority=5)
    fleet.wait(11)
    return fleet


# ---------------------------------------------------------------- reserved spares


def test_a_reserved_spare_is_not_taken_by_a_job_of_equal_or_lower_priority() -> None:
    fleet = Fleets(4)
    fleet.start(LOW, 2, spares=1)
    assert fleet.reserved(LOW) == ("n2",)
    fleet.start("equal", 2)
    fleet.start("lower", 2, priority=-1)
    fleet.wait(61)
    assert fleet.of("equal").phase is JobPhase.PREPARING
    assert fleet.has("equal") == {"n3"}, "it starts with what is left, as a job without its full mesh does"
    assert fleet.of("lower").phase is JobPhase.PENDING
    assert "n2 is reserved for low" in fleet.waits_for("lower")
    assert "low has 2 nodes" in fleet.waits_for("lower")
    assert not fleet.loans()


def test_the_job_takes_its_reserved_spare_and_gets_another_one_reserved() -> None:
    fleet = Fleets(4)
    fleet.start(LOW, 2, spares=1)
    fleet.start("equal", 2)
    fleet.about = LOW
    fleet.lose("n1")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.HOT_SWAP
    assert fleet.has(LOW) == {"n0", "n2"}
    assert fleet.reserved(LOW) == ("n3",)
    fleet.go(LOW)
    assert fleet.of("equal").phase is JobPhase.PENDING


def test_a_node_on_which_old_workers_of_the_job_still_live_is_the_last_that_is_reserved_for_it() -> None:
    fleet = Fleets(4)
    fleet.start(LOW, 2, spares=1)
    fleet.about = LOW
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.gone("n0")  # while the restart is prepared: n2 takes its place
    fleet.wait(20)
    fleet.go(LOW)
    assert fleet.has(LOW) == {"n1", "n2"}
    assert fleet.reserved(LOW) == ("n3",)
    fleet.hello("n0", running=1)
    assert fleet.reserved(LOW) == ("n3",), "n0 can take no ranks before its old worker has stopped"
    fleet.start("equal", 1)
    assert fleet.of("equal").phase is JobPhase.PENDING
    fleet.answer_orders()  # the order to stop it
    assert fleet.of("equal").phase is JobPhase.STARTING
    assert len(fleet.reserved(LOW)) == 1


def test_a_job_of_higher_priority_takes_a_node_that_nobody_reserves_and_then_a_reserved_one() -> None:
    fleet = Fleets(4)
    fleet.start(LOW, 1, spares=2)
    assert fleet.reserved(LOW) == ("n1", "n2")
    fleet.start(HIGH, 2, priority=1)
    assert fleet.has(HIGH) == {"n1", "n3"}
    assert fleet.reserved(LOW) == ("n2",)


def test_spares_are_reserved_while_the_job_runs_or_waits_for_a_time_and_not_while_it_lacks_nodes() -> None:
    fleet = Fleets(3)
    fleet.start(LOW, 4, spares=1, min_dp=4)
    assert fleet.of(LOW).phase is JobPhase.PENDING
    fleet.start("equal", 2)
    assert fleet.has("equal") == {"n0", "n1"}
    fleet.stop("equal")
    fleet.stop(LOW)
    fleet.start("first", 2, spares=1, min_dp=2)
    fleet.decide = False
    fleet.about = "first"
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    fleet.answer(wait("the file system is away", retry_s=30))
    fleet.answer_orders()
    assert fleet.of("first").phase is JobPhase.WAITING
    assert fleet.reserved("first") == ("n2",)
    fleet.start("second", 1)
    assert fleet.of("second").phase is JobPhase.PENDING


def test_jobs_without_the_two_keys_share_as_before() -> None:
    fleet = Fleets(3)
    fleet.start(LOW, 2)
    fleet.start("other", 2)
    fleet.wait(600)
    assert not fleet.loans()
    assert fleet.has("other") == {"n2"}


# ---------------------------------------------------------------- who comes first


def test_of_several_jobs_that_wait_the_one_of_the_highest_priority_starts_first_then_the_oldest() -> None:
    fleet = Fleets(1)
    fleet.start("all", 1)
    for name, priority in (("old", 1), ("young", 1), ("urgent", 2), ("patient", -3)):
        fleet.now += 1
        fleet.start(name, 1, priority=priority)
    began, runs = [], "all"
    while runs:
        fleet.stop(runs)
        runs = next((name for name, one in fleet.state.jobs.items() if one.phase is JobPhase.STARTING), "")
        if runs:
            began.append(runs)
            fleet.go(runs)
    assert began == ["urgent", "old", "young", "patient"]


def test_a_job_that_cannot_use_a_node_does_not_keep_it_from_others() -> None:
    fleet = Fleets(2)
    fleet.start(HIGH, 4, priority=9, min_dp=3)
    fleet.start(LOW, 2)
    assert fleet.dp(LOW) == 2
    fleet.wait(300)
    assert not fleet.loans(), "both of its nodes would not be enough"


def test_a_node_that_a_job_is_about_to_grow_into_is_not_taken_by_one_of_lower_priority() -> None:
    fleet = Fleets(3)
    fleet.start(HIGH, 3, priority=1)
    fleet.lose("n2")
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 2
    fleet.connect("n3")
    fleet.start(LOW, 1)
    assert fleet.of(LOW).phase is JobPhase.PENDING
    assert "n3 is reserved for high (priority 1)" in fleet.waits_for(LOW)
    fleet.save_for(HIGH)
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 3


# ---------------------------------------------------------------- loans


def test_a_replica_is_lent_and_comes_back() -> None:
    fleet = lending()
    (loan,) = fleet.loans()
    assert loan.job == LOW
    assert loan.loan is not None
    assert (loan.loan.job, loan.loan.dp, loan.loan.nodes) == (HIGH, 2, ("n2",))
    assert loan.action is not None
    assert loan.action.kind is ActionKind.SCALE_DOWN
    assert fleet.of(LOW).phase is JobPhase.RUNNING, "nothing stops before the save"
    fleet.give(LOW)
    (loan,) = fleet.loans()
    assert loan.closed
    assert loan.rework_steps == 0
    assert fleet.dp(LOW) == 2
    assert fleet.of(HIGH).phase is JobPhase.STARTING
    fleet.go(HIGH)
    assert fleet.has(HIGH) == {"n2"}
    lent = fleet.of(LOW).lent
    assert lent is not None
    assert lent.to == HIGH
    fleet.stop(HIGH)
    fleet.save_for(LOW)
    fleet.go(LOW)
    assert fleet.dp(LOW) == 3
    assert fleet.of(LOW).lent is None
    assert "after a loan to high" in fleet.notes()


def test_a_job_waits_a_moment_before_it_asks() -> None:
    fleet = Fleets(3)
    fleet.start(LOW, 3)
    fleet.start(HIGH, 1, priority=5)
    fleet.wait(9)
    assert not fleet.loans()
    fleet.connect("n3")
    assert fleet.has(HIGH) == {"n3"}
    fleet.go(HIGH)
    fleet.wait(600)
    assert not fleet.loans()


@pytest.mark.parametrize("answer", [ignore("it is nearly done"), wait("later", retry_s=900.0)], ids=["ignore", "wait"])
def test_a_policy_may_refuse_and_is_left_alone_for_a_while(answer: Action) -> None:
    fleet = lending(decide=False)
    fleet.answer(answer)
    assert fleet.dp(LOW) == 3
    (loan,) = fleet.loans()
    assert loan.closed
    assert answer.reason in loan.outcome
    assert not fleet.state.jobs[LOW].planned
    fleet.wait(590)
    assert len(fleet.loans()) == 1
    fleet.wait(340)
    assert len(fleet.loans()) == 2


def test_what_gives_nothing_is_no_answer() -> None:
    fleet = lending(decide=False)
    for useless in (hot_swap("no"), scale_down("no", dp=1), scale_down("no", "n0")):
        (loan,) = fleet.loans()
        fleet.about = LOW
        assert "answer scale_down(reason, dp=2), or refuse with wait or ignore" in check(useless, loan, fleet.view)
    fleet.answer(hot_swap("no"))
    (loan,) = fleet.loans()
    assert loan.action is not None
    assert loan.action.kind is ActionKind.SCALE_DOWN
    assert "because default policy answered hot_swap" in loan.decided_by


def test_nobody_lends_below_its_minimum() -> None:
    fleet = lending(min_dp=3)
    fleet.wait(900)
    assert not fleet.loans()
    assert "low has 3 nodes" in fleet.waits_for(HIGH)


def test_equals_do_not_lend() -> None:
    fleet = Fleets(3)
    fleet.start(LOW, 3, priority=5)
    fleet.start(HIGH, 1, priority=5)
    fleet.wait(900)
    assert not fleet.loans()


def test_no_loan_that_would_not_help() -> None:
    """The nodes of the one that could lend have no room for the workers of the other."""
    fleet = Fleets(3)
    fleet.start(LOW, 3)
    fleet.submit(replace(job(2, nproc=2, name=HIGH), priority=5))
    fleet.wait(900)
    assert not fleet.loans()


def test_the_lowest_priority_lends_first_and_only_what_is_needed() -> None:
    fleet = Fleets(6)
    fleet.start("middle", 3, priority=1)
    fleet.start(LOW, 3)
    fleet.start(HIGH, 1, priority=5)
    fleet.wait(11)
    (loan,) = fleet.loans()
    assert loan.job == LOW
    assert loan.loan is not None
    assert loan.loan.dp == 2


def test_several_jobs_lend_together_and_the_borrower_starts_once() -> None:
    fleet = Fleets(4)
    fleet.start("a", 2)
    fleet.start("b", 2)
    fleet.start(HIGH, 2, priority=5, min_dp=2)
    fleet.wait(11)
    assert sorted(loan.job for loan in fleet.loans()) == ["a", "b"]
    fleet.give("a")
    assert fleet.of(HIGH).phase is JobPhase.PENDING
    fleet.start("thief", 1)
    assert fleet.of("thief").phase is JobPhase.PENDING, "what was given is kept for the borrower"
    fleet.give("b")
    assert fleet.of(HIGH).phase is JobPhase.STARTING
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 2


def test_what_was_given_and_is_not_taken_is_free_again_and_is_not_asked_for_again_soon() -> None:
    fleet = Fleets(4)
    fleet.start("a", 2)
    fleet.start("b", 2)
    fleet.start(HIGH, 2, priority=5, min_dp=2)
    fleet.decide = False
    fleet.wait(11)
    first, second = (fleet.state.incidents[question.incident].job for question in fleet.questions)
    loan = next(each.loan for each in fleet.loans() if each.job == first)
    assert loan is not None
    fleet.answer(scale_down("yes", dp=loan.dp))
    fleet.give(first)
    fleet.answer(ignore("no"))
    assert fleet.dp(second) == 2
    fleet.decide = True
    fleet.wait(125)
    assert "did not take" in fleet.notes()
    fleet.save_for(first)
    fleet.go(first)
    assert fleet.dp(first) == 2
    fleet.wait(900)
    assert len(fleet.loans()) == 2


def test_a_waiting_job_gets_a_replica_of_another_one() -> None:
    fleet = Fleets(5)
    fleet.start(LOW, 3)
    fleet.start(HIGH, 2, priority=5, min_dp=2)
    fleet.lose("n4")
    fleet.answer_orders()
    assert fleet.of(HIGH).phase is JobPhase.WAITING
    fleet.wait(11)
    fleet.give(LOW)
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 2
    assert fleet.has(HIGH) == {"n2", "n3"}


def test_a_job_gets_a_node_back_that_it_had_before_another_job_got_it() -> None:
    """Its first start failed, and its plan still names the node that the lender has grown into meanwhile."""
    fleet = Fleets(5)
    fleet.start(LOW, 3)
    fleet.start(HIGH, 3, priority=5, min_dp=3)
    fleet.wait(11)
    step = fleet.save_for(LOW)
    fleet.now += 0.1
    fleet.answer_orders("n4")
    fleet.step_all(step + 1)
    assert fleet.of(HIGH).phase is JobPhase.PREPARING
    fleet.wait(fleet.of(HIGH).spec.limits.prepare_timeout_s + 1.0)
    fleet.answer_orders()
    assert fleet.of(HIGH).phase is JobPhase.PENDING, "n4 did not prepare"
    fleet.save_for(LOW)
    fleet.go(LOW)
    assert fleet.dp(LOW) == 3
    assert fleet.has(LOW) & fleet.has(HIGH), "what it was to start on"
    asked_until = fleet.now + fleet.state.config.loan_unused_s + fleet.state.config.kept_s + 60.0
    while len(fleet.loans()) < 2 and fleet.now < asked_until:
        fleet.wait(1.0)
    fleet.give(LOW)
    fleet.go(HIGH)
    assert (fleet.dp(LOW), fleet.dp(HIGH)) == (2, 3)
    assert not fleet.has(LOW) & fleet.has(HIGH)


def test_a_job_below_its_size_grows_by_a_replica_of_another_one() -> None:
    fleet = Fleets(5)
    fleet.start(LOW, 3)
    fleet.start(HIGH, 2, priority=5)
    fleet.lose("n4")
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 1
    fleet.wait(11)
    fleet.give(LOW)
    fleet.save_for(HIGH)
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 2
    assert fleet.dp(LOW) == 2


def test_a_loan_that_is_not_needed_any_more_is_called_off_before_it_costs_anything() -> None:
    fleet = lending()
    fleet.connect("n7")
    assert fleet.has(HIGH) == {"n7"}
    fleet.go(HIGH)
    fleet.save_for(LOW)
    assert not fleet.orders(Prepare)
    assert fleet.dp(LOW) == 3
    (loan,) = fleet.loans()
    assert "high does not wait for nodes any more" in loan.outcome


def test_a_fault_of_the_lender_comes_first() -> None:
    fleet = lending()
    fleet.about = LOW
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    (loan,) = fleet.loans()
    assert "overtaken" in loan.outcome
    fleet.go(LOW)
    assert fleet.dp(LOW) == 3


def test_no_job_is_asked_or_changed_while_the_breaker_is_open() -> None:
    fleet = lending()
    fleet.about = LOW
    for name in ("x", "y", "z"):
        fleet.connect(name)
        fleet.gone(name)
        fleet.find(FindingKind.NODE_LOST, name, generation=0)
    assert fleet.state.breaker.open_until is not None
    fleet.save_for(LOW)
    assert fleet.dp(LOW) == 3
    assert "the circuit breaker is open" in fleet.loans()[0].outcome
    fleet.wait(100)
    assert len(fleet.loans()) == 1
    fleet.fold(BreakerResetRequested(fleet.now, "looked"))
    fleet.wait(20)
    assert len(fleet.loans()) == 2


def test_a_new_leader_goes_on_with_a_loan() -> None:
    fleet = lending()
    fleet.fold(LeaderStarted(fleet.now, 2, "secret"))
    fleet.answer_orders(*fleet.has(LOW))
    fleet.give(LOW)
    fleet.go(HIGH)
    assert fleet.has(HIGH) == {"n2"}


def test_a_lender_that_was_changed_lately_is_not_asked() -> None:
    fleet = lending()
    fleet.give(LOW)
    fleet.go(HIGH)
    fleet.start("third", 1, priority=9)
    fleet.wait(500)
    assert len(fleet.loans()) == 1
    fleet.wait(130)
    assert len(fleet.loans()) == 2


def test_a_replica_of_several_nodes_is_lent_as_a_whole() -> None:
    fleet = Fleets(4)
    fleet.start(LOW, 2, pp=2)
    fleet.start(HIGH, 1, priority=2)
    fleet.wait(11)
    (loan,) = fleet.loans()
    assert loan.loan is not None
    assert loan.loan.nodes == ("n2", "n3")
    fleet.give(LOW)
    assert fleet.dp(LOW) == 1
    fleet.go(HIGH)
    assert fleet.dp(HIGH) == 1


def test_the_reason_says_who_has_the_nodes() -> None:
    fleet = Fleets(6)
    for name, dp in (("a", 3), ("b", 1), ("c", 1), ("d", 1)):
        fleet.start(name, dp, priority=1 if name == "b" else 0)
    fleet.start("e", 2)
    assert fleet.waits_for("e") == "a has 3 nodes; b (priority 1) has 1 node; c has 1 node; 1 more job has 1 node"

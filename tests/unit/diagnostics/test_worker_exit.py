"""Exits: the first failing rank is the cause, its peers are cascade, whatever the order in which they are heard."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from diagnosing import BUG, COLLECTIVE, T0, Fleet

from holdfast.diagnostics.detectors.exit_cause import ending
from holdfast.diagnostics.detectors.liveness import UNWITNESSED_GRACE_S
from holdfast.domain import tracing
from holdfast.domain.findings import Blamed, FindingKind, Remedy
from holdfast.domain.signals import ClockTick, WorkerError, WorkerExited

NCCL_ON_CUDA = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: Last error:\n"
)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(nodes=3)
    fleet.start()
    fleet.run(until=5.0)
    return fleet


def test_a_killed_rank_is_found_at_once(fleet: Fleet) -> None:
    fleet.exits(1, signal=9)
    found = fleet.only()
    assert (found.kind, found.rank, found.node, found.generation) == (FindingKind.WORKER_CRASH, 1, "n1", 1)
    assert found.since == T0 + 5.0
    assert "SIGKILL" in found.summary
    assert found.evidence["signal"] == "9"


def test_the_signal_that_killed_a_rank_is_in_the_evidence_beside_the_trace(fleet: Fleet) -> None:
    parent = tracing.new_trace("exit").traceparent
    fleet.fold(replace(fleet.exit_of(1, signal=9), traceparent=parent))
    evidence = fleet.only().evidence
    assert (evidence["signal"], evidence[tracing.SIGNAL]) == ("9", parent)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_peers_are_cascade_in_every_order_of_arrival(fleet: Fleet, order: tuple[int, ...]) -> None:
    exits = [fleet.exit_of(1, at=5.0, signal=9), *(fleet.exit_of(rank, at=5.01, error=COLLECTIVE) for rank in (0, 2))]
    for index in order:
        fleet.now += 0.05
        fleet.fold(exits[index])
    fleet.training = False
    fleet.run(until=12.0)
    assert fleet.only().rank == 1


def test_a_signal_sent_again_says_nothing_new(fleet: Fleet) -> None:
    exit_ = fleet.exit_of(1, signal=9)
    for _ in range(3):
        fleet.fold(exit_)
    assert len(fleet.found) == 1


@pytest.mark.parametrize(
    "fields", [{"expected": True, "signal": 9}, {"exit_code": 0}], ids=["ordered to stop", "clean end"]
)
def test_no_failure(fleet: Fleet, fields: dict[str, object]) -> None:
    fleet.fold(fleet.exit_of(1, **fields))  # type: ignore[arg-type]
    fleet.run(until=7.0)
    assert fleet.found == []


def test_an_exit_after_the_generation_was_stopped_is_no_crash(fleet: Fleet) -> None:
    fleet.stop("n1")
    fleet.exits(1, signal=9)
    assert fleet.found == []


def test_a_collective_error_alone_is_reported_late_and_with_doubt(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(2, at=5.02, error=COLLECTIVE)
    fleet.exits(0, at=5.01, error=COLLECTIVE)
    fleet.run(until=6.9)
    assert fleet.found == []  # the third may be the root
    fleet.run(until=7.1)
    found = fleet.only()
    assert (found.kind, found.rank, found.node) == (FindingKind.WORKER_EXCEPTION, None, "")  # culprit not known
    assert found.evidence["first"] == "rank 0 on n0"
    assert found.confidence < 0.5
    assert "no rank or node that failed first is known" in found.summary


def leaves(fleet: Fleet, rank: int = 2, after_s: float = 0.0) -> None:
    """The rank is done, the others fail thereby, and its process ends `after_s` later."""
    now = fleet.now
    left = fleet.exit_of(rank, at=now, exit_code=0)
    others = [fleet.exit_of(each, at=now + 0.01, error=COLLECTIVE) for each in range(3) if each != rank]
    for exit_ in others if after_s else [left, *others]:
        fleet.fold(exit_)
    fleet.run(until=now + after_s)
    fleet.fold(left)
    fleet.run(until=now + after_s + 0.4)


@pytest.mark.parametrize("after_s", [0.0, 0.2, 1.5])
def test_a_rank_that_ended_with_code_0_while_others_needed_it_is_named(fleet: Fleet, after_s: float) -> None:
    fleet.training = False
    leaves(fleet, after_s=after_s)
    found = fleet.only()
    assert (found.rank, found.node, found.since) == (2, "n2", T0 + 5.0)
    assert "ended with exit code 0" in found.summary
    assert found.evidence["root"] == "left early"


def test_a_rank_that_leaves_the_others_again_is_an_error_of_the_script(fleet: Fleet) -> None:
    """Inputs of different lengths, without an agreement on the end."""
    fleet.training = False
    leaves(fleet)
    for generation in (2, 3):
        fleet.generation = generation
        fleet.start()
        leaves(fleet, after_s=1.0)
    first, *again = fleet.found
    assert (first.kind, first.attribution.tries) == (FindingKind.WORKER_CRASH, 0)
    assert [(found.kind, found.rank, found.attribution.tries) for found in again] == [
        (FindingKind.REPEATED_EXCEPTION, 2, 2),
        (FindingKind.REPEATED_EXCEPTION, 2, 3),
    ]
    assert again[0].attribution.blame is Blamed.USER
    assert "while others continued, for the 2nd time" in again[0].summary


def test_a_rank_that_leaves_the_others_at_a_later_step_is_no_loop(fleet: Fleet) -> None:
    fleet.training = False
    leaves(fleet)
    fleet.generation = 2
    fleet.start()
    fleet.training = True
    fleet.run(until=fleet.now + 5.0)
    fleet.training = False
    leaves(fleet)
    assert fleet.found[-1].kind is not FindingKind.REPEATED_EXCEPTION


def test_a_rank_that_crashed_is_the_cause_though_another_had_ended(fleet: Fleet) -> None:
    fleet.training = False
    fleet.fold(fleet.exit_of(2, at=5.0, exit_code=0))
    fleet.exits(0, at=5.2, error=COLLECTIVE)
    fleet.exits(1, at=5.1, signal=9)
    fleet.run(until=6.0)
    assert fleet.only().rank == 1


def test_one_that_ended_after_the_others_failed_has_left_nobody(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(0, at=5.0, error=COLLECTIVE)
    fleet.fold(fleet.exit_of(2, at=5.15, exit_code=0))
    fleet.run(until=7.4)
    assert fleet.only().rank is None


def test_a_root_that_is_heard_late_corrects_the_finding(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(0, at=5.0, error=COLLECTIVE)
    fleet.run(until=5.4)
    fleet.exits(1, at=4.99, signal=9)
    doubtful, root = fleet.found
    assert root.rank == 1
    assert root.evidence["supersedes"] == doubtful.id


def test_the_earlier_of_two_own_failures_wins_beyond_the_skew_of_clocks(fleet: Fleet) -> None:
    fleet.exits(0, at=5.0, signal=9)
    fleet.exits(1, at=4.95, signal=9)  # within what clocks may differ by
    assert len(fleet.found) == 1
    fleet.exits(2, at=4.5, signal=9)
    assert [finding.rank for finding in fleet.found] == [0, 2]
    assert fleet.found[1].evidence["supersedes"] == fleet.found[0].id


def test_an_exception_is_dated_by_its_own_time(fleet: Fleet) -> None:
    fleet.exits(1, at=5.0, error=WorkerError("ValueError", "x", at=T0 + 3.0))
    assert fleet.only().since == T0 + 3.0


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (WorkerError("torch.distributed.DistBackendError", "NCCL error in: x.cpp"), False),
        (WorkerError("DistNetworkError", "The client socket has failed to connect"), False),
        (WorkerError("RuntimeError", "[/gloo/transport/tcp/pair.cc:534] Connection reset by peer"), False),
        (WorkerError("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"), False),
        (WorkerError("ConnectionRefusedError", "[Errno 111] Connection refused"), False),
        (
            WorkerError("c10.DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL("),
            False,
        ),
        (WorkerError("c10.Error", "[pair.cc:553] Connection closed by peer [10.0.0.1]:17839"), False),
        (WorkerError("c10.Error", "Expected all tensors to be on the same device"), True),
        (WorkerError("gloo.IoException", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), False),
        (WorkerError("c10.DistBackendError", "CUDA error: uncorrectable ECC error encountered"), True),
        (WorkerError("torch.distributed.DistBackendError", NCCL_ON_CUDA + "Cuda failure 2 'out of memory'"), True),
        (
            WorkerError("torch.distributed.DistBackendError", NCCL_ON_CUDA + "Cuda failure 802 'system not yet init"),
            True,
        ),
        (WorkerError("RuntimeError", "CUDA error: an illegal memory access was encountered"), True),
        (WorkerError("ValueError", "nccl is not a valid optimizer"), True),
        (WorkerError("OSError", "[Errno 28] No space left on device"), True),
    ],
)
def test_which_errors_are_echoes(fleet: Fleet, error: WorkerError, own: bool) -> None:
    fleet.exits(1, error=error)
    assert bool(fleet.found) is own


def test_the_watchdogs_abort_is_an_echo(fleet: Fleet) -> None:
    fleet.exits(1, signal=6, log_tail=("[rank1] Watchdog caught collective operation timeout: WorkNCCL",))
    assert fleet.found == []
    fleet.exits(2, signal=11, log_tail=("nccl loaded",))
    assert fleet.only().rank == 2


WARNED = (  # by every script that ends without destroy_process_group(), since torch 2.4
    "[rank1]:[W825 13:09:39.967659278 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called "
    "before program exit, which can leak resources. (function operator())"
)
GLOO = "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
NCCL = "node-1:3054646:3054695 [1] NCCL INFO ncclCommInitRank comm 0x5581 rank 1 nranks 4 - Init COMPLETE"
AFTER_AN_ERROR = (
    '  File "/site-packages/torch/nn/parallel/distributed.py", line 800 in forward',
) * 20  # of faulthandler


@pytest.mark.parametrize(
    ("log_tail", "own"),
    [
        (("NCCL version 2.27.3+cuda12.9", GLOO, "ERROR: the vocabulary is empty"), True),
        ((NCCL, "the vocabulary is empty", WARNED), True),
        (("[rank1]: KeyError: 'lr'", WARNED), True),
        (("ConnectionResetError: [Errno 104] Connection reset by peer", *(f"shard {n} again" for n in range(9))), True),
        (("[E817 17:40:34.227 ProcessGroupNCCL.cpp:1515] [PG 0 Rank 1] Process group watchdog thread terminated with "
          "exception: CUDA error: uncorrectable ECC error encountered", *AFTER_AN_ERROR), True),
        (("[rank1]:[E210 02:06:33.393 ProcessGroupNCCL.cpp:636] [Rank 1] To avoid data inconsistency, we are taking the "
          "entire process down.", *AFTER_AN_ERROR), False),
        (("frame #3: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x14d (0x7f in libtorch_cuda.so)", *AFTER_AN_ERROR), False),
        (("[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:93, unhandled system error", WARNED), False),
        (("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:17839", GLOO), False),
    ],
)  # fmt: skip
def test_only_what_states_why_a_process_ended_makes_it_an_echo(
    fleet: Fleet, log_tail: tuple[str, ...], own: bool
) -> None:
    """Scripts that print their exception themselves, or end by an exit code, leave only the log."""
    fleet.exits(1, exit_code=1, log_tail=log_tail)
    assert bool(fleet.found) is own


# ------------------------------------------------------------------ the same exception again


def fails_again(fleet: Fleet, *, generation: int, step: int, error: WorkerError = BUG, rank: int = 1) -> None:
    """One more generation, from a checkpoint, that raises at `step`."""
    fleet.stop()
    fleet.now += 1.0
    fleet.start(generation, connect=False)
    for each in fleet.ranks.values():
        each.step, each.alive = step, True
    fleet.exits(rank, error=error)


def test_the_same_exception_at_the_same_step_stops_the_job(fleet: Fleet) -> None:
    fleet.exits(1, error=BUG)
    other_message = WorkerError(BUG.type, "bad batch 99", BUG.frames)
    fails_again(fleet, generation=2, step=fleet.ranks[1].step, error=other_message, rank=2)
    first, second = fleet.found
    assert first.kind is FindingKind.WORKER_EXCEPTION
    assert (second.kind, second.recommended_actions) == (FindingKind.REPEATED_EXCEPTION, (Remedy.STOP_JOB,))
    assert second.evidence["tries"] == "2"
    assert second.rank == 2
    for word in ("ValueError", "Rank 2", "step 10", "2nd time"):
        assert word in second.summary


def test_a_rank_that_failed_before_it_stepped_again_counts(fleet: Fleet) -> None:
    """Restored to the step where it failed: nothing finished in this generation."""
    fleet.exits(1, error=BUG)
    fails_again(fleet, generation=2, step=0)
    assert fleet.kinds()[-1] is FindingKind.REPEATED_EXCEPTION
    assert fleet.found[-1].evidence["step"] == "10"


@pytest.mark.parametrize(
    ("step", "error"),
    [(14, BUG), (10, WorkerError("KeyError", "x", BUG.frames)), (10, WorkerError("ValueError", "x", ("a:1 f",)))],
    ids=["another step", "another type", "another place"],
)
def test_another_failure_is_not_the_same(fleet: Fleet, step: int, error: WorkerError) -> None:
    fleet.exits(1, error=BUG)
    fails_again(fleet, generation=2, step=step, error=error)
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION] * 2


def test_a_cascading_error_in_the_same_line_is_no_second_node(fleet: Fleet) -> None:
    """All ranks are in loss.backward(): the one fails by itself, the others because it has gone."""
    own = WorkerError("RuntimeError", "view size is not compatible", BUG.frames)
    cascading = WorkerError("RuntimeError", "[gloo/transport/tcp/pair.cc:525] Connection closed by peer", BUG.frames)
    for generation in (1, 2):
        if generation == 1:
            fleet.exits(1, error=own)
        else:
            fails_again(fleet, generation=generation, step=fleet.ranks[1].step, error=own)
        fleet.exits(2, error=cascading)
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION]
    fails_again(fleet, generation=3, step=fleet.ranks[1].step, error=own)
    assert fleet.found[-1].evidence["nodes"] == "1"


def test_a_rank_that_was_stopped_while_it_raised_the_same_exception_is_a_second_node(fleet: Fleet) -> None:
    """All ranks raise at the same step. The report of the first stops the others before their processes have ended."""
    for generation in (1, 2):
        if generation == 1:
            fleet.exits(1, error=BUG)
        else:
            fails_again(fleet, generation=generation, step=fleet.ranks[1].step)
        fleet.stop("n2")
        fleet.fold(fleet.exit_of(2, expected=True, signal=9, error=BUG))
        fleet.fold(fleet.exit_of(0, expected=True, signal=9, error=WorkerError("KeyboardInterrupt", "", BUG.frames)))
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION]
    assert (fleet.found[-1].evidence["nodes"], fleet.found[-1].evidence["tries"]) == ("2", "2")


def test_progress_beyond_the_failure_resets_it(fleet: Fleet) -> None:
    fleet.exits(1, error=BUG)
    fleet.stop()
    fleet.start(2, connect=False)
    for rank in fleet.ranks.values():
        rank.alive = True
    fleet.run(until=7.0)
    fails_again(fleet, generation=3, step=10)
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION] * 2


def test_one_generation_that_raises_on_every_rank_is_one_failure(fleet: Fleet) -> None:
    for rank in range(3):
        fleet.exits(rank, error=BUG)
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION]


def test_a_rare_crash_of_a_script_without_steps_is_no_loop(fleet: Fleet) -> None:
    fleet.training = False
    for generation in (2, 3):
        fleet.stop()
        fleet.start(generation, connect=False)
        for rank in fleet.ranks.values():
            rank.step, rank.alive = 0, True
        fleet.now += 3600.0
        fleet.exits(1, error=BUG)
    assert FindingKind.REPEATED_EXCEPTION not in fleet.kinds()


def test_a_job_submitted_again_under_its_name_starts_without_a_past(fleet: Fleet) -> None:
    fleet.exits(1, error=BUG)
    fleet.stop()
    fleet.now += 5.0
    fleet.submission = "s2"
    fleet.start(1, connect=False)
    fleet.exits(1, error=BUG)
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION] * 2


def test_collective_errors_never_make_a_loop(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(1, error=COLLECTIVE)
    fleet.run(until=6.0)
    fails_again(fleet, generation=2, step=10, error=COLLECTIVE)
    fleet.run(until=fleet.now + 1.0)
    assert fleet.kinds() == [FindingKind.WORKER_EXCEPTION] * 2


# ------------------------------------------------------------------ what it says of the time


def test_a_failure_after_a_restart_is_not_called_one_before_the_first_step(fleet: Fleet) -> None:
    """Restored to step 10; the rank had not stepped again, or its agent does not know."""
    fails_again(fleet, generation=2, step=0)
    assert "before its first step after a restart (the job had finished step 10)" in fleet.only().summary
    assert fleet.only().evidence["blame"] == "unknown"


def test_of_a_script_that_reports_no_steps_no_step_is_claimed() -> None:
    fleet = Fleet(nodes=2)
    fleet.training = False
    fleet.start()
    fleet.now += 3600.0
    fleet.exits(1, signal=11)
    assert "without having reported a step" in fleet.only().summary


@pytest.mark.parametrize("observed", [0, 250])
def test_an_exception_after_observed_steps_is_not_one_before_the_first_step(observed: int) -> None:
    """A script that reports no steps fails within minutes. Before its first step that would be a bug of its own."""
    fleet = Fleet(nodes=2)
    fleet.training = False
    fleet.start()
    fleet.now += 30.0
    fleet.exits(1, error=BUG, observed=observed)
    found = fleet.only()
    assert ("before its first step" in found.summary) == (not observed)
    assert ("after 250 optimizer steps (observed: the script reports none)" in found.summary) == bool(observed)
    assert (found.attribution.blame is Blamed.USER) == (not observed)


def test_a_repeated_exception_after_observed_steps_is_not_one_before_the_first_step() -> None:
    fleet = Fleet(nodes=2)
    fleet.training = False
    fleet.start()
    for generation in (1, 2, 3):
        if generation > 1:
            fleet.stop()
            fleet.now += 1.0
            fleet.start(generation, connect=False)
        fleet.exits(1, error=BUG, observed=4)
    assert fleet.kinds()[-1] is FindingKind.REPEATED_EXCEPTION
    assert "after 4 optimizer steps (observed: the script reports none), for the 3rd time" in fleet.found[-1].summary


def test_a_failure_before_the_first_step_is_called_so() -> None:
    fleet = Fleet(nodes=2)
    fleet.start()
    fleet.exits(1, error=BUG)
    assert "before its first step." in fleet.only().summary


def test_an_estimated_date_is_called_one(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(2, error=COLLECTIVE)
    fleet.run(until=5.4)
    assert fleet.only().evidence["dated"].startswith("estimate: the first communication error")
    fleet.found.clear()
    fleet.start(2, connect=False)
    fleet.exits(0, signal=9)
    assert fleet.only().evidence["dated"] == "the end of the process by the agent's clock"
    fleet.breaks("n1")
    fleet.run(until=fleet.now + UNWITNESSED_GRACE_S + 1.0)
    assert fleet.found[-1].evidence["dated"] == "estimate: its last sign of life"


def test_a_communication_error_before_any_start_is_reported_names_no_node() -> None:
    """How many ranks the generation has is not known then: other nodes may belong to it."""
    fleet = Fleet(nodes=3)
    fleet.connects("n1", "n1-a")
    fleet.exits(1, error=COLLECTIVE)
    fleet.now += 12.0
    fleet.fold(ClockTick(T0 + fleet.now))
    found = fleet.only()
    assert (found.node, found.rank) == ("", None)
    assert found.evidence["first"] == "rank 1 on n1"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("12.00 MiB is free.", "raised E: 12.00 MiB is free"),
        ("one\n  two", "raised E: one two"),
        (f"{'ab ' * 200}.", f"raised E: {'ab ' * 80}".rstrip() + " …"),
        ("", "raised E"),
    ],
    ids=["full stop", "lines", "long", "empty"],
)
def test_the_message_of_an_exception_is_part_of_a_sentence(message: str, shown: str) -> None:
    error = WorkerError(type="E", message=message)
    exit_ = WorkerExited("n0", T0, "x", 1, 0, pid=7, exit_code=1, signal=None, step=3, expected=False, error=error)
    assert ending(exit_) == shown

"""Replicas that differ: the odd one is named when a majority says so, nobody otherwise; a doubtful check is only said."""

from __future__ import annotations

from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.silent_corruption import SilentCorruption
from holdfast.diagnostics.roster import RunStarted
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, ReplicaChecks

T0 = 1_700_000_000.0
GOOD, BAD, OTHER = "a" * 16, "b" * 16, "c" * 16


class Watch:
    """A job with one rank per node, checked step by step."""

    def __init__(self, dp: int = 3, pp: int = 1, per_node: int = 1, mesh: Mesh | None = None) -> None:
        self.mesh = mesh or Mesh.of({"dp": dp, "pp": pp})
        self.per_node = per_node
        self.detector = Alone(SilentCorruption())
        self.now = T0
        self.start(1)

    def node(self, rank: int) -> str:
        return f"n{rank // self.per_node}"

    def start(self, generation: int) -> None:
        self.generation = generation
        for rank in range(self.mesh.world_size):
            self.fold(GenerationStarted(self.node(rank), T0, "gpt", generation, self.mesh, (rank,), HangSpec()))

    def fold(self, item: GenerationStarted | ReplicaChecks | RunStarted) -> list[Finding]:
        self.now += 0.1
        return [*self.detector.observe(item, self.now)]

    def check(
        self, step: int, *, restored: bool = False, lost: tuple[int, ...] = (), odd: dict[int, str] | None = None
    ) -> list[Finding]:
        """Every rank reports `GOOD` but those in `odd`; those in `lost` report nothing."""
        found: list[Finding] = []
        for rank in range(self.mesh.world_size):
            digest = (odd or {}).get(rank, GOOD)
            item = ReplicaChecks(
                self.node(rank), self.now, "gpt", self.generation, (rank,), (step,), (digest,), (0.002,), (restored,)
            )
            found += self.fold(item) if rank not in lost else []
        return found


def test_replicas_that_agree_say_nothing() -> None:
    watch = Watch()
    assert [finding for step in range(10, 500, 10) for finding in watch.check(step)] == []


def test_the_odd_one_of_three_is_named_with_the_last_step_that_passed() -> None:
    watch = Watch()
    watch.check(10)
    watch.check(20)
    (finding,) = watch.check(30, odd={1: BAD})
    assert (finding.kind, finding.severity) == (FindingKind.SILENT_CORRUPTION, Severity.FATAL)
    assert (finding.node, finding.rank, finding.evidence["verified_step"]) == ("n1", 1, "20")
    assert finding.evidence["differing"] == f"rank 1 (n1): {BAD}"
    assert watch.check(40, odd={1: BAD}) == [], "one verdict for a generation"


def test_positions_are_compared_on_their_own_and_a_node_with_several_odd_ranks_is_one_node() -> None:
    watch = Watch(dp=3, pp=2, per_node=2)
    stages = {1: OTHER, 3: OTHER, 5: OTHER}  # the second stage holds other parameters, everywhere the same
    watch.check(10, odd=stages)
    (finding,) = watch.check(20, odd={**stages, 2: BAD, 3: BAD})
    assert (finding.node, finding.severity) == ("n1", Severity.FATAL)


def test_replicas_are_those_of_the_mesh_in_any_order() -> None:
    watch = Watch(mesh=Mesh.of({"pp": 2, "dp": 3, "tp": 2}))
    shares = {rank: f"{watch.mesh.position_of(rank):016x}" for rank in range(12)}
    assert watch.check(10, odd=shares) == []
    (finding,) = watch.check(20, odd={**shares, 9: BAD})
    assert (finding.node, finding.rank, finding.severity) == ("n9", 9, Severity.FATAL)


def test_one_of_two_differs_and_nobody_is_named() -> None:
    watch = Watch(dp=2)
    watch.check(10)
    (finding,) = watch.check(20, odd={1: BAD})
    assert (finding.severity, finding.node, finding.rank) == (Severity.ERROR, "", None)
    assert finding.evidence["verified_step"] == "10"
    assert "no majority" in finding.summary


def test_odd_ranks_on_two_nodes_are_no_single_culprit() -> None:
    watch = Watch(dp=5)
    watch.check(10)
    (finding,) = watch.check(20, odd={1: BAD, 3: OTHER})
    assert (finding.severity, finding.node) == (Severity.ERROR, "")


def test_replicas_that_never_agreed_are_not_believed_to_have_to() -> None:
    watch = Watch()
    (finding,) = watch.check(1, odd={1: BAD})
    assert (finding.severity, finding.node) == (Severity.WARNING, "")
    assert watch.check(10, odd={1: OTHER}) == []
    watch.start(2)
    assert watch.check(20, odd={1: BAD}) == [], "said once for a job"


def test_a_missing_report_is_no_verdict() -> None:
    watch = Watch()
    watch.check(10)
    assert watch.check(20, lost=(2,), odd={1: BAD}) == []
    (finding,) = watch.check(30, odd={1: BAD})
    assert finding.evidence["verified_step"] == "10"


def test_a_restored_step_that_differs_is_the_checkpoint_and_no_node() -> None:
    watch = Watch()
    watch.check(10)
    watch.check(20)
    watch.start(2)
    (finding,) = watch.check(20, restored=True, odd={1: BAD})
    assert (finding.severity, finding.node, finding.evidence["verified_step"]) == (Severity.ERROR, "", "10")
    watch.start(3)
    assert watch.check(10, restored=True) == []


def test_without_a_step_known_to_be_good_the_restored_one_alone_is_doubted() -> None:
    watch = Watch()
    watch.check(50, restored=True)
    watch.start(2)
    (finding,) = watch.check(50, restored=True, odd={1: BAD})
    assert finding.evidence["verified_step"] == "49"


def test_a_step_that_differs_again_after_going_back_is_only_said() -> None:
    watch = Watch(dp=2)
    watch.check(10)
    watch.check(20, odd={1: BAD})
    watch.start(2)
    watch.check(10, restored=True)
    (finding,) = watch.check(20, odd={1: OTHER})
    assert finding.severity is Severity.WARNING
    assert "the same step" in finding.summary
    watch.start(3)
    watch.check(10, restored=True)
    (finding,) = watch.check(30, odd={1: BAD})
    assert finding.severity is Severity.ERROR, "another step is another fault"


def test_steps_of_a_branch_that_was_given_up_do_not_count_as_passed() -> None:
    watch = Watch()
    for step in (10, 20, 30, 40):
        watch.check(step)
    watch.start(2)
    watch.check(20, restored=True)
    (finding,) = watch.check(30, odd={2: BAD})
    assert finding.evidence["verified_step"] == "20"


def test_nothing_to_compare_is_said_once() -> None:
    watch = Watch(dp=2)
    (finding,) = watch.check(1, odd={0: "", 1: ""})
    assert finding.severity is Severity.WARNING
    assert "nothing to compare" in finding.summary
    assert watch.check(10, odd={0: "", 1: ""}) == []


def test_garbage_ranks_old_generations_and_a_new_submission() -> None:
    watch = Watch()
    watch.check(10)
    watch.fold(ReplicaChecks("n9", T0, "gpt", 1, (99,), (20,), (BAD,), (0.0,), (False,)))
    watch.start(2)
    watch.generation = 1
    assert watch.check(20, odd={1: BAD}) == [], "of an old generation"
    watch.fold(RunStarted("gpt"))
    watch.start(1)
    (finding,) = watch.check(20, odd={1: BAD})
    assert finding.severity is Severity.WARNING, "another job of that name has not agreed yet"

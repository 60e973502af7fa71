"""What is copied, pushed and deleted, and what never is."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.replicator.plan import BACKLOG_STEPS_MAX, plan
from holdfast.replicator.view import Copies, CopyToDisk, Delete, FreeImages, Held, Push, Tier, View, id_of


def image(step: int, rank: int = 0, attempt: int = 1) -> Held:
    return Held(Tier.IMAGE, ShardKey(attempt, step, rank))


def disk(step: int, rank: int = 0, attempt: int = 1) -> Held:
    return Held(Tier.DISK, ShardKey(attempt, step, rank))


OTHERS_ARE_AHEAD = CheckpointId(9, 0)  # every node is said to have something newer than anything here


def view(*held: Held, **changes: object) -> View:
    base = View(
        attempt=1, ranks=(0,), world_size=2, keep=2, peers=(), held=Copies.of(held), saved_by_all=OTHERS_ARE_AHEAD
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def deleted(given_view: View) -> set[int]:
    return {step.key.step for step in plan(given_view) if isinstance(step, Delete)}


def test_only_the_newest_in_memory_is_copied() -> None:
    assert plan(view(image(10), image(20))) == (
        CopyToDisk(ShardKey(1, 20, 0), "newest in memory, not yet on disk"),
    )  # fmt: skip
    assert plan(view(image(10), disk(20))) == ()


def test_a_save_goes_to_the_disk_while_its_checksums_are_computed() -> None:
    new = ShardKey(1, 20, 0)
    assert plan(view(image(10), disk(10), fresh=(new,))) == (CopyToDisk(new, "newest in memory, not yet on disk"),)
    assert plan(view(disk(20), fresh=(new,))) == ()
    assert plan(view(fresh=(new,), disk_full=True)) == ()


def test_the_newest_step_goes_first_over_ranks() -> None:
    steps = plan(view(image(10, 1), image(20, 0), ranks=(0, 1)))
    assert [step.key.step for step in steps if isinstance(step, CopyToDisk)] == [20, 10]
    assert len(steps) == 2


def test_a_peer_gets_what_is_on_disk_and_only_once() -> None:
    assert plan(view(image(10), peers=("b",))) == (
        CopyToDisk(ShardKey(1, 10, 0), "newest in memory, not yet on disk"),
    )  # fmt: skip
    there = view(image(10), disk(10), peers=("b",))
    assert [type(step) for step in plan(there)] == [Push]
    assert plan(replace(there, pushed=frozenset({(ShardKey(1, 10, 0), "b")}))) == ()


def pushes(given_view: View) -> list[tuple[int, int]]:
    """(step, rank) in the order in which the peer gets them."""
    return [(step.key.step, step.key.rank) for step in plan(given_view) if isinstance(step, Push)]


def two_ranks(*steps: int, **changes: object) -> View:
    return view(*(disk(step, rank) for step in steps for rank in (0, 1)), ranks=(0, 1), peers=("b",), **changes)


def sent(*keys: tuple[int, int]) -> frozenset[tuple[ShardKey, str]]:
    return frozenset((ShardKey(1, step, rank), "b") for step, rank in keys)


def test_a_rank_does_not_wait_until_the_copy_of_another_is_on_the_peers_disk() -> None:
    assert pushes(two_ranks(10)) == [(10, 0), (10, 1)]
    assert pushes(two_ranks(10, sent=sent((10, 0)))) == [(10, 1), (10, 0)], "the other rank, then the question"
    both = sent((10, 0), (10, 1))
    assert pushes(two_ranks(10, sent=both)) == [(10, 0), (10, 1)]
    assert pushes(two_ranks(10, sent=both, pushed=sent((10, 0)))) == [(10, 1)]


def test_a_step_that_was_begun_is_finished_before_the_next() -> None:
    assert pushes(two_ranks(10, 20, sent=sent((10, 0))))[0] == (10, 1)
    assert pushes(two_ranks(10, 20, sent=sent((10, 0), (10, 1))))[:2] == [(20, 0), (20, 1)]
    newer_here = (disk(10, 0), disk(10, 1), disk(20, 0))
    assert pushes(view(*newer_here, ranks=(0, 1), peers=("b",), sent=sent((10, 0))))[0] == (10, 1)


def test_a_node_that_lags_takes_the_steps_that_all_who_lag_take() -> None:
    behind = sent((10, 0), (10, 1))
    assert pushes(two_ranks(10, 20, sent=behind))[0] == (20, 0)
    assert pushes(two_ranks(10, 20, 30, sent=behind))[0] == (20, 0), "one that copies every second step, too"
    assert pushes(two_ranks(10, 20, 30, 40, 50, sent=behind))[:2] == [(40, 0), (40, 1)]
    assert pushes(two_ranks(20, 30, 40, 50))[0] == (50, 0), "a peer that has nothing gets the newest"


@given(
    costs=st.lists(st.floats(0.1, 2.5), min_size=2, max_size=5),
    interval=st.sampled_from([1, 5, 7, 10, 1000]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_copies_of_all_nodes_meet_in_one_step_however_slow_they_are(
    costs: list[float], interval: int, order: random.Random
) -> None:
    """`costs`: of one shard's push by node, in intervals between saves. Each node has two ranks."""
    nodes = [_Pushing(cost, order.random()) for cost in costs]
    met: list[int] = []
    for tick in range(1, 97):
        for node in nodes:
            node.save(tick * interval)
            node.work(tick)
        common = set.intersection(*({step for step, ranks in node.copies.items() if ranks == {0, 1}} for node in nodes))
        if common and (not met or max(common) > met[-1]):
            met.append(max(common))
        if met and met[-1] >= 64 * interval:
            break  # it is never less than before
        for node in nodes:
            node.retain(max(common, default=None))
    assert met[-1] >= 64 * interval, "the newest of them is no older than the slowest node needs"


class _Pushing:
    """A node that pushes to "b", as its plan says."""

    def __init__(self, cost: float, phase: float) -> None:
        self.cost, self.free_at = cost, phase
        self.held: list[Held] = []
        self.sent: dict[int, ShardKey] = {}
        self.copies: dict[int, set[int]] = {}  # step → ranks, at the peer
        self.saved_by_all: CheckpointId | None = None

    def view(self) -> View:
        received = frozenset((key, "b") for key in self.sent.values())
        common = self.saved_by_all
        return view(*self.held, ranks=(0, 1), peers=("b",), sent=received, pushed=received, saved_by_all=common)

    def save(self, step: int) -> None:
        self.held += [disk(step, 0), disk(step, 1)]

    def work(self, now: float) -> None:
        while self.free_at < now + 1:
            found = [step.key for step in plan(self.view()) if isinstance(step, Push)]
            if not found:
                self.free_at = now + 1
                return
            self.free_at += self.cost
            self.sent[found[0].rank] = found[0]
            self.copies.setdefault(found[0].step, set()).add(found[0].rank)

    def retain(self, common: int | None) -> None:
        if common is not None:
            self.saved_by_all = CheckpointId(1, common)
        for step in plan(self.view()):
            if isinstance(step, Delete):
                self.held.remove(Held(Tier.DISK, step.key))
        kept = sorted(self.copies)[-2 - BACKLOG_STEPS_MAX :]
        self.copies = {step: ranks for step, ranks in self.copies.items() if step in kept or step == common}


def test_copies_of_other_nodes_are_not_pushed_on() -> None:
    assert plan(view(disk(10, rank=1), peers=("b",))) == ()


def test_a_full_disk_makes_the_peer_the_next_tier() -> None:
    (step,) = plan(view(image(10), peers=("b",), disk_full=True))
    assert isinstance(step, Push)
    assert "disk is full" in step.reason


def test_two_complete_steps_stay_even_when_asked_to_keep_fewer() -> None:
    assert deleted(view(disk(10), disk(20), disk(30), keep=0)) == {10}


def test_a_step_counts_only_when_all_ranks_here_have_it() -> None:
    both = (disk(10, 0), disk(10, 1), disk(20, 0), disk(20, 1))
    assert deleted(view(*both, disk(30, 0), ranks=(0, 1))) == set()
    assert deleted(view(*both, disk(30, 0), disk(30, 1), ranks=(0, 1))) == {10}


def test_nothing_goes_before_its_successor_is_with_a_peer() -> None:
    held = [disk(step) for step in (10, 20, 30)]
    waiting = view(*held, peers=("b",))
    assert deleted(waiting) == set()
    assert deleted(replace(waiting, pushed=frozenset({(ShardKey(1, 10, 0), "b")}))) == set()
    assert deleted(replace(waiting, pushed=frozenset({(ShardKey(1, 20, 0), "b")}))) == {10}


def test_a_peer_that_never_answers_does_not_fill_the_disk() -> None:
    many = [disk(step) for step in range(1, 2 + BACKLOG_STEPS_MAX + 2)]
    assert deleted(view(*many, peers=("b",))) == {1}


def test_what_every_node_has_stays_until_all_have_something_newer() -> None:
    held = [disk(step) for step in (10, 20, 30, 40)]
    assert deleted(view(*held, saved_by_all=CheckpointId(1, 10))) == set()
    assert deleted(view(*held, saved_by_all=CheckpointId(1, 20))) == {10}
    assert deleted(view(*held, saved_by_all=CheckpointId(1, 40))) == {10, 20}
    assert deleted(view(*held, disk(10, rank=1), saved_by_all=CheckpointId(1, 10))) == set(), "nor the copies of others"


def test_without_a_word_more_is_kept_and_not_without_end() -> None:
    backlog = 2 + BACKLOG_STEPS_MAX
    many = [disk(step) for step in range(1, backlog + 2)]
    assert deleted(view(*many, saved_by_all=None)) == set(), "the oldest may be the one that all have"
    assert deleted(view(*many, disk(20), saved_by_all=None)) == {2}
    assert deleted(view(*many, disk(20), saved_by_all=CheckpointId(1, 2))) == {1}, (
        "2 is what all have, and stays for good"
    )
    assert deleted(view(*many, disk(20), disk(30), saved_by_all=CheckpointId(1, 2))) == {1, 3}


def test_a_full_disk_takes_what_might_have_become_the_next_but_not_what_all_have() -> None:
    held = [disk(step) for step in (10, 20, 30, 40, 50)]
    assert deleted(view(*held, saved_by_all=CheckpointId(1, 20), disk_full=True)) == {10, 30}
    assert deleted(view(*held, saved_by_all=None, disk_full=True)) == {20, 30}


def test_what_the_attempt_started_from_stands_for_a_word_that_has_not_come() -> None:
    held = [disk(10), *(disk(step, attempt=2) for step in (15, 25, 35, 45))]
    before = view(*held, attempt=2, restored=CheckpointId(1, 10), disk_full=True)
    assert deleted(replace(before, saved_by_all=None)) == {15, 25}
    assert deleted(replace(before, saved_by_all=CheckpointId(1, 40))) == {15, 25}, (
        "about a lineage given up: as good as none"
    )
    assert deleted(replace(before, saved_by_all=CheckpointId(1, 5))) == {15, 25}
    assert deleted(replace(before, saved_by_all=CheckpointId(2, 35))) == {10, 15, 25}


def test_the_restore_point_outlives_a_lineage_given_up() -> None:
    after_rollback = view(disk(10), disk(20), disk(15, attempt=2), attempt=2, restored=CheckpointId(1, 10))
    assert deleted(after_rollback) == set()  # 20 of attempt 1 is not counted as newer than the restore point
    later = replace(after_rollback, held=Copies.of((*after_rollback.held, disk(25, attempt=2))))
    assert deleted(later) == {10}, "the newest that were given up stay: the user may know better"
    assert deleted(replace(later, disk_full=True)) == {10, 20}
    more = replace(later, held=Copies.of((*later.held, disk(30), disk(40))))
    assert deleted(more) == {10, 20}


def test_what_an_earlier_submission_saved_is_never_deleted_for_want_of_room() -> None:
    old = [disk(step) for step in (10, 20, 30)]
    new = [disk(step, attempt=101) for step in (10, 20, 30, 40)]
    now = view(*old, *new, attempt=101, first_attempt=101, saved_by_all=CheckpointId(101, 40))
    gone = {step.key for step in plan(now) if isinstance(step, Delete)}
    assert gone == {ShardKey(101, 10, 0), ShardKey(101, 20, 0)}
    full = {step.key.attempt for step in plan(replace(now, disk_full=True)) if isinstance(step, Delete)}
    assert full == {101}
    going_on = replace(now, restored=CheckpointId(1, 30))
    assert {step.key.attempt for step in plan(going_on) if isinstance(step, Delete)} == {101}
    expired = {step.key for step in plan(replace(now, expired_before=101)) if isinstance(step, Delete)}
    assert expired == gone | {held.key for held in old}, "kept for as long as it was to be"


def test_what_an_earlier_submission_left_in_memory_goes_to_the_disk_before_its_image_is_needed() -> None:
    left = view(image(30), image(20), disk(20), attempt=101, first_attempt=101)
    assert plan(left) == (
        CopyToDisk(ShardKey(1, 30, 0), "an earlier submission's newest in memory, not yet on disk"),
    )  # fmt: skip
    assert plan(view(image(30), disk(30), attempt=101, first_attempt=101)) == ()
    copy = Held(Tier.STAGED, ShardKey(1, 30, 1))
    newer = [disk(step, rank=1, attempt=101) for step in (40, 50)]
    assert [type(step) for step in plan(view(copy, *newer, attempt=101, first_attempt=101))] == [CopyToDisk]
    there = disk(30, rank=1)
    assert [type(step) for step in plan(view(copy, there, *newer, attempt=101, first_attempt=101))] == [Delete]


def test_the_memory_of_a_job_that_is_over_is_given_back_once_its_newest_save_is_on_disk() -> None:
    over = view(image(20), image(30), disk(20), ended=True, images_left=True)
    assert plan(over) == (CopyToDisk(ShardKey(1, 30, 0), "newest in memory, not yet on disk"),)
    assert plan(replace(over, disk_full=True)) == (), "it is the only copy"
    saved = replace(over, held=Copies.of((*over.held, disk(30))))
    assert plan(saved) == (FreeImages("the job is over, and its newest save is on disk"),)
    assert plan(replace(saved, pinned=frozenset({image(30)}))) == ()
    assert plan(replace(saved, images_left=False)) == ()


def test_what_is_pinned_or_of_an_unknown_job_stays() -> None:
    held = tuple(disk(step) for step in (10, 20, 30))
    assert deleted(view(*held, pinned=frozenset({disk(10)}))) == set()
    assert deleted(view(*held, attempt=0, ranks=(), world_size=0)) == set()


def test_ranks_that_no_longer_exist_are_cleared_away_by_progress() -> None:
    vanished = disk(10, rank=5)
    assert deleted(view(vanished, disk(10), disk(20, attempt=2), attempt=2, restored=CheckpointId(1, 10))) == set()
    assert 10 in deleted(
        view(vanished, disk(20, attempt=2), disk(30, attempt=2), attempt=2, restored=CheckpointId(1, 10))
    )


def test_a_fetched_shard_leaves_memory_once_it_is_superseded_on_disk() -> None:
    fetched = Held(Tier.STAGED, ShardKey(1, 10, 0))
    now = view(fetched, disk(10), attempt=2, restored=CheckpointId(1, 10))
    assert plan(now) == ()
    assert plan(replace(now, held=Copies.of((*now.held, disk(15, attempt=2))))) == (
        Delete(Tier.STAGED, fetched.key, "restored from and superseded on disk"),
    )
    assert plan(replace(now, held=Copies.of((*now.held, disk(15, attempt=2))), pinned=frozenset({fetched}))) == ()


def test_a_copy_of_another_node_leaves_memory_when_it_is_on_disk_and_a_newer_one_has_come() -> None:
    first, second = (Held(Tier.STAGED, ShardKey(1, step, 1)) for step in (10, 20))
    assert plan(view(first)) == (CopyToDisk(first.key, "newest in memory, not yet on disk"),)
    assert plan(view(first, disk(10, rank=1))) == (), "restored from here, it is at memory's speed"
    assert deleted(view(first, second)) == set(), "neither is on disk yet"
    gone = Delete(Tier.STAGED, first.key, "a copy, and a newer one has come")
    assert plan(view(first, disk(10, rank=1), second))[1:] == (gone,)
    assert plan(view(first, second, disk_full=True)) == (gone,), "memory is all there is: the newest has it"
    assert plan(view(first, disk(10, rank=1), second, pinned=frozenset({first})))[1:] == ()


def test_a_copy_that_nobody_renews_leaves_memory() -> None:
    copy = Held(Tier.STAGED, ShardKey(1, 10, 1))
    assert plan(view(copy, disk(10, rank=1), disk(20))) == ()
    assert plan(view(copy, disk(10, rank=1), disk(20), disk(30))) == (
        Delete(Tier.STAGED, copy.key, "a copy on disk, too, and not renewed for some steps"),
    )
    assert deleted(view(copy, disk(20), disk(30))) == set(), "it is nowhere else"


keys = st.builds(ShardKey, st.integers(1, 3), st.integers(1, 6).map(lambda n: n * 10), st.integers(0, 3))
helds = st.builds(Held, st.sampled_from(Tier), keys)


@settings(max_examples=400, deadline=None)
@given(
    held=st.sets(helds, max_size=30),
    ranks=st.sets(st.integers(0, 3), max_size=3),
    attempt=st.integers(0, 3),
    restored=st.none() | st.builds(CheckpointId, st.integers(1, 2), st.integers(1, 6).map(lambda n: n * 10)),
    pushed=st.sets(st.tuples(keys, st.sampled_from(["b", "c"])), max_size=5),
    peers=st.sets(st.sampled_from(["b", "c"])),
    keep=st.integers(0, 3),
    saved_by_all=st.none() | st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 6).map(lambda n: n * 10)),
)
def test_whatever_is_held_the_newest_of_every_living_rank_stays(
    held: set[Held], ranks: set[int], attempt: int, restored: CheckpointId | None,
    pushed: set[tuple[ShardKey, str]], peers: set[str], keep: int, saved_by_all: CheckpointId | None,
) -> None:  # fmt: skip
    now = View(
        attempt=attempt,
        ranks=tuple(sorted(ranks)),
        world_size=4,
        keep=keep,
        peers=tuple(sorted(peers)),
        held=Copies.of(held),
        restored=restored,
        pushed=frozenset(pushed),
        saved_by_all=saved_by_all,
    )  # fmt: skip
    steps = plan(now)
    assert len(set(steps)) == len(steps)
    gone = {Held(step.tier, step.key) for step in steps if isinstance(step, Delete)}
    assert gone <= held
    assert all(each.tier is not Tier.IMAGE for each in gone)
    left = held - gone
    for rank in range(4):
        before = [id_of(h.key) for h in held if h.key.rank == rank and h.tier is Tier.DISK]
        after = [id_of(h.key) for h in left if h.key.rank == rank and h.tier is Tier.DISK]
        living = [a for a in before if not (a[0] < attempt and (restored is None or a > restored))]
        if living:
            assert max(living) in after, "the newest living step of a rank must stay"
        if before and restored in before and max(a for a in before) == restored:
            assert restored in after


class Retention(RuleBasedStateMachine):
    """A node with two ranks lives through saves, copies, failures of peers and rollbacks. At every moment each of its
    ranks can restore some step that all of them have, on disk, once there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt, self.step = 1, 0
        self.restored: CheckpointId | None = None
        self.memory: dict[int, list[ShardKey]] = {0: [], 1: []}
        self.disk: set[ShardKey] = set()
        self.pushed: set[tuple[ShardKey, str]] = set()
        self.peers: tuple[str, ...] = ("b",)

    @initialize(peers=st.sampled_from([(), ("b",), ("b", "c")]))
    def configure(self, peers: tuple[str, ...]) -> None:
        self.peers = peers

    def view(self) -> View:
        held = [Held(Tier.IMAGE, key) for keys in self.memory.values() for key in keys]
        held += [Held(Tier.DISK, key) for key in sorted(self.disk, key=lambda key: (id_of(key), key.rank))]
        return View(self.attempt, (0, 1), 2, 2, self.peers, Copies.of(held), self.restored, frozenset(self.pushed))

    @rule(missed=st.sampled_from([None, None, None, 0, 1]))
    def save(self, missed: int | None) -> None:
        self.step += 10
        for rank, images in self.memory.items():
            if rank != missed:
                images.append(ShardKey(self.attempt, self.step, rank))
                del images[:-2]

    @rule(chosen=st.integers(0, 20))
    def carry_out_one(self, chosen: int) -> None:
        steps = plan(self.view())
        if not steps:
            return
        match steps[chosen % len(steps)]:
            case CopyToDisk(key):
                self.disk.add(key)
            case Push(key, peer):
                self.pushed.add((key, peer))
            case Delete(Tier.DISK, key):
                self.disk.remove(key)
            case Delete(store, key):
                raise AssertionError(f"{key} must not be deleted from {store}")

    def whole(self) -> list[CheckpointId]:
        first, second = ({id_of(key) for key in self.disk if key.rank == rank} for rank in (0, 1))
        return sorted(first & second)

    @precondition(lambda self: self.whole())
    @rule(older=st.booleans())
    def roll_back(self, older: bool) -> None:
        """Training goes back to a step that is complete: the newest living one, or the one before it."""
        living = [step for step in self.whole() if step[0] == self.attempt or step == self.restored]
        if not living:
            return
        self.restored = living[-2] if older and len(living) > 1 else living[-1]
        self.attempt += 1
        self.step = self.restored.step

    @invariant()
    def a_step_to_restore_is_never_lost(self) -> None:
        whole = self.whole()
        self.had = getattr(self, "had", False) or bool(whole)
        assert whole or not self.had
        newer = [step for step in whole if step[0] == self.attempt]
        if self.restored is not None and len(newer) < 1:
            assert self.restored in whole, "the restore point went before anything newer was complete"

    @invariant()
    def the_disk_is_bounded(self) -> None:
        deletions = [step for step in plan(self.view()) if isinstance(step, Delete)]
        assert len(self.disk) - len(deletions) <= 2 * (2 * (2 + BACKLOG_STEPS_MAX) + self.attempt * 4)


TestRetention = Retention.TestCase
TestRetention.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)

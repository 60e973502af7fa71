"""The planner: whatever breaks, the plan is a full mesh on healthy nodes, and kept nodes keep what they have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.generations import Placement
from holdfast.domain.job import JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.supervisor.core.rules import planner
from holdfast.supervisor.core.rules.planner import Plan, Request, Spare, Unplannable, peers, plan


def nodes_for(job: JobSpec, dp: int) -> int:
    return -(-job.mesh.replica_size * dp // job.nproc_per_node)


def spec(dp: int, pp: int = 1, nproc: int = 1) -> JobSpec:
    mesh = Mesh.of({"dp": dp, "pp": pp})
    return JobSpec("job", LaunchSpec("/train.py"), mesh.world_size // nproc, nproc, mesh, 1, dp)


def spares(*names: str, zone: str = "") -> tuple[Spare, ...]:
    return tuple(Spare(name, zone) for name in names)


def first(job: JobSpec) -> Plan:
    names = [f"n{index:02}" for index in range(job.nodes)]
    made = plan(Request(job, job.mesh.dp, job.mesh.dp, spares=spares(*names)))
    assert isinstance(made, Plan)
    return made


def again(
    job: JobSpec, before: Plan, out: set[str], free: tuple[Spare, ...] = (), *, dp: int = 0, dp_min: int = 1
) -> Plan:
    made = plan(Request(job, dp or job.mesh.dp, dp_min, before.placements, frozenset(out), free))
    assert isinstance(made, Plan), made.reason
    return made


def again_in(zones: Mapping[str, str], job: JobSpec, before: Plan, out: set[str], free: tuple[Spare, ...]) -> Plan:
    made = plan(Request(job, job.mesh.dp, 1, before.placements, frozenset(out), free, zones))
    assert isinstance(made, Plan), made.reason
    return made


def test_a_spare_takes_the_slot_and_everybody_else_stays() -> None:
    job = spec(3, 3)
    made = again(job, first(job), {"n04"}, spares("s1"))
    assert made.nodes == ("n00", "n01", "n02", "n03", "s1", "n05", "n06", "n07", "n08")
    assert made.reason == "s1 (free) takes slot 4 from n04"


@given(
    st.dictionaries(
        st.sampled_from([f"s{number}" for number in range(9)]),
        st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from([0.0, 0.1, 0.5]), st.booleans(), st.booleans()),
        min_size=4,
    ),
    st.sets(st.integers(0, 3), min_size=1),
)
def test_each_hole_gets_the_spare_that_a_search_of_all_would_find(
    free: dict[str, tuple[str, float, bool, bool]], holes: set[int]
) -> None:
    job, left = spec(4), {name: Spare(name, *each) for name, each in free.items()}
    zones = {"n00": "a", "n01": "b", "n02": "a"}
    before = first(job)
    made = again_in(zones, job, before, {f"n0{slot}" for slot in holes}, tuple(left.values()))
    for slot in sorted(holes):
        zone = zones.get(f"n0{slot}", "")
        best = min(left.values(), key=lambda each: (each.repute, bool(zone) and each.zone != zone, each.node))
        assert made.nodes[slot] == best.node
        del left[best.node]


def test_a_spare_of_the_same_failure_domain_is_taken_first_and_a_suspect_one_last() -> None:
    job = spec(3)
    free = (Spare("s1", "b"), Spare("s2", "a"), Spare("s0", "a", faults_per_day=0.02))
    zones = {f"n0{index}": "a" for index in range(3)}
    made = plan(Request(job, 3, 3, first(job).placements, frozenset({"n01"}), free, zones))
    assert isinstance(made, Plan)
    assert made.nodes == ("n00", "s2", "n02")


def test_without_a_spare_the_broken_replica_leaves_and_the_last_one_moves_into_the_gap() -> None:
    job = spec(3, 3)
    made = again(job, first(job), {"n04"})
    assert made.mesh.dp == 2
    assert made.nodes == ("n00", "n01", "n02", "n06", "n07", "n08")


def test_two_half_broken_replicas_make_one_whole() -> None:
    job = spec(3, 3)
    made = again(job, first(job), {"n01", "n04"})
    assert made.mesh.dp == 2
    assert set(made.nodes) == {"n00", "n02", "n03", "n06", "n07", "n08"} - {"n03"} | {"n03"}
    assert made.nodes[0] == "n00"
    assert made.nodes[2] == "n02"


def test_several_replicas_on_a_node_leave_together() -> None:
    job = spec(4, 1, nproc=2)
    made = again(job, first(job), {"n00"})
    assert made.mesh.dp == 2
    assert made.nodes == ("n01",)


def test_too_few_nodes_is_said_with_numbers() -> None:
    job = spec(3, 3)
    outcome = plan(Request(job, 3, 3, first(job).placements, frozenset({"n04"})))
    assert outcome == Unplannable("job needs 9 nodes with room for 1 worker; 8 are there, 1 missing", 1)


def test_scale_up_brings_the_replica_back_behind_the_others() -> None:
    job = spec(3, 3)
    smaller = again(job, first(job), {"n04"})
    made = again(job, smaller, set(), spares("s1", "s2", "s3"), dp_min=3)
    assert made.mesh.dp == 3
    assert made.nodes[:6] == smaller.nodes


@st.composite
def broken(draw: st.DrawFn) -> tuple[JobSpec, Plan, set[str], tuple[Spare, ...], int]:
    dp, pp = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    nproc = draw(
        st.sampled_from([n for n in range(1, dp * pp + 1) if (dp * pp) % n == 0 and (n % pp == 0 or pp % n == 0)])
    )
    job = spec(dp, pp, nproc)
    before = first(job)
    out = draw(st.sets(st.sampled_from(before.nodes)))
    free = spares(*(f"s{index}" for index in range(draw(st.integers(0, 6)))))
    return job, before, out, free, draw(st.integers(1, dp))


@given(broken())
def test_every_plan_is_a_full_mesh_on_healthy_distinct_nodes(
    case: tuple[JobSpec, Plan, set[str], tuple[Spare, ...], int],
) -> None:
    job, before, out, free, dp_min = case
    request = Request(job, job.mesh.dp, dp_min, before.placements, frozenset(out), free)
    made = plan(request)
    assert plan(request) == made
    healthy = len(before.nodes) - len(out) + len(free)
    if isinstance(made, Unplannable):
        assert healthy < nodes_for(job, dp_min), "there were enough nodes"
        return
    assert [rank for p in made.placements for rank in p.ranks] == list(range(made.mesh.world_size))
    assert len(set(made.nodes)) == len(made.nodes)
    assert not out & set(made.nodes)
    assert dp_min <= made.mesh.dp <= job.mesh.dp
    assert made.mesh.dp == job.mesh.dp or healthy < nodes_for(job, job.mesh.dp), "it shrank although it need not"
    if made.mesh.dp == job.mesh.dp:
        kept = [(p, q) for p, q in zip(before.placements, made.placements, strict=True) if p.node not in out]
        assert all(p == q for p, q in kept), "a kept node moved"


# ---------------------------------------------------------------- dp is not the outermost dimension


def layered(dims: dict[str, int], nproc: int, min_dp: int | None = None, max_dp: int | None = None) -> JobSpec:
    mesh = Mesh.of(dims)
    least, most = min_dp or mesh.dp, max_dp or mesh.dp
    return JobSpec("job", LaunchSpec("/train.py"), mesh.world_size // nproc, nproc, mesh, least, most)


def shares(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Node → (replica, position) of its ranks."""
    mesh = plan.mesh
    return {p.node: [(mesh.replica_of(rank), mesh.position_of(rank)) for rank in p.ranks] for p in plan.placements}


def test_a_replica_leaves_from_every_stage_and_the_others_keep_their_coordinates() -> None:
    job = layered({"pp": 2, "dp": 3}, 1, min_dp=1)
    before = first(job)
    assert before.nodes == ("n00", "n02", "n04", "n01", "n03", "n05"), (
        "nodes are taken replica by replica, of a zone if it can be"
    )
    made = again(job, before, {"n05"})
    assert made.mesh == Mesh.of({"pp": 2, "dp": 2})
    assert made.nodes == ("n00", "n02", "n01", "n03")
    assert made.reason == "2 replicas instead of 3"
    assert shares(made) == {node: share for node, share in shares(before).items() if node not in ("n04", "n05")}
    middle = again(job, before, {"n02"})
    assert middle.nodes == ("n00", "n04", "n01", "n05"), "the last replica moves into the gap, in each stage"
    grown = again(job, made, set(), spares("s1", "s2"), dp_min=3)
    assert grown.nodes == ("n00", "n02", "s1", "n01", "n03", "s2")
    assert "s1 (free) takes slot 2; s2 (free) takes slot 5" in grown.reason


def test_replicas_that_share_a_node_leave_together() -> None:
    job = layered({"pp": 2, "dp": 4}, 2, min_dp=1)
    before = first(job)
    assert before.nodes == ("n00", "n02", "n01", "n03")  # by slot: n00 n02 are stage 0
    assert again(job, before, {"n00"}).nodes == ("n02", "n03")
    assert again(job, before, set(), dp=3).mesh.dp == 2, "not a part of a node in each stage"
    refused = plan(Request(job, 3, 3, before.placements))
    assert refused == Unplannable(
        "job cannot run 3 replicas: on nodes of 2 workers replicas of the mesh pp 2 × dp 4 leave and return 2 at a time"
    )


def test_where_every_node_has_ranks_of_all_replicas_a_swap_is_possible_and_nothing_else() -> None:
    job = layered({"pp": 2, "dp": 2, "tp": 2}, 4)
    before = first(job)
    assert again(job, before, {"n01"}, spares("s1")).reason == "s1 (free) takes slot 1 from n01"
    fewer = plan(Request(job, 1, 1, before.placements))
    assert isinstance(fewer, Unplannable)
    assert "leave and return 2 at a time, all of them" in fewer.reason
    short = plan(Request(job, 2, 1, before.placements, frozenset({"n01"})))
    assert short == Unplannable("job needs at least 2 nodes with room for 4 workers; 1 is there, 1 missing", 1)


@st.composite
def broken_in_any_order(draw: st.DrawFn) -> tuple[JobSpec, Plan, set[str], tuple[Spare, ...], int, int]:
    names = draw(st.permutations(["dp", "pp", "tp"]))
    mesh = Mesh(tuple((name, draw(st.integers(1, 4))) for name in names))
    widths = [n for n in range(1, mesh.world_size + 1) if mesh.world_size % n == 0]
    size = mesh.replica_size
    if mesh.is_dp_outermost:
        widths = [n for n in widths if n % size == 0 or size % n == 0]
    width = draw(st.sampled_from(widths))
    group = mesh.grouping(width)
    least = 1 if mesh.is_dp_outermost or group.replicas < mesh.dp else mesh.dp
    most = mesh.dp if group.is_fixed else mesh.dp + group.replicas
    job = layered(dict(mesh.dims), width, draw(st.integers(least, mesh.dp)), most)
    before = first(job)
    out = draw(st.sets(st.sampled_from(before.nodes), max_size=4))
    free = spares(*(f"s{index}" for index in range(draw(st.integers(0, 6)))))
    return job, before, out, free, draw(st.integers(1, most)), draw(st.integers(job.min_dp, most))


@settings(max_examples=300)
@given(broken_in_any_order())
def test_in_any_order_a_plan_is_a_full_mesh_and_kept_nodes_keep_their_coordinates(
    case: tuple[JobSpec, Plan, set[str], tuple[Spare, ...], int, int],
) -> None:
    job, before, out, free, dp, dp_min = case
    made = plan(Request(job, dp, min(dp, dp_min), before.placements, frozenset(out), free))
    group = job.mesh.grouping(job.nproc_per_node)
    there = len(before.nodes) - len(out) + len(free)
    if isinstance(made, Unplannable):
        least = -(-min(dp, dp_min) // group.replicas)
        partly = not job.mesh.is_dp_outermost and dp // group.replicas < max(1, least)
        assert there < least * group.nodes or partly, "there were enough nodes"
        return
    assert [rank for p in made.placements for rank in p.ranks] == list(range(made.mesh.world_size))
    assert len(set(made.nodes)) == len(made.nodes)
    assert not out & set(made.nodes)
    assert [name for name, _ in made.mesh.dims] == [name for name, _ in job.mesh.dims]
    assert min(dp, dp_min) <= made.mesh.dp <= dp
    if made.mesh.dp == before.mesh.dp:
        kept = [(p, q) for p, q in zip(before.placements, made.placements, strict=True) if p.node not in out]
        assert all(p == q for p, q in kept), "a kept node moved"
    moved = {move.split(" ")[0] for move in made.reason.split("; ") if " takes slot " in move}
    was, now, renumbered = shares(before), shares(made), dict[int, int]()
    for node in set(was) & set(now) - moved:
        pairs = list(zip(was[node], now[node], strict=False))
        assert all(old[1] == new[1] for old, new in pairs), "another share of the model"
        assert all(renumbered.setdefault(old[0], new[0]) == new[0] for old, new in pairs), "a replica was torn"
    assert sum(old != new for old, new in renumbered.items()) <= 4 * group.replicas, (
        "only those that fill gaps are renumbered"
    )


@settings(max_examples=300)
@given(broken_in_any_order(), st.lists(st.sampled_from(["", "a", "b"]), min_size=64, max_size=64))
def test_filling_holes_gives_the_plan_that_looking_at_all_groups_gives(
    case: tuple[JobSpec, Plan, set[str], tuple[Spare, ...], int, int], zones: list[str]
) -> None:
    job, before, out, free, dp, dp_min = case
    zone_of = dict(zip(before.nodes, zones, strict=False))
    near = tuple(replace(spare, zone=zone) for spare, zone in zip(free, zones, strict=False))
    request = Request(job, dp, min(dp, dp_min), before.placements, frozenset(out), near, zone_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_with_holes_filled", lambda *_: None)
        whole = plan(request)
    assert plan(request) == whole


class Counted(Mapping[str, str]):
    """Failure domains, and how often they were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, node: str) -> str:
        self.asked += 1
        return "a"

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("nobody goes through all nodes")

    def __len__(self) -> int:
        raise AssertionError("nobody counts all nodes")


@pytest.mark.parametrize("dp", [4, 400])
def test_a_lost_node_costs_its_own_group_whatever_the_size_of_the_job(dp: int) -> None:
    job, zones = spec(dp, 4), Counted()
    before = first(job)
    lost = before.nodes[6]
    made = plan(Request(job, dp, dp, before.placements, frozenset({lost}), spares("s1"), zones))
    assert isinstance(made, Plan)
    assert zones.asked == 1
    others = zip(before.placements, made.placements, strict=True)
    assert [new.node for old, new in others if new is not old] == ["s1"], "the placements of the others are made anew"


@given(st.integers(1, 12), st.lists(st.sampled_from("abc"), min_size=12, max_size=12))
def test_every_node_has_a_peer_and_is_somebodys_peer(count: int, zones: list[str]) -> None:
    placements = [Placement(slot, f"n{slot}", slot, 1) for slot in range(count)]
    zone_of = {f"n{slot}": zones[slot] for slot in range(count)}
    partner = peers(placements, zone_of)
    assert set(partner) == {p.node for p in placements}
    if count == 1:
        assert partner == {"n0": ()}
        return
    receivers = [peer for peer_list in partner.values() for peer in peer_list]
    assert sorted(receivers) == sorted(partner), "everybody receives exactly one node's copies"
    assert all(node not in peer_list for node, peer_list in partner.items())


@pytest.mark.parametrize(
    ("zones", "pairs"), [("aabb", {("n0", "n2"), ("n1", "n3")}), ("aaaa", {("n0", "n1"), ("n2", "n3")})]
)
def test_peers_are_in_another_failure_domain_where_there_is_one(zones: str, pairs: set[tuple[str, str]]) -> None:
    placements = [Placement(slot, f"n{slot}", slot, 1) for slot in range(4)]
    partner = peers(placements, {f"n{slot}": zone for slot, zone in enumerate(zones)})
    assert {tuple(sorted((node, other[0]))) for node, other in partner.items()} == pairs

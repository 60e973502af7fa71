"""The sampler's promise: whatever happens to dp on the way, the run consumes one and the same sequence of samples."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.train import ElasticSampler, World


def samplers(
    dp: int, *, pp: int = 1, n_samples: int = 100, global_batch: int = 12, micro_batch: int = 2, seed: int = 7
) -> list[ElasticSampler]:
    """One sampler per rank of a dp × pp mesh."""
    mesh = Mesh.of({"dp": dp, "pp": pp})
    return [
        ElasticSampler(
            n_samples, global_batch=global_batch, micro_batch=micro_batch, world=World(mesh, rank), seed=seed
        )
        for rank in range(mesh.world_size)
    ]


def global_step(replicas: list[ElasticSampler]) -> list[int]:
    """The samples of one global step in the order of the sequence: the micro-batches were dealt in turn."""
    dealt = [next(replica) for replica in replicas]
    assert all(len(micro) == replicas[0].micro_batch for share in dealt for micro in share)
    turns = max(len(share) for share in dealt)
    return [index for turn in range(turns) for share in dealt if turn < len(share) for index in share[turn].tolist()]


@given(
    n_samples=st.integers(1, 60),
    micro_batch=st.integers(1, 4),
    micro_batches=st.integers(4, 7),
    phases=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    seed=st.integers(0, 2**63),
)
@settings(deadline=None, max_examples=60)
def test_resizes_neither_skip_nor_repeat(
    n_samples: int, micro_batch: int, micro_batches: int, phases: list[tuple[int, int]], seed: int
) -> None:
    shape = {
        "n_samples": n_samples,
        "global_batch": micro_batch * micro_batches,
        "micro_batch": micro_batch,
        "seed": seed,
    }
    resized: list[int] = []
    state = None
    for dp, steps in phases:
        replicas = samplers(dp, **shape)
        for replica in replicas:
            if state is not None:
                replica.load_state_dict(state)
        for _ in range(steps):
            resized += global_step(replicas)
        state = replicas[-1].state_dict()

    alone = samplers(1, **shape)
    steady = [index for _ in range(sum(steps for _, steps in phases)) for index in global_step(alone)]
    assert resized == steady
    whole_epochs = len(steady) // n_samples * n_samples
    counts = Counter(steady[:whole_epochs])
    assert all(counts[index] == whole_epochs // n_samples for index in range(n_samples))


def test_three_two_three_replicas_consume_every_sample_of_an_epoch_once() -> None:
    consumed: list[int] = []
    state = None
    for dp, steps in ((3, 4), (2, 3), (3, 3)):
        replicas = samplers(dp, n_samples=120)
        for replica in replicas:
            if state is not None:
                replica.load_state_dict(state)
        for _ in range(steps):
            consumed += global_step(replicas)
        state = replicas[0].state_dict()
    assert sorted(consumed) == list(range(120))


def test_ranks_of_one_replica_take_the_same_samples() -> None:
    first, second = samplers(2, pp=2)[:2]
    assert torch.equal(torch.cat(next(first)), torch.cat(next(second)))


def test_epochs_are_shuffled_differently_and_only_by_the_seed() -> None:
    (one,), (same,), (other,) = samplers(1), samplers(1), samplers(1, seed=8)
    epochs = [[index for _ in range(25) for index in torch.cat(next(s)).tolist()] for s in (one, same, other)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert epochs[0][:100] != epochs[0][100:200]
    assert one.epoch == 3


def test_in_any_order_of_the_mesh_a_replica_has_one_share() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 3, "tp": 2})
    taken = [
        next(ElasticSampler(12, global_batch=12, micro_batch=2, world=World(mesh, rank), shuffle=False))
        for rank in range(mesh.world_size)
    ]
    for rank, micro_batches in enumerate(taken):
        replica = mesh.coords(rank)["dp"]
        assert [index for micro in micro_batches for index in micro.tolist()] == [
            2 * replica, 2 * replica + 1, 6 + 2 * replica, 7 + 2 * replica
        ]  # fmt: skip


def test_without_shuffle_the_order_is_the_data_s() -> None:
    sampler = ElasticSampler(5, global_batch=3, world=World(Mesh.of({"dp": 1}), 0), shuffle=False)
    assert [torch.cat(next(sampler)).tolist() for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_peek_does_not_move() -> None:
    (sampler,) = samplers(1)
    ahead = [torch.cat(sampler.peek(n)).tolist() for n in range(20)]
    assert ahead == [torch.cat(next(sampler)).tolist() for _ in range(20)]


@pytest.mark.parametrize(
    ("field", "changed"), [("n_samples", {"n_samples": 101}), ("seed", {"seed": 8}), ("global_batch", None)]
)
def test_another_sequence_is_refused_another_batch_size_is_not(field: str, changed: dict[str, int] | None) -> None:
    (saved,) = samplers(1)
    next(saved)
    if changed is None:
        (restored,) = samplers(1, global_batch=24)
        restored.load_state_dict(saved.state_dict())
        assert restored.consumed == 12
        return
    (restored,) = samplers(1, **changed)
    with pytest.raises(InvalidSpec, match=f"sampler.{field}"):
        restored.load_state_dict(saved.state_dict())


def test_a_build_that_shuffles_differently_is_noticed() -> None:
    (sampler,) = samplers(1)
    state = sampler.state_dict()
    state["next"] = state["next"][::-1]
    with pytest.raises(IntegrityError, match="shuffles differently"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"n_samples": 0}, "n_samples"),
        ({"global_batch": 0}, "global_batch"),
        ({"micro_batch": 5}, "micro_batch"),
        ({"micro_batch": 12}, "global_batch"),  # one micro-batch for two replicas
    ],
)
def test_what_cannot_be_dealt_is_refused(arguments: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidSpec, match=f"^{field}"):
        samplers(2, **arguments)

"""FSDP2, HSDP and TP state: saved by pieces, put together again at any size, and read by plain DCP."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharded_ranks import Phase, image, run

from holdfast.domain.errors import IntegrityError
from holdfast.shards import Reader
from holdfast.train.dcp import export


def shards(directory: Path, ranks: int) -> list[Path]:
    return [Path(image(directory, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("saved", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_fully_sharded_state_restores_at_any_size_and_loads_with_plain_dcp(tmp_path: Path, saved: int) -> None:
    """Rows divide by neither number, and on four ranks some hold no row of a layer at all."""
    run(tmp_path, Phase("save", saved), Phase("restore", saved))
    export(shards(tmp_path, saved), tmp_path / "plain")
    run(tmp_path, *(Phase(do, ranks) for ranks in (1, 2, 4) for do in ("restore", "dcp")))


def test_one_rank_grows_to_three(tmp_path: Path) -> None:
    run(tmp_path, Phase("save", 1), Phase("restore", 3))


def test_hybrid_shards(tmp_path: Path) -> None:
    """Two replicas of two shards; one replica's parts are all there is to restore from."""
    run(tmp_path, Phase("save", 4, hsdp=True), Phase("restore", 4, hsdp=True), Phase("restore", 2, parts=[2, 3]))


@pytest.mark.slow
def test_tensor_parallel_shards(tmp_path: Path) -> None:
    """dp 2 × tp 2, whose rows are sharded twice; dp 1 puts together what both replicas hold at its position."""
    run(tmp_path, Phase("save", 4, tp=2), Phase("restore", 4, tp=2), Phase("restore", 2, tp=2))
    export(shards(tmp_path, 4), tmp_path / "plain")
    run(tmp_path, Phase("dcp", 4, tp=2), Phase("dcp", 2, tp=2))


def test_parts_that_do_not_cover_the_state_are_refused(tmp_path: Path) -> None:
    run(tmp_path, Phase("save", 2))
    with pytest.raises(AssertionError, match=r"the shards do not cover the state: .*ranks \[0\]"):
        run(tmp_path, Phase("restore", 1, parts=[0]))
    with pytest.raises(IntegrityError, match=r"do not cover the state: .*ranks \[1\], saved on dp"):
        export(shards(tmp_path, 2)[1:], tmp_path / "plain")
    assert not (tmp_path / "plain" / ".metadata").exists()


def test_replicas_of_a_sharded_state_have_different_tensors(tmp_path: Path) -> None:
    """What the supervisor goes by when it elects parts: equal bytes at equal positions mean replicas."""
    run(tmp_path, Phase("save", 2))
    sections = []
    for path in shards(tmp_path, 2):
        with Reader(path) as shard:
            sections.append(bytes(shard.data[4096 : shard.header.tensors_end]))
    assert sections[0] != sections[1]

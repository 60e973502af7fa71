"""Names, pacing, tokens: the small rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import InvalidSpec, MalformedMessage, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.domain.mesh import Mesh
from holdfast.domain.names import job_name
from holdfast.domain.replication import Configure
from holdfast.replicator.jobs import Remembered
from holdfast.replicator.names import parse_shard_path, shard_path
from holdfast.replicator.threads import Pace


@given(st.text(max_size=20))
def test_a_job_name_is_one_plain_path_component(name: str) -> None:
    try:
        job_name(name)
    except InvalidSpec:
        return
    assert Path("/root", name).parent == Path("/root")
    assert name not in (".", "..", "")
    assert Path("/root", name).resolve().parent == Path("/root")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\0", "-x", "é", "a" * 129, "a\n"])
def test_these_are_not(name: str) -> None:
    with pytest.raises(InvalidSpec, match="job"):
        job_name(name)


def test_paths_go_there_and_back() -> None:
    key = ShardKey(2, 150, 7)
    assert parse_shard_path(shard_path(key)) == key
    assert parse_shard_path(Path("a1/s2/rank-3.shard.corrupt")) is None


def test_pace_lets_the_rate_pass_and_catches_up_a_second_at_most() -> None:
    now = [100.0]
    pace = Pace(1000, clock=lambda: now[0])
    assert pace.reserve(500) == 0.0
    assert pace.reserve(500) == pytest.approx(0.5)
    assert pace.reserve(1000) == pytest.approx(1.0)
    now[0] += 50.0
    assert pace.reserve(1000) == 0.0  # of the second that passed idle
    assert pace.reserve(1000) == 0.0
    assert pace.reserve(1) == pytest.approx(1.0)


def test_without_a_rate_nothing_waits_and_a_stop_is_heard() -> None:
    pace = Pace(0)
    pace(10**12)
    pace.stop()
    with pytest.raises(Unavailable, match="stopping"):
        pace(1)


def test_the_configuration_is_kept_privately(tmp_path: Path) -> None:
    assert Remembered.read(tmp_path) is None
    config = Configure("llm", 3, 2, Mesh.of({"dp": 2}), (1,), (ShardSource("b", "h:1"),), 2, "secret")
    Remembered(config, CheckpointId(1, 100)).write(tmp_path)
    assert Remembered.read(tmp_path) == Remembered(config, CheckpointId(1, 100))
    assert (tmp_path / "job.json").stat().st_mode & 0o077 == 0
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(MalformedMessage):
        Remembered.read(tmp_path)

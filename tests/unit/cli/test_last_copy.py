"""A last checkpoint that the disks cannot take is noticed, and not waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cli.last_copy import CONFIRMED_S, LastCopy, free_bytes

SIZE = 30_000_000


def kept(directory: Path, **changes: Any) -> dict[str, Any]:
    base = {"step": 30, "on_disk": False, "directories": {"n0": str(directory)}, "unwritten": {"n0": SIZE}}
    return base | changes


def refusal(node: str = "n0", place: str = "disk") -> dict[str, Any]:
    return {
        "node": node,
        "summary": "On n0 no shards are copied to disk: [x]",
        "evidence": {"trouble": "tier_fails", "place": place},
    }


def test_a_full_disk_is_named_with_what_it_needs(tmp_path: Path) -> None:
    copy = LastCopy(on_this_machine=True, free=lambda _: 7_000_000)
    assert copy.look(kept(tmp_path), [], 0.0) == ""
    line = copy.look(kept(tmp_path), [], CONFIRMED_S)
    assert f"step 30 is not on disk: {tmp_path} of n0 needs 30.0 MB and has 7.0 MB free" in line
    assert copy.given_up
    assert copy.look(kept(tmp_path), [], CONFIRMED_S + 1.0) == ""


def test_a_disk_with_room_is_waited_for(tmp_path: Path) -> None:
    copy = LastCopy(on_this_machine=True, free=lambda _: SIZE)
    assert [copy.look(kept(tmp_path), [refusal()], float(at)) for at in range(30)] == [""] * 30
    assert not copy.given_up


def test_a_disk_that_gets_room_in_time_is_waited_for(tmp_path: Path) -> None:
    room = [0, 0, SIZE, 0]
    copy = LastCopy(on_this_machine=True, free=lambda _: room.pop(0))
    assert [copy.look(kept(tmp_path), [], at) for at in (0.0, 1.0, 2.0, 3.0)] == [""] * 4


def test_somebody_at_the_terminal_gets_time_to_make_room(tmp_path: Path) -> None:
    copy = LastCopy(on_this_machine=True, waits_s=30.0, free=lambda _: 0)
    copy.look(kept(tmp_path), [], 0.0)
    assert "make room within 28 s" in copy.look(kept(tmp_path), [], CONFIRMED_S)
    assert not copy.given_up


@pytest.mark.parametrize(
    ("findings", "refused"),
    [([], False), ([refusal()], True), ([refusal("n7")], False), ([refusal(place="memory")], False)],
)
def test_on_other_machines_the_report_of_the_replicator_counts(
    tmp_path: Path, findings: list[dict[str, Any]], refused: bool
) -> None:
    copy = LastCopy(on_this_machine=False, free=lambda _: 0)
    lines = [copy.look(kept(tmp_path), findings, at) for at in (0.0, CONFIRMED_S)]
    assert ("no shards are copied to disk: \\[x]" in lines[1]) == refused
    assert copy.given_up == refused


def test_without_a_checkpoint_nothing_is_said() -> None:
    assert LastCopy(on_this_machine=True, free=lambda _: 0).look(None, [], 10.0) == ""


def test_an_unfinished_copy_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is continued. Without it, a copy in progress on a nearly full disk would look hopeless."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    part = tmp_path / "gpt" / "a1" / "s30" / ".rank-0.shard.x.part"
    assert free_bytes(tmp_path / "gpt") == 100
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (8 << 20))
    assert free_bytes(tmp_path / "gpt") >= 100 + (8 << 20)

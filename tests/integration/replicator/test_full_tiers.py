"""A tier that takes nothing costs that tier: the save is on the others."""

from __future__ import annotations

from pathlib import Path

from replicator_node import JOB, PLAN, fill_up, nodes, small_tmpfs
from waiting import wait_until

from holdfast.domain.generations import ShardKey

KEY = ShardKey(1, 10, 0)


def test_with_memory_full_to_the_last_page_disk_and_peer_have_the_save(tmp_path: Path) -> None:
    """Of an image that an earlier release made, without room for its manifest."""
    memory = tmp_path / "a" / "memory"
    with small_tmpfs(memory, "16m"), nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(peers=(b,))
        images = a.images()
        images.prepare(PLAN)
        a.wait_for(a.save(images, 10), "disk")
        b.wait_for(KEY, "disk")
        for room in memory.rglob("*.json*"):
            room.unlink()
        for room in memory.rglob(".*.json.tmp"):
            room.unlink()
        filling = fill_up(memory)
        newest = a.save(images, 20)
        a.wait_for(newest, "disk")
        b.wait_for(newest, "disk")
        a.wait_for(newest, "memory")
        for said in ("checkpoint trouble detected", "tier_fails"):
            wait_until(lambda said=said: said in a.log, description=f"{said} in the log")  # type: ignore[misc]
        filling.unlink()


def test_a_disk_that_answers_with_errors_costs_the_disk_only(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(peers=(b,))
        images = a.images()
        a.wait_for(a.save(images, 10), "disk")
        (a.disk / JOB / "a1").rename(a.disk / JOB / "elsewhere")
        (a.disk / JOB / "a1").write_text("no directory any more")
        newest = a.save(images, 20)
        b.wait_for(newest, "disk")
        wait_until(lambda: "tier_fails" in a.log, description="the trouble in the log")

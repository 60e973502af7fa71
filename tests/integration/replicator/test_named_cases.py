"""Defects that were reproduced in other checkpointers, each as a case of its own; and tiers that are full."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from replicator_node import JOB, TENSOR_BYTES, Node, nodes, small_tmpfs
from waiting import wait_until

from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Reader
from holdfast.stores import open_store
from holdfast.stores.layout import steps
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, World
from holdfast.train.saves.checkpoint import Checkpointer

KEY = ShardKey(1, 10, 0)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        middle = file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    """Another, shorter file: to truncate one that the replicator has mapped would end it by SIGBUS."""
    half = path.with_name("half")
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    half.replace(path)


def image_of(node: Node) -> Path:
    return next(node.memory.glob(f"{JOB}/w0/a.image"))


def is_step_10(path: str) -> bool:
    with Reader(Path(path)) as reader:
        return reader.key == KEY and bytes(reader.view("w")) == bytes([10]) * TENSOR_BYTES


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_whatever_file_is_damaged_the_next_holder_gives_the_shard(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A flipped byte that loads silently; a truncated shard that raises although a good replica exists."""
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(peers=(b,))
        record_digest = a.wait_for(a.save(a.images(), 10), "disk").digest
        b.wait_for(KEY, "disk")
        files = {
            "image": image_of(a),
            "image's manifest": image_of(a).with_name("a.image.json"),
            "disk": a.shard_file(KEY),
            "disk's manifest": a.shard_file(KEY).with_suffix(".json"),
        }
        whole = tmp_path / "whole"
        whole.mkdir()
        for name, path in files.items():
            shutil.copyfile(path, whole / name)
        for generation, damaged in enumerate(itertools.combinations(files, 2), 2):
            for name in damaged:
                with suppress(FileNotFoundError):  # the replicator has set the pair aside for what was damaged before
                    damage(files[name])
            a.configure(generation=generation, attempt=generation, peers=(b,))
            staged = a.stage(KEY, a, b, digest=record_digest)
            assert is_step_10(staged.path), (damaged, staged)
            a.stop()
            for path in (*a.memory.rglob("*.corrupt"), *a.disk.rglob("*.corrupt")):
                path.unlink()
            shutil.rmtree(a.memory / JOB / "staged", ignore_errors=True)
            for name, path in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(whole / name, path)
            a.start()


def test_ranks_permuted_over_nodes_hide_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "c") as three:
        for rank, node in enumerate(three):
            node.configure(ranks=(rank,), world=3)
        for rank, node in enumerate(three):
            node.wait_for(node.save(node.images(), 10, rank=rank), "disk")
        for rank, node in enumerate((three[2], three[0], three[1])):
            node.configure(generation=2, attempt=2, ranks=(rank,), world=3)
            staged = node.stage(ShardKey(1, 10, rank), *three)
            assert staged.source == three[rank].name
            with Reader(Path(staged.path)) as reader:
                assert reader.key == ShardKey(1, 10, rank)


def test_a_save_holds_the_values_of_the_moment_it_was_called(tmp_path: Path) -> None:
    """An async save that stores values mutated after the call: training goes on while the copies are made."""
    with nodes(tmp_path, "a", HOLDFAST_REPLICATOR_DISK_BYTES_PER_S_MAX=str(8 << 20)) as (a,):
        a.configure()
        weights, nbytes = torch.ones(6 << 20), 24 << 20
        images = a.memory / JOB / "w0"
        environment = Environment(World(Mesh.of({"dp": 2}), 0, 1), job=JOB, attempt=1, images=str(images))
        notes = Notes(agent="", replicator=str(a.notes), job=JOB, generation=1, rank=0)
        with closing(notes):
            assert Checkpointer(environment, torch.device("cpu"), notes).save({"w": weights}, 10)
        weights.fill_(7)  # before most of it is on the disk
        a.wait_for(KEY, "disk")
        with Reader(a.shard_file(KEY)) as reader:
            (name,) = (spec.fqn for spec in reader.tensors)
            saved = torch.frombuffer(reader.view(name), dtype=torch.float32)
            assert len(saved) * saved.element_size() == nbytes
            assert bool((saved == 1).all())


def test_writes_that_fail_in_the_background_never_block_the_trainer(tmp_path: Path) -> None:
    """Disk and store are both full to the last byte: memory has the newest step, and saving goes on."""
    bucket = tmp_path / "bucket"
    with (
        small_tmpfs(tmp_path / "a" / "disk", "1m"),
        small_tmpfs(bucket, "1m"),
        nodes(tmp_path, "a") as (a,),
    ):
        a.configure(store=f"file://{bucket}/of-the-job")
        images = a.images()
        for step in range(10, 40, 10):
            a.wait_for(saved(a, images, step), "memory")
        wait_until(lambda: "no room for" in a.log, description="the reason in the log")
        assert not [path for path in bucket.rglob("*") if path.is_file()]


def saved(node: Node, images: object, step: int) -> ShardKey:
    """Images are busy while somebody reads them: such a save is skipped, and the next one is made."""

    def once() -> ShardKey | None:
        try:
            return node.save(images, step)  # type: ignore[arg-type]
        except AssertionError:
            return None

    return wait_until(once, description=f"step {step} saved")


def test_with_a_full_disk_the_store_takes_from_memory(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    with small_tmpfs(tmp_path / "a" / "disk", "1m"), nodes(tmp_path, "a") as (a,):
        a.configure(ranks=(0, 1), store=url)
        for rank in (0, 1):
            a.save(a.images(rank), 10, rank=rank)
        a.wait_stored(10)
        assert steps(open_store(url), JOB) == [(1, 10)]


def test_when_memory_is_full_what_the_store_gives_goes_to_the_disk(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    with small_tmpfs(tmp_path / "spare" / "memory", "4m"), nodes(tmp_path, "a", "spare") as (a, spare):
        a.configure(ranks=(0, 1), store=url)
        for rank in (0, 1):
            a.save(a.images(rank), 10, rank=rank, value=10)
        a.wait_stored(10)
        spare.configure(generation=2, attempt=2, store=url)
        staged = spare.stage(KEY, store=url)
        assert Path(staged.path) == spare.shard_file(KEY)
        assert is_step_10(staged.path)

"""The image format and the flock protocol: what a reader may ever see."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, IntegrityError, InvalidSpec, OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.shards import Image, ImageSet, Plan, Reader, Skipped, Staged, Stamp, TensorSpec, peek

MESH = Mesh.of({"dp": 2})
PLAN = Plan(
    (TensorSpec("w", "float32", (4, 8), 128), TensorSpec("b", "float32", (), 4), TensorSpec("e", "int64", (0,), 0))
)


def stamp(step: int, attempt: int = 1) -> Stamp:
    return Stamp(ShardKey(attempt, step, 0), MESH, producer="test")


def fill_with(value: int) -> Callable[[Image], None]:
    def fill(image: Image) -> None:
        for fqn in ("w", "b"):
            view = image.view(fqn)
            view[:] = bytes([value]) * len(view)

    return fill


def save(images: ImageSet, step: int, attempt: int = 1, plan: Plan = PLAN, extra: bytes = b"x") -> Staged | Skipped:
    return images.stage(plan, attempt, step, 0, MESH, fill_with(step % 256), extra)


def steps_in(directory: Path) -> set[int]:
    headers = [peek(path) for path in directory.glob("*.image")]
    return {header.stamp.key.step for header in headers if header is not None}


def test_a_save_reads_back(tmp_path: Path) -> None:
    images = ImageSet(tmp_path, producer="torch 9")
    staged = save(images, 7, extra=b"rng state")
    assert isinstance(staged, Staged)
    with Reader(staged.path, expected=ShardKey(1, 7, 0)) as reader:
        assert bytes(reader.view("w")) == b"\7" * 128
        assert reader.view("e").nbytes == 0
        assert reader.extra == b"rng state"
        assert reader.header.stamp.mesh == MESH
        assert reader.header.stamp.producer == "torch 9"
        assert [spec.fqn for spec, _ in reader.items()] == ["w", "b", "e"]
        assert "w" in reader
        assert "v" not in reader


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from(["float32", "bfloat16"])), max_size=12),
    st.binary(max_size=9000),
)
def test_any_shape_and_extra_survive(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, str]], extra: bytes
) -> None:
    directory = tmp_path_factory.mktemp("any")
    specs = tuple(TensorSpec(f"t{i}", dtype, (n,), n) for i, (n, dtype) in enumerate(shapes))
    content = {spec.fqn: random.Random(spec.fqn).randbytes(spec.nbytes) for spec in specs}

    def fill(image: Image) -> None:
        for fqn, raw in content.items():
            image.view(fqn)[:] = raw

    staged = ImageSet(directory).stage(Plan(specs, 16), 3, 9, 1, {"dp": 2}, fill, extra)
    assert isinstance(staged, Staged)
    with Reader(staged.path) as reader:
        assert {spec.fqn: bytes(view) for spec, view in reader.items()} == content
        assert reader.extra == extra
        assert reader.tensors == specs
        assert reader.header.size == staged.nbytes


def test_the_newest_complete_save_is_never_the_victim(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    for step in range(1, 6):
        save(images, step)
        assert step in steps_in(tmp_path)
        assert step == 1 or step - 1 in steps_in(tmp_path)


def test_an_image_being_read_is_not_overwritten_but_skipped(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    first = save(images, 1)
    assert isinstance(first, Staged)
    save(images, 2)
    with Reader(first.path) as reader:
        skipped = save(images, 3)
        assert isinstance(skipped, Skipped)
        assert "still being copied" in skipped.reason
        assert bytes(reader.view("w")) == b"\1" * 128
    assert isinstance(save(images, 4), Staged)


def test_a_closed_reader_gives_up_its_lock_though_views_live_on(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    first = save(images, 1)
    assert isinstance(first, Staged)
    save(images, 2)
    reader = Reader(first.path)
    view = reader.view("w")
    reader.close()
    assert isinstance(save(images, 3), Staged)
    assert len(view) == 128


def test_a_reader_of_an_image_being_written_gets_an_error(tmp_path: Path) -> None:
    image = Image.create(tmp_path / "a.image", PLAN)
    assert image.try_lock()
    image.begin(stamp(1))
    with pytest.raises(Conflict, match="being written"):
        Reader(image.path)
    image.abandon()
    with pytest.raises(Conflict, match="does not contain a complete shard"):
        Reader(image.path)


def test_a_failing_fill_leaves_the_other_image(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    save(images, 1)

    def fail(image: Image) -> None:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        images.stage(PLAN, 1, 2, 0, MESH, fail, b"")
    assert steps_in(tmp_path) == {1}
    assert isinstance(save(images, 3), Staged)
    assert steps_in(tmp_path) == {1, 3}


def test_a_lineage_given_up_is_overwritten_before_the_restore_point(tmp_path: Path) -> None:
    before = ImageSet(tmp_path)
    save(before, 100)
    save(before, 200)
    before.close()
    after = ImageSet(tmp_path, restored=CheckpointId(1, 100))
    save(after, 150, attempt=2)
    assert steps_in(tmp_path) == {100, 150}
    after.close()
    again = ImageSet(tmp_path, restored=CheckpointId(1, 100))  # attempt 2 was lost elsewhere: back to 100 once more
    save(again, 120, attempt=3)
    assert steps_in(tmp_path) == {100, 120}


def test_new_shapes_make_new_images_one_after_the_other(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    save(images, 1)
    save(images, 2)
    other = Plan((*PLAN.tensors, TensorSpec("more", "float32", (10,), 40)))
    save(images, 3, plan=other)
    assert steps_in(tmp_path) == {2, 3}
    save(images, 4, plan=other)
    assert steps_in(tmp_path) == {3, 4}


def test_extra_that_outgrows_the_reserve_gets_a_larger_image(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    for step, size in enumerate((10, 100_000, 150_000, 5), start=1):
        staged = save(images, step, extra=bytes(size))
        assert isinstance(staged, Staged)
        with Reader(staged.path) as reader:
            assert len(reader.extra) == size


def test_images_are_reused_by_the_next_process(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    assert images.prepare(PLAN) == ""
    save(images, 1)
    save(images, 2)
    inodes = {path.stat().st_ino for path in tmp_path.glob("*.image")}
    images.close()
    again = ImageSet(tmp_path)
    staged = save(again, 3)
    assert isinstance(staged, Staged)
    assert staged.sequence == 2
    assert {path.stat().st_ino for path in tmp_path.glob("*.image")} == inodes


def test_an_image_taken_away_is_replaced(tmp_path: Path) -> None:
    images = ImageSet(tmp_path)
    save(images, 1)
    save(images, 2)
    for path in tmp_path.glob("*.image"):
        path.rename(path.with_suffix(".corrupt"))
    save(images, 3)
    assert steps_in(tmp_path) == {3}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = Plan((TensorSpec("w", "float32", (1,), 4), TensorSpec("w", "float32", (1,), 4)))
    with pytest.raises(InvalidSpec, match="each tensor name once"):
        Image.create(tmp_path / "a.image", twice)


@pytest.mark.parametrize("offset", [0, 9, 30, 60, 4096, 4100])
def test_a_flipped_bit_in_the_structure_is_noticed(tmp_path: Path, offset: int) -> None:
    staged = save(ImageSet(tmp_path), 1)
    assert isinstance(staged, Staged)
    raw = bytearray(staged.path.read_bytes())
    raw[offset] ^= 0x10
    copy = tmp_path / "copy"
    copy.write_bytes(raw)
    with pytest.raises((IntegrityError, Conflict)):
        Reader(copy)


@given(st.binary(max_size=6000))
@settings(max_examples=60, deadline=None)
def test_garbage_is_no_shard(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "a.image"
    path.write_bytes(raw)
    with pytest.raises(IntegrityError):
        Reader(path)
    assert isinstance(save(ImageSet(path.parent), 1), Staged)


def test_a_truncated_shard_is_noticed(tmp_path: Path) -> None:
    staged = save(ImageSet(tmp_path), 1)
    assert isinstance(staged, Staged)
    os.truncate(staged.path, staged.nbytes - 1)
    with pytest.raises(IntegrityError, match="truncated"):
        Reader(staged.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs takes root")
def test_a_full_tmpfs_is_a_skip_with_numbers_and_no_sigbus(tmp_path: Path) -> None:
    room = tmp_path / "small"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", room], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        large = Plan((TensorSpec("w", "uint8", (2 << 20,), 2 << 20),))
        images = ImageSet(room)
        first = images.stage(large, 1, 1, 0, MESH, lambda image: None, b"")
        assert isinstance(first, Staged)
        second = images.stage(large, 1, 2, 0, MESH, lambda image: None, b"")
        assert isinstance(second, Skipped)
        assert "no room for a shard image of" in second.reason
        assert "are free there" in images.prepare(large)
        assert steps_in(room) == {1}
        with pytest.raises(OutOfSpace):
            Image.create(room / "third", large)
        assert not (room / "third").exists()
        images.close()
        del images
    finally:
        subprocess.run(["umount", "-l", room], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs takes root")
def test_images_that_memory_has_no_room_for_go_to_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room, disk = tmp_path / "small", tmp_path / "disk"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", room], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        large = Plan((TensorSpec("w", "uint8", (2 << 20,), 2 << 20),))
        images = ImageSet(room, fallback=disk)
        for step in (1, 2, 3):
            staged = images.stage(large, 1, step, 0, MESH, lambda image: None, b"")
            assert isinstance(staged, Staged)
        assert "no room for a shard image of" in caplog.text
        assert "are free there" in caplog.text
        assert caplog.text.count("goes to") == 1, "said when it is made, not at every save"
        assert steps_in(room) | steps_in(disk) == {2, 3}
        images.close()
        again = ImageSet(room, fallback=disk)
        assert isinstance(again.stage(large, 1, 4, 0, MESH, lambda image: None, b""), Staged)
        assert steps_in(room) | steps_in(disk) == {3, 4}, "both are found again by the next process"
        again.close()
        del images, again
    finally:
        subprocess.run(["umount", "-l", room], check=True)


WRITER = """
import sys
from pathlib import Path
from holdfast.shards import ImageSet, Plan, TensorSpec
N = 1 << 20
plan = Plan((TensorSpec("w", "uint8", (N,), N), TensorSpec("v", "uint8", (N,), N)))
images = ImageSet(Path(sys.argv[1]))
def fill(image):
    for fqn in ("w", "v"):
        image.view(fqn)[:] = bytes([step % 251]) * N
step = int(sys.argv[2])
while True:
    step += 1
    images.stage(plan, 1, step, 0, {"dp": 1}, fill, bytes([step % 251]) * 100)
    print(step, flush=True)
"""


def test_sigkill_anywhere_leaves_the_previous_save_whole(tmp_path: Path) -> None:
    """The stamp test: every byte of a shard belongs to the step that its header names."""
    chance = random.Random(20)
    last = 0
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(3):
                last = int(writer.stdout.readline())
            pause = time.perf_counter() + chance.random() * 0.01
            while time.perf_counter() < pause:
                pass
            os.kill(writer.pid, signal.SIGKILL)
            rest = writer.stdout.read().split()
        last = max([last, *(int(line) for line in rest if line.isdigit())])
        whole = steps_in(tmp_path)
        assert whole, "the newest complete save was lost"
        assert max(whole) in (last, last + 1)
        for path in tmp_path.glob("*.image"):
            if (header := peek(path)) is None:
                continue
            mark = header.stamp.key.step % 251
            with Reader(path) as reader:
                assert set(bytes(reader.view("w"))) == {mark}
                assert set(bytes(reader.view("v"))) == {mark}
                assert reader.extra == bytes([mark]) * 100
        last = max(whole)


FORKER = """
import os, sys, time
from pathlib import Path
from holdfast.shards import ImageSet, Plan, TensorSpec
plan = Plan((TensorSpec("w", "uint8", (64,), 64),))
images = ImageSet(Path(sys.argv[1]))
images.prepare(plan)
def fill(image):
    child = os.fork()  # a data-loader worker, born in the middle of a save
    if not child:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
images.stage(plan, 1, 1, 0, {"dp": 1}, fill, b"")
"""


def test_a_forked_child_that_outlives_its_trainer_holds_no_image(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        child = int(trainer.stdout.readline())
        try:
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.wait()
            images = ImageSet(tmp_path)
            small = Plan((TensorSpec("w", "uint8", (64,), 64),))
            for step in (2, 3):
                assert isinstance(images.stage(small, 1, step, 0, MESH, lambda image: None, b""), Staged)
        finally:
            os.kill(child, signal.SIGKILL)

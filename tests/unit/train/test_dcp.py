"""Shards in DCP's terms: what plain torch reads from them, and what must never be read."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.domain.errors import Conflict, IntegrityError, InvalidSpec, OutOfSpace
from holdfast.domain.mesh import Mesh
from holdfast.replicator.checksum import Checksummer
from holdfast.shards import Manifest, Reader, peek
from holdfast.shards.crc import summarise
from holdfast.train.channels import Notes
from holdfast.train.dcp import ShardReader, export, metadata
from holdfast.train.environment import Environment, World
from holdfast.train.saves.checkpoint import Checkpointer
from holdfast.train.saves.dcp_reader import open_shards


def save(
    images: Path, state: dict[str, Any], *, step: int = 3, rank: int = 0, mesh: dict[str, int] | None = None
) -> Path:
    environment = Environment(World(Mesh.of(mesh or {"dp": 2}), rank, 1), job="t", attempt=1, images=str(images))
    notes = Notes(agent="", replicator="", job="t", generation=1, rank=rank)
    assert Checkpointer(environment, torch.device("cpu"), notes).save(state, step)
    (found,) = (path for path in images.glob("*.image") if (header := peek(path)) and header.stamp.key.step == step)
    return found


def stored(image: Path, path: Path) -> Path:
    """The image as the replicator keeps it: a file that nobody writes again, and its manifest."""
    with Reader(image) as shard:
        path.write_bytes(shard.data)
        checksummer = Checksummer(1)
        sums = checksummer.sums(shard.data, shard.header.tensors_end)
        digest, crc = summarise(sums.spans, sums.crc32c, shard.header.tensors_end)
        checksummer.close()
        manifest = Manifest.of(shard.header, job="t", node="n", digest=digest, crc32c=crc, spans=sums.crc32c)
    manifest.write(path.with_suffix(".json"))
    return path


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "seen": seed, "pair": (torch.rand(2), seed), "array": np.arange(3) * seed,
            "many": [torch.rand(1), {"inner": torch.zeros(())}], "half": torch.rand(3).bfloat16(), "no": torch.empty(0, 2),
            "none": None, "empty": {}}  # fmt: skip


def nested(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a script that knows only torch writes it down for `dcp.load`."""
    numbered = state["optim"].state_dict()
    names = [name for name, _ in state["model"].named_parameters()]
    return {
        **state,
        "model": state["model"].state_dict(),
        "optim": {
            "state": {names[number]: slots for number, slots in numbered["state"].items()},
            "param_groups": [{**group, "params": names} for group in numbered["param_groups"]],
        },
    }


def load(into: dict[str, Any], **how: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(into, **how)  # type: ignore[attr-defined]
    return into


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_plain_dcp_loads_an_export(tmp_path: Path) -> None:
    saved = job(1)
    shard = stored(save(tmp_path / "images", saved), tmp_path / "rank-0.shard")
    seen: list[tuple[int, int]] = []
    export([shard], tmp_path / "plain", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (shard.stat().st_size, shard.stat().st_size)
    assert same(load(nested(job(2)), checkpoint_id=tmp_path / "plain"), nested(saved))


def test_our_reader_gives_dcp_the_same_without_a_pickle(tmp_path: Path) -> None:
    saved = job(1)
    shard = stored(save(tmp_path / "images", saved), tmp_path / "rank-0.shard")
    with open_shards([shard], verify=True) as shards:
        assert same(load(nested(job(2)), storage_reader=ShardReader(shards)), nested(saved))


def test_a_slot_is_a_file_that_torch_loads(tmp_path: Path) -> None:
    saved = job(1)
    with Reader(save(tmp_path, saved)) as shard:
        for name, tensor in (
            ("half", saved["half"]),
            ("no", saved["no"]),
            ("model.0.weight", saved["model"][0].weight),
        ):
            slot = shard.slot(name)
            (tmp_path / "slot").write_bytes(shard.data[slot.offset : slot.offset + slot.length])
            loaded = torch.load(tmp_path / "slot", weights_only=True)
            assert same(loaded, tensor.detach())
            assert slot.payload % 64 == 0


def test_files_are_linked_and_images_copied(tmp_path: Path) -> None:
    image = save(tmp_path / "images", {"w": torch.ones(3)})
    shard = stored(image, tmp_path / "rank-0.shard")
    export([shard], tmp_path / "linked")
    export([image], tmp_path / "copied")
    assert (tmp_path / "linked" / "__0_0.distcp").stat().st_ino == shard.stat().st_ino
    copied = tmp_path / "copied" / "__0_0.distcp"
    assert copied.stat().st_ino != image.stat().st_ino
    assert copied.read_bytes() == shard.read_bytes()
    assert same(load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "copied"), {"w": torch.ones(3)})


def test_a_file_system_without_links_is_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = stored(save(tmp_path / "images", {"w": torch.ones(3)}), tmp_path / "rank-0.shard")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "link", refuse)
    export([shard], tmp_path / "plain")
    assert (tmp_path / "plain" / "__0_0.distcp").read_bytes() == shard.read_bytes()


def test_a_flipped_byte_loads_silently_with_plain_dcp_and_never_with_ours(tmp_path: Path) -> None:
    """Named after the same defect in another local checkpoint manager."""
    shard = stored(save(tmp_path / "images", {"w": torch.ones(1000)}), tmp_path / "rank-0.shard")
    export([shard], tmp_path / "plain")
    with Reader(shard) as reader:
        at = reader.slot("w").payload + 402
    raw = bytearray(shard.read_bytes())
    raw[at] ^= 0x40
    with shard.open("r+b") as file:  # in place, as a disk rots: the linked export rots with it
        file.write(raw)
    assert not same(load({"w": torch.zeros(1000)}, checkpoint_id=tmp_path / "plain"), {"w": torch.ones(1000)})
    with pytest.raises(IntegrityError, match="are damaged"), open_shards([shard], verify=True):
        pass
    with pytest.raises(IntegrityError, match="are damaged"):
        export([shard], tmp_path / "again")
    assert list((tmp_path / "again").iterdir()) == []


def test_a_manifest_of_another_shard_is_noticed(tmp_path: Path) -> None:
    shard = stored(save(tmp_path / "a", {"w": torch.ones(9)}), tmp_path / "rank-0.shard")
    stored(save(tmp_path / "b", {"w": torch.ones(9)}, step=4), tmp_path / "rank-1.shard")
    (tmp_path / "rank-1.json").rename(tmp_path / "rank-0.json")
    with pytest.raises(IntegrityError, match="of different shards"), open_shards([shard], verify=True):
        pass


def test_unverified_reading_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = save(tmp_path, {"w": torch.ones(9)})
    with open_shards([image], verify=True):
        assert "it has no manifest" in caplog.text


def test_the_manifest_of_an_earlier_save_into_an_image_says_nothing(tmp_path: Path) -> None:
    image = save(tmp_path / "images", {"w": torch.ones(9)})
    earlier = stored(save(tmp_path / "other", {"w": torch.zeros(9)}, step=2), tmp_path / "rank-0.shard")
    earlier.with_suffix(".json").rename(image.with_name(f"{image.name}.json"))
    with open_shards([image], verify=False) as (shard,):
        assert shard.verify(lambda data: google_crc32c.value(bytes(data))) is False
        same_save = stored(image, tmp_path / "rank-1.shard").with_suffix(".json")
        same_save.rename(image.with_name(f"{image.name}.json"))
        assert shard.verify(lambda data: google_crc32c.value(bytes(data))) is True


def test_shards_of_different_steps_are_a_mixed_state(tmp_path: Path) -> None:
    one = save(tmp_path / "a", {"w": torch.ones(9)}, step=3)
    other = save(tmp_path / "b", {"w": torch.ones(9)}, step=4, rank=1)
    with pytest.raises(IntegrityError, match="a mixed state"):
        export([one, other], tmp_path / "plain")


def test_stages_that_name_their_layers_alike_are_not_taken_for_one(tmp_path: Path) -> None:
    mesh = {"dp": 1, "pp": 2}
    stages = [save(tmp_path / f"{r}", {"w": torch.full((9,), float(r))}, rank=r, mesh=mesh) for r in range(2)]
    with pytest.raises(InvalidSpec, match=r"one tensor on rank 0 and another on rank 1.*one pipeline stage at a time"):
        export(stages, tmp_path / "plain")
    export(stages[1:], tmp_path / "second")
    assert same(load({"w": torch.zeros(9)}, checkpoint_id=tmp_path / "second"), {"w": torch.ones(9)})


def test_stages_that_name_their_layers_apart_are_one_checkpoint(tmp_path: Path) -> None:
    mesh = {"dp": 1, "pp": 2}
    stages = [save(tmp_path / f"{r}", {f"w{r}": torch.full((9,), float(r))}, rank=r, mesh=mesh) for r in range(2)]
    export(stages, tmp_path / "plain")
    loaded = load({"w0": torch.ones(9), "w1": torch.zeros(9)}, checkpoint_id=tmp_path / "plain")
    assert same(loaded, {"w0": torch.zeros(9), "w1": torch.ones(9)})


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    image = save(tmp_path / "images", {"w": torch.ones(9)})
    export([image], tmp_path / "plain")
    with pytest.raises(Conflict, match="already holds a checkpoint"):
        export([image], tmp_path / "plain")


def test_an_export_onto_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = save(tmp_path / "images", {"w": torch.ones(9)})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace, match="bytes are free"):
        export([image], tmp_path / "plain")
    assert list((tmp_path / "plain").iterdir()) == []


def test_keys_that_make_one_name_twice_are_refused(tmp_path: Path) -> None:
    image = save(tmp_path / "images", {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}})
    with pytest.raises(InvalidSpec, match="duplicated flatten key"):
        export([image], tmp_path / "plain")


def test_the_index_names_the_files_of_the_shards(tmp_path: Path) -> None:
    with Reader(save(tmp_path, {"w": torch.ones(9)})) as shard:
        (where,) = metadata([shard]).storage_data.values()
        slot = shard.slot("w")
        assert (where.relative_path, where.offset, where.length) == (shard.path.name, slot.offset, slot.length)


def test_crc_is_what_the_manifests_are_made_with(tmp_path: Path) -> None:
    from holdfast.train.saves.tensors import checksum

    crc32c = checksum()
    assert crc32c is not None
    assert crc32c(memoryview(b"123456789")) == google_crc32c.value(b"123456789") == 0xE3069283
    assert crc32c(memoryview(b"")) == 0

"""`holdfast checkpoints export`: what comes out of a bucket is what plain torch loads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import stored
import torch
from commands import Shell
from torch.distributed.checkpoint import state_dict_loader

from holdfast.domain.mesh import Mesh
from holdfast.shards import Reader, peek
from holdfast.stores import layout
from holdfast.stores.checksum import of_parts
from holdfast.stores.file import FileStore
from holdfast.train.channels import Notes
from holdfast.train.environment import Environment, World
from holdfast.train.saves.checkpoint import Checkpointer

MESH = Mesh.of({"dp": 2})


def saved_by_trainers(store: FileStore, images: Path, model: torch.nn.Module) -> None:
    """As the trainer library saves it, and replicators store it."""
    raws = []
    for rank in range(MESH.world_size):
        place = images / str(rank)
        place.mkdir(parents=True)
        environment = Environment(World(MESH, rank, 1), job="gpt", attempt=1, images=str(place))
        notes = Notes(agent="", replicator="", job="gpt", generation=1, rank=rank)
        assert Checkpointer(environment, torch.device("cpu"), notes).save({"model": model, "seen": 99}, 3)
        (path,) = (path for path in place.glob("*.image") if (header := peek(path)) and header.stamp.key.step == 3)
        with Reader(path) as reader:
            manifest = stored.manifest_of(reader.data, reader.header, "gpt")
            stored.upload_rank(store, bytes(reader.data), manifest)
        raws.append(manifest.encode())
    raw = layout.CheckpointManifest.of(raws).encode()
    assert store.put(layout.manifest_key("gpt", 1, 3), [raw], crc32c=of_parts([raw]), if_absent=True)


def test_exported(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    store = FileStore(tmp_path / "store")
    saved_by_trainers(store, tmp_path / "images", model)
    result = Shell(tmp_path)("checkpoints", "export", "gpt", "--store", store.url, "--to", "out")
    assert result.code == 0, result.err
    assert "step 3 (dp 2) exported to out" in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out", "store", "tmp"]
    other: dict[str, Any] = {
        "model": torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 2)).state_dict(),
        "seen": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state_dict_loader.load(other, checkpoint_id=tmp_path / "out")
    assert other["seen"] == 99
    for name, tensor in model.state_dict().items():
        assert torch.equal(other["model"][name], tensor)

"""Small gloo worlds that save, restore and load sharded state. A script of its own, so that ranks can be forked from a
process that has imported torch and done nothing else:

    run(directory, Phase("save", 4), Phase("restore", 2))

Every phase forks its ranks, each a `Checkpointer` with its images in `directory/images-<rank>`. `save` trains a little
and writes what the whole state is to `whole.pt`; `restore` puts it together again through holdfast, `dcp` through plain
`torch.distributed.checkpoint` from `directory/plain`; both compare.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warm_processes import run_script

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Phase:
    do: str  # save | restore | dcp
    ranks: int
    tp: int = 1
    hsdp: bool = False
    parts: Sequence[int] | None = None  # ranks that a restore reads from; None = all that saved, where tp is 1


def run(directory: Path, *phases: Phase) -> None:
    """Raises AssertionError with the ranks' output when one of them fails."""
    phases_json = json.dumps([asdict(phase) for phase in phases])
    code, output = run_script(__file__, str(directory), phases_json, timeout_s=TIMEOUT_S)
    assert code == 0, output


def main(directory: Path, phases: Sequence[Phase]) -> None:
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    for number, phase in enumerate(phases):
        children = [_fork(directory, number, phase, rank) for rank in range(phase.ranks)]
        if any(os.wait()[1] for _ in children):
            os.killpg(0, signal.SIGKILL)  # whoever still waits for the one that failed


def _fork(directory: Path, number: int, phase: Phase, rank: int) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _rank(directory, number, phase, rank)
        code = 0
    except BaseException:
        print(f"rank {rank} of {phase}", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(directory: Path, number: int, phase: Phase, rank: int) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(directory / f"store-{os.getppid()}-{number}"), phase.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=phase.ranks)
    {"save": _save, "restore": _restore, "dcp": _dcp}[phase.do](directory, phase, rank)
    dist.barrier()
    dist.destroy_process_group()


def build(phase: Phase, seed: int) -> dict[str, Any]:
    """A model whose rows divide by no number of ranks, some fewer than there are ranks."""
    import numpy as np
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    width = 9 if phase.tp == 1 else 10
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))
    if phase.tp > 1:
        mesh = init_device_mesh("cpu", (phase.ranks // phase.tp, phase.tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = mesh["dp"]
    elif phase.hsdp:
        mesh = init_device_mesh("cpu", (2, phase.ranks // 2), mesh_dim_names=("dp", "shard"))
    else:
        mesh = init_device_mesh("cpu", (phase.ranks,), mesh_dim_names=("dp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optim": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "table": torch.arange(5.0) + seed,
        "seen": seed,
        "array": np.arange(3) + seed,
    }


def train(state: dict[str, Any], steps: int) -> None:
    import torch

    for step in range(steps):
        torch.manual_seed(1000 + step)
        state["optim"].zero_grad()
        state["model"](torch.randn(4, 6)).square().mean().backward()
        state["optim"].step()
        state["schedule"].step()


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state without its sharding, by names; collective."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    def full(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.full_tensor().clone()
        return value.clone() if isinstance(value, torch.Tensor) else value

    moments: dict[str, Any] = get_optimizer_state_dict(state["model"], state["optim"])["state"]  # type: ignore[assignment]
    return {
        "model": {name: full(value) for name, value in state["model"].state_dict().items()},
        "moments": {name: {key: full(value) for key, value in slots.items()} for name, slots in moments.items()},
        "lr": state["optim"].param_groups[0]["lr"],
        "table": state["table"].clone(),
        "seen": state["seen"],
        "array": torch.from_numpy(state["array"].copy()),
    }


def assert_same(left: Any, right: Any, path: str = "state") -> None:
    import torch

    if isinstance(left, dict):
        assert left.keys() == right.keys(), f"{path}: {sorted(left)} {sorted(right)}"
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), f"{path}: {left} {right}"
    else:
        assert left == right, f"{path}: {left} {right}"


def _checkpointer(directory: Path, phase: Phase, rank: int) -> Any:
    import torch

    from holdfast.domain.mesh import Mesh
    from holdfast.train.channels import Notes
    from holdfast.train.environment import Environment, World
    from holdfast.train.saves.checkpoint import Checkpointer

    mesh = Mesh.of({"dp": phase.ranks // phase.tp} | ({"tp": phase.tp} if phase.tp > 1 else {}))
    environment = Environment(World(mesh, rank, 1), job="t", attempt=1, images=str(directory / f"images-{rank}"))
    return Checkpointer(
        environment, torch.device("cpu"), Notes(agent="", replicator="", job="t", generation=1, rank=rank)
    )


def _save(directory: Path, phase: Phase, rank: int) -> None:
    import torch

    state = build(phase, 1)
    train(state, 2)
    expected = whole(state)
    assert _checkpointer(directory, phase, rank).save(state, 2)
    train(state, 1)
    if rank == 0:
        torch.save(expected, directory / "whole.pt")
        torch.save(whole(state), directory / "next.pt")
    else:
        whole(state)


def image(directory: Path, rank: int) -> str:
    return str(next((directory / f"images-{rank}").glob("*.image")))


def _restore(directory: Path, phase: Phase, rank: int) -> None:
    import torch

    from holdfast.train.environment import RestoreTarget

    state = build(phase, 7)
    saved = sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("images-*"))
    parts = phase.parts or tuple(each for each in saved if each % phase.tp == rank % phase.tp)
    own = rank if rank in parts else parts[0]
    target = RestoreTarget(2, 1, image(directory, own), tuple(image(directory, each) for each in parts))
    restored = _checkpointer(directory / "elsewhere", phase, rank).restore(state, target)
    assert (restored.step, restored.rank) == (2, own)
    expected = torch.load(directory / "whole.pt")
    assert_same(whole(state), expected)
    assert state["schedule"].last_epoch == 2


def _dcp(directory: Path, phase: Phase, rank: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    state = build(phase, 7)
    flat = {
        **{key: state[key] for key in ("table", "seen", "array")},
        "model": state["model"].state_dict(),
        "optim": get_optimizer_state_dict(state["model"], state["optim"]),
        "schedule": state["schedule"].state_dict(),
    }
    dcp.load(flat, checkpoint_id=directory / "plain")  # type: ignore[attr-defined]
    set_optimizer_state_dict(state["model"], state["optim"], flat["optim"])
    state |= {key: flat[key] for key in ("table", "seen", "array")}
    assert_same(whole(state), torch.load(directory / "whole.pt"))
    assert flat["schedule"]["last_epoch"] == 2


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), [Phase(**raw) for raw in json.loads(sys.argv[2])])

"""A job in each layout whose sums have an order, interrupted and uninterrupted. A script of its own, so that ranks can be
forked from a process that has imported torch and done nothing else:

    uninterrupted, restored = run(directory, "ddp", {"dp": 4}, saves=(5, 0)).weights

Every number in `saves` is one generation: it starts from what the one before saved last, saves after that many steps (0 = not
at all), trains to step `STEPS` and leaves the parameters of all its ranks. The model's layers run in another order than they
were made in and fill several buckets, so that DDP's buckets of the first step are unlike those of all others.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from ports import reserve_port
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_workers import elect
from warm_processes import run_script

import holdfast.train as hf
from holdfast.domain import worker
from holdfast.domain.mesh import Mesh

STEPS = 8
WIDTH = 57
BUCKET_MIB = 0.02  # three layers
SAMPLES = 8
TIMEOUT_S = 280.0


@dataclass(frozen=True, slots=True)
class Options:
    layout: str  # ddp | fsdp2 | hsdp | pipeline
    mesh: Mapping[str, int]
    accumulate: int = 1  # backwards per step
    views: bool = False  # gradients are views of the buckets
    static_graph: bool = False
    late: bool = False  # DDP is made after the restore
    resized: Mapping[str, int] | None = None  # the mesh of all generations but the first


@dataclass(frozen=True, slots=True)
class Outcome:
    weights: list[list[Tensor]]  # of each generation, all ranks' parameters
    said: str


def run(directory: Path, options: Options, *, saves: Sequence[int]) -> Outcome:
    """Raises AssertionError with the ranks' output when one of them fails."""
    arguments = str(directory), json.dumps(asdict(options)), json.dumps(saves)
    code, said = run_script(__file__, *arguments, timeout_s=TIMEOUT_S)
    assert code == 0, said
    loaded = [
        [each for rank in range(_world(options, number)) for each in torch.load(_weights(directory, number, rank))]
        for number in range(len(saves))
    ]
    return Outcome(loaded, said)


def _mesh(options: Options, generation: int) -> Mapping[str, int]:
    return options.resized if generation and options.resized else options.mesh


def _world(options: Options, generation: int) -> int:
    return Mesh.of(_mesh(options, generation)).world_size


def _weights(directory: Path, generation: int, rank: int) -> Path:
    return directory / f"generation-{generation}-rank-{rank}.pt"


def main(directory: Path, options: Options, saves: Sequence[int]) -> None:
    torch.set_num_threads(1)
    # What torch imports at first use: once, for all ranks. The first optimizer of a process imports _dynamo.
    for module in ("torch._dynamo", *(["torch.distributed.fsdp"] if options.layout in ("fsdp2", "hsdp") else [])):
        importlib.import_module(module)
    for generation, save_at in enumerate(saves):
        mesh, world = _mesh(options, generation), _world(options, generation)
        restore = elect(directory, _mesh(options, generation - 1), target=mesh) if generation else {}
        with reserve_port() as reserved:
            port = reserved.getsockname()[1]
            for rank in range(world):
                environment = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    worker.ENV_JOB: "test",
                    worker.ENV_GENERATION: str(generation),
                    worker.ENV_ATTEMPT: str(generation + 1),
                    worker.ENV_MESH: json.dumps(mesh),
                    worker.ENV_IMAGES: str(directory / f"images-{rank}"),
                }
                if rank in restore:
                    environment[worker.ENV_RESTORE] = json.dumps(restore[rank])
                    environment[worker.ENV_PREVIOUS_MESH] = json.dumps(_mesh(options, generation - 1))
                _fork(environment, options, save_at, _weights(directory, generation, rank))
            if any(os.wait()[1] for _ in range(world)):
                os.killpg(0, signal.SIGKILL)  # whoever still waits for the one that failed


def _fork(environment: Mapping[str, str], options: Options, save_at: int, out: Path) -> None:
    sys.stdout.flush()
    if os.fork():
        return
    code = 1
    try:
        os.environ.update(environment)
        hf.launch(lambda run: _train(run, options, save_at, out))
        code = 0
    except BaseException:
        print(f"rank {environment['RANK']} of {options}", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Stack(nn.Module):
    """Layers that are used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for number in (3, 0, 4, 1, 2):
            x = x + torch.tanh(self.layers[number](x))
        return x


def _sharded(stack: Stack, run: hf.Run, layout: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = run.mesh["dp", "shard"] if layout == "hsdp" else run.mesh["dp"]
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(stack, mesh=mesh)
    return stack  # the same object, which is sharded now


def _replicated(stack: Stack, run: hf.Run, options: Options) -> DistributedDataParallel:
    return DistributedDataParallel(
        stack,
        process_group=run.mesh["dp"].get_group(),
        bucket_cap_mb=BUCKET_MIB,
        gradient_as_bucket_view=options.views,
        static_graph=options.static_graph,
    )


def _train(run: hf.Run, options: Options, save_at: int, out: Path) -> None:
    torch.manual_seed(run.world.index("pp"))
    stack = Stack()
    model: nn.Module = stack
    if options.layout in ("fsdp2", "hsdp"):
        model = _sharded(stack, run, options.layout)
    elif not options.late:
        model = _replicated(stack, run, options)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-2)
    state = {"model": stack, "optimizer": optimizer}
    step = run.restore(state)
    if options.late:
        model = _replicated(stack, run, options)
    while step < STEPS:
        with run.step(step):
            optimizer.zero_grad()
            for number in range(1, options.accumulate):
                with model.no_sync():  # type: ignore[operator]
                    _backward(run, model, options.layout, _samples(run, step, number))
            _backward(run, model, options.layout, _samples(run, step, 0))
            optimizer.step()
        step += 1
        run.checkpoint(state, step, force=step == save_at)
    torch.save([getattr(each, "_local_tensor", each).detach() for each in model.parameters()], out)


def _samples(run: hf.Run, step: int, number: int) -> Tensor:
    column = run.rank // run.world.size("pp")
    generator = torch.Generator().manual_seed((step * 1000 + column) * 10 + number)
    return 3 * torch.randn(SAMPLES, WIDTH, generator=generator)


def _backward(run: hf.Run, model: nn.Module, layout: str, x: Tensor) -> None:
    if layout != "pipeline":
        model(x).square().mean().backward()
    elif run.world.index("pp") == 0:
        out = model(x)
        dist.send(out.detach(), run.rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, run.rank + 1)
        out.backward(gradient)
    else:
        received = torch.empty_like(x)
        dist.recv(received, run.rank - 1)
        received.requires_grad_()
        model(received).square().mean().backward()
        assert received.grad is not None
        dist.send(received.grad, run.rank - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Options(**json.loads(sys.argv[2])), json.loads(sys.argv[3]))

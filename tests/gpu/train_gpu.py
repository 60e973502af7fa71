"""A small model on the GPU, under `holdfast run`: bf16 products, dropout on the device, Adam. Each step's loss is a line of
`losses-RANK.jsonl`, with all digits.

    train_gpu.py --steps 200 --out DIR [--backend gloo] [--fault oom --fault-step 20] [--compile]

The fault happens in the first generation only, on rank 0, after `--fault-step`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast.train as hf

WIDTH = 256
BATCH = 32
ENDLESS_CYCLES = 1 << 40  # of `torch.cuda._sleep`: ten minutes at 1.8 GHz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="")
    parser.add_argument("--fault", choices=("", "oom", "assert", "address", "endless"), default="")
    parser.add_argument("--fault-step", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pace-s", type=float, default=0.02, help="a pause after each step, for who disturbs the run")
    parser.add_argument("--width", type=int, default=WIDTH)
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    hf.launch(lambda run: train(run, arguments), backend=arguments.backend or None)


def train(run: hf.Run, arguments: argparse.Namespace) -> None:
    torch.manual_seed(run.rank)
    width = arguments.width
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
    model.to(run.device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=run.device.type == "cuda")
    half = next(model.parameters()).detach().bfloat16()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "half": half, "host": torch.zeros(7)}
    forward = torch.compile(model) if arguments.compile else model
    with (arguments.out / f"losses-{run.rank}.jsonl").open("a", buffering=1) as losses:
        for step in range(run.restore(state) + 1, arguments.steps + 1):
            with run.step(step - 1) as finished:
                loss = one_step(run, forward, optimizer, state)
                finished.log(loss=loss)
            line = {"step": step, "loss": float(loss), "generation": run.generation, "at": time.time()}
            losses.write(json.dumps(line) + "\n")
            if arguments.fault and run.generation == 1 and run.rank == 0 and step == arguments.fault_step:
                fail(arguments.fault, run.device)
            run.checkpoint(state, step)
            time.sleep(arguments.pace_s)
    sums = {name: float(tensor.double().sum()) for name, tensor in model.state_dict().items()}
    sums |= {"half": float(half.double().sum()), "host": float(state["host"].sum())}
    (arguments.out / f"end-{run.rank}.json").write_text(json.dumps(sums))


def one_step(
    run: hf.Run, forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Tensor:
    width = state["model"][0].in_features
    x = torch.randn(BATCH, width, device=run.device)
    with torch.autocast(run.device.type, torch.bfloat16):
        loss = (forward(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in state["model"].parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    state["half"].add_(state["model"][0].weight.detach().to(state["half"].dtype) * 1e-3)
    state["host"] += 1
    return loss.detach()


def fail(kind: str, device: torch.device) -> None:
    match kind:
        case "oom":
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        case "assert":  # of a kernel: the index is checked on the device
            table = torch.zeros(4, device=device)
            table[torch.tensor([9], device=device)].sum().item()
        case "address":
            wild_store(device)
        case "endless":
            torch.cuda._sleep(ENDLESS_CYCLES)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)


def wild_store(device: torch.device) -> None:
    """Write to an address that is not mapped: the driver reports Xid 31, and the context is lost."""
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void wild(float* x) { x[1ll << 40] = 1.0f; }', "wild")
    kernel(grid=(1, 1, 1), block=(1, 1, 1), args=(torch.zeros(1, device=device),))
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()

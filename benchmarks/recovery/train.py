"""The training script of the recovery benchmark: an ordinary torchrun script, the same bytes for every launcher.

DDP over gloo, AdamW, a checkpoint by rank 0 every few steps; on GPUs where torch sees some. Every rank appends one JSON line
per finished step to `OUT/rank-R.jsonl`: pid, step, wall-clock time and the step's duration. The benchmark reads nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [torch.nn.Sequential(torch.nn.Linear(args.width, args.width), torch.nn.GELU()) for _ in range(args.depth)]
    device = torch.device("cpu")
    if gpus := torch.cuda.device_count():  # gloo, because NCCL refuses two ranks on one GPU
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpoint = args.out / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with (args.out / f"rank-{rank}.jsonl").open("a", buffering=1) as progress:
        while step < args.steps:
            started = time.perf_counter()
            inputs = torch.randn(args.batch, args.width, device=device)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), inputs).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            step += 1
            took_ms = (time.perf_counter() - started) * 1e3
            progress.write(json.dumps({"pid": os.getpid(), "step": step, "at": time.time(), "ms": took_ms}) + "\n")
            if rank == 0 and step % args.save_every == 0:
                part = checkpoint.with_suffix(".part")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
                part.replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

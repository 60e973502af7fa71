"""The recovery benchmark's training with `holdfast.train` in it: saves into shared memory and reports its phases."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as hf


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


def main(run: hf.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(args.width, args.width), torch.nn.GELU()) for _ in range(args.depth)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model.module, "optimizer": optimizer}
    step = run.restore(state)
    with (args.out / f"rank-{run.rank}.jsonl").open("a", buffering=1) as progress:
        while step < args.steps:
            started = time.perf_counter()
            with run.step(step) as s:
                inputs = torch.randn(args.batch, args.width, device=run.device)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), inputs)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if run.device.type == "cuda":
                    torch.cuda.synchronize(run.device)
                s.log(loss=loss, tokens=args.batch)
            step += 1
            took_ms = (time.perf_counter() - started) * 1e3
            progress.write(json.dumps({"pid": os.getpid(), "step": step, "at": time.time(), "ms": took_ms}) + "\n")
            run.checkpoint(state, step)


if __name__ == "__main__":
    arguments = parse()
    hf.launch(lambda run: main(run, arguments), backend="gloo")  # as train.py

"""What the trainings of the frameworks share: arguments, model, samples, and one line per finished step for the benchmark."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

WIDTH, DEPTH, BATCH, SAMPLES = 512, 4, 32, 8192


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save-every", type=int, default=0, help="steps between the framework's own saves; 0 = none")
    return parser.parse_args()


def model() -> torch.nn.Sequential:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(DEPTH)]
    return torch.nn.Sequential(*layers)


def samples() -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.rand(SAMPLES, WIDTH, generator=made))


class Progress:
    """Appends to `OUT/rank-R.jsonl`: pid, step and time."""

    def __init__(self, out: Path) -> None:
        self._file = (out / f"rank-{os.environ['RANK']}.jsonl").open("a", buffering=1)

    def finished(self, step: int) -> None:
        self._file.write(json.dumps({"pid": os.getpid(), "step": step, "at": time.time()}) + "\n")

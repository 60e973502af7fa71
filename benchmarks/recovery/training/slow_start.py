"""The MLP with DistributedDataParallel, whose batches need an index that takes some seconds to make (`slow_data.py`)."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from mlp import BATCH, SAMPLES, Progress, arguments, model, samples  # type: ignore[import-not-found]
from slow_data import WORDS, prepare  # type: ignore[import-not-found]

import holdfast.train as hf


def main(run: hf.Run) -> None:
    index = hf.prepared(prepare)
    module = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    data, progress = samples(), Progress(options.out)
    state = {"model": module, "optimizer": optimizer}
    step = run.restore(state)
    while step < options.steps:
        positions = index[f"word-{step * run.world_size % WORDS + run.rank}"][:BATCH]
        (inputs,) = data[[position % SAMPLES for position in positions]]
        with run.step(step):
            loss: Any = torch.nn.functional.mse_loss(module(inputs), inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        step += 1
        progress.finished(step)
        run.checkpoint(state, step)


if __name__ == "__main__":
    options: argparse.Namespace = arguments()
    hf.launch(main)

"""A script with a bug: it raises the same exception at the same step in every run.

Holdfast restarts it once. When two nodes have shown the exception, it stops the job; the reason contains the exception, the
rank and the step.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

import holdfast.train as hf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit", type=int, default=25, help="samples in the lookup table; this step fails")
    return parser.parse_args()


def main(run: hf.Run, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    table = torch.randn(args.limit, 8)
    state = {"model": model, "optimizer": optimizer}
    step = run.restore(state)
    while step < args.steps:
        with run.step(step) as s:
            row = table[step].to(run.device)  # IndexError once step reaches --limit
            loss = mse_loss(model(row), row.sum().reshape(1))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            s.log(loss=loss, tokens=1)
        step += 1
        run.checkpoint(state, step)


if __name__ == "__main__":
    arguments = parse_arguments()
    hf.launch(lambda run: main(run, arguments))

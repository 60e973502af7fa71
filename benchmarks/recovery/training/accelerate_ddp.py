"""The MLP with Accelerate. Its own resume: `save_state`, `load_state` and `skip_first_batches`, as in its documentation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from mlp import BATCH, Progress, arguments, model, samples  # type: ignore[import-not-found]

from holdfast.integrations.accelerate import attach


def main(options: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=True)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(samples(), BATCH, shuffle=True)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    progress, own, latest = Progress(options.out), options.out / "own", options.out / "latest"
    run = attach(accelerator)
    step = run.steps_finished
    if options.save_every and latest.exists():
        step = int(latest.read_text())
        accelerator.load_state(str(own / f"step-{step}"))

    def batches() -> Iterator[Any]:
        if options.save_every:
            yield from accelerator.skip_first_batches(loader, step % len(loader))
        else:
            yield from run.batches(loader)

    while step < options.steps:
        for (inputs,) in batches():
            with run.step():
                loss = torch.nn.functional.mse_loss(module(inputs), inputs)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            progress.finished(step)
            if options.save_every and step % options.save_every == 0:
                accelerator.save_state(str(own / f"step-{step}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    part = latest.with_suffix(".part")
                    part.write_text(str(step))
                    part.replace(latest)
            if step >= options.steps:
                break


if __name__ == "__main__":
    main(arguments())

"""The MLP with DeepSpeed, ZeRO stage 1. Its own resume: `save_checkpoint` and `load_checkpoint`, with the step in the client
state, as in its documentation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import deepspeed
import torch
from mlp import BATCH, Progress, arguments, model, samples  # type: ignore[import-not-found]

from holdfast.integrations.deepspeed import attach


def main(options: argparse.Namespace) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel for CPUs whose build takes minutes
    deepspeed.init_distributed()
    module = model()
    engine, _, loader, _ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4),
        training_data=samples(),
        config={"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 1}},
    )
    loader.num_local_io_workers = 0
    progress, own = Progress(options.out), options.out / "own"
    step = 0
    if options.save_every and (own / "latest").exists():
        _, client = engine.load_checkpoint(str(own))
        step = client["step"]
    run = attach(engine)
    step = max(step, run.steps_finished)

    def batches() -> Iterator[Any]:
        if options.save_every:
            yield from islice(loader, step % len(loader), None)
        else:
            yield from run.batches(loader)

    while step < options.steps:
        for (inputs,) in batches():
            loss = torch.nn.functional.mse_loss(engine(inputs), inputs)
            engine.backward(loss)
            engine.step()
            step += 1
            progress.finished(step)
            if options.save_every and step % options.save_every == 0:
                engine.save_checkpoint(str(own), client_state={"step": step})
            if step >= options.steps:
                break


if __name__ == "__main__":
    main(arguments())

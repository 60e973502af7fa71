"""The MLP with FSDP2 and `torch.distributed.checkpoint`. Its own resume: `dcp.load` of the newest directory."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from mlp import BATCH, WIDTH, Progress, arguments, model  # type: ignore[import-not-found]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.train as hf
from holdfast.integrations.dcp import Reader, Writer


class App(Stateful):
    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        module, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": module, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def main(options: argparse.Namespace) -> None:
    run = hf.attach()
    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    state = {"app": App(module, optimizer)}
    progress, own, latest = Progress(options.out), options.out / "own", options.out / "latest"
    writer, reader = Writer(run) if run.saves else None, Reader(run)
    step = 0
    if reader.available:
        load(state, storage_reader=reader)
        step = run.steps_finished
    elif latest.exists():
        step = int(latest.read_text())
        load(state, checkpoint_id=str(own / f"step-{step}"))
    while step < options.steps:
        with run.step(step):
            inputs = torch.randn(BATCH, WIDTH)
            loss = torch.nn.functional.mse_loss(module(inputs), inputs)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        step += 1
        progress.finished(step)
        if writer is not None and writer.due:
            save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        elif options.save_every and step % options.save_every == 0:
            save(state, checkpoint_id=str(own / f"step-{step}"))
            if dist.get_rank() == 0:
                part = latest.with_suffix(".part")
                part.write_text(str(step))
                part.replace(latest)
    run.close()


if __name__ == "__main__":
    main(arguments())

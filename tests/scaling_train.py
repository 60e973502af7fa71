"""A tiny data-parallel model whose replicas keep their own batch: the learning rate follows the number of replicas.

    scaling_train.py --steps 100 --out DIR [--checkpoint DIR --save-every 5]

`DIR/steps.jsonl`: step, replicas, the learning rate that the step used, and replica 0's loss. `DIR/events.jsonl`: what the
callbacks received, one line each, per rank. Under an agent or under torchrun."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast.train as hf

PER_REPLICA = 4
REFERENCE_BATCH = 12  # three replicas
BASE_LR = 0.1
SAMPLES = 96
SCHEDULE_STEPS = 1000


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """One whose next value is computed from the present one."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=SCHEDULE_STEPS, eta_min=1e-3)


def append(path: Path, **record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def main(run: hf.Run, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world, events = run.world, options.out / "events.jsonl"
    batch = PER_REPLICA * world.dp_size
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=BASE_LR, momentum=0.9)
    rate = hf.scaling.linear(optimizer, batch=batch, reference_batch=REFERENCE_BATCH)
    scheduler = schedule(optimizer)
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    data = hf.ElasticSampler(SAMPLES, global_batch=batch, micro_batch=PER_REPLICA, world=world)
    features = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    state: dict[str, Any] = {"model": {"weight": weight}, "optimizer": optimizer, "scheduler": scheduler, "data": data}

    def tell_resize(old: hf.World, new: hf.World, when: str) -> None:
        append(
            events,
            event="resize",
            when=when,
            old=old.dp_size,
            new=new.dp_size,
            old_rank=old.rank,
            rank=run.rank,
            generation=run.generation,
            scheduled=scheduler.last_epoch,
            rate=rate.rates[0],
        )

    run.on_resize(lambda old, new: tell_resize(old, new, "restore"))

    @run.on_leaving
    def leaving(change: hf.Leaving) -> None:
        append(
            events, event="leaving", step=change.step, reason=change.reason, rank=run.rank, generation=run.generation
        )

    step = run.restore(state)
    run.on_resize(lambda old, new: tell_resize(old, new, "late"))
    while step < options.steps:
        with run.step(step) as s:
            optimizer.zero_grad()
            (indices,) = next(data)
            loss = (features[indices] @ weight).square().sum() / batch
            torch.autograd.backward(loss)
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            optimizer.step()
            scheduler.step()
            s.log(loss=loss)
        step += 1
        if world.dp_index == 0:
            was = {"rate": used[-1], "reported": rate.factor, "loss": float(loss.detach())}
            append(options.out / "steps.jsonl", step=step, dp=world.dp_size, **was)
        time.sleep(options.step_s)
        run.checkpoint(state, step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="added to every step")
    parser.add_argument("--checkpoint", type=Path, help="directory of checkpoints without an agent")
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    own = hf.Checkpoints(directory=arguments.checkpoint, interval_steps=arguments.save_every)
    hf.launch(lambda run: main(run, arguments), checkpoint=own if arguments.checkpoint else None)

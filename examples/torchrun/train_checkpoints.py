"""`train_ddp.py` with Holdfast's checkpoints: no services, only torchrun.

torchrun --nproc-per-node 2 train_checkpoints.py --directory /tmp/checkpoints
    … after a kill of any process, the same command continues bit for bit from the last checkpoint.
kill -USR1 (any rank)    all ranks save the same step and continue
kill -TERM (any rank)    all ranks save the same step, write it to disk and exit; also when torchrun is stopped
python train_checkpoints.py --directory /tmp/checkpoints
    … with one process: the state of one replica suffices, and the sampler distributes the same samples to fewer ranks.

A save copies the tensors to /dev/shm; a thread writes them to the directory. `holdfast run` accepts the script as well, with
the checkpoint settings of the job."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import holdfast.train as hf

SAMPLES = 4096


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="samples per step of all ranks together")
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"), help="on this node, or shared by all")
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum time per step, to follow the run")
    return parser.parse_args()


def main(run: hf.Run) -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    features = torch.randn(SAMPLES, 32)
    network = nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 1)).to(run.device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = hf.ElasticSampler(SAMPLES, global_batch=args.batch, world=run.world)

    state = {"model": network, "optimizer": optimizer, "samples": samples}
    step = run.restore(state)
    if run.rank == 0:
        print(f"starts at step {step}", flush=True)
    while step < args.steps:
        began = time.monotonic()
        with run.step(step) as s:
            (batch,) = next(samples)
            x = features[batch].to(run.device)
            loss = mse_loss(model(x), x.square().sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            s.log(loss=loss, tokens=len(batch))
        step += 1
        if run.rank == 0 and step % args.save_every == 0:
            print(f"step {step}  loss {loss.item():.9g}", flush=True)
        time.sleep(max(0.0, began + args.step_s - time.monotonic()))
        run.checkpoint(state, step)


if __name__ == "__main__":
    arguments = parse_arguments()
    hf.launch(main, checkpoint=hf.Checkpoints(directory=arguments.directory, interval_steps=arguments.save_every))

"""Train a byte-level GPT on the Python standard library's own source: data parallel × pipeline parallel.

    python train.py --steps 20                              one process
    torchrun --nproc-per-node 4 train.py --pp 2             dp 2 × pp 2
    holdfast run job.yaml                                   dp 3 × pp 3, with recovery

Runs on CUDA with NCCL if there are GPUs, otherwise on CPU with gloo. The gradient of a step is the mean over the global batch,
for any number of replicas. With `--shard-optimizer` each replica keeps only its part of the optimizer's state, and a resize
redistributes the parts. With `--batch-per-replica` the global batch follows the number of replicas, and `--scale-lr` adapts the
learning rate to it.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast.train as hf

from model import GPTConfig, build_stage  # isort: skip
from pipeline import Pipeline  # isort: skip
from sharding import SharedWeights  # isort: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in total (default %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="model width (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sample (default %(default)s)")
    parser.add_argument("--global-batch", type=int, default=36, help="samples per step over all replicas")
    parser.add_argument("--micro-batch", type=int, default=6, help="samples per forward pass")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages; under holdfast the job's mesh decides")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for --global-batch samples per step")
    parser.add_argument(
        "--batch-per-replica", type=int, help="samples per step of each replica, instead of a constant global batch"
    )
    parser.add_argument(
        "--scale-lr",
        choices=("linear", "square_root"),
        default="linear",
        help="with --batch-per-replica: how the learning rate follows the global batch (default %(default)s)",
    )
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="divide the optimizer's state over the replicas (ZeRO 1)"
    )
    parser.add_argument("--step-s-min", type=float, default=0.0, help="seconds per step at least, as of a larger model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per process")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--out", type=Path, help="directory for loss.jsonl, one line per step, and the final weights")
    return parser.parse_args()


def load_text(files: int = 16) -> Tensor:
    """The largest top-level modules of the standard library as one uint8 tensor (about 2 MB)."""
    modules = Path(sysconfig.get_path("stdlib")).glob("*.py")
    largest = sorted(modules, key=lambda module: (-module.stat().st_size, module.name))[:files]
    return torch.frombuffer(bytearray().join(module.read_bytes() for module in largest), dtype=torch.uint8)


class Gradients:
    """All gradients of a stage in one flat buffer, with the loss at the end, so that one all-reduce sums everything."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in parameters) + 1, device=parameters[0].device)
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, loss: Tensor, group: dist.ProcessGroup) -> float:
        """Sum over the replicas. Returns the summed loss."""
        self.flat[-1] = loss
        dist.all_reduce(self.flat, group=group)
        return self.flat[-1].item()


def tell_resizes(run: hf.Run, rate: hf.scaling.ScaledRate, batch: int, out: Path | None) -> None:
    """After a change of the number of replicas, print the new batch and learning rate, and append them to a file for the
    demo."""

    @run.on_resize
    def resized(old: hf.World, new: hf.World) -> None:
        line = f"{old.dp_size} → {new.dp_size} replicas: {batch} samples per step, learning rate {rate.rates[0]:.6g}"
        line += f" (scaled by {rate.factor:.4g})" if rate.factor != 1 else " (constant global batch: not scaled)"
        print(line, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with (out / "resizes.log").open("a") as file:
                file.write(f"{line}\n")


class LossLog:
    """Prints the loss every few steps, and appends the loss of every step with all its digits to a file."""

    def __init__(self, directory: Path | None, every: int, start: int) -> None:
        self._every = every
        self._file = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / "loss.jsonl"
            lines = path.read_text().splitlines() if start and path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= start]  # later steps are repeated
            path.with_suffix(".new").write_text("".join(line + "\n" for line in kept))
            path.with_suffix(".new").replace(path)
            self._file = path.open("a", buffering=1)

    def __call__(self, step: int, loss: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if step % self._every == 0:
            print(f"step {step:6d}  loss {loss:.4f}", flush=True)


def main(run: hf.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    config = GPTConfig(args.layers, args.width, args.heads, args.seq, args.seed)
    world, dp = run.world, run.mesh["dp"]
    stages, stage_index = world.size("pp"), world.index("pp")
    replica_ranks = [world.mesh.ranks_at(position)[world.dp_index] for position in range(stages)]

    stage = build_stage(config, stage_index, stages).to(run.device)
    pipeline = Pipeline(stage, stage_index, replica_ranks, config.width, run.comm_wait)
    gradients = Gradients(stage.parameters())
    shared = SharedWeights(stage.parameters(), gradients.flat, dp) if args.shard_optimizer else None
    optimizer = torch.optim.AdamW([shared.parameter] if shared else stage.parameters(), lr=args.lr, fused=True)
    batch = args.batch_per_replica * world.dp_size if args.batch_per_replica else args.global_batch
    scale = {"linear": hf.scaling.linear, "square_root": hf.scaling.square_root}[args.scale_lr]
    rate = scale(optimizer, batch=batch, reference_batch=args.global_batch)
    text = load_text()
    window = torch.arange(config.seq + 1)
    data = hf.ElasticSampler(
        (len(text) - 1) // config.seq,
        global_batch=batch,
        micro_batch=args.micro_batch,
        world=world,
        seed=args.seed,
    )

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the part of this micro-batch in the mean over the global batch."""
        summed = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / (batch * config.seq)

    state: dict[str, Any] = {"model": stage, "optimizer": optimizer, "data": data}
    if shared is not None:  # a flat tensor has no parameter name, so each stage's tensor gets a different one
        state["optimizer"] = {f"stage{stage_index}": optimizer}
    speaks = pipeline.is_last and world.dp_index == 0
    if speaks:
        tell_resizes(run, rate, batch, args.out)
    step = run.restore(state)
    log = LossLog(args.out, args.log_every, step) if speaks else None
    while step < args.steps:
        with run.step(step) as s:
            step_until_s = time.monotonic() + args.step_s_min
            with run.data_wait():
                samples = [text[indices[:, None] * config.seq + window].long() for indices in next(data)]
                samples = [sample.to(run.device) for sample in samples]
            gradients.zero()
            loss = pipeline.step([x[:, :-1] for x in samples], [x[:, 1:] for x in samples], mean_loss)
            with run.comm_wait():
                loss_of_all = gradients.reduce(loss, dp.get_group())
            optimizer.step()
            if shared is not None:
                with run.comm_wait():
                    shared.exchange()
            if pipeline.is_last:
                s.log(loss=loss_of_all, tokens=sum(x[:, 1:].numel() for x in samples))
            time.sleep(max(0.0, step_until_s - time.monotonic()))
        step += 1
        if log is not None:
            log(step, loss_of_all)
        run.checkpoint(state, step)
    if args.out is not None and world.dp_index == 0:
        torch.save(stage.state_dict(), args.out / f"stage-{stage_index}.pt")


if __name__ == "__main__":
    arguments = parse_arguments()
    hf.launch(lambda run: main(run, arguments), mesh={"dp": -1, "pp": arguments.pp})

"""A stand-in for torchtitan's trainer, which needs a GPU: its loop, over torchtitan's own checkpoint manager, optimizers,
schedulers and data loader, with FSDP2 on CPUs. A rank can do to itself what a fault would do, once, at a (rank, step).

    faulty_torchtitan.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes when the gradients of the step are reduced and the optimizer has not stepped. Prints a hash of the final
weights."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides

import holdfast.train as hf

sys.path.insert(0, str(Path(__file__).parent))
from striking import Strike  # type: ignore[import-not-found]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--fault", action="append", default=[], type=Strike)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--own", action="store_true", help="torchtitan writes its own files, too")


@dataclass(kw_only=True, slots=True)
class Config(Configurable.Config):  # type: ignore[misc]
    """The part of torchtitan's configuration that this trainer has."""

    checkpoint: BaseCheckpointManager.Config = field(default_factory=CheckpointManager.Config)


class Tokens(IterableDataset[Any]):
    """An endless data set that knows its position, as torchtitan's are."""

    def __init__(self, rank: int) -> None:
        self._rank, self._sample = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            made = torch.Generator().manual_seed(1000 * self._rank + self._sample)
            self._sample += 1
            yield {"input": torch.rand(16, generator=made)}, torch.rand(8, generator=made)

    def state_dict(self) -> dict[str, Any]:
        return {"sample": self._sample}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sample = state["sample"]


class Metrics:
    """As torchtitan's `MetricsProcessor`, which needs a device to measure."""

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float) -> None:
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {global_avg_loss:.4f}", flush=True)


class Trainer:
    """`torchtitan.trainer.Trainer`, without what needs a device: the same calls of the manager in the same order."""

    def __init__(self, args: argparse.Namespace, rank: int, ranks: int) -> None:
        self._args = args
        self.step, self.ntokens_seen = 0, 0
        self.metrics_processor = Metrics()
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        self.model_parts = [model]
        torch.manual_seed(rank)  # dropout differs between ranks
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
        self.optimizers = OptimizersContainer(
            OptimizersContainer.Config(param_groups=groups, implementation="for-loop"), model_parts=self.model_parts
        )
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=10).build(
            optimizers=self.optimizers, training_steps=args.steps
        )
        self.dataloader = ParallelAwareDataloader(Tokens(rank), dp_rank=rank, dp_world_size=ranks, batch_size=4)
        config = Config(checkpoint=CheckpointManager.Config(enable=args.own, interval=20, folder="own"))
        apply_overrides(OverrideConfig(imports=["holdfast.integrations.torchtitan.checkpoint"]), config)
        self.checkpointer = config.checkpoint.build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(args.out),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def batch_generator(self, loader: Any) -> Iterator[Any]:
        yield from iter(loader)

    def train_step(self, batches: Iterator[Any]) -> None:
        time.sleep(self._args.step_s)
        self.optimizers.zero_grad()
        inputs, labels = next(batches)
        self.ntokens_seen += labels.numel()
        loss: Any = nn.functional.mse_loss(self.model_parts[0](inputs["input"]), labels)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        for strike in self._args.fault:
            strike.at(self.step, self._args.out)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.metrics_processor.log(self.step, loss.item(), loss.item(), float(norm.full_tensor()))

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        batches = self.batch_generator(self.dataloader)
        while self.step < self._args.steps:
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == self._args.steps)
        self.checkpointer.close()


def main() -> None:
    args = parser.parse_args()
    hf.attach()  # makes the process group, as torchtitan's init_distributed does
    trainer = Trainer(args, dist.get_rank(), dist.get_world_size())
    trainer.train()
    full = [value.full_tensor() for value in trainer.model_parts[0].state_dict().values()]
    if dist.get_rank() == 0:
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in full)).hexdigest()
        print(f"weights {digest[:16]}", flush=True)


if __name__ == "__main__":
    main()

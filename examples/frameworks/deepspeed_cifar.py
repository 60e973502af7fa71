"""DeepSpeed's own "Getting started" loop with the network of its CIFAR-10 tutorial and ZeRO, on synthetic images.

    torchrun --nproc-per-node 2 deepspeed_cifar.py
    holdfast run --local --nproc-per-node 2 deepspeed_cifar.py

Prints a hash of the final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.integrations.deepspeed import attach


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.dropout = nn.Dropout(0.1)
        self.fc2 = nn.Linear(120, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        out: torch.Tensor = self.fc2(self.dropout(F.relu(self.fc1(torch.flatten(x, 1)))))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--step-s", type=float, default=0.0, help="so long a micro-batch takes at least, to look at faults"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2), help="of ZeRO")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    # the kernel for reductions on CPUs is built at the first start, which takes minutes
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    made = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.rand(512, 3, 32, 32, generator=made), torch.randint(0, 10, (512,), generator=made))
    torch.manual_seed(0)
    model: Any = Net()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        training_data=dataset,
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": args.accumulate,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": args.stage},
            "bf16": {"enabled": args.bf16},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": args.steps}},
        },
    )
    loader.num_local_io_workers = 0
    torch.manual_seed(engine.global_rank)  # dropout differs between ranks

    run = attach(engine)
    dtype = next(engine.module.parameters()).dtype
    while run.steps_finished < args.steps:
        loader.data_sampler.set_epoch(run.epoch)
        for inputs, labels in run.batches(loader):
            time.sleep(args.step_s)
            before = run.steps_finished
            loss = F.cross_entropy(engine(inputs.to(engine.device, dtype)), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0 and run.steps_finished != before and run.steps_finished % 10 == 0:
                print(f"step {run.steps_finished}  loss {loss.item():.4f}", flush=True)
            if run.steps_finished >= args.steps:
                break
    if engine.global_rank == 0:
        weights = b"".join(value.float().cpu().numpy().tobytes() for value in engine.module.state_dict().values())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    run.close()


if __name__ == "__main__":
    main()

"""`bridge_stand_in.Trainer` under `attach`, with two ranks on CPUs. A rank can do to itself what a fault would do, once, at a
(rank, step).

    faulty_megatron.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes when the gradients of the step are reduced and the optimizer has not stepped. Prints a hash of the final weights of
all ranks."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast.train as hf

sys.path.insert(0, str(Path(__file__).parent))
import bridge_stand_in  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]

bridge_stand_in.install()

from holdfast.integrations.megatron_bridge import attach  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--fault", action="append", default=[], type=Strike)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument("--own", action="store_true", help="Bridge writes its own files, too")
parser.add_argument("--overlap", action="store_true", help="parameters are gathered in the next forward pass")
parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")


def main() -> None:
    args = parser.parse_args()
    hf.attach()  # makes the process group, as Bridge's initialisation does

    def before_step(step: int, loss: float) -> None:
        time.sleep(args.step_s)
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {loss:.4f}", flush=True)
        for strike in args.fault:
            strike.at(step + 1, args.out)

    config = bridge_stand_in.configuration(
        steps=args.steps, out=args.out, own=args.own, overlap=args.overlap, tp=args.tp
    )
    trainer = bridge_stand_in.Trainer(config, attach(config), before_step)
    trainer.setup()
    trainer.train()
    for chunk in trainer.model:
        chunk.start_param_sync(force_sync=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model[0].module.parameters()])
    every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    if dist.get_rank() == 0:
        digest = hashlib.sha256(torch.cat(every).numpy().tobytes()).hexdigest()[:16]
        print(f"weights {digest}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()

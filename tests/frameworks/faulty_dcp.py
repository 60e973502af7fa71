"""examples/frameworks/dcp_fsdp.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_dcp.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes when the gradients of the step are reduced and the optimizer has not stepped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import holdfast.train as hf

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import dcp_fsdp  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--fault", action="append", default=[], type=Strike)


def attached() -> hf.Run:
    run = hf.attach()

    def stepping(*args: Any) -> None:
        for strike in chosen.fault:
            strike.at(run.steps_finished + 1, chosen.out)

    register_optimizer_step_pre_hook(stepping)
    return run


if __name__ == "__main__":
    chosen, sys.argv[1:] = parser.parse_known_args()
    dcp_fsdp.hf = SimpleNamespace(attach=attached)
    dcp_fsdp.main()

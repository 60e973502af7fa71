"""examples/frameworks/accelerate_loop.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_accelerate.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes between two batches of one step: the gradients of the first are accumulated, and the optimizer has not stepped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import accelerate_loop  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]

from holdfast.integrations.accelerate import AcceleratedRun, attach

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--fault", action="append", default=[], type=Strike)


class Faulty(accelerate_loop.Accelerator):  # type: ignore[misc]
    run: AcceleratedRun

    def backward(self, loss: Any, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if not self.sync_gradients:
            for strike in chosen.fault:
                strike.at(self.run.steps_finished + 1, chosen.out)


def attached(accelerator: Faulty) -> AcceleratedRun:
    accelerator.run = attach(accelerator)
    return accelerator.run


if __name__ == "__main__":
    chosen, sys.argv[1:] = parser.parse_known_args()
    accelerate_loop.Accelerator, accelerate_loop.attach = Faulty, attached
    accelerate_loop.main()

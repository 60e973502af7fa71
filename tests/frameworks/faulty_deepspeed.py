"""examples/frameworks/deepspeed_cifar.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_deepspeed.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes between two micro-batches of one step: the gradients of the first are accumulated, and the optimizer has not
stepped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import deepspeed_cifar  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]

from holdfast.integrations.deepspeed import DeepSpeedRun, attach

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--fault", action="append", default=[], type=Strike)


def attached(engine: Any) -> DeepSpeedRun:
    run, step = attach(engine), engine.step

    def stepped() -> None:
        before = run.steps_finished
        step()
        if run.steps_finished == before:
            for strike in chosen.fault:
                strike.at(run.steps_finished + 1, chosen.out)

    engine.step = stepped
    return run


if __name__ == "__main__":
    chosen, sys.argv[1:] = parser.parse_known_args()
    deepspeed_cifar.attach = attached
    deepspeed_cifar.main()

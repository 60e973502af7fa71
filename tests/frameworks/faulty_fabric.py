"""examples/frameworks/fabric_language_model.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_fabric.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes between two batches of one step: the gradients of the first are accumulated, and the optimizer has not stepped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import fabric_language_model  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]

from holdfast.integrations.fabric import FabricRun, attach

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--fault", action="append", default=[], type=Strike)


class Faulty(fabric_language_model.Fabric):  # type: ignore[misc]
    batches = 0
    run_of_it: FabricRun

    def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, *args, **kwargs)
        self.batches += 1
        if self.batches % 2:
            for strike in chosen.fault:
                strike.at(self.run_of_it.steps_finished + 1, chosen.out)


def attached(fabric: Faulty, state: dict[str, Any]) -> FabricRun:
    fabric.run_of_it = attach(fabric, state)
    return fabric.run_of_it


if __name__ == "__main__":
    chosen, sys.argv[1:] = parser.parse_known_args()
    fabric_language_model.Fabric, fabric_language_model.attach = Faulty, attached
    fabric_language_model.main()

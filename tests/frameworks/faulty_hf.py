"""examples/frameworks/hf_trainer.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_hf.py --steps 80 --out DIR --fault kill:1:17 --fault hang:0:31      (what:rank:step)

Each strikes between two batches of one step: the gradients of the first are accumulated, and the optimizer has not stepped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import hf_trainer  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]


class Fault(TrainerCallback):  # type: ignore[misc]
    def __init__(self, reported: str) -> None:
        self._strike = Strike(reported)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._strike.at(state.global_step + 1, Path(args.output_dir))


if __name__ == "__main__":
    parser = hf_trainer.arguments()
    parser.add_argument("--fault", action="append", default=[], type=Fault)
    chosen = parser.parse_args()
    hf_trainer.train(chosen, chosen.fault)

"""examples/frameworks/hf_trainer.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_hf.py --steps 80 --out DIR --fault kill:1:17 --fault hang:0:31      (what:rank:step)

Each strikes between two batches of one step: the gradients of the first are accumulated, and the optimizer has not stepped.
A file below DIR says that it has struck, so that the same step passes when it is done again."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import hf_trainer  # type: ignore[import-not-found]

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Fault(TrainerCallback):  # type: ignore[misc]
    def __init__(self, told: str) -> None:
        what, rank, step = told.split(":")
        self._signal = SIGNALS[what]
        self._here = rank == os.environ["RANK"]
        self._step = int(step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._here and state.global_step + 1 == self._step:
            struck = Path(args.output_dir) / f"struck-{self._step}"
            struck.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                struck.touch(exist_ok=False)
                os.kill(os.getpid(), self._signal)


if __name__ == "__main__":
    parser = hf_trainer.arguments()
    parser.add_argument("--fault", action="append", default=[], type=Fault)
    chosen = parser.parse_args()
    hf_trainer.train(chosen, chosen.fault)

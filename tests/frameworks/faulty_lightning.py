"""examples/frameworks/lightning_autoencoder.py, in which a rank does to itself what a fault would do, once, at a (rank, step).

    faulty_lightning.py --out DIR --fault hang:0:31 --steps 80      (what:rank:step)

Each strikes when the gradients of the step are reduced and the optimizer has not stepped."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
import lightning_autoencoder  # type: ignore[import-not-found]
from striking import Strike  # type: ignore[import-not-found]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--fault", action="append", default=[], type=Strike)


class Faulty(lightning_autoencoder.LitAutoEncoder):  # type: ignore[misc]
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for strike in chosen.fault:
            strike.at(self.global_step + 1, chosen.out)


if __name__ == "__main__":
    chosen, sys.argv[1:] = parser.parse_known_args()
    lightning_autoencoder.LitAutoEncoder = Faulty
    lightning_autoencoder.main()

"""`python -m holdfast.sim --seed 42 --trace`: simulate one seed. `--seeds 2000`: simulate 2,000 seeds from `--seed` on."""

from __future__ import annotations

import argparse
import sys

from holdfast.sim import seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of consecutive seeds")
    parser.add_argument("--jobs", type=int, default=0, help="processes at a time; 0 = one per core")
    parser.add_argument("--trace", action="store_true", help="print every event and command")
    options = parser.parse_args()
    return seeds.run(range(options.seed, options.seed + options.seeds), jobs=options.jobs, trace=options.trace)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m holdfast.sim --seed 42 --trace`: replay one seed. `--seeds 2000`: that many in a row from there."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from holdfast.sim.scenario import simulate
from holdfast.sim.world import Violation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, in a row")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    options = parser.parse_args()
    write = sys.stdout.write
    begun, failed = time.perf_counter(), 0
    generations: Counter[int] = Counter()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            result = simulate(seed, tracing=options.trace)
        except Violation as violation:
            failed += 1
            message, *trace = violation.args
            write("".join(f"{line}\n" for line in trace))
            write(f"VIOLATION {message}\n  replay: python -m holdfast.sim --seed {seed} --trace\n")
        else:
            generations[result.generations] += 1
            write("".join(f"{line}\n" for line in result.trace))
            if options.trace:
                outcome = f"{result.generations} generations, {result.incidents} incidents"
                write(f"seed {seed}: trained after {result.seconds:.1f} s, {outcome}\n")
    spent = time.perf_counter() - begun
    spread = ", ".join(f"{count} × {number}" for number, count in sorted(generations.items()))
    write(
        f"{options.seeds - failed} of {options.seeds} seeds hold every promise ({spent:.1f} s; runs × generations: {spread})\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`make fuzz`: every target in turn until the time is up, then a table. Ends with 1 if something was found."""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import structlog
from fuzz.runner import BATCH, Find, run_batch, seed_of
from fuzz.targets import TARGETS
from rich.console import Console
from rich.table import Table

OUT = Path("out/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="targets whose name begins with this")
    parser.add_argument("--batch", type=int, help="seed of the one batch to repeat, as a find names it")
    parser.add_argument("--inputs", type=int, default=BATCH, help="inputs per batch")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # what is refused is logged, thousands of times
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a find is in the file at once, should the run be ended
    console = Console(highlight=False)
    targets = [target for target in TARGETS if target.name.startswith(options.only)]
    if not targets:
        console.print(
            f"no target begins with {options.only!r}; there are {', '.join(target.name for target in TARGETS)}"
        )
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    tried: Counter[str] = Counter()
    spent_s: dict[str, float] = defaultdict(float)
    finds: dict[tuple[str, str], Find] = {}
    end = time.monotonic() + options.minutes * 60
    for number in itertools.count():
        for target in targets:
            if options.batch is None and number and time.monotonic() >= end:
                break
            seed = seed_of(options.seed, target, number) if options.batch is None else options.batch
            began = time.monotonic()
            batch = run_batch(target, seed, options.inputs, OUT / "last-input.txt")
            tried[target.name] += batch.inputs
            spent_s[target.name] += time.monotonic() - began
            for find in batch.finds:
                if finds.setdefault((find.target, find.error.partition(":")[0]), find) is find:
                    _report(console, find)
        else:
            if options.batch is not None:
                break
            left_s = max(0.0, end - time.monotonic())
            console.print(
                f"round {number + 1}: {tried.total()} inputs, {len(finds)} finds, {left_s / 60:.1f} minutes left"
            )
            if left_s:
                continue
        break
    table = Table("target", "inputs", "seconds", "finds")
    for target in targets:
        found = sum(name == target.name for name, _ in finds)
        table.add_row(target.name, str(tried[target.name]), f"{spent_s[target.name]:.1f}", str(found or "-"))
    console.print(table)
    console.print(f"seed {options.seed}: {tried.total()} inputs, {len(finds)} finds")
    return 1 if finds else 0


def _report(console: Console, find: Find) -> None:
    console.rule(find.target, style="red")
    console.print(find.error, markup=False)
    console.print(find.example, markup=False, soft_wrap=True)
    console.print(f"repeat it: {find.command}", markup=False)


if __name__ == "__main__":
    sys.exit(main())

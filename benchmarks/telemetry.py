"""What telemetry costs a training step: median step time with traces and metrics on and off, interleaved.

    python -m benchmarks.telemetry [--rounds 5] [--steps 300]

Two ranks with `holdfast.train` on one local node, a collector in this process, which costs more here than one on another
machine would. The aim is a median of at most 0.5 % more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from benchmarks.recovery.healthy import STEPS, step_ms
from benchmarks.recovery.launchers import LIBRARY_SCRIPT, holdfast
from holdfast.runtime.fake_collector import collecting
from holdfast.runtime.telemetry import ENV_ENDPOINT

AIM = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    start = holdfast(LIBRARY_SCRIPT)
    off, on = [], []
    with collecting() as collector:
        for round_ in range(arguments.rounds):
            for turned_on in (False, True) if round_ % 2 == 0 else (True, False):  # so that a drift hits both
                if turned_on:
                    os.environ[ENV_ENDPOINT] = collector.endpoint  # what the stack starts inherits it
                else:
                    os.environ.pop(ENV_ENDPOINT, None)
                took = step_ms(start, steps=arguments.steps)
                (on if turned_on else off).append(took)
                print(
                    f"round {round_ + 1}/{arguments.rounds}  telemetry {'on ' if turned_on else 'off'}  {took:.2f} ms"
                )
        exported = len(collector.metrics)
    if not exported:
        raise SystemExit("no metric arrived: telemetry was not on, and nothing was measured")
    more = statistics.median(on) / statistics.median(off) - 1
    pairs = [after / before - 1 for before, after in zip(off, on, strict=True)]
    print(
        f"\nstep with telemetry: {more:+.2%} (medians; by round {min(pairs):+.2%} … {max(pairs):+.2%}), aim ≤ {AIM:.1%}; "
        f"{exported} metrics arrived; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"step_ms": {"off": off, "on": on}, "more": more, "aim": AIM}
    (arguments.out / "telemetry.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

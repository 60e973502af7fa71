"""Measures the quality of detection: precision, recall with its Wilson interval, and delay, for each suite.

    make bench-detection                       all suites on tests/data and fresh seeds; writes out/bench/detection.json
    make bench-detection DATA=DIR              the same on other data with the layout of tests/data
    python -m benchmarks.detection --only hang,storm --seed 7
    python -m benchmarks.detection --only healthy --hours 1000
    python -m benchmarks.detection --only actions --noise-hours 10000

No constant of a detector was fitted to the data that it is measured with here. Recorded data is only used to measure. Generated
cases come from the seed, which is printed, and is new for every run unless it is given.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detection import actions, causes, fleet, hang, hang_gloo, healthy, numerical, storm, stragglers, xid
from benchmarks.detection.score import Score, progress
from holdfast.runtime.files import write_whole

Suite = Callable[[Path, np.random.Generator], Score]

SUITES: dict[str, Suite] = {
    "xid": lambda data, rng: xid.suite(data),
    "stragglers": stragglers.suite,
    "user_vs_hardware": lambda data, rng: causes.suite(data),
    "hang": hang.suite,
    "hang_gloo": lambda data, rng: hang_gloo.suite(rng),
    "numerical": lambda data, rng: numerical.suite(rng),
    "bitflips": lambda data, rng: _bitflips(rng),
    "fleet": lambda data, rng: fleet.suite(rng),
    "storm": lambda data, rng: storm.suite(rng),
    "actions": lambda data, rng: actions.suite(rng),  # `main` passes the hours
    "healthy": healthy.suite,  # `main` passes the hours
}


def _bitflips(rng: np.random.Generator) -> Score:
    from benchmarks.detection import bitflips  # imported here because no other suite needs torch

    return bitflips.suite(rng)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.detection", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("tests/data"), help="directory with the layout of tests/data")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--only", default=",".join(SUITES), help="suites to run, separated by commas")
    parser.add_argument("--seed", type=int, default=None, help="seed of the generated cases; default: a new one")
    parser.add_argument(
        "--noise-hours", type=float, default=actions.NOISE_H_BY_DEFAULT, help="virtual hours of noise in suite actions"
    )
    parser.add_argument("--hours", type=float, default=healthy.HOURS_BY_DEFAULT, help="virtual hours of suite healthy")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - SUITES.keys():
        parser.error(f"--only: no suite {', '.join(sorted(unknown))}; the suites are {', '.join(SUITES)}")
    if not options.data.is_dir():
        parser.error(f"--data: {options.data} is not a directory")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"data {options.data}, seed {seed}\n\n{_HEAD}")
    results: dict[str, Any] = {}
    for number, (name, suite) in enumerate(SUITES.items()):
        if name in wanted:
            began = time.perf_counter()
            rng = np.random.default_rng((seed, number))
            if name == "healthy":
                score = healthy.suite(options.data, rng, healthy.shares(options.hours))
            elif name == "actions":
                score = actions.suite(rng, options.noise_hours)
            else:
                score = suite(options.data, rng)
            duration_s = round(time.perf_counter() - began, 1)
            results[name] = score.as_json() | {"duration_s": duration_s}
            _show(score)
            progress(f"{name}: {duration_s} s")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "detection.json"
    report = {"seed": seed, "data": str(options.data), "suites": results}
    write_whole(path, (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
    print(f"\nwritten to {path}")


_HEAD = f"{'suite':34} {'precision':>9} {'recall':>7} {'wilson 95 %':>15} {'delay p50 / p90 / max':>24} {'cases':>7}"


def _show(score: Score) -> None:
    """Print one line for the suite and one for each of its rows, then the first mistakes."""
    for indent, one in (("", score), *(("  ", row) for row in score.rows)):
        found = one.as_json()
        low, high = found["wilson95"]
        delay = found["delay"]
        times = f"{delay['p50']:.2f} / {delay['p90']:.2f} / {delay['max']:.2f} {delay['unit']}" if delay else "–"
        interval = f"{low:.3f} … {high:.3f}" if one.hits + one.missed else "–"
        print(
            f"{indent + one.suite:34} {_share(found['precision']):>9} {_share(found['recall']):>7} {interval:>15}"
            f" {times:>24} {one.cases:>7}",
            flush=True,
        )
        for name, value in one.facts.items():
            print(f"{indent}    {name}: {value}")
    for mistake in score.mistakes[:5]:
        print(f"    ! {mistake}")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()

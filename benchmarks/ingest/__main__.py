"""Measures how many nodes one diagnostics process can serve, and how it behaves with more.

    make bench-ingest                                        12,500 nodes of 8 GPUs; writes out/bench/ingest.json
    python -m benchmarks.ingest --nodes 2000 --seconds 5     a quick look
    python -m benchmarks.ingest --only core                  without the network: the cost of a tick, and of a step of all ranks
    python -m benchmarks.ingest --only job                   one job on all nodes: a second of it, and one fault of each kind

The service, Redis and the clients that generate the load share this machine. A fleet is *sustained* if 99 % of its ticks were
sent completely and in their second, no signal was dropped, and the 99th percentile from a report to its finding in Redis is at
most a second; otherwise the reasons are printed below its line. `nodes per core` counts only the CPU time of the service.

The benchmark ends after `--minutes`: a trial that would not end by then is skipped, with a message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ingest import core, one_job, trial
from benchmarks.ingest.fleet import GPUS
from benchmarks.ingest.trial import Outcome
from holdfast.runtime.files import write_whole

PARTS = ("core", "job", "fleet", "largest", "twice")
TRIES_MAX = 5  # trials of the search for the largest fleet
LARGER = 1.25
SMALLER = 0.9  # size of the fleet after one that was too large, as a fraction of the ticks per second that it reached
CORE_NODES_MAX = 4000  # sufficient, because the cost of a tick does not depend on the number of nodes


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ingest", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each trial")
    parser.add_argument("--step-s", type=float, default=5.0, help="step time of the job that runs on all nodes")
    parser.add_argument("--clients", type=int, default=2, help="processes that generate the load")
    parser.add_argument("--streams-per-connection", type=int, default=25)
    parser.add_argument("--minutes", type=float, default=7.5, help="limit of the whole benchmark")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    budget = _Budget(time.monotonic() + 60.0 * options.minutes)
    report: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(options).items()}}
    if "core" in wanted:
        report |= _core(options.nodes, options.step_s)
    if "job" in wanted:
        report |= _job(options.nodes)
    with tempfile.TemporaryDirectory() as directory:
        run = partial(
            trial.run,
            seconds=options.seconds,
            step_s=options.step_s,
            clients=options.clients,
            streams_per_connection=options.streams_per_connection,
            directory=Path(directory),
        )
        if {"fleet", "largest", "twice"} & set(wanted):
            print(_HEAD)
            report |= _fleets(options.nodes, wanted, budget.of(run))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "ingest.json"
    write_whole(path, (json.dumps(report, indent=1) + "\n").encode())
    print(f"\nwritten to {path}")


def _core(nodes: int, step_s: float) -> dict[str, Any]:
    ticking = min(nodes, CORE_NODES_MAX)
    costs = core.ticks(ticking, step_s=step_s)
    print(
        f"{ticking} nodes x {GPUS} GPUs in one process, without the network (CPU time, medians of {core.ROUNDS} rounds)"
    )
    whole_us = costs.parse_us + costs.decode_us + costs.fold_us
    print(f"  a tick: parse {costs.parse_us:.1f}, decode {costs.decode_us:.1f}, fold {costs.fold_us:.1f} us")
    print(f"  = {1e6 / whole_us:,.0f} ticks/s and core; one clock tick {costs.clock_ms:.2f} ms")
    step_ms = core.step_of_all_ranks(nodes * GPUS)
    print(
        f"  judging a step of {nodes * GPUS:,} ranks: {statistics.median(step_ms):.1f} ms, at most {max(step_ms):.1f}\n"
    )
    return {"core": asdict(costs), "step_ms": step_ms}


def _job(nodes: int) -> dict[str, Any]:
    sizes = (min(one_job.SMALL_NODES, nodes // 2), nodes)
    print(
        f"one job of {sizes[0]:,} and of {sizes[1]:,} nodes x {GPUS} ranks: CPU s of the detectors, and how they grow"
    )
    rows = one_job.measure(sizes)
    for name, row in rows.items():
        small, large, exponent = row.values()
        print(f"  {name:46} {small:>8.2f} {large:>8.2f}  n^{exponent:.2f}", flush=True)
    print()
    return {"job": rows}


@dataclass(slots=True)
class _Budget:
    """The remaining time. A trial is assumed to take as long as the longest one so far."""

    until: float
    longest_s: float = 0.0

    def of(self, run: partial[Outcome]) -> Callable[..., Outcome | None]:
        """Return `run`, which returns None if it and `reserve` further trials would not end in time."""

        def run_in_time(nodes: int, reserve: int = 0) -> Outcome | None:
            began = time.monotonic()
            if began + (1 + reserve) * self.longest_s > self.until:
                return None
            outcome = _show(run(nodes))
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            return outcome

        return run_in_time


def _fleets(nodes: int, wanted: list[str], run: Callable[..., Outcome | None]) -> dict[str, Any]:
    first = run(nodes)
    assert first is not None  # the first trial always has time
    report: dict[str, Any] = {"fleet": first.as_json(), "trials": [first.as_json()]}
    if not {"largest", "twice"} & set(wanted):
        return report
    low, high = (nodes, None) if first.sustained else (0, nodes)
    guess = int(nodes * LARGER) if first.sustained else min(int(SMALLER * first.ticks_s), nodes // 2)
    while len(report["trials"]) <= TRIES_MAX and guess > 0 and (high is None or high - low > 0.1 * high):
        outcome = run(guess, reserve=int("twice" in wanted))
        if outcome is None:
            print("the search for the largest fleet ends here: its time is over")
            break
        report["trials"].append(outcome.as_json())
        low, high = (guess, high) if outcome.sustained else (low, guess)
        guess = int(low * LARGER) if high is None else (low + high) // 2
    print(f"largest fleet that was sustained: {low} nodes, {low * GPUS:,} GPUs")
    report["largest_sustained_nodes"] = low
    if "twice" in wanted and low:
        print("twice as many:")
        twice = run(2 * low)
        report["twice"] = twice.as_json() if twice is not None else None
        if twice is None:
            print("left out: its time is over")
    return report


_HEAD = (
    f"{'nodes':>7} {'ticks/s':>8} {'late':>7} {'bare':>7} {'dropped':>8} {'findings':>9} {'p50 / p99 / max s':>20}"
    f" {'written':>8} {'cores':>6} {'clients':>8} {'nodes/core':>11} {'MB idle / max':>14}"
)


def _show(outcome: Outcome) -> Outcome:
    values = outcome.as_json()
    spread, written = values["latency_s"], values["written_s"]
    assert isinstance(spread, dict)
    assert isinstance(written, dict)
    times = " / ".join(f"{seconds:.3f}" for seconds in spread.values())
    since_written = f"{written['p99']:.3f}" if written else ""
    memory = f"{outcome.memory_idle_bytes / 1e6:.0f} / {outcome.memory_bytes / 1e6:.0f}"
    print(
        f"{outcome.nodes:>7} {outcome.ticks_s:>8,.0f} {outcome.late:>7} {outcome.bare:>7} {outcome.dropped:>8}"
        f" {outcome.findings:>4}/{outcome.expected:<4} {times:>20} {since_written:>8} {outcome.service_cores:>6.2f}"
        f" {outcome.clients_cores:>8.2f} {outcome.nodes_per_core:>11,.0f} {memory:>14}"
        f" {'sustained' if outcome.sustained else 'not sustained:'}",
        flush=True,
    )
    for reason in outcome.missed:
        print(f"    - {reason}", flush=True)
    if outcome.unexpected:
        print(f"    ! unexpected findings: {outcome.unexpected}", flush=True)
    return outcome


if __name__ == "__main__":
    main()

"""Suite `healthy`: 1,000 virtual hours of healthy jobs with the noise of real ones, through all detectors and the supervisor's
core. Every job that is stopped or restarted, and every node that is taken out of service, was healthy.

The messages of agents are simulated: steps, progress, heartbeats, phases, sessions, answers of flight recorders. No number here
was chosen by its effect on the result:

* step times: the median from 5 to 40 s, of one job in ten of up to 1,024 nodes from 0.5 to 5 s; each rank's time over its own
  median, resampled in blocks of eight steps (so that it keeps its autocorrelation) from the two recorded traces of
  tests/data/stragglers; all ranks wait for the slowest;
* pauses of 0.1 to 2 s of one rank that delay a step, more often with more nodes: Python's garbage collection (MegaScale,
  NSDI'24);
* a tail of 1 step in 1,000 in which one rank takes 1.5 to 5 times as long: a slow fetch (Dean and Barroso, The Tail at Scale);
* saves every 10 to 30 minutes for 0.5 to 10 s, evaluations every 30 to 60 minutes for 12 to 300 s: half of the jobs announce
  them (`run.phase`), half do not, as many scripts do not; in half of the jobs the flight recorders answer;
* the first step takes 30 to 90 s more: torch.compile;
* 1 % of the rows of steps are lost: datagrams from a worker to its agent;
* telemetry streams break 50 times a day per 12,500 nodes (as in suite `fleet`) and reconnect after 0.05 to 5 s, which agents'
  back-off allows; half of the time the control session breaks with it;
* clocks are off by 50 ms (one sigma; NTP), of one node in 100 by up to a minute.

Not simulated: readings of devices, ports and hosts (suite `fleet`), checksums of replicas (`bitflips`), agents' inventories and
their comparison with the desired state, and a rank that evaluates alone while the others wait for it. Such a rank is named
after ten times the job's allowance, because it cannot be distinguished from an endless loop.

`false_stops`: the job ended. `false_evictions`: a node was taken out of service, reported lost or replaced. `false_restarts`: a
new generation began. After any of these the run ends and another one begins, so that one cause is not counted repeatedly.
`false_errors`: findings of severity error or fatal, with or without consequences.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.detection.healthy_run import Noise, Run
from benchmarks.detection.score import Score, progress
from benchmarks.detection.stragglers import read_trace

# Virtual hours by number of nodes; a run of one job lasts RUN_H. Hours that are not finished within DEADLINE_S of CPU time per
# size are left out; `virtual_hours` contains the finished hours.
HOURS: Mapping[int, float] = {64: 940.0, 1_024: 50.0, 12_500: 10.0}
HOURS_BY_DEFAULT = 40.0
RUN_H = 2.0
DEADLINE_S = 3600.0
_PROGRESS_S = 10.0


def suite(data: Path, rng: np.random.Generator, hours: Mapping[int, float] | None = None) -> Score:
    """Run the suite. `hours`: virtual hours by number of nodes."""
    score, wrong, warned = Score("healthy"), Counter[str](), Counter[str]()
    noise, errors = recorded_noise(data), 0
    done: dict[str, float] = {}
    for nodes, wanted_h in (shares(HOURS_BY_DEFAULT) if hours is None else hours).items():
        row, done_h, began, shown = score.row(f"{nodes} nodes"), 0.0, time.process_time(), time.process_time()
        row.facts |= {"signals": 0, "steps": 0}
        while wanted_h - done_h > 1e-6 and time.process_time() < began + DEADLINE_S:
            run = Run(nodes, noise, rng)
            end = run.train(min(RUN_H, wanted_h - done_h) * 3600.0)
            done_h = min(wanted_h, done_h + max(end.hours, 1 / 60))
            wrong.update(end.wrong)
            warned.update(end.warnings)
            errors += end.errors
            row.facts["signals"] += end.signals
            row.facts["steps"] += end.steps
            for name, count in end.warnings.items():
                row.facts[f"warning: {name}"] = row.facts.get(f"warning: {name}", 0) + count
            if end.wrong or end.errors:
                row.fail(f"{nodes} nodes after {end.hours:.2f} h, {run.manner}: {end.why}", spoiled=True)
            else:
                row.clean += 1
            if time.process_time() >= shown + _PROGRESS_S:
                shown = time.process_time()
                progress(
                    f"{nodes} nodes: {done_h:.1f} of {wanted_h:g} h in {shown - began:.0f} s of CPU; wrong: {wrong.total()}"
                )
        done[str(nodes)] = round(done_h, 2)
        row.facts["cpu_s_per_hour"] = round((time.process_time() - began) / done_h, 2) if done_h else None
        progress(f"{nodes} nodes, {done_h:.1f} h: {time.process_time() - began:.0f} s of CPU")
    covered_h = sum(done.values())
    score.facts |= {name: wrong[name] for name in ("false_stops", "false_evictions", "false_restarts")}
    score.facts |= {"false_errors": errors, "virtual_hours": round(covered_h, 2), "virtual_hours_by_nodes": done}
    score.facts["warnings_per_hour"] = {name: round(count / covered_h, 4) for name, count in sorted(warned.items())}
    return score.total()


def shares(hours: float) -> dict[int, float]:
    """Divide `hours` among the numbers of nodes in the same proportions as the 1,000 hours."""
    return {nodes: part * hours / sum(HOURS.values()) for nodes, part in HOURS.items()}


def recorded_noise(data: Path) -> list[Noise]:
    """The noise of each recorded trace."""
    return [Noise.of(read_trace(path)[1]) for path in sorted((data / "stragglers").glob("trace-*.parquet"))]

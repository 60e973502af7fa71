"""Training frameworks: SIGKILL of one of two ranks until every rank has finished a new step, and the steps that are done again.

    make bench-recovery ARGS='--only frameworks'                                     5 trials; out/bench/frameworks.json
    make bench-recovery ARGS='--only frameworks --trials 1 --frameworks accelerate'

Side by side, in turns: Holdfast with the framework's integration, and the framework's own saves and resume under torchrun. Both
run the same script (benchmarks/recovery/training) and save every `SAVE_EVERY` steps. A kill comes some steps later in each
trial, so that it meets the interval at several places. A framework that is not installed is named and left out.

`prepare` is no framework: a script that loads for some seconds at its start, under Holdfast both times, with its prepare
function in the worker template and without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.recovery.launchers import ONE_NODE, RANKS, Start, holdfast, torchrun
from benchmarks.recovery.progress import Recovery, TrialFailed, wait_for_recovery, wait_for_start

SAVE_EVERY = 10  # steps; the job file of `launchers.holdfast` says the same
KILL_AFTER = (15, 18, 21, 24, 27)  # finished steps of every rank, by trial
TIMEOUT_S = 300.0
TRAINING = Path(__file__).with_name("training")


@dataclass(frozen=True, slots=True)
class Framework:
    """`module`: what has to be importable, and what the worker template imports ahead of time, as the documentation says."""

    script: str
    module: str
    preload: tuple[str, ...] = ()
    prepares: bool = False  # is compared with the same script without `preload`


FRAMEWORKS: Mapping[str, Framework] = {
    "transformers": Framework("hf_trainer.py", "transformers", ("transformers.trainer",)),
    "lightning": Framework("lightning_ddp.py", "lightning", ("lightning",)),
    "accelerate": Framework("accelerate_ddp.py", "accelerate", ("accelerate",)),
    "deepspeed": Framework("deepspeed_zero.py", "deepspeed", ("deepspeed",)),
    "dcp": Framework("dcp_fsdp2.py", "torch"),
    "prepare": Framework("slow_start.py", "torch", ("slow_data:prepare",), prepares=True),
}


def measure(out: Path, trials: int, names: Sequence[str]) -> dict[str, Any]:
    """Run all trials; print, and write `frameworks.json` into `out`. Returns what is written."""
    if unknown := set(names) - set(FRAMEWORKS):
        sys.exit(f"--frameworks: {', '.join(sorted(unknown))} not known; there are {', '.join(FRAMEWORKS)}")
    present = [name for name in names if find_spec(FRAMEWORKS[name].module) is not None]
    for name in names:
        if name not in present:
            print(f"{name} is NOT MEASURED: {FRAMEWORKS[name].module} is not installed (make frameworks-test)")
    recoveries: dict[str, dict[str, list[Recovery]]] = {name: defaultdict(list) for name in present}
    failed: dict[str, int] = defaultdict(int)
    path = out / "frameworks.json"
    for trial in range(trials):
        for name in present:
            for how, start, more in _ways(FRAMEWORKS[name]):
                print(f"trial {trial + 1}/{trials}  {name:13} {how:10}", end=" ", flush=True)
                try:
                    recovery = _trial(start, more, KILL_AFTER[trial % len(KILL_AFTER)])
                except TrialFailed as error:
                    failed[f"{name}:{how}"] += 1
                    print(f"failed: {error}")
                    continue
                recoveries[name][how].append(recovery)
                print(f"{recovery.seconds:.2f} s, {recovery.rework_steps} steps again")
        path.write_text(json.dumps(_result(recoveries, failed), indent=2) + "\n")  # after each: all of them take long
    result = _result(recoveries, failed)
    _print(result)
    print(f"\n{path}")
    return result


def _result(recoveries: Mapping[str, Mapping[str, list[Recovery]]], failed: Mapping[str, int]) -> dict[str, Any]:
    return {
        "kill_to_step_s": {
            name: {how: [each.seconds for each in all_] for how, all_ in ways.items()}
            for name, ways in recoveries.items()
        },
        "rework_steps": {
            name: {how: [each.rework_steps for each in all_] for how, all_ in ways.items()}
            for name, ways in recoveries.items()
        },
        "failed_trials": dict(failed),
        "save_every_steps": SAVE_EVERY,
        "releases": {name: importlib.metadata.version(FRAMEWORKS[name].module) for name in recoveries},
    }


def _ways(framework: Framework) -> list[tuple[str, Start, list[str]]]:
    script = TRAINING / framework.script
    if framework.prepares:
        return [("holdfast", holdfast(script, framework.preload), []), ("unprepared", holdfast(script), [])]
    return [
        ("holdfast", holdfast(script, framework.preload), []),
        ("own", torchrun(script), ["--save-every", str(SAVE_EVERY)]),
    ]


def _trial(start: Start, more: Sequence[str], kill_after: int) -> Recovery:
    with tempfile.TemporaryDirectory(prefix="hfb-") as name, ExitStack() as cleanup:
        out = Path(name)
        start(ONE_NODE, out, ["--out", str(out), *more], cleanup)
        before = wait_for_start(out, kill_after, TIMEOUT_S)
        killed_at = time.time()
        os.kill(before[RANKS - 1].pid, signal.SIGKILL)
        return wait_for_recovery(out, before, killed_at, TIMEOUT_S)


def _print(result: Mapping[str, Any]) -> None:
    print(f"\n{'':14}{'':11}{'kill to step, s':>26}{'rework, steps':>22}{'n':>4}   ÷ holdfast")
    for name, ways in result["kill_to_step_s"].items():
        ours = statistics.median(ways["holdfast"]) if ways.get("holdfast") else None
        for how, seconds in ways.items():
            again = result["rework_steps"][name][how]
            ratio = f"{statistics.median(seconds) / ours:8.1f}" if ours and how != "holdfast" else ""
            print(f"{name:14}{how:11}{_range(seconds, '.2f'):>26}{_range(again, '.0f'):>22}{len(seconds):4}   {ratio}")
    if result["failed_trials"]:
        print(f"failed trials: {result['failed_trials']}")
    print(f"{os.cpu_count()} cores, load {' '.join(f'{value:.1f}' for value in os.getloadavg())}")


def _range(values: Sequence[float], how: str) -> str:
    return f"{statistics.median(values):{how}} ({min(values):{how}}–{max(values):{how}})"

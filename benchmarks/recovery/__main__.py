"""Recovery time, side by side: SIGKILL of a rank, and of a whole node, until every rank has finished a new step.

    make bench-recovery                                  5 trials each, interleaved; prints, writes out/bench/recovery.json
    python -m benchmarks.recovery --trials 1 --only holdfast,torchrun
    make bench-recovery ARGS='--only frameworks'         training frameworks: see benchmarks/recovery/frameworks.py

Trial by trial the launchers take turns, so that a noisy machine is noisy for all. A trial that has not recovered within
the limit is counted under `failed_trials`, not dropped. Every launcher runs the same bytes: benchmarks/recovery/train.py.
`holdfast+library` is the same training with `holdfast.train` in it; it saves into shared memory and knows its phases.
`holdfast+user` is that with `--user`, only on request and as root, where any user can reach the interpreter. `holdfast+tls`
is that with certificates for agents, services and replicators, only on request.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.recovery import frameworks
from benchmarks.recovery.healthy import step_ms
from benchmarks.recovery.launchers import (
    LIBRARY_SCRIPT,
    MARKS,
    ONE_NODE,
    RANKS,
    TWO_NODES_AND_SPARE,
    Layout,
    Running,
    Start,
    ft_launcher,
    torchrun,
)
from benchmarks.recovery.launchers import holdfast as holdfast_launcher
from benchmarks.recovery.progress import POLL_S, TrialFailed, wait_for_recovery, wait_for_start

TRAINING_USER = "65534:65534"
WARM_STEPS = 15  # steps that every rank has finished before the kill
BOOKS_TIMEOUT_S = 15.0  # a script without the library counts as stepping after five seconds of life


def main() -> None:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only == "frameworks":
        frameworks.measure(arguments.out, arguments.trials, arguments.frameworks.split(","))
        return
    launchers = _launchers(arguments.only.split(",") if arguments.only else None)
    recovery: dict[str, dict[str, list[float]]] = {"rank_kill_s": defaultdict(list), "node_loss_s": defaultdict(list)}
    failed: dict[str, int] = defaultdict(int)
    phases: dict[str, list[dict[str, float]]] = defaultdict(list)
    for trial in range(arguments.trials):
        for name, start in launchers.items():
            for kind, layout in (("rank_kill_s", ONE_NODE), ("node_loss_s", TWO_NODES_AND_SPARE)):
                if kind not in arguments.kinds.split(","):
                    continue
                print(f"trial {trial + 1}/{arguments.trials}  {kind:12} {name:18}", end=" ", flush=True)
                try:
                    seconds, parts = _trial(start, layout, kill_node=kind == "node_loss_s")
                except TrialFailed as error:
                    failed[f"{kind}:{name}"] += 1
                    print(f"failed: {error}")
                    continue
                recovery[kind][name].append(seconds)
                if parts:
                    phases[f"{kind}:{name}"].append(parts)
                print(f"{seconds:.2f} s")
    result = {
        **recovery,
        "healthy_step_ms": {},
        "phases_s": {kind: _medians(parts) for kind, parts in phases.items()},
        "failed_trials": dict(failed),
    }
    path = arguments.out / "recovery.json"
    _write(path, result)  # already now: the healthy runs take minutes
    if not arguments.skip_healthy:
        result["healthy_step_ms"] = _healthy(launchers, arguments.trials)
        _write(path, result)
    _print(result)
    print(f"\n{path}")


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="launchers, comma-separated: holdfast,torchrun,ft_launcher; or frameworks"
    )
    parser.add_argument("--kinds", default="rank_kill_s,node_loss_s", help="faults, comma-separated")
    parser.add_argument("--frameworks", default=",".join(frameworks.FRAMEWORKS), help="which, with --only frameworks")
    parser.add_argument("--skip-healthy", action="store_true", help="leave out the cost of the healthy path")
    return parser.parse_args()


def _launchers(only: list[str] | None) -> dict[str, Start]:
    launchers = {
        "holdfast": holdfast_launcher(),
        "torchrun": torchrun(),
        "holdfast+library": holdfast_launcher(LIBRARY_SCRIPT),
    }
    if only is not None and "holdfast+user" in only:
        launchers["holdfast+user"] = holdfast_launcher(LIBRARY_SCRIPT, user=TRAINING_USER)
    if only is not None and "holdfast+tls" in only:
        launchers["holdfast+tls"] = holdfast_launcher(LIBRARY_SCRIPT, tls=True)
    if peers := os.environ.get("PEERS_DIR"):
        launchers["ft_launcher"] = ft_launcher(Path(peers))
    elif only is None or "ft_launcher" in only:
        print("PEERS_DIR is not set: measuring without ft_launcher (make bench-recovery sets it)")
    if only is None:
        return launchers
    if unknown := set(only) - set(launchers):
        sys.exit(f"--only: {', '.join(sorted(unknown))} not known or not installed; there are {', '.join(launchers)}")
    return {name: launchers[name] for name in only}


# ---------------------------------------------------------------- one trial


def _trial(start: Start, layout: Layout, *, kill_node: bool) -> tuple[float, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="hfb-") as name, ExitStack() as cleanup:
        out = Path(name)
        running = start(layout, out, ["--out", str(out)], cleanup)
        before = wait_for_start(out, WARM_STEPS)
        victim = before[RANKS - 1].pid
        killed_at = time.time()
        if kill_node:
            running.lose_node(victim)
        else:
            os.kill(victim, signal.SIGKILL)
        seconds = wait_for_recovery(out, before, killed_at).seconds
        return seconds, _phases(running, killed_at, seconds)


def _phases(running: Running, killed_at: float, seconds: float) -> dict[str, float]:
    """Where the time went, in seconds from the kill, which this process has seen.

    `fault_dated`: how far from the kill the launcher dates the fault. It estimates: a lost node is dated by its last heartbeat.
    """
    deadline = time.monotonic() + BOOKS_TIMEOUT_S
    if not running.marks() and running.closed():
        return {}  # it keeps no books
    while len(marks := running.marks()) < len(MARKS) or not running.closed():
        if time.monotonic() > deadline:
            return {}
        time.sleep(POLL_S)
    return {
        "detect": marks["detected"] - killed_at,
        "decide": marks["decided"] - marks["detected"],
        "prepare": marks["prepared"] - marks["decided"],
        **running.parts(),
        "start": killed_at + seconds - marks["prepared"],
        "fault_dated": marks["fault"] - killed_at,
    }


# ---------------------------------------------------------------- the cost while nothing happens


def _healthy(launchers: dict[str, Start], rounds: int) -> dict[str, list[float]]:
    """Median step time of a run without faults, one value per round; the launchers take turns."""
    result: dict[str, list[float]] = defaultdict(list)
    for round_ in range(rounds):
        for name in ("holdfast", "torchrun", "holdfast+library"):
            if name not in launchers:
                continue
            result[name].append(step_ms(launchers[name]))
            print(f"round {round_ + 1}/{rounds}  healthy step  {name:18} {result[name][-1]:.2f} ms")
    return result


# ---------------------------------------------------------------- results


def _medians(parts: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: statistics.median(part[name] for part in parts if name in part) for name in names}


def _print(result: dict[str, Any]) -> None:
    print(f"\n{'':16}{'launcher':18}{'min':>8}{'median':>8}{'max':>8}{'n':>4}   peer ÷ holdfast")
    for kind in ("rank_kill_s", "node_loss_s", "healthy_step_ms"):
        by_launcher: dict[str, list[float]] = result[kind]
        ours = statistics.median(by_launcher["holdfast"]) if by_launcher.get("holdfast") else None
        for name, values in by_launcher.items():
            if not values:
                continue
            middle = statistics.median(values)
            ratio = f"{middle / ours:8.2f}" if ours else ""
            print(f"{kind:16}{name:18}{min(values):8.2f}{middle:8.2f}{max(values):8.2f}{len(values):4}   {ratio}")
    for kind, parts in result["phases_s"].items():
        print(
            f"{kind} phases of holdfast (medians): " + "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
        )
    if result["failed_trials"]:
        print(f"failed trials: {result['failed_trials']}")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} cores, load {load}")


if __name__ == "__main__":
    main()

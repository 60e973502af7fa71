"""Compares the cost of checkpoints: Holdfast, torch.distributed.checkpoint, nvidia-resiliency-ext, torch.save, and the limits
of the machine.

    make bench-checkpoint                                      5 trials each; prints, writes out/bench/checkpoint.json
    python -m benchmarks.checkpoint --size 0.1 --trials 1      a quick look, in GB
    python -m benchmarks.checkpoint --only holdfast,copy,network

The trials of the contenders alternate, so that a noisy machine affects all of them. Each trial is a separate process. A failed
trial is counted under `failed_trials`, not dropped. docs/benchmarks.md describes the measurements.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from benchmarks.checkpoint import network, protection, saves, small_saves, store
from benchmarks.checkpoint.protocol import LIMIT, Request
from benchmarks.checkpoint.results import OURS, Measured, Results, TrialFailed
from benchmarks.checkpoint.scratch import Scratch, scratch
from holdfast.domain.distribution import install_command
from holdfast.domain.errors import HoldfastError

SAVES = 2  # counted saves per trial and contender
ON_REQUEST = (
    "dcp_async_process",
    "protection",
    "small_saves",
)  # only with --only, because they take minutes

# Errors of the measured systems. Other errors are bugs of this benchmark, and end it.
FAILURES = (TrialFailed, HoldfastError, grpc.RpcError, OSError, RuntimeError, subprocess.TimeoutExpired)

Trial = Callable[[Request, Scratch], Measured]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinding ends the processes that trials have started
    arguments = _arguments()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    nbytes = int(arguments.size * 1e9)
    results = Results(about={"size": f"{arguments.size:g} GB", "trials": arguments.trials})
    trials = _trials(arguments.only.split(",") if arguments.only else None)
    began = time.monotonic()
    for number in range(arguments.trials):
        for name, trial in trials.items():
            print(f"trial {number + 1}/{arguments.trials}  {name:18}", end=" ", flush=True)
            started = time.monotonic()
            try:
                measured = _one(name, trial, nbytes, out)
            except FAILURES as error:
                results.failed[name] += 1
                print(f"failed: {error}")
                continue
            results.add(measured)
            shown = [f"{measure} {value:.3g}" for measure, contender, value in measured if contender in (name, OURS)]
            print("  ".join(shown), f"({time.monotonic() - started:.0f} s)")
        results.about["seconds"] = round(time.monotonic() - began)
        results.write(out / "checkpoint.json")  # after every trial, because the benchmark takes minutes
    results.print()
    print(f"\n{arguments.out / 'checkpoint.json'}")


def _one(name: str, trial: Trial, nbytes: int, out: Path) -> Measured:
    with scratch(out) as place:
        directory = place.disk / name
        directory.mkdir()
        return trial(Request(name, nbytes, str(directory), str(place.memory), SAVES), place)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/bench"),
        help="directory for results; it must be on the local disk to measure",
    )
    parser.add_argument("--size", type=float, default=1.1, help="GB of state (default 1.1)")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="comma-separated: contenders, network, store, protection, small_saves"
    )
    return parser.parse_args()


def _trials(only: list[str] | None) -> dict[str, Trial]:
    peers = os.environ.get("PEERS_DIR", "")
    trials: dict[str, Trial] = {
        OURS: saves.measure_holdfast,
        **dict.fromkeys((LIMIT, "dcp_async", "dcp_async_cached", "torch_save", "dcp_async_process"), saves.measure),
        "nvrx_local": partial(saves.measure, packages=peers),
        "network": network.measure,
        "store": store.measure,
        "protection": protection.measure,
        "small_saves": small_saves.measure,
    }
    if not peers:
        del trials["nvrx_local"]
        print("PEERS_DIR is not set: measuring without nvrx_local (make bench-checkpoint sets it)")
    if "store" in (only or trials) and not store.installed():
        print(f"google-cloud-storage is not installed ({install_command('gcs')}): measuring file:// only")
    if "network" in (only or trials) and not network.has_iperf3():
        print("iperf3 is not installed (apt-get install iperf3): the limit is a bare socket's")
    if only is None:
        return {name: trial for name, trial in trials.items() if name not in ON_REQUEST}
    if unknown := set(only) - set(trials):
        sys.exit(f"--only: {', '.join(sorted(unknown))} not known or not installed; there are {', '.join(trials)}")
    return {name: trials[name] for name in only}


if __name__ == "__main__":
    main()

"""Measures the cost of telemetry in a training step: two trainings at the same time, one of them with traces and metrics.

    python -m benchmarks.telemetry [--rounds 6] [--seconds 15]

Each training (one rank with `holdfast.train`) has a separate local stack, and runs with it on one core: ranks, agent,
replicator, supervisor, diagnostics, Redis and, with telemetry, the OpenTelemetry Collector. So the CPU time of telemetry is
taken from that training's steps, and other load of the machine affects both. The trainings change cores in every round; the
difference of the cores cancels out in a pair of rounds. The goal is a median of at most 0.5 % more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery.launchers import LIBRARY_SCRIPT
from holdfast.cli.client import Client
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.runtime.telling.fake_collector import collecting
from holdfast.runtime.telling.telemetry import ENV_ENDPOINT

AIM = 0.005
NOISE_MAX = 0.02  # if pairs differ by more, the machine is too noisy for a result
ROUNDS = 6
SECONDS = 15.0
SKIP_S = 2.0  # after both have started, until caches and clock rates are stable
START_TIMEOUT_S = 90.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Round:
    """Median and 99th percentile of the steps of one window, in milliseconds."""

    off_ms: tuple[float, float]
    on_ms: tuple[float, float]
    metrics: int  # metrics that the OpenTelemetry Collector has received

    @property
    def ratio(self) -> float:
        return self.on_ms[0] / self.off_ms[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds, even")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of each window")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.rounds % 2:
        parser.error("--rounds is an even number: the trainings change cores, and two rounds make a pair")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores, one for each training")
    os.environ.pop(ENV_ENDPOINT, None)  # otherwise both stacks would inherit it
    rounds = []
    for number in range(arguments.rounds):
        on_core, off_core = cores if number % 2 == 0 else reversed(cores)
        rounds.append(measure(on_core, off_core, arguments.seconds))
        print(f"round {number + 1}/{arguments.rounds}  {row(rounds[-1])}", flush=True)
    result = judged(rounds)
    print(f"\n{result['verdict']}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "telemetry.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def row(one: Round) -> str:
    off, on = (f"{median:7.2f} ms (p99 {late:7.2f})" for median, late in (one.off_ms, one.on_ms))
    return f"telemetry off {off}   on {on}   {one.ratio - 1:+.2%}"


def judged(rounds: Sequence[Round]) -> dict[str, object]:
    """Return the median over the pairs of rounds, with their range."""
    pairs = [math.sqrt(first.ratio * second.ratio) - 1 for first, second in zip(rounds[::2], rounds[1::2], strict=True)]
    more = statistics.median(pairs)
    spread = f"{min(pairs):+.2%} … {max(pairs):+.2%}"
    if max(pairs) - min(pairs) > NOISE_MAX:
        met = f"too noisy to say, pairs differ by more than {NOISE_MAX:.0%}"
    else:
        met = "met" if more <= AIM else "missed"
    return {
        "verdict": f"a step with telemetry takes {more:+.2%} (pairs {spread}); aim ≤ {AIM:.1%}: {met}",
        "more": more,
        "pairs": pairs,
        "aim": AIM,
        "step_ms": {"off": [one.off_ms[0] for one in rounds], "on": [one.on_ms[0] for one in rounds]},
        "step_ms_p99": {"off": [one.off_ms[1] for one in rounds], "on": [one.on_ms[1] for one in rounds]},
        "load": os.getloadavg()[0],
    }


def measure(on_core: int, off_core: int, seconds: float) -> Round:
    """Measure one window in which both train. Ends the program if one does not train, or if no telemetry was sent."""
    with tempfile.TemporaryDirectory(prefix="hfb-") as name, ExitStack() as opened:
        off = opened.enter_context(training(off_core, Path(name) / "off", {}))
        os.sched_setaffinity(0, {on_core})
        collector = opened.enter_context(collecting())
        on = opened.enter_context(training(on_core, Path(name) / "on", {ENV_ENDPOINT: collector.endpoint}))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (off.exists() and on.exists()):
            if time.monotonic() > deadline:
                raise SystemExit(f"no first step within {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        begin = time.time() + SKIP_S
        time.sleep(SKIP_S + seconds)  # the window
        end = begin + seconds
        result = Round(steps_ms(off, begin, end), steps_ms(on, begin, end), len(collector.metrics))
    if not result.metrics:
        raise SystemExit("no metric arrived: telemetry was not on, and nothing was measured")
    return result


@contextmanager
def training(core: int, directory: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Run a stack and a training on one core. Yields the path to which rank 0 writes its steps."""
    os.sched_setaffinity(0, {core})  # inherited by all processes that are started here
    options = StackOptions(directory=directory / "stack", nodes=1, environment=environment)
    with LocalStack(options) as stack, Client(stack.api_url) as client:
        wait_for_nodes(client, stack, 1)
        client.submit(
            {
                "name": "bench",
                "script": str(LIBRARY_SCRIPT),
                "args": ["--out", str(directory)],
                "nodes": 1,
                "nproc_per_node": 1,
                "mesh": {"dp": 1},
                "checkpoint": {"interval_steps": 100, "keep": 2},
            }
        )
        yield directory / "rank-0.jsonl"


def steps_ms(path: Path, begin: float, end: float) -> tuple[float, float]:
    """Return median and 99th percentile of the steps that ended within the window."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    took = [float(line["ms"]) for line in lines if begin <= line["at"] <= end]
    if len(took) < 2:
        raise SystemExit(f"{len(took)} steps within the window: nothing was measured")
    return statistics.median(took), statistics.quantiles(took, n=100)[98]


if __name__ == "__main__":
    main()

"""Simulates many seeds, on all cores, with progress. The output does not depend on the number of processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from holdfast.domain.errors import HoldfastError
from holdfast.runtime.garbage import collect_seldom
from holdfast.sim.scenario import simulate
from holdfast.sim.world import Violation

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TOGETHER = 10  # seeds per task of a process; a task takes some seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    text: str  # output for this seed
    generations: int  # 0 = it broke a promise


def run(seeds: Sequence[int], *, jobs: int = 0, trace: bool = False) -> int:
    """Simulate the seeds in `jobs` processes (0 = one per core), and print their results in this order.

    Returns an exit code: 1 if a seed broke a promise.
    """
    begun, count, failed = time.perf_counter(), len(seeds), 0
    generations: Counter[int] = Counter()
    progress = Progress(count)
    outcomes = _outcomes(seeds, jobs or len(os.sched_getaffinity(0)), trace)
    for done, outcome in enumerate(outcomes, 1):
        if outcome.text:
            progress.clear()
            _print(outcome.text)
        failed += not outcome.generations
        generations[outcome.generations] += 1
        progress.show(done, failed)
    progress.clear()
    spent = time.perf_counter() - begun
    spread = ", ".join(f"{runs} × {number}" for number, runs in sorted(generations.items()) if number)
    held = f"{count - failed} of {count} seeds hold every promise"
    _print(f"{held} ({spent:.1f} s; runs × generations: {spread})\n")
    return 1 if failed else 0


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _outcomes(seeds: Sequence[int], jobs: int, trace: bool) -> Iterator[Outcome]:
    """Yield the outcomes in the order of the seeds."""
    if jobs == 1 or len(seeds) <= _TOGETHER:
        for seed in seeds:
            yield _simulate(seed, trace)
        return
    parts = [seeds[first : first + _TOGETHER] for first in range(0, len(seeds), _TOGETHER)]
    pool = ProcessPoolExecutor(jobs, initializer=_prepare_process)
    # Not `pool.map`: it cancels the remaining tasks while a pool that has lost a process ends the others, which then fails.
    tasks = deque(pool.submit(_simulate_all, part, trace) for part in parts)
    try:
        while tasks:
            yield from tasks.popleft().result()
    except BrokenProcessPool as broken:
        pool.shutdown()
        raise HoldfastError(
            "a process of the simulation was ended from outside, perhaps because the machine had no memory left; "
            "with fewer --jobs the simulation takes less memory"
        ) from broken
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the remaining tasks
        raise
    pool.shutdown()  # otherwise its threads would write to pipes that are closed when this process ends


def _prepare_process() -> None:
    collect_seldom()  # a seed's objects are freed without collections
    # The command's handlers raise an exception, which the pool would take for the result of a task: the process would run on.
    # The pool ends its processes by SIGTERM when it has lost one of them, and waits for them.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Each process of the pool holds both ends of the pipe from which it reads tasks, and does not notice the command's end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _simulate_all(seeds: Sequence[int], trace: bool) -> list[Outcome]:
    return [_simulate(seed, trace) for seed in seeds]


def _simulate(seed: int, trace: bool) -> Outcome:
    try:
        result = simulate(seed, tracing=trace)
    except Violation as violation:
        message, *lines = violation.args
        said = [*lines, f"VIOLATION {message}", f"  replay: python -m holdfast.sim --seed {seed} --trace"]
        return Outcome(seed, _lines(said), 0)
    said = list(result.trace)
    if trace:
        outcome = f"{result.generations} generations, {result.incidents} incidents"
        said.append(f"seed {seed}: trained after {result.seconds:.1f} s, {outcome}")
    return Outcome(seed, _lines(said), result.generations)


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


class Progress:
    """Prints progress to stderr: on a terminal one line that changes, otherwise one line per minute."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self._terminal = sys.stderr.isatty()
        self._every_s = 0.5 if self._terminal else 60.0
        self._shown_at = time.perf_counter()
        self._width = 0

    def show(self, done: int, failed: int) -> None:
        now = time.perf_counter()
        if done == self._seeds or now < self._shown_at + self._every_s:
            return
        self._shown_at = now
        text = f"{done} of {self._seeds} seeds, {failed} broke a promise"
        sys.stderr.write(f"\r{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        if self._terminal and self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            self._width = 0

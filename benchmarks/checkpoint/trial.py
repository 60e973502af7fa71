"""Runs one contender in a separate process: `python -m benchmarks.checkpoint.trial JSON`, with the fields of `Request`.

In a save, every tensor is stamped, saved, and overwritten as soon as the save returns. Steps continue until all background work
has ended. If loading the last save does not return all stamps, the contender has failed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import holdfast.train as hf
from benchmarks.checkpoint import contenders, ours
from benchmarks.checkpoint.contenders import Contender, timed
from benchmarks.checkpoint.pages import recall
from benchmarks.checkpoint.protocol import RESTORE, RESULT, SEED, WARM, WARMED, Request
from benchmarks.checkpoint.training import Loop, State, StepTime

SETTLE_STEPS = 40  # steps until caches and clock rates are stable
OVERWRITTEN = 15_000  # mark that overwrites the state after each save


@dataclass(slots=True)
class Result:
    """Durations of the counted saves. Slow-downs are ratios of the same statistic, during ÷ before, over all saves."""

    state_bytes: int
    mark: int  # mark of the last save
    stall_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    slowdown: dict[str, dict[str, float]] = field(default_factory=dict)  # window → statistic
    restore_s: float | None = None
    step_s: float = 0.0  # median of the steps before the saves


@dataclass(slots=True)
class Windows:
    """Step times of all counted saves by the time of their beginning: before, until durable, and from durable to settled."""

    before: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)

    def sort(self, times: Sequence[StepTime], durable_at: float) -> None:
        for step in times:
            (self.durable if step.began_at <= durable_at else self.settled).append(step.duration_s)

    def slowdown(self) -> dict[str, dict[str, float]]:
        """Return the slow-downs. A window with very few steps has no percentiles and is omitted."""
        return {
            name: {
                statistic: of(times) / of(self.before)
                for statistic, of in (("mean", statistics.fmean), ("median", statistics.median), ("p99", p99))
            }
            for name, times in (("durable", self.durable), ("settled", self.settled))
            if len(times) > 1
        }


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of the measured libraries
    if request.contender == "holdfast":
        hf.launch(lambda run: _holdfast(run, request))
    elif request.contender == RESTORE:
        hf.launch(lambda run: _restore(run, request))
    elif request.contender == SEED:
        hf.launch(lambda run: _seed(run, request))
    else:
        contenders.alone()
        state = State(request.nbytes)
        _measure(_contender(request, state), state, request)


def _contender(request: Request, state: State) -> Contender:
    directory = Path(request.directory)
    match request.contender:
        case "copy":
            return contenders.Copy(state, directory, Path(request.memory))
        case "torch_save":
            return contenders.TorchSave(state, directory)
        case "dcp_async":
            return contenders.dcp_async(state, directory)
        case "dcp_async_cached":
            return contenders.dcp_async_cached(state, directory)
        case "dcp_async_process":
            return contenders.dcp_async_process(state, directory)
        case "nvrx_local":
            from benchmarks.checkpoint.nvrx import NvrxLocal  # only where it is installed

            return NvrxLocal(state, directory)
        case other:
            sys.exit(f"no contender {other!r}")


def _holdfast(run: hf.Run, request: Request) -> None:
    state = State(request.nbytes)
    _measure(ours.Holdfast(run, state), state, request)


def _restore(run: hf.Run, request: Request) -> None:
    state = State(request.nbytes)
    state.stamp(OVERWRITTEN)
    result = Result(state.nbytes, request.mark, restore_s=ours.restore(run, state))
    _insist_whole(state, request.mark)
    _say(RESULT, **asdict(result))


def _seed(run: hf.Run, request: Request) -> None:
    state = State(request.nbytes)
    state.stamp(request.mark)
    holdfast = ours.Holdfast(run, state)
    for number in range(request.mark):  # so that the save has this step number
        with holdfast.step(number):
            pass
    holdfast.save(request.mark)
    _say(RESULT, **asdict(Result(state.nbytes, request.mark)))


# ---------------------------------------------------------------- saves


def _measure(contender: Contender, state: State, request: Request) -> None:
    loop = Loop(contender.step, contender.poll)
    loop.steps(SETTLE_STEPS)
    last = contender.warm_saves + request.saves
    result, windows = Result(state.nbytes, last), Windows()
    _say(WARM)
    for save in range(contender.warm_saves):
        _save(contender, state, loop, request, 1 + save)
    _say(WARMED)
    for save in range(request.saves):
        contender.tidy()
        recall(state.nbytes)
        windows.before += [step.duration_s for step in loop.steps(request.before_steps)]
        _save(contender, state, loop, request, 1 + contender.warm_saves + save, result, windows)
    result.restore_s = contender.load()
    if result.restore_s is not None:
        _insist_whole(state, last)
    result.step_s = statistics.median(windows.before) if windows.before else 0.0
    result.slowdown = windows.slowdown()
    _say(RESULT, **asdict(result))
    contender.close()


def _save(
    contender: Contender,
    state: State,
    loop: Loop,
    request: Request,
    mark: int,
    result: Result | None = None,
    windows: Windows | None = None,
) -> None:
    state.stamp(mark)
    began, stall_s = time.monotonic(), timed(lambda: contender.save(mark))
    state.stamp(OVERWRITTEN)
    times = loop.until(lambda: contender.progress().settled_at is not None, request.save_timeout_s)
    durable_at = contender.progress().durable_at
    assert durable_at is not None  # a settled save is durable
    if result is not None and windows is not None:
        result.stall_s.append(stall_s)
        result.durable_s.append(durable_at - began)
        windows.sort(times, durable_at)


def _insist_whole(state: State, mark: int) -> None:
    if torn := state.torn(mark):
        sys.exit(f"torn: {torn} of {len(state.tensors)} tensors do not hold what was saved")


def _say(at: str, **fields: Any) -> None:
    print(json.dumps({"at": at, **fields}), flush=True)


def p99(times: Sequence[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


if __name__ == "__main__":
    main()

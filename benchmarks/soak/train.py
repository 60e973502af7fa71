"""The chain job: training whose values are all known in advance (`truth`) and are checked on every rank at every step and
restore.

A wrong value is recorded and then corrected, so that each error is counted once and the job continues. If the script raised an
exception, the job would be stopped as a user error, which would hide further errors.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast.train as hf
from benchmarks.soak.truth import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SAMPLES,
    StepLog,
    Stepped,
    Wrong,
    chain,
    compare,
    constants,
    mark,
    mix,
    say_wrong,
)
from holdfast.train.sampler import ElasticSampler


class Chain:
    """One rank's state, and its expected values."""

    def __init__(self, run: hf.Run, out: Path) -> None:
        self._run = run
        self._out = out
        self.position = run.world.mesh.position_of(run.rank)
        a, b = constants(self.position)
        self._a = torch.from_numpy(a.view("int64"))
        self._b = torch.from_numpy(b.view("int64"))
        self.vector = torch.zeros_like(self._a)
        self.data = ElasticSampler(
            SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, world=run.world, shuffle=False
        )
        self.state = {"vector": self.vector, "data": self.data, "mark": mark(run.rank, 0), "step": 0}
        self.resized = False
        torch.manual_seed(mix(0))

    def advance(self, step: int, pause_s: float) -> None:
        """Finish one step after `step` finished steps."""
        self._check_random(step)
        samples = torch.cat(next(self.data))
        sums = torch.tensor([int(samples.sum()), len(samples)])
        dist.all_reduce(sums)  # over all ranks, so that one stopped rank blocks all others, as in any training
        sums //= self._run.world_size // self._run.world.dp_size  # every position has used the same samples
        self.vector += self._a * sums[0] + self._b * sums[1]
        time.sleep(pause_s)
        self.state["mark"] = mark(self._run.rank, step + 1)
        self.state["step"] = step + 1
        torch.manual_seed(mix(step + 1))

    def check(self, step: int, where: str) -> None:
        run = self._run
        about = {"rank": run.rank, "generation": run.generation, "step": step}
        expected = chain(self.position, step)
        wrong = compare("vector", where, self.vector.numpy().view("uint64"), expected, **about)
        if wrong is not None:
            say_wrong(self._out, wrong)
            self.vector.copy_(torch.from_numpy(expected.view("int64")))
        self._expect("data", where, self.data.consumed, step * GLOBAL_BATCH, step)
        self._expect("step", where, self.state["step"], step, step)
        if not self.resized:  # a rank that did not exist at the save has another rank's mark
            self._expect("mark", where, self.state["mark"], mark(run.rank, step), step)

    def _check_random(self, step: int) -> None:
        found = torch.randint(1 << 62, ())
        if self.resized:  # a new rank's generator is seeded from (seed, step, rank)
            self.resized = False
            return
        expected = torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(mix(step)))
        self._expect("random", "step", int(found), int(expected), step)

    def _expect(self, what: str, where: str, found: object, expected: object, step: int) -> None:
        if found != expected:
            run = self._run
            say_wrong(self._out, Wrong(run.rank, run.generation, step, what, where, str(found), str(expected)))
            if what == "data":
                self.data.consumed = step * GLOBAL_BATCH


def main(run: hf.Run, out: Path, steps: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    job = Chain(run, out)

    @run.on_resize
    def resized(_old: hf.World, _new: hf.World) -> None:
        job.resized = True

    log = StepLog(out, run.rank)
    (out / f"rank-{run.rank}.pid").write_text(str(os.getpid()))
    step = run.restore(job.state)
    job.check(step, "restore")
    while step < steps:
        with run.step(step) as s:
            job.advance(step, pause_s)
            s.log(loss=1.0 / (step + 1), tokens=GLOBAL_BATCH)
        step += 1
        job.check(step, "step")
        log.write(Stepped(run.generation, run.world_size, run.rank, step, time.monotonic()))
        run.checkpoint(job.state, step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause-s", type=float, required=True)
    arguments = parser.parse_args()
    hf.launch(lambda run: main(run, arguments.out, arguments.steps, arguments.pause_s))

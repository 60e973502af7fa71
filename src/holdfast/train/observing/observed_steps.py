"""Observes the steps of a script that reports none: shows their progress, and which rank is slow.

Theory. A step of an unmodified script ends where an optimizer's step begins: every torch optimizer calls a hook there. DDP's
timers give the time that the rank has waited for other ranks (`holdfast.train.observing.ddp_waits`). Step time and wait are
added up over a block of steps of 0.25 to 1 s, and reported in one message that is dropped if it cannot be sent at once. Blocks
end at multiples of a power of two, so that the blocks of all ranks contain the same steps.

The observations show that all ranks have begun to step, how many optimizer steps they have taken since, and how the ranks
compare. They are not steps of the job: the step that the script continues from after a restart, and its own saves, are unknown.
A script without a torch optimizer sends nothing. A script that uses `holdfast.train` is observed, without the waits, until it
has finished its first `run.step`: it may never do so. `HOLDFAST_OBSERVE_STEPS=0` in the job's `env` disables the observation.

The hook must not disturb the user's process. It takes 30 to 100 µs (at most once in 20 ms, if steps are shorter), synchronises
nothing, and is not traced by a compiler. The first exception in it ends the observation."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.domain import worker
from holdfast.domain.signals import Phase
from holdfast.train.channels import Notes
from holdfast.train.observing import imports
from holdfast.train.observing.ddp_waits import DDPWaits

log = logging.getLogger("holdfast.train")

BLOCK_S = (0.25, 1.0)  # duration of a block, unless a single step takes longer
STEPS_MAX = 1 << 16  # of a block
READ_S = 0.02  # waits are read at most once in this time, so that reading takes at most 0.5 % of a step


class StepObserver:
    """Reports steps to `notes`, from the first optimizer step until `close`."""

    def __init__(self, notes: Notes, waits: DDPWaits, clock: Callable[[], float] = time.time) -> None:
        self._notes = notes
        self._waits = waits
        self._clock = clock
        self._process = os.getpid()
        self._step = -1  # optimizer steps that have begun, without the first, which ends a step of unknown beginning
        self._block = 1  # steps, a power of two
        self._every = 1  # steps from one reading of the waits to the next
        self._started_at = 0.0
        self._steps = self._samples = 0
        self._waited_s = 0.0
        self._measured = False  # a wait was read: from then on every block has one
        self._hook = register_optimizer_step_pre_hook(self._stepping)

    def without_waits(self) -> None:
        """Report steps without waits from now on."""
        self._measured, self._samples, self._waited_s = False, 0, 0.0

    def done(self) -> None:
        """Report that the script has ended with exit code 0."""
        if self._process == os.getpid():
            self._notes.phase(Phase.DONE, self._clock(), 0)

    def close(self) -> None:
        """Stop observing. The caller closes `waits`."""
        self._hook.remove()
        if self._process == os.getpid():
            self._notes.close()

    def _stepping(self, optimizer: object, args: object, kwargs: object) -> None:
        """Hook: an optimizer's step begins."""
        if torch.compiler.is_compiling():
            return  # a compiled optimizer does not call hooks
        try:
            self._observe()
        except Exception as error:  # no error of the observation may end the training
            log.warning("the steps of this script are no longer observed: %r", error)
            self.close()

    def _observe(self) -> None:
        if self._process != os.getpid():
            return  # a process that the script has forked
        self._step += 1
        waited_s = self._waits.take(self._every) if self._step % self._every == 0 else None
        if self._step == 1:
            imports.record()
        if self._step == 0:
            self._started_at = self._clock()
            return
        self._steps += 1
        if waited_s is not None:
            self._waited_s += waited_s
            self._samples += 1
            self._measured = True
        if self._step % self._block == 0 and (self._samples or not self._measured):
            self._report(self._clock())

    def _report(self, now: float) -> None:
        started_at, steps = self._started_at, self._steps
        wait_s = self._waited_s / self._samples * steps if self._samples else math.nan
        self._started_at, self._steps, self._samples, self._waited_s = now, 0, 0, 0.0
        duration_s = now - started_at
        if duration_s < 0:
            return  # the clock was set back
        self._notes.observed_steps(
            step=self._step, steps=steps, started_at=started_at, ended_at=now, comm_wait_s=wait_s
        )
        shortest_s, longest_s = BLOCK_S
        if duration_s < shortest_s:
            self._block = min(2 * self._block, STEPS_MAX)
        elif duration_s > longest_s:
            self._block = max(1, self._block // 2)
        self._every = 1
        while self._every < self._block and self._every * duration_s < READ_S * steps:
            self._every *= 2


_running: tuple[StepObserver, DDPWaits] | None = None


def observe(environ: Mapping[str, str]) -> None:
    """Begin the observation in a worker that is about to run its script. Does nothing without an agent."""
    global _running
    path, job = environ.get(worker.ENV_NOTES, ""), environ.get(worker.ENV_JOB, "")
    if not path or not job or environ.get(worker.ENV_OBSERVE_STEPS, "") == "0":
        return
    generation, rank = int(environ.get(worker.ENV_GENERATION, "0")), int(environ.get("RANK", "0"))
    notes = Notes(agent=path, replicator="", job=job, generation=generation, rank=rank)
    waits = DDPWaits()
    _running = StepObserver(notes, waits), waits


def done() -> None:
    """Report that the script has ended with exit code 0: other ranks may fail while the process still runs exit handlers and
    frees its memory."""
    if _running is not None:
        observer, _ = _running
        observer.done()


def leave_waits() -> None:
    """Stop reading DDP's timers, because the script has a run of `holdfast.train`, which reads them itself."""
    if _running is not None:
        observer, waits = _running
        waits.close()
        observer.without_waits()


def stand_down() -> None:
    """End the observation, because the script reports its steps itself."""
    global _running
    if _running is not None:
        for each in _running:
            each.close()
        _running = None

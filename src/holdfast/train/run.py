"""`hf.Run`: the handle of this rank in the training script.

The step loop never waits: a finished step is one datagram, which is dropped if it cannot be sent at once, and orders of the
agent are polled without blocking. Orders take effect between steps:

* `checkpoint_now` saves after the named step, which is the same on every rank. The ranks agree on it first (`train.orders`).
* `stop` ends the script by `Interrupted`: after the current step or, if a save is requested, after the next `run.checkpoint`.

Without an agent `run.checkpoint` can save as well (`holdfast.train.standalone`); POSIX signals replace the orders.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import Phase
from holdfast.shards import Reader
from holdfast.train.channels import Control, Notes
from holdfast.train.compile_cache import CompileCache
from holdfast.train.environment import Environment, World
from holdfast.train.observing import imports, observed_steps
from holdfast.train.observing.ddp_waits import DDPWaits
from holdfast.train.observing.recorder import Recorder
from holdfast.train.observing.replica_check import ReplicaCheck
from holdfast.train.orders import Orders
from holdfast.train.saves import rng
from holdfast.train.saves.checkpoint import Checkpointer, Load, Restored, opened
from holdfast.train.saves.ddp_buckets import DDPBuckets
from holdfast.train.scale_events import Leaving, Leavings, OnLeaving, OnResize, Resizes, is_resize
from holdfast.train.standalone import Session
from holdfast.train.standalone.agreement import Proposal
from holdfast.train.step import Interrupted, Owner, Step
from holdfast.train.step_events import FinishedStep, OnStep

log = logging.getLogger("holdfast.train")
# How long a rank waits for its end after the save of a planned change. The change usually takes a fifth of this.
LEAVING_S_MAX = 1.0
# How long a rank that has reached the step of a proposed save waits for the result. It is usually known before the step; after
# this time the supervisor, the agent or the network has failed.
AGREEMENT_S_MAX = 5.0
# How long a save that the supervisor, a signal or the script has requested waits for a memory image. A save that is only due by
# its interval does not wait: it is skipped, since the next one replaces it.
DEMANDED_WAIT_S = 5.0


class Run:
    """The handle of one rank of one generation, created by `hf.launch` or `hf.attach`.

    The end of its `with` block, or `close`, ends the run. `hf.launch` does this itself."""

    def __init__(
        self,
        *,
        environment: Environment,
        device: torch.device,
        notes: Notes,
        control: Control,
        process_group_s: float,
        recorder: Recorder | None = None,
        standalone: Session | None = None,
        compile_cache: CompileCache | None = None,
        buckets: DDPBuckets | None = None,
        waits: DDPWaits | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.world = environment.world
        self.device = device
        self.local_rank = environment.local_rank
        self._environment = environment
        self._notes = notes
        self._recorder = recorder
        self._standalone = standalone
        self._compile_cache = compile_cache
        self._buckets = buckets
        self._waits = waits
        self._owner = owner
        self._rng_restored: dict[str, Any] | None = None
        self._interrupted: Interrupted | None = None
        self._checkpoints = Checkpointer(environment, device, notes, buckets)
        self._replicas = ReplicaCheck(environment.replica_check_steps, notes, environment.world.rank)
        self._mesh: DeviceMesh | None = None
        self._resizes = Resizes()
        self._leavings = Leavings(device)
        self._step_callbacks: list[OnStep] = []
        self._finish_callbacks: list[Callable[[], None]] = []
        self._restored = environment.restore is None
        self._done = 0  # steps finished
        self._finished = False
        self._step: Step | None = None
        self._stall_reported_s = 0.0
        self._warned_unsaved = False
        self._looks_for_checkpoint = False  # by `restore` or a property or method that precedes it
        self._orders = Orders(
            control, environment.interval_steps, rank=environment.world.rank, miss=self._checkpoints.miss
        )
        self._asked: tuple[int, Proposal | None] = (-1, None)  # step, and the save agreed for it
        self._mark = time.monotonic()
        # None after `started` has been sent.
        self._phases_s: dict[str, float] | None = {"process_group": process_group_s}
        if environment.began_s is not None:
            self._phases_s["script"] = max(0.0, self._mark - process_group_s - environment.began_s)

    @property
    def rank(self) -> int:
        """Rank of this process, 0 … `world_size` - 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of this generation."""
        return self.world.world_size

    @property
    def generation(self) -> int:
        """The number of the current assignment of ranks to nodes; 0 without an agent."""
        return self.world.generation

    @property
    def job(self) -> str:
        """The name of the job; empty without an agent."""
        return self._environment.job

    @property
    def submission(self) -> str:
        """Name of this submission of the job, for example `gpt-1795718875`: equal in all its generations, different when a job
        of the same name is submitted again. Empty if it is not known: without an agent."""
        first = self._environment.first_attempt
        return f"{self.job}-{first}" if self.job and first else ""

    @property
    def previous_mesh(self) -> Mesh | None:
        """The mesh that saved the selected checkpoint; None if there is no checkpoint or its mesh is not known."""
        return self._environment.previous_mesh

    @property
    def inert(self) -> bool:
        """Whether the run neither reports nor saves: no agent has started this process, and no directory is set."""
        return not self._environment.job and self._standalone is None

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a torch `DeviceMesh` with the job's dimensions, which always include `dp`.

        Built on first use, since it makes one process group per dimension (10-40 ms for nine ranks over gloo): the first use
        is collective, so every rank must use it.
        """
        if self._mesh is None:
            if self._owner is not None and not dist.is_initialized():
                self._owner.join()
            names, sizes = zip(*_with_dp(self.world.mesh).dims, strict=True)
            self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return self._mesh

    @property
    def steps_finished(self) -> int:
        """Number of finished steps, including those before the restored checkpoint."""
        return self._done

    @property
    def saves(self) -> bool:
        """Whether `checkpoint` can save: under an agent, or with a checkpoint directory."""
        return self._checkpoints.enabled

    @property
    def newest_image(self) -> Path | None:
        """The memory image of this process's latest save; None before the first one."""
        return self._checkpoints.newest

    # ------------------------------------------------------------------ the end

    def close(self, error: BaseException | None = None) -> None:
        """End the run: write the last checkpoint and close the channels. A second call does nothing. `error`: the exception
        that ends the script, if any; it is not raised. Steps and saves are not possible afterwards."""
        if self._owner is not None:
            self._owner.close(error if error is not None else self._interrupted)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    # ------------------------------------------------------------------ state

    @property
    def restore_step(self) -> int:
        """The step that `restore` restores, or has restored; 0 if there is no checkpoint. Available before any state exists."""
        self._looks_for_checkpoint = True
        target = self._environment.restore
        return 0 if target is None else target.step

    def reapply_rng(self) -> None:
        """Set the random number generators again to their state when `restore` returned. For a framework that draws random
        numbers between the restore and the first step, for example to skip batches. Does nothing if nothing was restored, and
        after the first step."""
        if self._rng_restored is not None:
            rng.restore(self._rng_restored)

    def restore(self, state: Mapping[str, Any]) -> int:
        """Load the selected checkpoint into `state` and return its step; 0 if there is no checkpoint.

        Values with `load_state_dict` get their state. Tensors, arrays and containers are filled in place, other plain values
        are replaced in the dict that holds them. Random number generators continue; those of a new rank are seeded from
        (seed, step, rank).
        """
        self._lap("build")
        self._looks_for_checkpoint = True
        self._checkpoints.expect(state)
        target = self._environment.restore
        if target is None or self._restored:
            return self._done
        self._notes.phase(Phase.RESTORE, time.time(), 0)
        self._resume(self._checkpoints.restore(state, target), state)
        return self._done

    def restore_by(self, load: Load) -> int:
        """As `restore`, for a loader that fills the live objects itself. `load` gets the open shards, this rank's own first,
        and returns the plain values that were saved with the state (`state.disassemble`). For a state that is loaded in parts,
        this may be called again until the first step.

        Raises `Conflict` if this run has no checkpoint to restore, or has finished a step."""
        target = self._environment.restore
        if target is None or self._phases_s is None:
            why = (
                "no checkpoint is selected for it" if target is None else "it has finished a step since it was restored"
            )
            raise Conflict(f"this run cannot be restored: {why}")
        self._lap("build")
        self._notes.phase(Phase.RESTORE, time.time(), 0)
        restored = self._checkpoints.restore_by(load, target)
        if not self._restored:
            self._resume(restored, {})
        return self._done

    def restore_parts(self) -> AbstractContextManager[list[Reader]]:
        """Context of the shards of the selected checkpoint, opened for reading, this rank's own first. Raises `Conflict` if no
        checkpoint is selected."""
        if self._environment.restore is None:
            raise Conflict("this run has no checkpoint to restore")
        return opened(self._environment.restore)

    def _resume(self, restored: Restored, state: Mapping[str, Any]) -> None:
        self._rng_restored = rng.capture()
        self._restored = True
        self._done = restored.step
        self._replicas.after_restore(state, restored.step)
        self._lap("restore")
        previous = self._environment.previous_mesh
        if previous is not None and is_resize(previous, self.world.mesh):
            self._resizes.happened(World(previous, restored.rank), self.world)

    def on_resize(self, callback: OnResize) -> OnResize:
        """Decorator: call `callback(old, new)` once if the restored state was saved by a mesh of another size, to adjust what
        depends on the size: learning rate (`hf.scaling`), accumulation, logging.

        The callback is called on every rank, in `run.restore` after the state was loaded or, if it is registered later, at
        once. `old` is the world that saved the state, with the rank whose shard this rank continues from (its generation is
        unknown: 0). The restored state decides: a run that goes from 2 replicas to 1 and is restarted before it has saved is
        resized from 2 to 1 again, and a run that continues with the size that saved is not resized. The same holds under
        torchrun with `hf.Checkpoints`. A start without a checkpoint is not a resize.

        An exception of a callback ends the script like any other exception of the script; a note on it names the callback."""
        self._resizes.add(callback)
        return callback

    def on_leaving(self, callback: OnLeaving) -> OnLeaving:
        """Decorator: call `callback(leaving)` before a planned change ends this process: a hot swap at a checkpoint, scale up,
        scale down, the maintenance of a node, an operator's stop; without an agent, SIGTERM. For example, to flush logs and
        metrics or to finish an upload.

        It is called on every rank at the same step, in `run.checkpoint` before the state of `leaving.step` is saved; the run
        continues from exactly this state. Steps that the process still finishes until it is killed are repeated. A change can
        be postponed after the save, and the callback is then called again: flush, do not close.

        Limits: it runs in a thread while training waits, for at most 5 s for all callbacks of a rank together; without an agent
        also at most half of the time left of `grace_s`. After that the state is saved without waiting; the callback continues
        until the process ends, and those after it are not called. An exception is logged with the callback's name. Neither
        a timeout nor an exception affects the run. The callback must not call collectives: ranks do not wait for each other's
        callbacks.

        It is *not* called for an unplanned end (a crash, a hang, a lost node, a failed GPU, SIGKILL), if the ranks do not reach
        the step in time, or for a stop without a save. Never rely on it for correctness."""
        self._leavings.add(callback)
        return callback

    def on_step(self, callback: OnStep) -> OnStep:
        """Decorator: call `callback(finished)` after each step that this rank finishes, in the training thread. It gets the
        measurements that the agent gets, which are of this rank. The callback must return quickly, because training waits for
        it; an exception ends the script like any other exception of the script."""
        self._step_callbacks.append(callback)
        return callback

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call `callback` in `finish`, while the run can still save; not if an exception ends the script."""
        self._finish_callbacks.append(callback)

    def checkpoint(self, state: Mapping[str, Any], step: int, *, force: bool = False) -> bool:
        """Save `state` after `step` finished steps if a save is due. Returns whether it was saved.

        A save is due at every multiple of the job's interval, at a step that the supervisor or a signal requested, and with
        `force`, which must be equal on every rank. Training is blocked while the tensors are copied to shared memory. If both
        images there are still being read, a save that is due by its interval is skipped; a requested or forced save waits for
        an image for at most 5 s. Without an agent and without a checkpoint directory (`hf.launch(checkpoint=…)`), nothing is
        saved and a warning is logged once.
        Raises `Interrupted` if the agent or SIGTERM requests the run to stop, and `InvalidSpec` if `step` is not the number of
        finished steps, because a wrong number would repeat or skip a step."""
        if self._phases_s is None and step != self._done:
            inside = "; a step has begun and not ended: call run.checkpoint after it" if self._step is not None else ""
            raise InvalidSpec("step", step, f"{self._done}, the number of finished steps{inside}")
        if not self._looks_for_checkpoint:
            self._looks_for_checkpoint = True
            log.warning(
                "run.checkpoint is called, but run.restore was not: this run would fail after a restart, because a run that "
                "continues from a checkpoint has to load it. Call step = run.restore(state) before the first step"
            )
        self._await_agreement(step)
        asked = self._ask(step)
        leaving = self._orders.stop is not None or (asked is not None and asked.leave)
        demanded = force or leaving or self._demanded(step)
        due = demanded or self._orders.due(step)
        change = self._orders.change_after(step)
        self._before_leaving(step, change or ("SIGTERM" if asked is not None and asked.leave else ""))
        self._replicas.before_checkpoint(state, step, saving=due)
        saved = due and self._save(state, step, DEMANDED_WAIT_S if demanded else 0.0)
        if not saved and self._checkpoints.enabled:
            self._checkpoints.prepare(state)
        self._orders.forget_until(step)
        if change and saved and not leaving:
            leaving = self._wait_for_end(step)
        if leaving:
            raise self._interrupt(step, saved)
        return saved

    def due(self) -> bool:
        """Whether a save is due now, by the interval or by request. Between two steps, the value is equal on every rank.

        For a script whose save is costly or collective, so that it starts one only if it is due. A stop request does not count,
        because ranks may receive it one step apart; the next `step` raises `Interrupted` for it."""
        self._await_agreement(self._done)
        return self._ask(self._done) is not None or self._orders.due(self._done)

    def due_by_interval_only(self) -> bool:
        """Whether a save is due now and nothing but the interval asks for it. Such a save can be made later: each rank makes
        it at the same place by calling `checkpoint`."""
        return self._orders.stop is None and self.due() and not self._demanded(self._done)

    def _demanded(self, step: int) -> bool:
        """Whether the supervisor or a signal has requested a save at `step`."""
        return self._ask(step) is not None or self._orders.requested(step)

    def _ask(self, step: int) -> Proposal | None:
        """Return the save that the ranks of a run without an agent have agreed on for this step. Queried once per step."""
        if self._standalone is not None and self._asked[0] != step:
            self._asked = (step, self._standalone.due(step))
        return self._asked[1] if self._asked[0] == step else None

    def _wait_for_end(self, step: int) -> bool:
        """Wait for the planned change that ends this process, because further steps would be repeated after it. Returns whether
        the run must stop. If the change was cancelled, training continues after `LEAVING_S_MAX`."""
        self._orders.pass_step(step)
        with self.phase(Phase.CHECKPOINT):
            return self._orders.await_stop(self._done, LEAVING_S_MAX)

    def _await_agreement(self, step: int) -> None:
        """If a save of this step was proposed, wait until it is known whether all ranks save it."""
        if self._orders.undecided(step):
            with self.phase(Phase.CHECKPOINT):
                self._orders.await_result(step, self._done, AGREEMENT_S_MAX)

    def _before_leaving(self, step: int, reason: str) -> None:
        if reason and self._leavings:
            left_s = self._standalone.grace_left_s if self._standalone is not None else None
            with self.phase(Phase.CHECKPOINT):
                self._leavings.call(Leaving(step, reason), None if left_s is None else left_s / 2)

    def _save(self, state: Mapping[str, Any], step: int, wait_s: float) -> bool:
        if not self._checkpoints.enabled:
            if not self._warned_unsaved:
                log.warning(
                    "run.checkpoint: no agent runs this script and no directory is set (hf.launch(checkpoint=…) or "
                    "HOLDFAST_CHECKPOINT_DIR), so nothing is saved"
                )
                self._warned_unsaved = True
            return False
        with self.phase(Phase.CHECKPOINT):
            return self._checkpoints.save(state, step, wait_s=wait_s)

    # ------------------------------------------------------------------ steps

    def step(self, step: int) -> Step:
        """Context of one optimizer step. `step` is the number of steps finished before it, which `restore` returns at first.

        Raises `Conflict` if the selected checkpoint has not been restored yet, `InvalidSpec` if a restored run starts at
        another step than the restored one, and `Interrupted` if the agent requests the run to stop.
        """
        if not self._restored:
            raise Conflict("this run continues from a checkpoint: call run.restore(state) before the first run.step")
        if self._interrupted is not None:  # raised here, because DCP's writer, which noticed the stop, must not raise
            raise self._interrupted
        if self._orders.stop is not None:
            raise self._interrupt(self._done, saved=False)
        if self._environment.restore is not None and self._phases_s is not None and step != self._done:
            raise InvalidSpec("step", step, f"{self._done}, which run.restore returned")
        if self._recorder is not None:
            self._recorder.tell_groups()
        if self._buckets is not None:
            self._buckets.replay()
        self._done = step
        self._step = Step(self._finish)
        return self._step

    def begin_step(self, step: int) -> Step:
        """Begin a step that `end_step` ends. For a framework that has a callback at both ends of a step, instead of
        `with run.step(step)`.

        A step that is begun again, or never ended, does not count as finished. Raises the exceptions of `step`."""
        return self.step(step)

    def end_step(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        local_grad_norm: float | torch.Tensor | None = None,
        tokens: int = 0,
        flops: float = 0.0,
    ) -> None:
        """End the step that `begin_step` has begun, and report these values of it as `Step.log` does.

        Raises `Conflict` if no step has been begun, and `Interrupted` if the agent requests the run to stop."""
        step = self._step
        if step is None:
            raise Conflict("no step has been begun: call run.begin_step(step) first")
        step.log(loss=loss, grad_norm=grad_norm, local_grad_norm=local_grad_norm, tokens=tokens, flops=flops)
        self._finish(step)

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Measure time spent waiting for data; reported with the current step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._step is not None:
                self._step.data_s += time.perf_counter() - began

    @contextlib.contextmanager
    def comm_wait(self) -> Iterator[None]:
        """Measure time spent waiting for other ranks; reported with the current step. Use it around a blocking receive or
        all-reduce.

        In synchronous training the steps of all ranks take equally long; the slow rank is the one that waits least, and without
        this measurement it cannot be identified. Use it only if the call returns when the data has arrived: gloo's calls do,
        NCCL's calls return as soon as they are queued."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._step is not None:
                self._step.comm_wait_s = (self._step.comm_wait_s or 0.0) + time.perf_counter() - began

    @contextlib.contextmanager
    def phase(self, phase: Phase | str) -> Iterator[None]:
        """Announce work other than steps ("eval", "compile"), so that it is not reported as a hang. It also ends if the work
        raises: a script that catches the exception and continues is checked for hangs again."""
        self._notes.phase(Phase(phase), time.time(), self._done)
        try:
            yield
        finally:
            self._notes.phase(Phase.DONE if self._finished else Phase.STEP, time.time(), self._done)

    def finish(self) -> None:
        """Declare the last step finished: from now on the script is not checked for hangs. `hf.launch` calls this at the
        end."""
        if self._finished:
            return
        for callback in self._finish_callbacks:
            callback()
        self._finished = True
        if self._compile_cache is not None:
            self._compile_cache.close()
        self._notes.phase(Phase.DONE, time.time(), self._done)

    def _finish(self, finished: Step) -> None:
        """Report a finished step, then poll for orders."""
        self._done += 1
        self._step = None
        stall_s = self._checkpoints.stall_s
        if self._waits is not None and (waited_s := self._waits.take(on_cpu_only=True)) is not None:
            # DDP's own measurement, unless the script has measured its waits itself
            finished.comm_wait_s = waited_s if finished.comm_wait_s is None else finished.comm_wait_s
        ended_at = time.time()
        self._notes.step(
            step=self._done,
            started_at=finished.started_at,
            ended_at=ended_at,
            ended_uptime_s=time.monotonic(),
            data_s=finished.data_s,
            comm_wait_s=finished.comm_wait_s,
            stall_s=stall_s - self._stall_reported_s,
            tokens=finished.tokens,
            flops=finished.flops,
            loss=finished.loss,
            grad_norm=finished.grad_norm,
            local_grad_norm=finished.local_grad_norm,
        )
        finished.stall_s, self._stall_reported_s = stall_s - self._stall_reported_s, stall_s
        if self._phases_s is not None:
            observed_steps.stand_down()  # a script may begin a step and never end it; this one reports its steps
            self._lap("first_step")
            self._notes.started(self._phases_s)
            imports.record()
            self._phases_s = self._rng_restored = None
        if self._compile_cache is not None:
            self._compile_cache.step()
        if self._step_callbacks:
            self._call_back(finished, ended_at)
        self._orders.poll(self._done)
        if self._orders.stop is False:
            raise self._interrupt(self._done, saved=False)

    def _call_back(self, step: Step, ended_at: float) -> None:
        finished = FinishedStep(
            step=self._done,
            started_at=step.started_at,
            ended_at=ended_at,
            data_s=step.data_s,
            comm_wait_s=step.comm_wait_s,
            stall_s=step.stall_s,
            tokens=step.tokens,
        )
        for callback in self._step_callbacks:
            callback(finished)

    def _interrupt(self, step: int, saved: bool) -> Interrupted:
        self._interrupted = Interrupted(step, saved)
        return self._interrupted

    def _lap(self, name: str) -> None:
        """Record the duration of a phase of the start; phases after the first step are ignored."""
        now = time.monotonic()
        if self._phases_s is not None:
            self._phases_s[name] = now - self._mark
        self._mark = now


def _with_dp(mesh: Mesh) -> Mesh:
    """Add the dimension `dp` if the mesh has none: `{pp: 2}` means one replica of two stages, `{dp: 1, pp: 2}`."""
    return mesh.resized(mesh.dp)

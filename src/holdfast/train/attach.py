"""`hf.attach`: the way into a process that a framework owns.

    run = hf.attach()                      # or: with hf.attach() as run:
    first = run.restore_step               # known before a model exists; 0 if nothing is restored
    ...                                    # the framework builds its model, optimizer, data
    run.restore(state)                     # may come late: at any time before the first step
    run.reapply_rng()                      # where the framework has used random numbers since then
    for step in range(first, total):
        run.begin_step(step)               # the same as `with run.step(step)`, in two calls
        ...
        run.end_step(loss=..., tokens=...)
        run.checkpoint(state, step + 1)

`attach` returns the same `Run` as `hf.launch` gives to its `main`, and both are wired by `holdfast.train.wiring`. What differs:

* **Process group.** If one exists, the run uses it: `attach` may come after `init_process_group` or after the framework has
  made its group. If none exists and the environment describes one (RANK and MASTER_ADDR are set), `attach` makes it, as
  `launch` does; frameworks then use it. A script that calls `init_process_group` itself *after* `attach` passes
  `make_group=False`. A plain `python train.py` gets no group: `run.mesh` makes one on first use. A group that the script or
  the framework has made is never destroyed here, and one that is made here not before the process exits.
* **The end.** `run.close()`, or the end of the `with` block, ends the run: the last checkpoint is written, channels are closed.
  A script that does neither is ended by an exit handler. An exception that leaves the `with` block, or the script, abandons a
  run without services as `launch` does, and is written to `TORCHELASTIC_ERROR_FILE`.
* **Once per process.** A second `attach` returns the run of the first, also inside of `hf.launch`. Raises `Conflict` if it
  requests another mesh or other checkpoints, or if the run of an agent has ended.

Outside of Holdfast the run is inert: steps are counted, nothing is sent, nothing is saved. Under torchrun, or plain python,
with `checkpoint=hf.Checkpoints(...)` or `HOLDFAST_CHECKPOINT_DIR`, checkpoints work without services. They need the group at
once: the ranks elect the step to restore in `attach`.

Call `attach` before the framework wraps the model in DistributedDataParallel: the order in which more than two ranks add their
gradients is part of a checkpoint only for modules that are wrapped later."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from types import TracebackType

from holdfast.domain.errors import Conflict
from holdfast.train.run import Run
from holdfast.train.standalone import Checkpoints
from holdfast.train.wiring import Request, Wiring, current


def attach(
    *,
    mesh: Mapping[str, int] | None = None,
    checkpoint: Checkpoints | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
    make_group: bool = True,
) -> Run:
    """Return the run of this process: of its agent, or of its own under torchrun and plain python.

    `mesh`, `checkpoint`: as in `hf.launch`. `backend`, `timeout_s`: of a group that is made here. `make_group`: whether to make
    the group that the environment describes if there is none yet. Raises `InvalidSpec` if the environment is invalid or does
    not describe the existing group, `Conflict` if another run uses the checkpoint directory, or if this process has a run with
    another mesh or other checkpoints."""
    request = Request(mesh=mesh, checkpoint=checkpoint, backend=backend, timeout_s=timeout_s)
    earlier = current()
    if earlier is not None and earlier.run is not None and (not earlier.closed or earlier.environment.job):
        return _again(earlier, earlier.run, request)
    wiring = Wiring(request)
    run = wiring.open(make_group=make_group and wiring.environment.master is not None)
    _End(wiring, run)
    return run


def _again(earlier: Wiring, run: Run, request: Request) -> Run:
    """Return the run that this process already has."""
    if earlier.closed:
        raise Conflict("the run of this process has ended, and an agent starts one run per process")
    first = earlier.request
    for name, wanted, given in (
        ("mesh", request.mesh and dict(request.mesh), first.mesh and dict(first.mesh)),
        ("checkpoint", request.checkpoint, first.checkpoint),
    ):
        if wanted is not None and wanted != given:
            raise Conflict(f"this process already has a run with {name}={given!r}; it cannot get {name}={wanted!r}")
    return run


class _End:
    """Ends a run whose script does not: at a normal exit of the interpreter, or when an exception has ended the script."""

    def __init__(self, wiring: Wiring, run: Run) -> None:
        self._wiring = wiring
        self._run = run
        self._process = os.getpid()  # a forked child runs the same handlers
        self._failed = False
        self._excepthook = sys.excepthook
        sys.excepthook = self._raised
        atexit.register(self._exiting)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._wiring.made_group and "default process group twice" in str(error):
            error.add_note(
                "hf.attach() has made the process group. Call init_process_group before hf.attach(), or pass make_group=False."
            )
        self._excepthook(kind, error, trace)
        if os.getpid() == self._process:
            self._failed = True
            self._run.close(error)

    def _exiting(self) -> None:
        if os.getpid() != self._process:
            return
        self._run.close()
        if not self._failed:
            self._wiring.leave_group()

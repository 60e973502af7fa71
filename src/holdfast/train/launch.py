"""`hf.launch`: joins the process group, runs the script's `main`, and leaves (`holdfast.train.wiring`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.train.run import Run
from holdfast.train.standalone import Checkpoints
from holdfast.train.wiring import Request, Wiring


def launch(
    main: Callable[[Run], None],
    *,
    mesh: Mapping[str, int] | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
    checkpoint: Checkpoints | None = None,
) -> None:
    """Run `main` in the process group that the environment describes.

    `mesh`: layout of the ranks without an agent (under torchrun): sizes outermost first, one of them may be -1. `backend`:
    torch's; default NCCL with CUDA, otherwise gloo. `timeout_s`: limit of every collective. `checkpoint`: where
    `run.checkpoint` saves without an agent; default `HOLDFAST_CHECKPOINT_DIR`, otherwise nothing is saved. An exception of
    `main` propagates and ends the process with a traceback and exit code 1; under torchrun it is also written to
    `TORCHELASTIC_ERROR_FILE`. Raises `InvalidSpec` if the environment is invalid, `Conflict` if another run uses the
    checkpoint directory, or if this process already has a run."""
    wiring = Wiring(Request(mesh=mesh, checkpoint=checkpoint, backend=backend, timeout_s=timeout_s))
    run = wiring.open(make_group=True)
    try:
        main(run)
    except BaseException as error:
        wiring.close(error)
        raise
    wiring.close()
    wiring.leave_group()

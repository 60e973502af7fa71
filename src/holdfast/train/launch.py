"""`hf.launch`: joins the process group, runs the script's `main`, and leaves.

The rendezvous endpoint is new for every generation, so no key of an older one can be read. No rank waits for the others before
the group is formed or after the work is done. A group of one uses no network."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.distributed.distributed_c10d import Store

from holdfast.domain.signals import Phase
from holdfast.train import error_file, observed_steps
from holdfast.train.channels import Control, Notes
from holdfast.train.compile_cache import CompileCache, Key
from holdfast.train.ddp_buckets import DDPBuckets
from holdfast.train.ddp_waits import DDPWaits
from holdfast.train.environment import Environment
from holdfast.train.recorder import Recorder
from holdfast.train.rendezvous import wait_until_served
from holdfast.train.run import Interrupted, Run
from holdfast.train.standalone import Checkpoints, Session, open_session

LAST_WORK_S = 0.05


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
    checkpoint directory."""
    began = time.monotonic()
    environment = Environment.read(os.environ, mesh)
    world = environment.world
    notes = Notes(
        agent=environment.notes,
        replicator=environment.replicator,
        job=environment.job,
        generation=world.generation,
        rank=world.rank,
    )
    control = Control(environment.control_fd)
    recorder = Recorder(environment.recorder, notes)
    buckets = DDPBuckets()
    waits = DDPWaits()
    observed_steps.stand_down()
    try:
        notes.phase(Phase.INIT, time.time(), 0)
        device = _device(environment.local_rank)
        _join(environment, backend or ("nccl" if device.type == "cuda" else "gloo"), timeout_s)
        recorder.open()
        session = _open_session(checkpoint, environment)
        environment = session.environment if session else environment
        run = Run(
            environment=environment,
            device=device,
            notes=session.notes if session else notes,
            control=control,
            recorder=recorder,
            process_group_s=time.monotonic() - began,
            standalone=session,
            compile_cache=_compile_cache(session.place.directory.root if session else None, environment, device),
            buckets=buckets,
            waits=waits,
        )
        with _ended_well(session):
            main(run)
        run.finish()
    except Exception as error:
        if environment.error_file and not environment.job:  # under an agent, the worker template writes the file
            error_file.write(environment.error_file, error)
        raise
    finally:
        buckets.close()
        waits.close()
        recorder.close()
        notes.close()
        control.close()
    # Not after an error: other ranks may hang in a collective, and this rank's exit ends it.
    dist.destroy_process_group()
    # A DeviceMesh that torch caches keeps gloo's threads alive. If such a thread releases its last work while the interpreter
    # shuts down, the process aborts ("terminate called without an active exception", torch 2.13), so run the threads first.
    time.sleep(LAST_WORK_S)


def _open_session(checkpoint: Checkpoints | None, environment: Environment) -> Session | None:
    """Open checkpoints without services, if there is no agent and a directory is set."""
    if environment.job:
        return None
    checkpoint = checkpoint or Checkpoints.of_environment(os.environ, environment.interval_steps)
    return open_session(checkpoint, environment) if checkpoint else None


def _compile_cache(directory: Path | None, environment: Environment, device: torch.device) -> CompileCache | None:
    """Return the directory of the compile cache: the directory of the checkpoints or, under an agent, of the images."""
    where = directory / "compile" if directory else Path(environment.images) if environment.images else None
    if where is None or not hasattr(torch.compiler, "load_cache_artifacts"):
        return None
    world = environment.world
    cache = CompileCache(where, Key.of(device, world.mesh, world.rank), torch.compiler)
    cache.load()
    return cache


@contextlib.contextmanager
def _ended_well(session: Session | None) -> Iterator[None]:
    """End checkpoints without services according to how the script has ended."""
    try:
        yield
    except Interrupted:
        if session is not None:
            session.interrupt()
        raise
    except BaseException:
        if session is not None:
            session.abandon()
        raise
    if session is not None:
        session.finish()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(environment: Environment, backend: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    world = environment.world
    if environment.master is None:
        store: Store = HashStore()
    elif environment.job:
        host, port = environment.master
        # Rank 0 serves the store, and the others wait until it does. Waiting for all ranks here would only add a round
        # trip.
        if world.rank != 0:
            wait_until_served(host, port, timeout_s)
        store = TCPStore(host, port, world.world_size, world.rank == 0, timeout, wait_for_workers=False)
    else:
        dist.init_process_group(backend, timeout=timeout)  # torchrun's own rendezvous, which may live in its agent
        return
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)

"""Builds and ends the run of one process, for `hf.launch` and `hf.attach`.

A `Wiring` connects the process to its agent, or opens checkpoints without services, and builds the `Run`. It ends all of them
once, according to how the script has ended. A process has one open `Wiring` at a time.

Every generation has a new rendezvous endpoint, so no key of an older generation can be read. No rank waits for the work of
another one. A group of one rank uses no network."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.distributed.distributed_c10d import Store

from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.domain.worker import ENV_JOB
from holdfast.train import error_file, gloo_threads
from holdfast.train.channels import Control, Notes
from holdfast.train.compile_cache import CompileCache, Key
from holdfast.train.environment import Environment
from holdfast.train.observing import observed_steps
from holdfast.train.observing.ddp_waits import DDPWaits
from holdfast.train.observing.recorder import Recorder
from holdfast.train.rendezvous import Formation, wait_until_served
from holdfast.train.run import Run
from holdfast.train.saves.ddp_buckets import DDPBuckets
from holdfast.train.standalone import Checkpoints, Session, open_session
from holdfast.train.step import Interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `hf.launch`, which describes them."""

    mesh: Mapping[str, int] | None = None
    checkpoint: Checkpoints | None = None
    backend: str | None = None
    timeout_s: float = 1800.0


class Wiring:
    """Create a wiring, `open` it for the run, and `close` it. An error in `open` closes it."""

    def __init__(self, request: Request) -> None:
        """Raises `InvalidSpec` if the environment is invalid, `Conflict` if this process has an open run."""
        global _current
        self.began = time.monotonic()
        if _current is not None and not _current.closed:
            raise Conflict("this process already has a run: call hf.launch or hf.attach once")
        self.request = request
        self.environment = Environment.read(_with_group(os.environ), request.mesh)
        self._check_group()
        self.run: Run | None = None
        self.closed: bool = False
        self.made_group = False
        self._formation: Formation | None = None  # of a group whose store one of its ranks serves
        self._ended_well = False
        self._session: Session | None = None
        environment, world = self.environment, self.environment.world
        self._notes = Notes(
            agent=environment.notes,
            replicator=environment.replicator,
            job=environment.job,
            generation=world.generation,
            rank=world.rank,
        )
        self._control = Control(environment.control_fd)
        self._recorder = Recorder(environment.recorder, self._notes)
        self._buckets = DDPBuckets()
        self._waits = DDPWaits()
        observed_steps.leave_waits()
        _current = self

    def open(self, *, make_group: bool) -> Run:
        """Return the run. `make_group`: form the process group now, if there is none."""
        try:
            self._notes.phase(Phase.INIT, time.time(), 0)
            device = _device(self.environment.local_rank)
            if make_group:
                self.join()
            self._recorder.open()
            formed_s = time.monotonic() - self.began
            self._session = self._open_session()
            environment = self._session.environment if self._session else self.environment
            images = self._session.place.directory.root if self._session else None
            self.run = Run(
                environment=environment,
                device=device,
                notes=self._session.notes if self._session else self._notes,
                control=self._control,
                recorder=self._recorder,
                process_group_s=formed_s,
                standalone=self._session,
                compile_cache=_compile_cache(images, environment, device),
                buckets=self._buckets,
                waits=self._waits,
                owner=self,
            )
        except BaseException as error:
            self.close(error)
            raise
        return self.run

    def join(self) -> None:
        """Form the process group that the environment describes, unless the script or its framework has made one."""
        if not dist.is_initialized():
            backend = self.request.backend or ("nccl" if torch.cuda.is_available() else "gloo")
            self._formation = _join(self.environment, backend, self.request.timeout_s)
            self.made_group = True

    def close(self, error: BaseException | None = None) -> None:
        """End the run; a second call does nothing. `error`: the exception that ends the script; None = a normal end.

        Checkpoints without services are finished, abandoned or, after `Interrupted`, written within the grace period."""
        if self.closed:
            return
        self.closed = True
        observed_steps.stand_down()
        try:
            self._end(error)
        except Exception as failed:
            self._write_error_file(failed)
            raise
        finally:
            self._buckets.close()
            self._waits.close()
            self._recorder.close()
            self._notes.close()
            self._control.close()

    def leave_group(self) -> None:
        """Destroy the group if it was made here, and wait for gloo's threads. Called at the end of the process. Does nothing
        after an error: other ranks may hang in a collective, which ends when this rank exits."""
        if not self._ended_well:
            return
        if self._formation is not None:
            self._formation.wait_to_leave()
        if self.made_group and dist.is_initialized():
            dist.destroy_process_group()
        gloo_threads.wait_until_idle()

    def _end(self, error: BaseException | None) -> None:
        session = self._session
        if isinstance(error, Exception):
            self._write_error_file(error)
        match error:
            case None:
                if self.run is not None:
                    self.run.finish()
                if session is not None:
                    session.finish()
                self._ended_well = True
            case Interrupted() if session is not None:
                session.interrupt()
            case _ if session is not None:
                session.abandon()

    def _write_error_file(self, error: Exception) -> None:
        # under an agent, the worker template writes the file
        if self.environment.error_file and not self.environment.job:
            error_file.write(self.environment.error_file, error)

    def _open_session(self) -> Session | None:
        """Open checkpoints without services, if there is no agent and a directory is set."""
        if self.environment.job:
            return None
        environment = self.environment
        checkpoint = self.request.checkpoint or Checkpoints.of_environment(os.environ, environment.interval_steps)
        if checkpoint is None:
            return None
        if environment.world.world_size > 1 and not dist.is_initialized():
            raise InvalidSpec(
                "make_group",
                False,
                "True, or hf.attach after init_process_group: without an agent the ranks select a checkpoint together",
            )
        return open_session(checkpoint, environment)

    def _check_group(self) -> None:
        """Raise `InvalidSpec` if an existing process group has another rank or size than the environment."""
        if not dist.is_initialized():
            return
        world = self.environment.world
        for name, found, expected in (
            ("rank of the process group", dist.get_rank(), world.rank),
            ("size of the process group", dist.get_world_size(), world.world_size),
        ):
            if found != expected:
                raise InvalidSpec(name, found, f"{expected}, which the agent has given to this process")


_current: Wiring | None = None


def current() -> Wiring | None:
    """Return the wiring of this process, which may be closed; None if it never had one."""
    return _current


def _with_group(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Without an agent, take rank and size from an existing group, because mpirun and srun do not set RANK."""
    if not dist.is_initialized() or environ.get(ENV_JOB):
        return environ
    return {**environ, "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}


def _compile_cache(directory: Path | None, environment: Environment, device: torch.device) -> CompileCache | None:
    """Return the directory of the compile cache: the directory of the checkpoints or, under an agent, of the images."""
    where = directory / "compile" if directory else Path(environment.images) if environment.images else None
    if where is None or not hasattr(torch.compiler, "load_cache_artifacts"):
        return None
    world = environment.world
    cache = CompileCache(where, Key.of(device, world.mesh, world.rank), torch.compiler)
    cache.load()
    return cache


def _device(local_rank: int) -> torch.device:
    """Return the device of this rank. If a process group exists, this is the device that the script has selected."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_initialized():
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not used and dist.get_backend() == "gloo":
            return torch.device("cpu")
        if used and torch.cuda.current_device():
            return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(environment: Environment, backend: str, timeout_s: float) -> Formation | None:
    """Form the group. Returns which ranks have formed it, if a rank serves its store."""
    timeout = timedelta(seconds=timeout_s)
    world = environment.world
    if environment.master is None:
        store: Store = HashStore()
    elif environment.job:
        host, port = environment.master
        # Rank 0 serves the store, and the other ranks wait for its port. Waiting for all ranks here would only add a
        # round trip.
        if world.rank != 0:
            wait_until_served(host, port, timeout_s)
        store = TCPStore(host, port, world.world_size, world.rank == 0, timeout, wait_for_workers=False)
    else:
        dist.init_process_group(backend, timeout=timeout)  # torchrun's own rendezvous, which may live in its agent
        return None
    formation = Formation(store, world.rank, world.world_size) if environment.master is not None else None
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
    if formation is not None:
        connected = backend == "gloo"
        formation.done(connected=connected)
        if connected:
            formation.wait(timeout_s)
    return formation

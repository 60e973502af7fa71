"""`hf.launch`: joins the process group, runs the script's `main`, leaves.

The rendezvous endpoint is new for every generation, so no key of an older one can be read; nobody waits for the others
before the group is formed or after the work is done. A group of one uses no network at all.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # re-exported without saying so
from torch.distributed.distributed_c10d import Store

from holdfast.domain.signals import Phase
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment
from holdfast.train.run import Run

log = logging.getLogger("holdfast.train")

RENDEZVOUS_POLL_S = 0.003
CONNECT_TIMEOUT_S = 1.0


def launch(
    main: Callable[[Run], None],
    *,
    mesh: Mapping[str, int] | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
) -> None:
    """Run `main` in the process group that the environment describes.

    `mesh` lays out the ranks when no agent does (under torchrun): sizes outermost first, one of them may be -1.
    `backend` is torch's; default NCCL with CUDA, else gloo. `timeout_s` bounds every collective.
    An exception of `main` propagates and ends the process with a traceback and exit code 1; under torchrun it is
    also written to `TORCHELASTIC_ERROR_FILE`. Raises `InvalidSpec` when the environment makes no sense.
    """
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
    try:
        notes.phase(Phase.INIT, time.time(), 0)
        device = _device(environment.local_rank)
        _join(environment, backend or ("nccl" if device.type == "cuda" else "gloo"), timeout_s)
        run = Run(
            environment=environment,
            device=device,
            notes=notes,
            control=control,
            process_group_s=time.monotonic() - began,
        )
        main(run)
        run.finish()
    except Exception as error:
        if environment.error_file and not environment.job:  # an agent's template writes it for its own workers
            _write_error_file(Path(environment.error_file), error)
        raise
    finally:
        notes.close()
        control.close()
    dist.destroy_process_group()  # only now: after an error the others may hang, and the exit itself tells them


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
        # Rank 0 serves, the others wait until it does. Waiting for everyone here as well would only add a round trip.
        if world.rank != 0:
            _wait_until_served(host, port, timeout_s)
        store = TCPStore(host, port, world.world_size, world.rank == 0, timeout, wait_for_workers=False)
    else:
        dist.init_process_group(backend, timeout=timeout)  # torchrun's own rendezvous, which may live in its agent
        return
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)


def _wait_until_served(host: str, port: int, timeout_s: float) -> None:
    """Until rank 0's store listens. A store that is refused waits half a second before it asks again: longer than all the rest.

    Returns at the deadline as well: the store then says itself what it cannot reach.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError:  # reserved by rank 0's agent, not listening yet
            time.sleep(RENDEZVOUS_POLL_S)
        else:
            return


def _write_error_file(path: Path, error: BaseException) -> None:
    """In torchelastic's own format, so that torchrun's failure summary shows the exception."""
    message = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
        }
    }
    try:
        path.write_text(json.dumps(message))
    except OSError as failed:  # the exception itself matters more than its report
        log.warning("the error file %s could not be written: %s", path, failed)

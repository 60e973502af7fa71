"""What an agent and its worker template say to each other, over a `SOCK_SEQPACKET` pair that the template inherits.

The template is a process that has imported torch and the job's modules, has one thread and has touched no device; workers
are forked from it. Their parent is a reaper (`holdfast.train.reaper`), one for each, which tells the agent how its worker
ended on a link of its own: a template that ends ends no worker.

Messages are JSON objects with a `type`, as in `holdfast.domain.worker`; file descriptors travel beside them (SCM_RIGHTS).

    agent → template
      fork    runs:str target:str args:[str] cwd:str env:{name: value}     runs: script, module or program
              + 4 descriptors: the reaper's end of the link, and of the worker its end of the control channel, its standard
              output, its standard error
      drain   (nothing)   fork no more, and end

    template → agent
      ready        pid:int import_s:float left_out:{module or function: reason}
      failed       reason:str                       it cannot serve; it ends after this

    reaper → agent, on the link
      forked       pid:int                          + 2 descriptors: pidfds of the worker, opened before it could be reaped,
                                                    and of the reaper
      fork_failed  reason:str                       instead of all others; the template may say it for it
      exited       exit_code:int|null signal:int|null at:float uptime_s:float
      cleared      (nothing)                        nothing that the worker started is left; then the link ends
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MESSAGE_BYTES_MAX = (
    180_000  # below the default net.core.wmem_default, so that a message always fits the socket's buffer
)

# What a worker runs.
SCRIPT = "script"  # the path of a Python file, or of a directory or archive with a __main__.py
MODULE = "module"  # a dotted name
PROGRAM = "program"  # the path of a program that replaces the forked process

ENV_SOCKET_FD = "HOLDFAST_TEMPLATE_FD"  # the template's end of the pair
ENV_PRELOAD = "HOLDFAST_TEMPLATE_PRELOAD"  # JSON list of modules to import and of functions (module:function) to call
ENV_PATH = "HOLDFAST_TEMPLATE_PATH"  # JSON list of directories to look for them first

ENV_LEARNED = "HOLDFAST_TEMPLATE_LEARNED"  # JSON list of modules that an earlier worker has imported
ENV_SCOUT = "HOLDFAST_TEMPLATE_SCOUT"  # "1": every module is tried in a fork first
ENV_UNPREPARED = "HOLDFAST_TEMPLATE_UNPREPARED"  # JSON object: functions that are not to be called, and why


@dataclass(frozen=True, slots=True)
class Trap:
    """A module that would start a thread or touch a device when it is imported, and the variable that prevents it."""

    module: str
    variable: str
    value: str
    source: str


# Set for the template alone, before its interpreter starts. Workers have their own environment; what a library has read by
# then stays.
TRAPS = (
    Trap("numpy", "OPENBLAS_NUM_THREADS", "1", "OpenBLAS starts its pool of threads when it is loaded"),
    Trap("torch", "PYTORCH_NVML_BASED_CUDA_CHECK", "1", "torch.cuda.is_available: asks NVML instead of the device"),
    Trap(
        "pyarrow",
        "JE_ARROW_MALLOC_CONF",
        "background_thread:false",
        "Arrow's jemalloc starts a thread for unused pages (memory_pool_jemalloc.cc); they are freed by whoever allocates now",
    ),
)
IMPORT_ENVIRONMENT = {trap.variable: trap.value for trap in TRAPS}


def encode(kind: str, **fields: object) -> bytes:
    """One message as bytes. Raises ValueError when it is too long, which only an outsized environment or argument list is."""
    raw = json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()
    if len(raw) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {kind!r} message of {len(raw)} bytes exceeds {MESSAGE_BYTES_MAX}; shorten args or env")
    return raw


def decode(raw: bytes) -> Mapping[str, Any]:
    """The message. Raises ValueError: both ends are our own code, so garbage here is a bug and not a guest."""
    message = json.loads(raw)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError(f"not a template message: {raw[:200]!r}")
    return message

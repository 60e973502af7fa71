"""The messages between an agent and its worker template, over a `SOCK_SEQPACKET` pair that the template inherits.

The worker template is a process that has imported torch and the job's modules, has one thread and has not used any device.
Workers are forked from it. The parent of each worker is its own reaper (`holdfast.train.warm.reaper`), which reports the end of
the worker to the agent over a separate link. The end of the template therefore ends no worker.

Messages are JSON objects with a `type`, as in `holdfast.domain.worker`. File descriptors are sent with them (SCM_RIGHTS).

    agent → template
      fork    runs:str target:str args:[str] cwd:str env:{name: value}     runs: script, module or program
              + 4 descriptors: the reaper's end of the link, and the worker's end of the control channel, standard output
              and standard error
      check   (nothing)   answered by `checked`
      drain   (nothing)   fork no more workers, and end

    template → agent
      ready        pid:int import_s:float left_out:{module or function: reason}
      failed       reason:str                       the template cannot fork workers; it ends after this message
      checked      changed:str                      an imported module whose file has changed since; empty = none

    reaper → agent, on the link
      forked       pid:int                          + 2 descriptors: pidfds of the worker, opened before it could be reaped,
                                                    and of the reaper
      fork_failed  reason:str                       instead of all others; the template may send it for the reaper
      exited       exit_code:int|null signal:int|null at:float uptime_s:float
                   left:[command line]              of processes that still ran when the worker ended with code 0
      cleared      (nothing)                        no process that the worker started is left; then the link ends
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# below the default net.core.wmem_default, so that a message always fits the socket's buffer
MESSAGE_BYTES_MAX = 180_000

# The kinds of programs that a worker runs (`runs`).
SCRIPT = "script"  # the path of a Python file, or of a directory or archive with a __main__.py
MODULE = "module"  # a dotted name
PROGRAM = "program"  # the path of a program that replaces the forked process

ENV_SOCKET_FD = "HOLDFAST_TEMPLATE_FD"  # the template's end of the pair
ENV_PRELOAD = "HOLDFAST_TEMPLATE_PRELOAD"  # JSON list of modules to import and of functions (module:function) to call
ENV_PATH = "HOLDFAST_TEMPLATE_PATH"  # JSON list of directories that are searched first for these modules

# Descriptor of a memory file, because a variable has a limited length. JSON object: `modules` that an earlier worker has
# imported; `variables` that these must not read when they are imported, unless these have the given values.
ENV_LEARNED_FD = "HOLDFAST_TEMPLATE_LEARNED_FD"
ENV_SCOUT = "HOLDFAST_TEMPLATE_SCOUT"  # "1": each module is first imported in a fork, as a trial
ENV_UNPREPARED = "HOLDFAST_TEMPLATE_UNPREPARED"  # JSON object: functions that are not to be called, and why


@dataclass(frozen=True, slots=True)
class Trap:
    """A module whose import would start a thread or use a device, and the environment variable that prevents this."""

    module: str
    variable: str
    value: str
    source: str


# Set for the template only, before its interpreter starts. Workers have their own environment, but a library keeps the values
# that it has read at import.
TRAPS = (
    Trap("numpy", "OPENBLAS_NUM_THREADS", "1", "OpenBLAS starts its pool of threads when it is loaded"),
    Trap("torch", "PYTORCH_NVML_BASED_CUDA_CHECK", "1", "torch.cuda.is_available: reads NVML instead of the device"),
    Trap(
        "pyarrow",
        "JE_ARROW_MALLOC_CONF",
        "background_thread:false",
        "Arrow's jemalloc starts a thread to free unused pages (memory_pool_jemalloc.cc); now the allocating threads free them",
    ),
)
IMPORT_ENVIRONMENT = {trap.variable: trap.value for trap in TRAPS}


def encode(kind: str, **fields: object) -> bytes:
    """Encode one message. Raises ValueError if it is too long, which is possible only with a very large environment or argument
    list."""
    raw = json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()
    if len(raw) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {kind!r} message of {len(raw)} bytes exceeds {MESSAGE_BYTES_MAX}; shorten args or env")
    return raw


def decode(raw: bytes) -> Mapping[str, Any]:
    """Decode one message. Raises ValueError if it is malformed; both ends are Holdfast code, so this indicates a bug."""
    try:
        message = json.loads(raw)
    except RecursionError:
        raise ValueError(f"not a template message: {raw[:200]!r}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError(f"not a template message: {raw[:200]!r}")
    return message

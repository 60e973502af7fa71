"""Whose fault is a failure: the user's, the hardware's, or not known? Pure.

The rules, first match wins; sources are ByteRobust (SOSP'25), NVRx's restart policy and NVSentinel's, as compared in the
project's notes:

1. a hardware finding on the same node within a minute of the failure, and since the job first started: hardware, whatever the
   exception says;
2. the kernel ran out of memory there, or the exception is about memory: its own class, the user's as a rule;
3. an error that broken hardware raises too (an illegal address, an ECC error): the user's once it was seen on two nodes, the
   node's when another job failed there as well, else not known: the same node again proves nothing about the script;
4. the same exception again at the same place: the user's; the same signal or exit code only when seen on two nodes;
5. the same node under different jobs: hardware;
6. an exception of the script's own, before the first step and soon after the start: the user's.

Beside the verdict stands how likely the user's fault is by the time to failure alone (`prior_user`). It decides nothing here;
the supervisor uses it for what counts against a node.

Not a detector of its own: `worker_exit` asks it, and writes the answer into the finding's evidence.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.domain.signals import WorkerError, WorkerExited


class Who(StrEnum):
    USER = "user"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


class ErrorClass(StrEnum):
    DEVICE_OOM = "device_oom"  # more GPU memory wanted than there is
    HOST_OOM = "host_oom"
    NAN = "nan"
    DEVICE = "device"  # an error of the GPU, which a bug in a kernel causes as well as a broken board
    STORAGE = "storage"
    SCRIPT = "script"  # any other exception
    CRASH = "crash"  # ended without an exception


_SIGKILL = 9
_USER_EVENTS, _USER_MEAN_S = 1890, 144.0
_MACHINE_EVENTS, _MACHINE_MEAN_S = 281, 1303 * 60.0
_DEVICE_OOM = re.compile(r"(?:CUDA|HIP) (?:error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_NAN = re.compile(r"\bnan\b|\binf\b|not finite|non-finite", re.IGNORECASE)
_DEVICE = re.compile(
    r"(?:CUDA|HIP) (?:driver )?error|device-side assert|CUBLAS_STATUS|CUDNN_STATUS|uncorrectable ECC|unspecified launch failure"
    r"|illegal memory access|misaligned address|no CUDA GPUs|GPU is lost|busy or unavailable",
    re.IGNORECASE,
)
_STORAGE = re.compile(
    r"No space left|Input/output error|Stale file handle|Read-only file system|\[Errno (?:5|28|30|116)\]"
)


@dataclass(frozen=True, slots=True)
class Blame:
    who: Who
    error: ErrorClass
    why: str  # an English clause
    after_s: float = 0.0  # from the job's first start to the failure
    prior_user: float = 0.0  # how likely such a failure is the user's by its time alone


@dataclass(frozen=True, slots=True)
class Context:
    """What is known besides the exit itself."""

    hardware: str = ""  # the summary of a hardware finding on this node within a minute
    host_oom: bool = False  # the kernel killed for memory on this node within a minute
    tries: int = 1  # how often this exception was seen at this place
    nodes: int = 1  # on how many nodes
    other_jobs: int = 0  # that failed on this node, and on no other, within a day
    after_s: float = 0.0  # since the job's first generation started
    before_first_step: bool = False
    early: bool = False  # soon after the start


def class_of(error: WorkerError | None, signal: int | None = None, *, host_oom: bool = False) -> ErrorClass:
    """What kind of error ended a worker."""
    if error is None:
        return ErrorClass.HOST_OOM if host_oom and signal == _SIGKILL else ErrorClass.CRASH
    name = error.type.rpartition(".")[2]
    if name == "OutOfMemoryError" or _DEVICE_OOM.search(error.message):
        return ErrorClass.DEVICE_OOM
    if name == "MemoryError" or "Cannot allocate memory" in error.message:
        return ErrorClass.HOST_OOM
    if name == "FloatingPointError" or (name in ("ValueError", "AssertionError") and _NAN.search(error.message)):
        return ErrorClass.NAN
    if name in ("AcceleratorError", "CudaError") or _DEVICE.search(error.message):
        return ErrorClass.DEVICE
    return ErrorClass.STORAGE if _STORAGE.search(error.message) else ErrorClass.SCRIPT


def prior_user(after_s: float) -> float:
    """P(user's fault) by the time to failure alone: two exponentials, mixed as often as each was seen.

    Source: Acme's failure study: 1,890 script errors after 2.4 minutes on average (0.7 to 4, by kind), 281 of infrastructure
    after 1,303 minutes (ECC). A prior, never a verdict: nothing is stopped or replaced for it.
    """
    user = _USER_EVENTS / _USER_MEAN_S * math.exp(-after_s / _USER_MEAN_S)
    machine = _MACHINE_EVENTS / _MACHINE_MEAN_S * math.exp(-after_s / _MACHINE_MEAN_S)
    return user / (user + machine) if user + machine > 0 else 0.0


def blame(exit_: WorkerExited, context: Context) -> Blame:
    """Judge the first failing rank of a generation; the others' errors are its echo and are not asked about."""
    return replace(_verdict(exit_, context), after_s=context.after_s, prior_user=prior_user(context.after_s))


def _verdict(exit_: WorkerExited, context: Context) -> Blame:
    error = class_of(exit_.error, exit_.signal, host_oom=context.host_oom)
    if context.hardware:
        return Blame(Who.HARDWARE, error, f"at the same time: {context.hardware}")
    if error in (ErrorClass.DEVICE_OOM, ErrorClass.HOST_OOM, ErrorClass.NAN) and context.tries > 1:
        return Blame(Who.USER, error, f"the same {error.value} for the {context.tries}th time at the same place")
    if error is ErrorClass.DEVICE and context.nodes > 1:
        return Blame(Who.USER, error, f"the same device error at the same place on {context.nodes} nodes")
    if error is ErrorClass.CRASH and context.nodes > 1:
        return Blame(Who.USER, error, f"ended the same way at the same place on {context.nodes} nodes")
    if error in (ErrorClass.DEVICE, ErrorClass.CRASH) and context.other_jobs:
        return Blame(Who.HARDWARE, error, f"{context.other_jobs} other jobs failed on this node, and on no other")
    if error is ErrorClass.DEVICE:
        return Blame(Who.UNKNOWN, error, "a bug in a kernel and a broken board raise this alike")
    if exit_.error is not None and context.tries > 1 and error is not ErrorClass.STORAGE:
        return Blame(Who.USER, error, "the same exception again at the same place")
    if error is ErrorClass.SCRIPT and context.before_first_step and context.early:
        return Blame(Who.USER, error, "the script's own exception, before the first step")
    return Blame(Who.UNKNOWN, error, "seen once")

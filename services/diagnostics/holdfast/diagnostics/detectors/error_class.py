"""Classifies the error that ended a worker, by its type and its message. Pure.

The patterns match messages of torch, CUDA, the C library and the clients of common services, as users have reported them
(tests/data/endings lists the sources). The first class that matches decides. An error that Python itself raises for wrong code
(a `TypeError`, a `KeyError` …) is the script's own, whatever its message contains.
"""

from __future__ import annotations

import re
import signal
from enum import StrEnum

from holdfast.diagnostics.detectors.outage import is_service, is_storage
from holdfast.domain.signals import WorkerError


class ErrorClass(StrEnum):
    DEVICE_OOM = "device_oom"  # the GPU has no memory left
    HOST_OOM = "host_oom"
    NAN = "nan"
    DEVICE = "device"  # an error of the GPU; the cause may be a bug in a kernel or a broken board
    NODE = "node"  # an error of the node's driver or libraries, never of the script
    STORAGE = "storage"  # a file system is full, over its quota, or does not answer
    SERVICE = "service"  # a model hub, a tracker or name resolution did not answer in time
    ENVIRONMENT = "environment"  # a missing file, mount or package: a typo, or the installation of this node
    SCRIPT = "script"  # any other exception
    CRASH = "crash"  # ended without an exception
    LEARNED_START = (
        "learned_start"  # of any kind, in a start from a template with learned modules: the next one has none
    )


# Neither caused by the script nor avoidable by other code: temporary, or repaired by an operator.
OUTAGES = frozenset({ErrorClass.STORAGE, ErrorClass.SERVICE})

# Exceptions that the interpreter itself raises for wrong code.
_OWN = frozenset(
    {
        "TypeError",
        "KeyError",
        "IndexError",
        "AttributeError",
        "NameError",
        "UnboundLocalError",
        "ZeroDivisionError",
        "SyntaxError",
        "IndentationError",
        "NotImplementedError",
        "RecursionError",
        "UnicodeDecodeError",
    }
)
_DEVICE_OOM = re.compile(
    r"(?:CUDA|HIP) (?:error: |failure (?:\d+ )?')?out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|PT_DEVMEM Allocation failed",
    re.IGNORECASE,
)
_NAN = re.compile(r"\bnan\b|\binf\b|not finite|non-finite", re.IGNORECASE)
_NODE = re.compile(
    r"system not yet initialized|error 802|CUDA unknown error|Found no NVIDIA driver|no (?:CUDA|HIP) GPUs"
    r"|no (?:CUDA|ROCm)-capable device|CUDA driver initialization failed|synStatus.{0,64}Device acquire failed"
    r"|(?:NVML|RM) .*mismatch|Driver/library version mismatch|Failed to initialize NVML|driver version is insufficient"
    r"|NVIDIA driver on your system is too old|cannot open shared object file|cudaGetDeviceCount",
    re.IGNORECASE,
)
_DEVICE = re.compile(
    r"(?:CUDA|HIP) (?:driver )?error|device-side assert|CUBLAS_STATUS|CUDNN_STATUS|uncorrectable ECC|unspecified launch failure"
    r"|illegal memory access|misaligned address|GPU is lost|busy or unavailable",
    re.IGNORECASE,
)
_ENVIRONMENT_TYPES = frozenset(
    {"FileNotFoundError", "PermissionError", "NotADirectoryError", "ImportError", "ModuleNotFoundError"}
)
_ENVIRONMENT = re.compile(r"No such file or directory|Permission denied")


def class_of(error: WorkerError | None, ended_by: int | None = None, *, host_oom: bool = False) -> ErrorClass:
    """Classify the end of a worker. `ended_by`: POSIX signal. `host_oom`: the kernel of its node has just run out of memory."""
    if error is None:
        return ErrorClass.HOST_OOM if host_oom and ended_by == signal.SIGKILL else ErrorClass.CRASH
    name, message = error.type.rpartition(".")[2], error.message
    if name == "OutOfMemoryError" or _DEVICE_OOM.search(message):
        return ErrorClass.DEVICE_OOM
    if name in ("MemoryError", "bad_alloc") or "Cannot allocate memory" in message:
        return ErrorClass.HOST_OOM
    if name == "FloatingPointError" or (name in ("ValueError", "AssertionError") and _NAN.search(message)):
        return ErrorClass.NAN
    if name in _OWN or name == "AssertionError":
        return ErrorClass.SCRIPT
    if name.startswith("NVMLError") or _NODE.search(message):
        return ErrorClass.NODE
    if name in ("AcceleratorError", "CudaError") or _DEVICE.search(message):
        return ErrorClass.DEVICE
    if is_storage(message):
        return ErrorClass.STORAGE
    if is_service(error):
        return ErrorClass.SERVICE
    if name in _ENVIRONMENT_TYPES or _ENVIRONMENT.search(message):
        return ErrorClass.ENVIRONMENT
    return ErrorClass.SCRIPT


def is_of_a_device(message: str) -> bool:
    """Whether a call of this process to its GPU failed, for lack of memory or for any other reason."""
    return bool(_DEVICE_OOM.search(message) or _NODE.search(message) or _DEVICE.search(message))


def is_assertion(error: WorkerError | None) -> bool:
    """Whether an assertion in a GPU kernel failed: a check of the program, not an effect of a broken board."""
    return error is not None and "device-side assert" in error.message

"""Classifies the error that ended a worker, by its type and its message. Pure.

The patterns match messages of torch, CUDA, the C library and the clients of common services, as users have reported them
(tests/data/endings lists the sources). The first class that matches decides. An error that Python itself raises for wrong code
(a `TypeError`, a `KeyError` …) is the script's own, whatever its message contains.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import StrEnum

from holdfast.diagnostics.detectors.outage import is_service, is_storage
from holdfast.domain.signals import WorkerError, WorkerExited


class ErrorClass(StrEnum):
    DEVICE_OOM = "device_oom"  # the GPU has no memory left
    HOST_OOM = "host_oom"
    NAN = "nan"
    DEVICE = "device"  # an error of the GPU; the cause may be a bug in a kernel or a broken board
    NODE = "node"  # an error of the node's driver or libraries, never of the script
    RESOURCES = (
        "resources"  # a limit of the node: threads, open files, shared memory, helper processes that were killed
    )
    STORAGE = "storage"  # a file system is full, over its quota, or does not answer
    SERVICE = "service"  # a model hub, a tracker or name resolution did not answer in time
    ENVIRONMENT = "environment"  # a missing file, mount or package: a typo, or the installation of this node
    SCRIPT = "script"  # any other exception
    CRASH = "crash"  # ended without an exception
    USAGE = "usage"  # the script has not begun: a wrong command line, or code that cannot be loaded
    # Of any kind, in a start from a template with learned modules: the next one has none.
    LEARNED_START = "learned_start"


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
_RESOURCES = re.compile(
    r"can't start new thread|too many open files|errno (?:11|23|24)\]|resource temporarily unavailable|thread creation failed"
    r"|pthread_create failed|unable to open shared memory object|items of ancdata|insufficient shared memory"
    r"|workers are out of shared memory|creating shared memory segment|failed to extend /dev/shm"
    r"|DataLoader worker \(pid.{1,400}?\) (?:exited unexpectedly|is killed by signal: (?:Bus|Kill))"
    r"|process \d+ terminated with signal SIG(?:KILL|BUS)|process pool was terminated abruptly",
    re.IGNORECASE,
)
_KILLED_HELPER = re.compile(
    r"killed by signal: Killed|terminated with signal SIGKILL|terminated abruptly", re.IGNORECASE
)
_CRASHED_HELPER = re.compile(r"^process \d+ terminated with signal ")  # of torch.multiprocessing.spawn
# NCCL could not do its own part: it refuses what the script asks for, such as one GPU for two ranks, or a limit of the node was
# reached. A socket that has no data yet is also "temporarily unavailable".
_NCCL = re.compile(
    r"Duplicate GPU detected|ncclInvalid(?:Usage|Argument)|too many open files|pthread_create failed"
    r"|creating shared memory segment|failed to extend /dev/shm",
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


# Of argparse, click, typer, absl, fire and tyro, and of the interpreter if a program starts it.
_USAGE = re.compile(
    r"^\s*usage: |^\S+: error: |can't open file '|^\S*python\S*: (?:No module named|Error while finding module)"
    r"|Flags parsing error|^[^\w\s]+ (?:Parsing error|Required options|Unrecognized options)",
    re.IGNORECASE,
)
# Hydra ends with this line. Without a traceback before it, it has refused an override, or found no configuration.
_HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1"
# The line that says what is wrong; libraries print the usage before or after it.
_MISTAKE = re.compile(
    r"^(?:\S+: )?error: |Flags parsing error|can't open file '|: No module named|^Missing |^Unrecognized |^No such "
    r"|^Invalid value|^Got unexpected|^Could not |^Error (?:parsing|merging) |^Cannot find |^no viable alternative|^In '"
    r"|^You must ",
    re.IGNORECASE,
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# … and boxes with their titles
_DECORATION = re.compile(rf"{_COLOUR.pattern}|[\u2500-\u257f]+(?: [A-Z][a-z]+ [\u2500-\u257f]+)?")
_USAGE_CODES = (1, 2)
_UNLOADABLE = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})


def is_usage(exit_: WorkerExited) -> bool:
    """Whether the command line was refused, or the script's code could not be loaded. For an end before the first step."""
    if exit_.error is not None:
        return exit_.error.type in _UNLOADABLE and class_of(exit_.error) in (ErrorClass.SCRIPT, ErrorClass.ENVIRONMENT)
    lines = [_COLOUR.sub("", line) for line in exit_.log_tail]
    is_refused = any(map(_USAGE.search, lines)) or any(line.startswith(_HYDRA) for line in lines[-2:])
    return exit_.exit_code in _USAGE_CODES and is_refused


def mistake(lines: Sequence[str]) -> str:
    """What is wrong with a command line, from what was printed about it."""
    said = [line for each in lines if (line := _DECORATION.sub("", each).strip()) and not line.startswith(_HYDRA)]
    first = next((number for number, line in enumerate(said) if _MISTAKE.search(line)), len(said) - 1)
    return " ".join(said[max(first, 0) :])


def class_of(error: WorkerError | None, ended_by: int | None = None, *, host_oom: bool = False) -> ErrorClass:
    """Classify the end of a worker. `ended_by`: POSIX signal. `host_oom`: the kernel of its node has just run out of memory."""
    if error is None:
        return ErrorClass.HOST_OOM if host_oom and ended_by == signal.SIGKILL else ErrorClass.CRASH
    name, message = error.type.rpartition(".")[2], error.message
    if name == "OutOfMemoryError" or _DEVICE_OOM.search(message):
        return ErrorClass.DEVICE_OOM
    if name in ("MemoryError", "bad_alloc") or "Cannot allocate memory" in message:
        return ErrorClass.HOST_OOM
    if host_oom and _KILLED_HELPER.search(message):
        return ErrorClass.HOST_OOM
    if name == "FloatingPointError" or (name in ("ValueError", "AssertionError") and _NAN.search(message)):
        return ErrorClass.NAN
    if name in _OWN or name == "AssertionError":
        return ErrorClass.SCRIPT
    if name.startswith("NVMLError") or _NODE.search(message):
        return ErrorClass.NODE
    if name in ("AcceleratorError", "CudaError") or _DEVICE.search(message):
        return ErrorClass.DEVICE
    if _RESOURCES.search(message):
        return ErrorClass.RESOURCES
    if _CRASHED_HELPER.search(message):
        return ErrorClass.CRASH
    if is_storage(message):
        return ErrorClass.STORAGE
    if is_service(error):
        return ErrorClass.SERVICE
    if name in _ENVIRONMENT_TYPES or _ENVIRONMENT.search(message):
        return ErrorClass.ENVIRONMENT
    return ErrorClass.SCRIPT


def is_of_this_rank(message: str) -> bool:
    """Whether an error of the communication library is a failure of the rank itself, not of the connection to another one:
    a call to its GPU failed, or NCCL's own part did."""
    return bool(
        _DEVICE_OOM.search(message) or _NODE.search(message) or _DEVICE.search(message) or _NCCL.search(message)
    )


def is_assertion(error: WorkerError | None) -> bool:
    """Whether an assertion in a GPU kernel failed: a check of the program, not an effect of a broken board."""
    return error is not None and "device-side assert" in error.message

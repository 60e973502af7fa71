"""Whose fault: the rules one by one, and what they change in the finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosing import Fleet

from holdfast.diagnostics.detectors.blame import Context, Who, blame
from holdfast.diagnostics.detectors.error_class import ErrorClass, class_of
from holdfast.domain.findings import FindingKind, Remedy
from holdfast.domain.signals import WorkerError

ECC = WorkerError("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", ("m.py:1 f",))
BUG = WorkerError("ValueError", "bad batch 17", ("t.py:7 loss",))
NO_DRIVER = WorkerError("RuntimeError", "Found no NVIDIA driver on your system", ("t.py:3 main",))
NO_FILE = WorkerError("FileNotFoundError", "[Errno 2] No such file or directory: '/data/index.npy'", ("t.py:5 load",))
OOM = WorkerError("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", ("m.py:5 f",))


@pytest.mark.parametrize(
    ("type_", "message", "expected"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", ErrorClass.DEVICE_OOM),
        ("RuntimeError", "CUDA error: out of memory", ErrorClass.DEVICE_OOM),
        ("MemoryError", "", ErrorClass.HOST_OOM),
        ("RuntimeError", "[Errno 12] Cannot allocate memory", ErrorClass.HOST_OOM),
        ("AssertionError", "loss is nan", ErrorClass.NAN),
        ("FloatingPointError", "overflow", ErrorClass.NAN),
        ("RuntimeError", "nan in the name of a thing", ErrorClass.SCRIPT),
        ("torch.AcceleratorError", "CUDA error: device-side assert triggered", ErrorClass.DEVICE),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", ErrorClass.DEVICE),
        ("OSError", "[Errno 28] No space left on device", ErrorClass.STORAGE),
        ("RuntimeError", "Error 802: system not yet initialized", ErrorClass.NODE),
        ("RuntimeError", "CUDA unknown error - this may be due to an incorrectly set up environment", ErrorClass.NODE),
        ("RuntimeError", "Found no NVIDIA driver on your system", ErrorClass.NODE),
        ("RuntimeError", "CUDA driver initialization failed, you might not have a CUDA gpu.", ErrorClass.NODE),
        ("RuntimeError", "No HIP GPUs are available", ErrorClass.NODE),
        ("RuntimeError", "HIP error: no ROCm-capable device is detected", ErrorClass.NODE),
        ("RuntimeError", "synStatus=8 [Device not found] Device acquire failed.", ErrorClass.NODE),
        (
            "RuntimeError",
            "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::85",
            ErrorClass.DEVICE_OOM,
        ),
        ("c10.DistBackendError", "unhandled cuda error: Cuda failure 2 'out of memory'", ErrorClass.DEVICE_OOM),
        ("c10.AcceleratorError", "CUDA error: unknown error", ErrorClass.DEVICE),
        ("std.bad_alloc", "std::bad_alloc", ErrorClass.HOST_OOM),
        ("pynvml.nvml.NVMLError_LibRmVersionMismatch", "RM has detected an NVML/RM version mismatch.", ErrorClass.NODE),
        ("ImportError", "libcuda.so.1: cannot open shared object file: No such file or directory", ErrorClass.NODE),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/index.npy'", ErrorClass.ENVIRONMENT),
        ("KeyError", "'lr'", ErrorClass.SCRIPT),
    ],
)
def test_classes(type_: str, message: str, expected: ErrorClass) -> None:
    assert class_of(WorkerError(type_, message)) is expected


def test_a_kill_for_memory_is_distinguished_from_a_kill() -> None:
    assert class_of(None, 9, host_oom=True) is ErrorClass.HOST_OOM
    assert class_of(None, 9) is ErrorClass.CRASH
    assert class_of(None, 11, host_oom=True) is ErrorClass.CRASH


@pytest.mark.parametrize(
    ("error", "context", "expected"),
    [
        (BUG, Context(), Who.UNKNOWN),
        (BUG, Context(tries=2), Who.USER),
        (BUG, Context(before_first_step=True, early=True), Who.USER),
        (BUG, Context(tries=2, hardware="Xid 79"), Who.HARDWARE),
        (BUG, Context(other_jobs=3), Who.UNKNOWN),
        (NO_DRIVER, Context(before_first_step=True, early=True, tries=2), Who.UNKNOWN),
        (NO_FILE, Context(before_first_step=True, early=True, tries=2), Who.UNKNOWN),
        (NO_FILE, Context(before_first_step=True, early=True, tries=2, nodes=2), Who.USER),
        (OOM, Context(tries=2), Who.USER),
        (OOM, Context(), Who.UNKNOWN),
        (ECC, Context(tries=3), Who.UNKNOWN),
        (ECC, Context(tries=2, nodes=2), Who.USER),
        (ECC, Context(other_jobs=1), Who.UNKNOWN),
        (ECC, Context(other_jobs=2), Who.HARDWARE),
        (None, Context(other_jobs=1), Who.UNKNOWN),
        (None, Context(other_jobs=2), Who.HARDWARE),
        (None, Context(), Who.UNKNOWN),
    ],
)
def test_rules(error: WorkerError | None, context: Context, expected: Who) -> None:
    exit_ = Fleet().exit_of(0, error=error)
    judged = blame(exit_, context)
    assert judged.who is expected
    assert judged.why


def test_a_start_with_learned_modules_says_nothing_of_the_script() -> None:
    exit_ = replace(Fleet().exit_of(0, error=BUG), learned_start=True)
    judged = blame(exit_, Context(tries=2, nodes=2, before_first_step=True, early=True))
    assert (judged.who, judged.error) == (Who.UNKNOWN, ErrorClass.LEARNED_START)
    assert blame(exit_, Context(hardware="Xid 79")).who is Who.HARDWARE


def test_the_first_failure_without_learned_modules_is_the_first_try() -> None:
    fleet = Fleet()
    kinds = []
    for generation, learned_start in enumerate((True, False, False), 1):
        fleet.start(generation)
        fleet.exits(0, error=BUG, learned_start=learned_start)
        kinds.append(fleet.found[-1].kind)
    assert kinds == [FindingKind.WORKER_EXCEPTION, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION]


# ---------------------------------------------------------------- what other jobs on the node say


def ends_in_jobs(*jobs: str, nodes: int = 2, error: WorkerError | None = None, signal: int | None = None) -> list[str]:
    """Each job in turn starts on its nodes and ends on n1; whom the finding blames each time."""
    fleet = Fleet(nodes=nodes)
    said = []
    for fleet.job in jobs:
        fleet.now += 600.0
        fleet.start()
        for rank in fleet.ranks.values():
            rank.step = 50
        how: dict[str, Any] = {"error": error} if error is not None else {"signal": signal}
        fleet.exits(nodes - 1, **how)
        said.append(fleet.found[-1].evidence["blame"])
    return said


def test_a_node_on_which_three_jobs_end_alike_and_nowhere_else_is_blamed() -> None:
    assert ends_in_jobs("a", "b", "c", error=ECC) == ["unknown", "unknown", "hardware"]
    assert ends_in_jobs("a", "b", "c", signal=11) == ["unknown", "unknown", "hardware"]


def test_jobs_of_one_node_could_have_failed_nowhere_else() -> None:
    assert ends_in_jobs(*"abcdef", nodes=1, error=ECC) == ["unknown"] * 6
    assert ends_in_jobs(*"abcdef", nodes=1, signal=11) == ["unknown"] * 6


@pytest.mark.parametrize("error", [BUG, OOM, WorkerError("AssertionError", "loss is nan", ("t.py:1 f",))])
def test_scripts_memory_and_nan_of_other_jobs_say_nothing_of_the_node(error: WorkerError) -> None:
    """Nor do they let a later crash look like the node's."""
    fleet = Fleet(nodes=2)
    for fleet.job in "abcd":
        fleet.now += 600.0
        fleet.start()
        for rank in fleet.ranks.values():
            rank.step = 50
        if fleet.job == "d":
            fleet.exits(1, signal=11)
        else:
            fleet.exits(1, error=error)
    assert "hardware" not in [finding.evidence["blame"] for finding in fleet.found]


@pytest.mark.parametrize("signal", [9, 15, 2, 1])
def test_what_somebody_does_to_a_process_says_nothing_of_the_node(signal: int) -> None:
    assert ends_in_jobs(*"abcdef", signal=signal) == ["unknown"] * 6


def test_a_device_error_twice_on_one_node_does_not_stop_the_job() -> None:
    fleet = Fleet()
    for generation in (1, 2):
        fleet.generation = generation
        fleet.start()
        fleet.exits(1, error=ECC)
    assert [finding.kind for finding in fleet.found] == [FindingKind.WORKER_EXCEPTION] * 2
    assert fleet.found[1].evidence["blame"] == "unknown"


def test_an_xid_beside_it_blames_the_node() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.xid(95, "n1")
    fleet.exits(1, error=BUG)
    last = fleet.found[-1]
    assert (last.kind, last.evidence["blame"]) == (FindingKind.WORKER_EXCEPTION, "hardware")
    assert last.recommended_actions == (Remedy.REPLACE_NODE,)


def test_an_xid_from_before_the_job_does_not() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.xid(95, "n1")
    fleet.job, fleet.now = "the next one", fleet.now + 10
    for generation in (1, 2):
        fleet.start(generation)
        fleet.exits(1, error=BUG)
    assert [finding.kind for finding in fleet.found[-2:]] == [
        FindingKind.WORKER_EXCEPTION,
        FindingKind.REPEATED_EXCEPTION,
    ]


def test_the_application_s_own_xid_does_not() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.xid(31, "n1")
    fleet.exits(1, error=BUG)
    assert fleet.found[-1].evidence["blame"] != "hardware"

"""Whose fault: the rules one by one, and what they change in the finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosing import T0, Fleet

from holdfast.diagnostics.detectors.blame import Context, Who, blame
from holdfast.diagnostics.detectors.error_class import ErrorClass, class_of
from holdfast.domain.findings import FindingKind, Remedy
from holdfast.domain.signals import KernelEvent, KernelLine, WorkerError

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
        ("RuntimeError", "can't start new thread", ErrorClass.RESOURCES),
        ("OSError", "[Errno 24] Too many open files: 'a.npy'", ErrorClass.RESOURCES),
        ("BlockingIOError", "[Errno 11] Resource temporarily unavailable", ErrorClass.RESOURCES),
        ("RuntimeError", "received 0 items of ancdata", ErrorClass.RESOURCES),
        ("RuntimeError", "DataLoader worker (pid(s) 17, 18) exited unexpectedly", ErrorClass.RESOURCES),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", ErrorClass.RESOURCES),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Segmentation fault.", ErrorClass.SCRIPT),
        (
            "torch.multiprocessing.spawn.ProcessExitedException",
            "process 0 terminated with signal SIGKILL",
            ErrorClass.RESOURCES,
        ),
        ("ProcessExitedException", "process 0 terminated with signal SIGSEGV", ErrorClass.CRASH),
        ("ProcessExitedException", "process 1 terminated with exit code 3", ErrorClass.SCRIPT),
        (
            "concurrent.futures.process.BrokenProcessPool",
            "A process in the process pool was terminated abruptly while the future was running or pending.",
            ErrorClass.RESOURCES,
        ),
        ("RuntimeError", "unable to write to file </torch_7>: No space left on device (28)", ErrorClass.STORAGE),
        (
            "triton.runtime.errors.OutOfResources",
            "out of resource: shared memory, Required: 114688, Hardware limit: 101376",
            ErrorClass.SCRIPT,
        ),
    ],
)
def test_classes(type_: str, message: str, expected: ErrorClass) -> None:
    assert class_of(WorkerError(type_, message)) is expected


def test_a_helper_killed_for_memory_is_distinguished_from_one_killed() -> None:
    killed = WorkerError("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert class_of(killed, host_oom=True) is ErrorClass.HOST_OOM
    assert class_of(BUG, host_oom=True) is ErrorClass.SCRIPT


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


# ---------------------------------------------------------------- memory

CGROUP = "Memory cgroup out of memory: Killed process 1001 (limit: 2.00 GiB, /sys/fs/cgroup)"


def test_a_rank_that_the_kernel_killed_for_memory_is_named_so_with_the_limit() -> None:
    fleet = Fleet()
    fleet.start()
    for _ in range(2):  # the second one within ten minutes repeats no finding about the node
        fleet.fold(KernelLine("n1", T0 + fleet.now, CGROUP, event=KernelEvent.OOM_KILL))
        fleet.exits(1, signal=9)
        last = fleet.found[-1]
        assert (last.kind, last.attribution.error_class) == (FindingKind.WORKER_CRASH, "host_oom")
        assert last.summary.startswith("Rank 1 on n1 was killed by SIGKILL before its first step: Memory cgroup out of")
        assert "limit: 2.00 GiB" in last.summary
        fleet.now += 120.0
        fleet.start(fleet.generation + 1)
    fleet.exits(1, signal=9)
    assert fleet.found[-1].attribution.error_class == "crash", "two minutes later"


# ---------------------------------------------------------------- scripts that do not begin

USAGE = ("usage: train.py [-h] --lr LR", "train.py: error: the following arguments are required: --lr")
BOX = "\u2500"
HYDRA_END = ("", "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")
# What is printed, as the libraries print it, and what is repeated of it.
REFUSED: list[tuple[int, tuple[str, ...], str]] = [
    (2, USAGE, USAGE[-1]),
    (2, USAGE[1:], USAGE[-1]),  # the usage text is longer than what is kept of a log
    (2, ("Usage: train.py [OPTIONS]", "", "Error: No such option: --lrr"), "Error: No such option: --lrr"),
    (
        2,
        (
            "\x1b[33mUsage: \x1b[0mtrain.py [OPTIONS] {lr}",
            "Try 'train.py --help' for help.",
            f"\u256d{BOX} Error {BOX * 30}\u256e",
            "\u2502 No such option: --foo            \u2502",
            f"\u2570{BOX * 38}\u256f",
        ),
        "No such option: --foo",
    ),
    (
        2,
        (
            f"\u256d{BOX} Required options {BOX * 6}\u256e",
            "\u2502 Missing from train.py:    \u2502",
            "\u2502     --lr FLOAT            \u2502",
            f"\u2570{BOX * 25}\u256f",
        ),
        "Missing from train.py: --lr FLOAT",
    ),
    (2, ("ERROR: Could not consume arg: --foo=2", "Usage: fir.py 1 -"), "ERROR: Could not consume arg: --foo=2"),
    (
        1,
        ("FATAL Flags parsing error: Unknown command line flag 'foo'", "Pass --helpshort or --helpfull to see help"),
        "Unknown command line flag 'foo'",
    ),
    (1, ("Could not override 'foo'.", "To append to your config use +foo=1", *HYDRA_END), "Could not override 'foo'."),
    (
        1,
        ("a warning", "Error parsing override 'lr'", "missing EQUAL at '<EOF>'", *HYDRA_END),
        "step: Error parsing override 'lr' missing EQUAL",
    ),
    (
        1,
        ("Cannot find primary config 'nope'. Check that it's in your path.", "", "Config search path:", *HYDRA_END),
        "Cannot find primary config 'nope'",
    ),
    (1, ("Multiple values for db.", *HYDRA_END), "Multiple values for db"),
    (2, ("/usr/bin/python: can't open file '/w/nofile.py': [Errno 2] No such file",), "/w/nofile.py"),
    (1, ("/usr/bin/python3: No module named nomodule",), "No module named nomodule"),
]
NOT_BEGUN: list[dict[str, Any]] = [
    *({"exit_code": code, "log_tail": printed} for code, printed, _ in REFUSED),
    {"error": WorkerError("ModuleNotFoundError", "No module named 'flash_attn'", ("/w/t.py:1 <module>",))},
    {"error": WorkerError("SyntaxError", "invalid syntax (t.py, line 2)")},
]


@pytest.mark.parametrize(("code", "printed", "expected"), REFUSED, ids=str)
def test_what_is_wrong_with_a_command_line_is_repeated(code: int, printed: tuple[str, ...], expected: str) -> None:
    fleet = Fleet(nodes=1, ranks_per_node=2)
    fleet.start()
    fleet.exits(1, exit_code=code, log_tail=printed)
    summary = fleet.only().summary
    assert expected.removesuffix(".") in summary
    assert not {"HYDRA_FULL_ERROR", BOX, "\u2570", "\x1b"} & {*summary, *summary.split()}


@pytest.mark.parametrize("how", NOT_BEGUN, ids=str)
def test_a_script_that_cannot_begin_is_the_users_at_the_first_start_of_a_job_on_one_node(how: dict[str, Any]) -> None:
    fleet = Fleet(nodes=1, ranks_per_node=2)
    fleet.start()
    fleet.exits(1, **how)
    found = fleet.only()
    assert (found.attribution.blame, found.attribution.error_class) == ("user", "usage")


@pytest.mark.parametrize("how", NOT_BEGUN, ids=str)
def test_on_one_of_several_nodes_it_may_be_the_nodes(how: dict[str, Any]) -> None:
    fleet = Fleet(nodes=3)
    fleet.start()
    fleet.exits(1, **how)
    assert fleet.only().attribution.error_class != "usage"
    fleet.exits(2, **how)
    fleet.start(2)
    fleet.exits(1, **how)
    assert fleet.found[-1].kind is FindingKind.REPEATED_EXCEPTION
    assert fleet.found[-1].attribution.nodes == 2


@pytest.mark.parametrize("how", NOT_BEGUN, ids=str)
def test_after_a_step_or_minutes_it_is_no_error_of_usage(how: dict[str, Any]) -> None:
    fleet = Fleet(nodes=1, ranks_per_node=2)
    fleet.start()
    fleet.run(until=5.0)
    fleet.exits(1, **how)
    assert fleet.only().attribution.error_class != "usage", "it has finished steps"
    fleet.start(2)
    for rank in fleet.ranks.values():
        rank.step = 0
    fleet.exits(1, **how)
    assert fleet.found[-1].attribution.error_class != "usage", "the job has finished steps"
    late = Fleet(nodes=1, ranks_per_node=2)
    late.start()
    late.now += 301.0
    late.start(2)
    late.exits(1, **how)
    assert late.found[-1].attribution.error_class != "usage", "an unmodified script may have trained"


@pytest.mark.parametrize(
    "how",
    [
        {"exit_code": 1, "log_tail": ("RuntimeError: usage of the buffer is wrong",)},
        {"exit_code": 3, "log_tail": USAGE},
        {"exit_code": 1, "log_tail": ("Could not override the loss function", "giving up")},
        {"error": WorkerError("ValueError", "bad"), "log_tail": HYDRA_END},
        {"signal": 9, "log_tail": USAGE},
        {
            "error": WorkerError(
                "ImportError", "libcuda.so.1: cannot open shared object file: No such file or directory"
            )
        },
        {"error": NO_FILE},
    ],
    ids=str,
)
def test_other_early_ends_are_no_errors_of_usage(how: dict[str, Any]) -> None:
    fleet = Fleet(nodes=1, ranks_per_node=2)
    fleet.start()
    fleet.exits(1, **how)
    assert fleet.only().attribution.error_class != "usage"

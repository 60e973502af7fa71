"""Tests a suspect node within a few seconds: all devices at the same time, and the links between them.

Each device is tested in a separate process, because a driver call may hang and must not delay the results of other devices.
A test that has not ended at the deadline has no result. The processes then form an all-reduce through the loop-back interface
and the devices' own links: NCCL on GPUs, gloo between two processes on a machine without GPUs. Its sum is known in advance, bit
for bit. The processes rendezvous by a file in memory, so that no port is needed.

The process that forks the others opens no device, because a CUDA context does not survive a fork.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from holdfast.train.selftest.gemm import multiply
from holdfast.train.selftest.memory import bandwidth_gb_s

# of the time, for products; computing their factors and reading results takes the same time again
PRODUCTS_SHARE: Final = 0.15
CPU_RANKS: Final = 2  # processes that form the all-reduce on a machine without GPUs
ELEMENTS: Final = {"cpu": 1 << 18, "cuda": 1 << 24}  # of the all-reduce, float32
_CYCLE: Final = 251  # period of the summands, so small that the sum of 1000 ranks is exact in float32
NOT_ENDED: Final = "its test did not end"
_READ_BYTES: Final = 1 << 16
_ERROR_CHARS_MAX: Final = 500

Send = Callable[[str, object], None]  # (name, result), for the process that collects


def run(within_s: float) -> dict[str, Any]:
    """Test for `within_s` seconds at most. Returns what `holdfast.train.selftest` prints, and `all_reduce`:

    {"devices": [{"device": "cuda:0", "products": […], "memory_gb_s": 1502.3, "unfinished": ""}],
     "wants_gpus": true, "all_reduce": {"ranks": 8, "wrong": 0, "unfinished": ""}}

    `unfinished` is the reason why a result is missing; a missing result is unknown. `error` is the exception of a device.
    There is no `all_reduce` with a single GPU. `wants_gpus`: this torch would use GPUs if there were any.
    """
    deadline = time.monotonic() + within_s
    counted = _collect([_count_gpus], deadline)[0]
    gpus = counted.get("gpus")
    if gpus is None:
        why = counted.get("error") or f"the GPUs were not counted within {within_s:g} s"
        return {"devices": [{"device": "cuda", "unfinished": why}]}
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")] * CPU_RANKS
    store = os.memfd_create("all-reduce")
    budget_s = max(0.0, deadline - time.monotonic())

    def tester(rank: int) -> Callable[[Send], None]:
        return lambda send: _test(send, rank, devices, f"/proc/self/fd/{store}", budget_s)

    found = _collect([tester(rank) for rank in range(len(devices))], deadline)
    os.close(store)
    tested = [_of_device(device, result) for device, result in zip(devices, found, strict=True)]
    report: dict[str, Any] = {"devices": tested if gpus else tested[:1], "wants_gpus": _wants_gpus()}
    if len(devices) > 1:
        report["all_reduce"] = _of_links(found)
    return report


# ---------------------------------------------------------------- in the processes that test


def _count_gpus(send: Send) -> None:
    send("gpus", torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _wants_gpus() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return torch.version.cuda is not None and not hidden


def _test(send: Send, rank: int, devices: list[torch.device], store: str, budget_s: float) -> None:
    device = devices[rank]
    torch.set_num_threads(1)
    if rank == 0 or device.type == "cuda":  # a CPU is tested once
        send("products", [asdict(products) for products in multiply(device, PRODUCTS_SHARE * budget_s)])
        send("memory_gb_s", round(bandwidth_gb_s(device), 2))
    if len(devices) > 1:
        try:
            send("all_reduce", _all_reduce(rank, len(devices), device, store, budget_s))
        except (RuntimeError, ValueError) as error:  # torch's errors, also for a backend that is not available
            send("all_reduce_error", _first_line(error))


def _all_reduce(rank: int, ranks: int, device: torch.device, store: str, timeout_s: float) -> int:
    """Return the number of wrong elements of the sum."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    numbers = torch.arange(ELEMENTS[device.type], device=device) % _CYCLE
    summed = (numbers + rank).to(torch.float32)
    dist.all_reduce(summed)
    return int((summed != numbers * ranks + ranks * (ranks - 1) // 2).sum())


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().partition("\n")[0][:_ERROR_CHARS_MAX] or type(error).__name__


# ---------------------------------------------------------------- in the process that collects


def _collect(tests: list[Callable[[Send], None]], deadline: float) -> list[dict[str, Any]]:
    """Run each test in a fork until all have ended or the deadline is reached, then kill the rest. Returns the results that
    each has sent by then, with `error` for a test that raised, and `unfinished` for a test that did not end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # so that no pid is reused before waitpid
    received: list[bytearray] = [bytearray() for _ in tests]
    pids: list[int] = []
    with selectors.DefaultSelector() as open_ends:
        for number, test in enumerate(tests):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _in_fork(test, writing)
            os.close(writing)
            pids.append(pid)
            open_ends.register(reading, selectors.EVENT_READ, number)
        while open_ends.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in open_ends.select(left_s):
                if data := os.read(key.fd, _READ_BYTES):
                    received[key.data] += data
                else:
                    open_ends.unregister(key.fd)
                    os.close(key.fd)
        for key in list(open_ends.get_map().values()):
            os.close(key.fd)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid still is this child's
        os.waitpid(pid, os.WNOHANG)  # does not wait for a process that is stuck in the kernel
    return [_parsed(bytes(raw)) for raw in received]


def _in_fork(test: Callable[[Send], None], writing: int) -> None:
    """Run the test and send its results. Never returns."""

    def send(name: str, result: object) -> None:
        os.write(writing, json.dumps([name, result]).encode() + b"\n")

    try:
        test(send)
        send("ended", True)
    except torch.OutOfMemoryError as error:  # another process uses the device, so there is no result
        send("unfinished", _first_line(error))
    except RuntimeError as error:  # torch's only exception for a device that is lost or fails
        send("error", _first_line(error))
    except BaseException as error:  # a bug of the test, not a fault of the device
        send("unfinished", f"{type(error).__name__}: {_first_line(error)}")
    finally:
        os._exit(0)


def _parsed(raw: bytes) -> dict[str, Any]:
    lines = raw.split(b"\n")[:-1]  # the last one may be cut off
    found = dict(json.loads(line) for line in lines)
    if not found.keys() & {"ended", "error", "unfinished"}:
        found["unfinished"] = NOT_ENDED
    return found


def _of_device(device: torch.device, found: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"device": str(device)}
    if "error" in found:
        result["error"] = found["error"]
    result |= {key: found[key] for key in ("products", "memory_gb_s") if key in found}
    complete = "memory_gb_s" in result or "error" in result
    return result | {"unfinished": "" if complete else found.get("unfinished", NOT_ENDED)}


def _of_links(found: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = sum(each.get("all_reduce", 0) for each in found)
    missing = [each for each in found if "all_reduce" not in each]
    why = ""
    if missing:
        first = missing[0]
        why = first.get("all_reduce_error") or first.get("error") or first.get("unfinished", "")
    return {"ranks": len(found), "wrong": wrong, "unfinished": why}

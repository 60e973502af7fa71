"""The checks of a pre-flight test and their limits. `preflight` contains the parts that use a device or the network.

`ok` is None for a check that could not run; it counts neither as passed nor as failed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.agent.collectors.host import write_latency
from holdfast.domain.nodes import PEERS, Check
from holdfast.domain.signals import GpuHealth, GpuSample, NicSample

DISK_FULL_SHARE = 0.95  # as in diagnostics' host_pressure
WRITE_S_MAX = 5.0  # for one small fsynced write; diagnostics warns from 1 s on
SLOW_SHARE = 0.7  # fraction of the fastest device's bandwidth; in NVRx a rank below 0.75 is a straggler
SILENT_PEERS_MIN = 2  # if at least this many machines do not answer and no other does, this node's network has failed
# Errors of a write to a broken device, or to a file system that the kernel has made read-only because of one.
BROKEN_DISK = frozenset({errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV})
ACTIVE = "ACTIVE"  # state of a network port
DETAIL_CHARS_MAX = 500


def gpus(sample: GpuSample | None, health: GpuHealth | None, *, watched: bool, expected: int) -> Check:
    """Check device count, recovery action, ECC and row remapping in NVML's last readings. `watched`: there is a driver."""
    if not watched:
        ok = False if expected else None
        return Check("gpus", ok, f"{expected} expected, but this node has no driver" if expected else "none here")
    if sample is None:
        return Check("gpus", False, "NVML has given no reading")
    wrong = [*_of_sample(sample), *(_of_health(health) if health is not None else ())]
    wanted = max(expected, health.expected if health is not None else 0)
    if len(sample.gpu) < wanted:
        wrong.append(f"{len(sample.gpu)} of {wanted} GPUs")
    return _check("gpus", not wrong, "; ".join(wrong) or f"{len(sample.gpu)} GPUs, no recovery action, no ECC error")


def _of_sample(sample: GpuSample) -> Iterator[str]:
    for row, gpu in enumerate(sample.gpu):
        if sample.lost[row]:
            yield f"GPU {gpu} is lost"
        if sample.recovery_action[row] > 0:
            yield f"the driver requests recovery action {sample.recovery_action[row]} for GPU {gpu}"
        if sample.ecc_uncorrected[row] > 0:
            yield f"GPU {gpu} has {sample.ecc_uncorrected[row]} uncorrected memory errors since its driver was loaded"


def _of_health(health: GpuHealth) -> Iterator[str]:
    for row, gpu in enumerate(health.gpu):
        if health.remap_failed[row] == 1:
            yield f"GPU {gpu} has no spare memory row left"
        elif health.remap_pending[row] == 1:
            yield f"GPU {gpu} waits for a reset to replace a memory row"


def devices(report: str) -> list[Check]:
    """Evaluate `products` and `memory` from the output of `holdfast.train.selftest`."""
    try:
        return _judged(_parsed(report)["devices"])
    except _UNREADABLE as error:
        return [_unreadable(report, error)]


def quick(report: str, *, gpus: int) -> list[Check]:
    """Evaluate `products`, `memory` and `links` from the output of the quick self-test. `gpus`: number that NVML sees; 0 =
    unknown.

    A test that has not finished has no result. The same applies to an all-reduce that raised an exception, because a library
    that is not set up for it raises one on a healthy node, too."""
    try:
        found = _parsed(report)
        tested: list[Mapping[str, Any]] = found["devices"]
        checks = _judged(tested)
        links: Mapping[str, Any] | None = found.get("all_reduce")
        if links is not None:
            checks.append(_links(int(links["ranks"]), int(links["wrong"]), str(links["unfinished"])))
    except _UNREADABLE as error:
        return [_unreadable(report, error)]
    if gpus and found.get("wants_gpus") and all(each["device"] == "cpu" for each in tested):
        return [_check("devices", False, f"torch can use none of the {gpus} GPUs that NVML sees")]
    return checks


_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


def _parsed(report: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(report.strip().splitlines()[-1])
    return found


def _unreadable(report: str, error: Exception) -> Check:
    return _check("products", None, f"the self-test's answer cannot be read ({error!r}): {report[:200]}")


def _judged(tested: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Evaluate the devices. A device with `unfinished` was not tested to the end and is not compared with others."""
    broken = [f"{each['device']}: {each['error']}" for each in tested if "error" in each]
    well = [each for each in tested if "error" not in each]
    late = [f"{each['device']}: {each['unfinished']}" for each in well if each.get("unfinished")]
    made = 0
    wrong = []
    for each in well:
        for kind in each.get("products", ()) if each.get("unfinished") else each["products"]:
            made += kind["made"]
            if kind["wrong"]:
                few = f"{kind['wrong']} of {kind['made']} {kind['kind']} products are wrong ({kind['first_wrong']})"
                wrong.append(f"{each['device']}: {few}")
    speeds = {str(each["device"]): float(each["memory_gb_s"]) for each in well if not each.get("unfinished")}
    checks = [_check("devices", False, "; ".join(broken))] if broken else []
    if wrong:
        checks.append(_check("products", False, "; ".join(wrong)))
    elif late:
        checks.append(_check("products", None, "; ".join(late)))
    else:
        checks.append(_check("products", True, f"{made} exact products on {', '.join(speeds)}"))
    return checks if late else [*checks, _memory(speeds)]


def _links(ranks: int, wrong: int, unfinished: str) -> Check:
    if wrong:
        return _check(
            "links", False, f"{wrong} elements of an all-reduce between {ranks} processes of this node are wrong"
        )
    if unfinished:
        return _check("links", None, f"an all-reduce between {ranks} processes of this node: {unfinished}")
    return _check("links", True, f"an all-reduce between {ranks} processes of this node is exact")


def ports(sample: NicSample, seen_active: Collection[tuple[str, int]]) -> Check:
    """Check the ports that were active since the agent's start. One that is no longer active has failed."""
    columns = zip(sample.device, sample.port, sample.state, sample.phys_state, strict=True)
    now = {(device, port): (state, phys) for device, port, state, phys in columns}
    missing = ("gone", "its device does not exist")
    down = [(place, now.get(place, missing)) for place in sorted(seen_active) if now.get(place, missing)[0] != ACTIVE]
    wrong = [f"{device} port {port} was active, and is {state} ({phys})" for (device, port), (state, phys) in down]
    return _check("ports", not wrong, "; ".join(wrong) or f"{len(seen_active)} active")


def gpus_present(sample: GpuSample) -> Check:
    """Check that no GPU is lost. Detectors evaluate the driver's other readings and recommend their own actions."""
    lost = [f"GPU {gpu} is lost" for row, gpu in enumerate(sample.gpu) if sample.lost[row]]
    return _check("gpus", not lost, "; ".join(lost) or f"{len(sample.gpu)} GPUs")


def _memory(speeds: Mapping[str, float]) -> Check:
    """Compare the devices of a node with each other. A single device is measured but not judged."""
    best = max(speeds.values(), default=0.0)
    slow = [f"{name} copies {speed:g} GB/s" for name, speed in speeds.items() if speed < SLOW_SHARE * best]
    shown = ", ".join(f"{name} {speed:g} GB/s" for name, speed in speeds.items())
    return _check("memory", not slow, f"{'; '.join(slow)}, its fastest sibling {best:g}" if slow else shown)


def disk(directories: Sequence[Path]) -> Check:
    """Check free space and one small write in every directory of checkpoints and logs."""
    wrong, shown = [], []
    for directory in dict.fromkeys(directories):
        try:
            usage = shutil.disk_usage(directory)
        except OSError as error:
            wrong.append(f"{directory}: {error.strerror}")
            continue
        duration_s = write_latency(directory)
        if usage.used > DISK_FULL_SHARE * usage.total:
            wrong.append(f"{directory} is {usage.used / usage.total:.0%} full")
        elif duration_s is not None and duration_s > WRITE_S_MAX:
            wrong.append(f"{directory} cannot be written to within {WRITE_S_MAX:g} s")
        else:
            shown.append(f"{directory} {usage.free / 1e9:.1f} GB free")
    return _check("disk", not wrong, "; ".join(wrong or shown))


def disk_answers(directories: Sequence[Path]) -> Check:
    """Check that every directory takes one small write. A full disk does not count as broken: the disks of all nodes of a job
    may be full at once, and earlier warnings report that."""
    wrong: list[str] = []
    open_: list[str] = []
    for directory in dict.fromkeys(directories):
        try:
            _write(directory)
        except OSError as error:
            broken = error.errno in BROKEN_DISK
            (wrong if broken else open_).append(f"{directory}: {error.strerror}")
    return _check("disk", False if wrong else None if open_ else True, "; ".join(wrong or open_) or "takes writes")


def _write(directory: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".holdfast-test-", dir=directory)
    try:
        os.unlink(name)
        os.write(descriptor, b"x" * 4096)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peers(reached: Sequence[str], refused: Sequence[str], silent: Sequence[str]) -> Check:
    """Check that replicators of other nodes answer, by their endpoints. If several machines do not answer and no other does,
    this node's network has failed. A single one may be down, and one that refuses a connection answers: its replicator has
    ended, or has another port since it was started again."""
    if not reached and not refused and not silent:
        return Check(PEERS, None, "no other node is known yet")
    detail = f"{len(reached)} of {len(reached) + len(refused) + len(silent)} replicators of other nodes answer"
    if silent:
        detail += f"; not {', '.join(silent)}"
    if refused:
        detail += f"; the machine refuses connections to {', '.join(refused)}"
    if reached:
        return _check(PEERS, True, detail)
    machines = {endpoint.rpartition(":")[0] for endpoint in silent}
    return _check(PEERS, False if len(machines) >= SILENT_PEERS_MIN and not refused else None, detail)


def _check(name: str, ok: bool | None, detail: str) -> Check:
    return Check(name, ok, detail[:DETAIL_CHARS_MAX])

"""The checks of a pre-flight test and their limits. `preflight` contains the parts that use a device or the network.

`ok` is None for a check that could not run; it counts neither as passed nor as failed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.agent.collectors.host import write_latency
from holdfast.domain.nodes import Check
from holdfast.domain.signals import GpuHealth, GpuSample

DISK_FULL_SHARE = 0.95  # as in diagnostics' host_pressure
WRITE_S_MAX = 5.0  # for one small fsynced write; diagnostics warns from 1 s on
SLOW_SHARE = 0.7  # fraction of the fastest device's bandwidth; in NVRx a rank below 0.75 is a straggler
SILENT_PEERS_MIN = 2  # if this many peers do not answer and none does, this node's network has failed
DETAIL_CHARS_MAX = 500


def gpus(sample: GpuSample | None, health: GpuHealth | None, *, watched: bool, expected: int) -> Check:
    """Check device count, recovery action, ECC and row remapping in NVML's last readings. `watched`: there is a driver."""
    if not watched:
        ok = False if expected else None
        return Check("gpus", ok, f"{expected} expected, and no driver is here" if expected else "none here")
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
            yield f"the driver wants recovery action {sample.recovery_action[row]} for GPU {gpu}"
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
        tested: list[Mapping[str, Any]] = json.loads(report.strip().splitlines()[-1])["devices"]
        broken = [f"{each['device']}: {each['error']}" for each in tested if "error" in each]
        well = [each for each in tested if "error" not in each]
        wrong = [
            f"{each['device']}: {kind['wrong']} of {kind['made']} {kind['kind']} products are wrong ({kind['first_wrong']})"
            for each in well
            for kind in each["products"]
            if kind["wrong"]
        ]
        made = sum(kind["made"] for each in well for kind in each["products"])
        speeds = {str(each["device"]): float(each["memory_gb_s"]) for each in well}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return [_check("products", None, f"the self-test's answer cannot be read ({error!r}): {report[:200]}")]
    checks = [_check("devices", False, "; ".join(broken))] if broken else []
    checks.append(_check("products", not wrong, "; ".join(wrong) or f"{made} exact products on {', '.join(speeds)}"))
    return [*checks, _memory(speeds)]


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
        took_s = write_latency(directory)
        if usage.used > DISK_FULL_SHARE * usage.total:
            wrong.append(f"{directory} is {usage.used / usage.total:.0%} full")
        elif took_s is not None and took_s > WRITE_S_MAX:
            wrong.append(f"{directory} cannot be written to within {WRITE_S_MAX:g} s")
        else:
            shown.append(f"{directory} {usage.free / 1e9:.1f} GB free")
    return _check("disk", not wrong, "; ".join(wrong or shown))


def peers(reached: Sequence[str], silent: Sequence[str]) -> Check:
    """A single peer may be down. If several do not answer and none does, this node's network has failed."""
    if not reached and not silent:
        return Check("peers", None, "no other node is known yet")
    words = f"{len(reached)} of {len(reached) + len(silent)} replicators of other nodes answer"
    if silent:
        words += f"; not {', '.join(silent)}"
    if reached:
        return _check("peers", True, words)
    return _check("peers", False if len(silent) >= SILENT_PEERS_MIN else None, words)


def _check(name: str, ok: bool | None, detail: str) -> Check:
    return Check(name, ok, detail[:DETAIL_CHARS_MAX])

"""Runs the health checks of nvidia-resiliency-ext: `python -m holdfast.agent.collectors.nvrx_reader INTERVAL_S`.

It runs in a separate process because its checks take a lock on NVML and may hang with the driver, newer versions import an
HTTP client, and its `pynvml` dependency shadows the binding that the agent uses. The checks keep state (a link counter is
compared with its previous value), so the process is not restarted between rounds.

Differences between versions:

| | GPU recovery action | NVLink | NIC link-down counter | NIC state |
|---|---|---|---|---|
| 0.4 | one check over all GPUs | – | device chosen by `set_nic_device` | – |
| 0.5 | `device_index` | `NVLHealthCheck` | `device_index` | – |
| ≥ 0.6 | as 0.5, imports httpx | as 0.5 | as 0.5 | `NicLinkStateHealthCheck` |

The checks return True also if they cannot run (no driver, an old one, no NIC for the GPU). Such a check is reported as
`skipped`, because unknown is not healthy. Prints one JSON object per round:

    {"at": …, "version": "0.4.1", "checks": [{"check": "gpu", "gpu": null, "verdict": "ok", "reason": ""}]}
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

DISTRIBUTION = "nvidia-resiliency-ext"
MODULE = "nvidia_resiliency_ext.shared_utils.health_check"
# Holdfast's name of a check → its class.
CHECKS = {
    "gpu": "GPUHealthCheck",
    "nvlink": "NVLHealthCheck",
    "nic": "NicHealthCheck",
    "nic_state": "NicLinkStateHealthCheck",
}
UNUSABLE = 3
_REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Check:
    """One instance of a check. `gpu` is None for a check of the node."""

    name: str
    gpu: int | None
    run: Callable[[], object]

    @property
    def blind(self) -> bool:
        """Whether the check reports that it cannot run."""
        enabled = getattr(self.run, "enabled", True) and getattr(self.run, "pynvml_available", True)
        return not enabled or getattr(self.run, "nic_name", "") is None


class Heard(logging.Handler):
    """Captures the log of a check, because only the log contains the reason of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())

    def take(self) -> str:
        words, self.words = "; ".join(self.words), []
        return words[:_REASON_CHARS_MAX]


def build(module: Any, gpus: int) -> Iterator[Check]:
    """Return the checks of this version, one per GPU if the check accepts an index."""
    for name, kind in CHECKS.items():
        make = getattr(module, kind, None)
        if make is None:
            continue
        if "device_index" in inspect.signature(make).parameters:
            yield from (Check(name, gpu, make(device_index=gpu)) for gpu in range(gpus))
        elif hasattr(make, "set_nic_device"):
            for gpu in range(gpus):
                check = make()
                check.set_nic_device(gpu)
                yield Check(name, gpu, check)
        else:
            yield Check(name, None, make())


def look(check: Check, heard: Heard) -> dict[str, object]:
    """Run one check. An exception is a failure of the check, not of the hardware."""
    heard.take()
    try:
        verdict = "skipped" if check.blind else "ok" if check.run() is True else "failed"
    except Exception as error:
        verdict, raised = "skipped", f"{type(error).__name__}: {error}"[:_REASON_CHARS_MAX]
        return {"check": check.name, "gpu": check.gpu, "verdict": verdict, "reason": raised}
    return {"check": check.name, "gpu": check.gpu, "verdict": verdict, "reason": heard.take()}


def main() -> None:
    interval_s = float(sys.argv[1])
    heard = Heard()
    logging.getLogger().addHandler(heard)
    try:
        version = importlib.metadata.version(DISTRIBUTION)
        checks = list(build(importlib.import_module(MODULE), _count_gpus()))
    except Exception as error:  # a missing dependency, or a class with other arguments
        _leave(f"{DISTRIBUTION} cannot be used: {type(error).__name__}: {error}")
    if not checks:
        _leave(f"{DISTRIBUTION} {version} has none of the checks {', '.join(CHECKS.values())}")
    while True:
        started = time.monotonic()
        results = [look(check, heard) for check in checks]
        print(json.dumps({"at": time.time(), "version": version, "checks": results}), flush=True)  # noqa: T201
        time.sleep(max(0.0, interval_s - (time.monotonic() - started)))


def _count_gpus() -> int:
    """Return NVML's number of GPUs; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0


def _leave(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)  # noqa: T201
    sys.exit(UNUSABLE)


if __name__ == "__main__":
    main()

"""Reads the GPUs through NVML, in a process of its own: `python -m holdfast.agent.collectors.nvml_reader INTERVAL_S`.

A driver call may block for a minute when a GPU is sick, and no thread can be taken back from it; a process can be killed.
Prints one JSON object per sample on standard output. Ends with code 3 when there is no driver or no GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

try:
    import pynvml
except ModuleNotFoundError:
    pynvml = None

NO_GPUS = 3
LOST_CODES = (15, 16, 999)  # NVML_ERROR_GPU_IS_LOST, RESET_REQUIRED, UNKNOWN: no call will succeed any more
FIELD_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
UNKNOWN_ACTION = -1


@dataclass(slots=True)
class Gpu:
    gpu: int
    uuid: str = ""
    temperature_c: float = 0.0
    power_w: float = 0.0
    memory_used: int = 0
    ecc_uncorrected: int = 0
    recovery_action: int = UNKNOWN_ACTION
    lost: bool = False


def main() -> None:
    interval_s = float(sys.argv[1])
    if pynvml is None:
        sys.exit(NO_GPUS)
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        print(f"NVML: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(NO_GPUS)
    if count == 0:
        sys.exit(NO_GPUS)
    while True:
        gpus = [asdict(read(index)) for index in range(count)]
        print(json.dumps({"at": time.time(), "gpus": gpus}), flush=True)  # noqa: T201
        time.sleep(interval_s)


def read(index: int) -> Gpu:
    """One GPU. What it does not support stays at its default; a GPU that is lost says so and nothing else."""
    gpu = Gpu(index)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu.uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:
        gpu.lost = error.value in LOST_CODES
        return gpu
    readings: dict[str, Callable[[], float]] = {
        "temperature_c": lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "memory_used": lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        "ecc_uncorrected": lambda: int(
            pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        "recovery_action": lambda: _field(handle, FIELD_RECOVERY_ACTION),
    }
    for name, reading in readings.items():
        try:
            setattr(gpu, name, reading())
        except pynvml.NVMLError as error:
            if error.value in LOST_CODES:
                gpu.lost = True
                break
    return gpu


def _field(handle: Any, field: int) -> int:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
    return int(value.value.uiVal) if value.nvmlReturn == 0 else UNKNOWN_ACTION


def _text(raw: str | bytes) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


if __name__ == "__main__":
    main()

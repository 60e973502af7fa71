"""The NVML calls of the agent, answered by the driver or by a file with recorded or hand-written answers.

A call is a name and a GPU; its answer is a JSON value. The reader knows nothing else of NVML, so a file of answers can
simulate a machine with many GPUs, including every error code and a driver that hangs.

A replay file has one JSON object per line with the answers of one call, in order; the last answer repeats:

    {"call": "count", "answers": [2]}
    {"call": "temperature_c", "gpu": 0, "answers": [41.0, 43.5, {"error": 15}]}
    {"call": "recovery_action", "gpu": 1, "answers": [0, {"hang_s": 600}]}
    {"call": "events", "answers": [[], [{"type": 8, "data": 79, "gpu": 0, "pci": "00000000:18:00.0"}]]}

A call without a line is not supported by the driver.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

try:
    import pynvml
except ModuleNotFoundError:
    pynvml = None

NOT_SUPPORTED = 3
# FUNCTION_NOT_FOUND, NO_DATA, version mismatch, deprecated
UNSUPPORTED_CODES = frozenset({NOT_SUPPORTED, 13, 21, 25, 26})
GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND, UNKNOWN = 15, 16, 28, 999
# UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH
DRIVER_GONE_CODES = frozenset({1, 9, 12, 18})

# Read every time.
FAST = ("temperature_c", "power_w", "memory_used", "ecc_uncorrected", "recovery_action")
# Read every sixth time: slow values, and values that need a call per link.
SLOW = (
    "ecc_corrected", "ecc_uncorrected_ever", "remapped", "nvlinks", "nvlink_errors", "pcie_replays", "pcie_width",
    "pcie_width_max", "pcie_gen", "pcie_gen_max", "utilization", "thermal_slowdown_ns", "power_brake_ns", "margin_c",
    "fabric",
)  # fmt: skip

FIELD_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
FIELD_SW_THERMAL_NS, FIELD_HW_THERMAL_NS, FIELD_POWER_BRAKE_NS = 269, 270, 271
NVLINKS_MAX = 18
NVLINK_COUNTERS = (0, 1, 2)  # data link: replay, recovery, CRC flit
# Xid, GPU unavailable, recovery action changed; a driver refuses only those that it does not know.
EVENT_XID, EVENT_UNAVAILABLE, EVENT_RECOVERY = 0x8, 0x4000, 0x8000
EVENT_WAIT_MS = 1000

Event = dict[str, Any]  # {"type": int, "data": int, "gpu": int, "pci": str}


class NvmlRefused(Exception):
    """A call that NVML answered with an error code."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with NVML error {code}")
        self.call, self.code = call, code


class Answers(Protocol):
    """Answers calls, which may block, and waits for events for about a second."""

    def ask(self, call: str, gpu: int) -> Any:
        """Raises `NvmlRefused`."""

    def events(self) -> list[Event]:
        """Return the events since the last call. Raises `NvmlRefused` if the driver has no events."""


class Replay:
    """Answers from a file. Raises ValueError that names a malformed line."""

    def __init__(self, path: Path) -> None:
        self._lines: dict[tuple[str, int], list[Any]] = {}
        self._asked: dict[tuple[str, int], int] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                key = (str(entry["call"]), int(entry.get("gpu", -1)))
                answers = list(entry["answers"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: not a recorded call ({error!r}): {line[:200]}") from error
            if not answers:
                raise ValueError(f"{path}:{number}: no answers")
            self._lines[key] = answers

    def ask(self, call: str, gpu: int) -> Any:
        key = (call, gpu)
        answers = self._lines.get(key)
        if answers is None:
            raise NvmlRefused(call, NOT_SUPPORTED)
        turn = self._asked.get(key, 0)
        self._asked[key] = turn + 1
        answer = answers[min(turn, len(answers) - 1)]
        if isinstance(answer, dict):
            time.sleep(float(answer.get("hang_s", 0.0)))
            if "error" in answer:
                raise NvmlRefused(call, int(answer["error"]))
            return answer.get("value")
        return answer

    def events(self) -> list[Event]:
        if self._asked.get(("events", -1), 0) >= len(self._lines.get(("events", -1), ())):
            raise NvmlRefused("events", NOT_SUPPORTED)
        return list(self.ask("events", -1))


class Driver:
    """Answers from the NVIDIA driver. Raises `NvmlRefused` if it cannot be opened."""

    def __init__(self) -> None:
        if pynvml is None:
            raise NvmlRefused("import pynvml", 12)
        self._call("init", pynvml.nvmlInit)
        self._events: Any = None

    def ask(self, call: str, gpu: int) -> Any:
        if call == "count":
            return self._call(call, pynvml.nvmlDeviceGetCount)
        handle = self._call(call, lambda: pynvml.nvmlDeviceGetHandleByIndex(gpu))
        return self._call(call, lambda: _QUESTIONS[call](handle))

    def events(self) -> list[Event]:
        if self._events is None:
            self._events = self._call("events", self._register)
        try:
            data = pynvml.nvmlEventSetWait_v2(self._events, EVENT_WAIT_MS)
            index = pynvml.nvmlDeviceGetIndex(data.device)
            pci = _text(pynvml.nvmlDeviceGetPciInfo(data.device).busId)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return []
            raise NvmlRefused("events", int(error.value)) from error
        return [{"type": int(data.eventType), "data": int(data.eventData), "gpu": int(index), "pci": pci}]

    def _register(self) -> Any:
        events = pynvml.nvmlEventSetCreate()
        registered = 0
        for gpu in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
            known = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
            wanted = known & (EVENT_XID | EVENT_UNAVAILABLE | EVENT_RECOVERY)
            if wanted:
                pynvml.nvmlDeviceRegisterEvents(handle, wanted, events)
                registered += 1
        if not registered:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return events

    def _call(self, call: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except pynvml.NVMLError as error:
            raise NvmlRefused(call, int(error.value)) from error


# ---------------------------------------------------------------- queries of the driver


def _field(handle: Any, field: int) -> int:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
    if value.nvmlReturn:
        raise pynvml.NVMLError(value.nvmlReturn)
    member = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}[value.valueType]
    return int(getattr(value.value, member))


def _nvlinks(handle: Any) -> tuple[int, int]:
    """Return the number of links that are (up, down). NVML refuses the numbers of links that a board does not have."""
    states = []
    for link in range(NVLINKS_MAX):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError as error:
            if not states or error.value not in (NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            break
    return sum(state == 1 for state in states), sum(state != 1 for state in states)


def _nvlink_errors(handle: Any) -> int:
    up, down = _nvlinks(handle)
    return sum(
        pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
        for link in range(up + down)
        for counter in NVLINK_COUNTERS
    )


def _fabric(handle: Any) -> tuple[int, int]:
    """Return (state, health mask)."""
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    return int(info.state), int(info.healthMask)


def _ecc(handle: Any, kind: str, counter: str) -> int:
    kinds = {"corrected": "NVML_MEMORY_ERROR_TYPE_CORRECTED", "uncorrected": "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"}
    counters = {"volatile": "NVML_VOLATILE_ECC", "aggregate": "NVML_AGGREGATE_ECC"}
    total = pynvml.nvmlDeviceGetTotalEccErrors(handle, getattr(pynvml, kinds[kind]), getattr(pynvml, counters[counter]))
    return int(total)


_QUESTIONS: Mapping[str, Callable[[Any], Any]] = {
    "uuid": lambda h: _text(pynvml.nvmlDeviceGetUUID(h)),
    "temperature_c": lambda h: float(pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU)),
    "power_w": lambda h: pynvml.nvmlDeviceGetPowerUsage(h) / 1000,
    "memory_used": lambda h: int(pynvml.nvmlDeviceGetMemoryInfo(h).used),
    "ecc_uncorrected": lambda h: _ecc(h, "uncorrected", "volatile"),
    "recovery_action": lambda h: _field(h, FIELD_RECOVERY_ACTION),
    "ecc_corrected": lambda h: _ecc(h, "corrected", "volatile"),
    "ecc_uncorrected_ever": lambda h: _ecc(h, "uncorrected", "aggregate"),
    "remapped": lambda h: list(pynvml.nvmlDeviceGetRemappedRows(h)),
    "nvlinks": _nvlinks,
    "nvlink_errors": _nvlink_errors,
    "pcie_replays": lambda h: int(pynvml.nvmlDeviceGetPcieReplayCounter(h)),
    "pcie_width": lambda h: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(h)),
    "pcie_width_max": lambda h: int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(h)),
    "pcie_gen": lambda h: int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie_gen_max": lambda h: int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(h)),
    "utilization": lambda h: int(pynvml.nvmlDeviceGetUtilizationRates(h).gpu),
    "thermal_slowdown_ns": lambda h: _field(h, FIELD_SW_THERMAL_NS) + _field(h, FIELD_HW_THERMAL_NS),
    "power_brake_ns": lambda h: _field(h, FIELD_POWER_BRAKE_NS),
    "margin_c": lambda h: float(pynvml.nvmlDeviceGetMarginTemperature(h)),
    "fabric": _fabric,
}


def _text(raw: str | bytes) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw

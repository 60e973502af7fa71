"""Reads the GPUs in a separate process: `python -m holdfast.agent.collectors.nvml_reader INTERVAL_S DEADLINE_S [REPLAY]`.

A driver call can block for a minute when a GPU fails, and a thread cannot be cancelled; a process can be killed. Each GPU has
its own thread, so that one failed GPU does not hide the others. A GPU that has not answered by the deadline is reported with
the pending call, and is not queried again until the call returns.

Prints JSON objects, one per line, on standard output:

    {"at": …, "gpus": [{…FAST…}], "health": [{…SLOW…}], "late": [{"gpu": 0, "call": "power_w"}], "refused": [[0, "fabric", 10]]}
    {"at": …, "event": {"type": 8, "data": 79, "gpu": 0, "pci": "00000000:18:00.0"}}

Exits with code 3 and a message on standard error if there is no driver or no GPU (any more).
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from holdfast.agent.collectors.nvml_calls import (
    DRIVER_GONE_CODES,
    EVENT_XID,
    FAST,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    RESET_REQUIRED,
    SLOW,
    UNKNOWN,
    UNSUPPORTED_CODES,
    Answers,
    Driver,
    NvmlRefused,
    Replay,
)

NO_GPUS = 3
SLOW_EVERY = 6
UNKNOWN_READINGS_MAX = 2  # a single "unknown error" can be transient; several in a row are the answer of a lost GPU
_ACTION_RESET = 1


@dataclass(slots=True)
class Reading:
    """One reading of one GPU. Values that are missing in `values` were refused or are not supported."""

    gpu: int
    uuid: str
    values: dict[str, Any] = field(default_factory=dict)
    refused: list[tuple[str, int]] = field(default_factory=list)
    lost: bool = False
    driver_gone: int = 0
    slow: bool = False
    number: int = 0  # number of the answered request


class Gpu:
    """One GPU with the thread that queries it."""

    def __init__(self, index: int, answers: Answers) -> None:
        self.index = index
        self.asking = ""  # the pending call, "" if idle
        self._answers = answers
        self._uuid = f"gpu-{index}"
        self._unknown_in_a_row = 0
        self._number = 0
        self._requests: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name=f"gpu-{index}").start()

    def request(self, *, slow: bool) -> None:
        """Request a reading, unless the last one is still pending."""
        if not self.asking:
            self.asking = "uuid"
            self._number += 1
            self._requests.put((self._number, slow))

    def take(self, deadline: float) -> Reading | None:
        """Return the answer to the last request; waits until the monotonic time `deadline`. Late answers are dropped."""
        while True:
            try:
                reading = self._readings.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if reading.number == self._number:
                return reading

    def nothing(self, *, slow: bool) -> Reading:
        """Return the reading of a GPU that does not answer: present, without values."""
        return Reading(self.index, self._uuid, slow=slow)

    def _work(self) -> None:
        while True:
            number, slow = self._requests.get()
            reading = self._read(slow)
            reading.number = number
            self.asking = ""
            self._readings.put(reading)

    def _read(self, slow: bool) -> Reading:
        reading = Reading(self.index, self._uuid, slow=slow)
        unknown = False
        for call in ("uuid", *FAST, *(SLOW if slow else ())):
            self.asking = call
            try:
                value = self._answers.ask(call, self.index)
            except NvmlRefused as refused:
                if refused.code in DRIVER_GONE_CODES:
                    reading.driver_gone = refused.code
                    break
                if refused.code in (GPU_IS_LOST, GPU_NOT_FOUND):
                    reading.lost = True
                    break
                if refused.code == RESET_REQUIRED:
                    reading.values["recovery_action"] = _ACTION_RESET
                if refused.code not in UNSUPPORTED_CODES:
                    reading.refused.append((call, refused.code))
                unknown = unknown or refused.code == UNKNOWN
            else:
                if call == "uuid":
                    self._uuid = reading.uuid = str(value)
                else:
                    reading.values.setdefault(call, value)
        self._unknown_in_a_row = self._unknown_in_a_row + 1 if unknown else 0
        reading.lost = reading.lost or self._unknown_in_a_row >= UNKNOWN_READINGS_MAX
        return reading


def main() -> None:
    interval_s, deadline_s = float(sys.argv[1]), float(sys.argv[2])
    try:
        answers: Answers = Replay(Path(sys.argv[3])) if len(sys.argv) > 3 else Driver()
        count = int(answers.ask("count", -1))
    except (NvmlRefused, ValueError, TypeError, OSError) as error:
        _leave(f"NVML: {error}")
    if count <= 0:
        _leave("NVML: the driver has no GPU")
    gpus = [Gpu(index, answers) for index in range(count)]
    wake = threading.Event()
    threading.Thread(target=_watch_events, args=(answers, wake), daemon=True, name="events").start()
    readings = 0
    while True:
        started = time.monotonic()
        _read_all(gpus, deadline_s, slow=readings % SLOW_EVERY == 0)
        readings += 1
        wake.wait(max(0.0, interval_s - (time.monotonic() - started)))
        wake.clear()


def _read_all(gpus: list[Gpu], deadline_s: float, *, slow: bool) -> None:
    for gpu in gpus:
        gpu.request(slow=slow)
    deadline = time.monotonic() + deadline_s
    readings, late, health = list[Reading](), list[dict[str, Any]](), list[Reading]()
    for gpu in gpus:
        reading = gpu.take(deadline)
        if reading is None:
            late.append({"gpu": gpu.index, "call": gpu.asking})
        else:
            readings.append(reading)
        health.append(reading or gpu.nothing(slow=slow))
    gone = next((reading.driver_gone for reading in readings if reading.driver_gone), 0)
    if gone:
        _leave(f"NVML: the driver is no longer available (error {gone})")
    _print(
        {
            "at": time.time(),
            "gpus": [_row(reading, FAST) for reading in readings],
            "health": [_row(reading, SLOW) for reading in health if reading.slow],
            "late": late,
            "refused": [[reading.gpu, call, code] for reading in readings for call, code in reading.refused],
        }
    )


def _row(reading: Reading, calls: tuple[str, ...]) -> dict[str, Any]:
    values = {call: reading.values[call] for call in calls if call in reading.values}
    head = {"gpu": reading.gpu, "uuid": reading.uuid, "lost": reading.lost, "rejected": len(reading.refused)}
    return {**head, **values}


def _watch_events(answers: Answers, wake: threading.Event) -> None:
    """Print an Xid immediately. Any event triggers a reading."""
    while True:
        try:
            events = answers.events()
        except NvmlRefused as refused:
            if refused.code not in UNSUPPORTED_CODES:
                _print(
                    {"at": time.time(), "gpus": [], "health": [], "late": [], "refused": [[-1, "events", refused.code]]}
                )
            return
        for event in events:
            if event["type"] == EVENT_XID:
                _print({"at": time.time(), "event": event})
            wake.set()


_print_lock = threading.Lock()


def _print(record: dict[str, Any]) -> None:
    with _print_lock:
        print(json.dumps(record), flush=True)  # noqa: T201


def _leave(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)  # noqa: T201
    sys.exit(NO_GPUS)


if __name__ == "__main__":
    main()

"""Reads why a worker failed: its error file, in the format of torchelastic, as the worker template or torch's `@record` writes
it, or what the C++ runtime printed before it aborted the process."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.agent.workers.apart import open_untrusted
from holdfast.domain.signals import WorkerError

FILE_BYTES_MAX = 1 << 20
MESSAGE_CHARS_MAX = 4096
FRAMES_MAX = 40
FRAME_CHARS_MAX = 1024
# Exceptions of reading a malformed file; the script can write any content.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
CALLS_MAX = 1024
CALL_CHARS_MAX = 220
SEQ_MAX = 1 << 62

# Of libstdc++, for an exception that no thread has caught. torch's watchdog of NCCL ends a process in this way. The frames that
# torch appends are not part of the message; faulthandler may have printed much after it.
_UNCAUGHT = re.compile(
    r"^terminate called after throwing an instance of '(?P<type>[^'\n]+)'\n"
    r"  what\(\):  (?P<message>.*?)(?=\n(?:Exception raised from |frame #\d|\n|Fatal Python error: |terminate called )|\Z)",
    re.MULTILINE | re.DOTALL,
)
_WATCHDOGS = re.compile(r"\A\[PG.{0,200}? watchdog thread terminated with exception: ", re.IGNORECASE | re.DOTALL)
LOG_BYTES_MAX = 64 << 10
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def read_error_file(path: Path, uid: int | None = None) -> WorkerError | None:
    """Return the exception in the file; None if the file is missing or malformed. The exit is reported in either case.

    `uid`: the user of the worker, if it is not the user of this process."""
    try:
        with open(path if uid is None else open_untrusted(path, uid), "rb") as file:
            record = json.loads(file.read(FILE_BYTES_MAX))
        return _parse(record["message"])
    except _UNREADABLE:
        return None


def read_uncaught(log: Path) -> WorkerError | None:
    """Return the C++ exception because of which the runtime aborted the process, from its log; None if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
            text = file.read(LOG_BYTES_MAX).decode(errors="replace")
    except OSError:
        return None
    uncaught = list(_UNCAUGHT.finditer(text))
    if not uncaught:
        return None
    found = uncaught[-1]
    message = _WATCHDOGS.sub("", found["message"])
    return WorkerError(
        _text(found["type"].replace("::", "."), FRAME_CHARS_MAX), _text(message.strip(), MESSAGE_CHARS_MAX)
    )


def _parse(message: object) -> WorkerError:
    if isinstance(message, str):  # torch writes a bare string if the child left no details
        return WorkerError(*_split(message))
    if not isinstance(message, dict):
        raise TypeError(f"a message or an object, not {message!r}")
    extra = message.get("extraInfo", {})
    if isinstance(ours := extra.get("exception"), dict):
        frames = tuple(_text(frame, FRAME_CHARS_MAX) for frame in list(ours["frames"])[-FRAMES_MAX:])
        kind, text = _text(ours["type"], FRAME_CHARS_MAX), _text(ours["message"], MESSAGE_CHARS_MAX)
        calls = _calls(ours.get("collectives", ()))
        return WorkerError(kind, text, frames, _time(ours["at"]), *calls, uptime_s=_time(ours.get("uptime_s", 0)))
    kind, text = _split(str(message["message"]))
    return WorkerError(kind, text, _frames(str(extra.get("py_callstack", ""))), _time(extra.get("timestamp", 0)))


def _time(value: object) -> float:
    """Return the time; 0.0, which means unknown, for an invalid value, so that the exception is reported in any case."""
    try:
        at = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return at if math.isfinite(at) and at > 0 else 0.0


def _text(value: object, chars_max: int) -> str:
    """Return text that can be encoded. A message with a file name that is not UTF-8 contains lone surrogates."""
    return str(value)[:chars_max].encode(errors="replace").decode()


def _calls(rows: Iterable[Sequence[object]]) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
    """Return the newest collectives, rows of [group, number, call], as columns; empty columns if a row is malformed."""
    try:
        listed = [
            (_text(group, CALL_CHARS_MAX), int(str(seq)), _text(call, CALL_CHARS_MAX)) for group, seq, call in rows
        ]
    except (TypeError, ValueError):
        return (), (), ()
    listed = [row for row in listed[:CALLS_MAX] if 0 <= row[1] <= SEQ_MAX]
    return tuple(row[0] for row in listed), tuple(row[1] for row in listed), tuple(row[2] for row in listed)


def _split(message: str) -> tuple[str, str]:
    """Split a message of the form "ValueError: text" into type and text. Without a type, the type is ""."""
    message = _text(message, MESSAGE_CHARS_MAX)
    kind, colon, text = message.partition(": ")
    return (kind, text) if colon and kind.isidentifier() else ("", message)


def _frames(callstack: str) -> tuple[str, ...]:
    found = [f"{match['file']}:{match['line']} {match['function']}" for match in _FRAME.finditer(callstack)]
    return tuple(_text(frame, FRAME_CHARS_MAX) for frame in found[-FRAMES_MAX:])

"""Reads why a worker failed: its error file, in the format of torchelastic, as the worker template or torch's `@record` writes
it, or what it printed at its end: the C++ runtime before it aborts the process, a program that does not start from the
template, or a library that catches exceptions and ends the process (Hydra)."""

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
# An exception that was printed is the cause of the end if at most this many lines follow: a script may go on after it.
LINES_AFTER_MAX = 3
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # of torch, before each line of an exception
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?P<frames>(?:[ \t].*\n)+)"
    r"(?P<type>[^\W\d][\w.]*)(?:: (?P<message>.*(?:\n[^\[\n].*){0,40}))?$",
    re.MULTILINE,
)
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


def read_printed(log: Path, *, aborted: bool) -> WorkerError | None:
    """Return the exception that ended the process, from the end of its log; None if there is none. `aborted`: the C++ runtime
    aborted the process."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
            text = file.read(LOG_BYTES_MAX).decode(errors="replace")
    except OSError:
        return None
    if aborted:
        if not (uncaught := list(_UNCAUGHT.finditer(text))):
            return None
        kind, message = uncaught[-1]["type"].replace("::", "."), _WATCHDOGS.sub("", uncaught[-1]["message"])
        return WorkerError(_text(kind, FRAME_CHARS_MAX), _text(message.strip(), MESSAGE_CHARS_MAX))
    text = _RANK_PREFIX.sub("", text)
    if not (printed := list(_TRACEBACK.finditer(text))):
        return None
    last = printed[-1]
    if sum(1 for line in text[last.end() :].splitlines() if line.strip()) > LINES_AFTER_MAX:
        return None
    message = (last["message"] or "").strip()
    return WorkerError(_text(last["type"], FRAME_CHARS_MAX), _text(message, MESSAGE_CHARS_MAX), _frames(last["frames"]))


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

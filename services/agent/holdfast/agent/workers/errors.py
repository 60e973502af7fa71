"""Reads the error file that a worker left: torchelastic's format, as our template or torch's own `@record` writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from holdfast.domain.signals import WorkerError

FILE_BYTES_MAX = 1 << 20
MESSAGE_CHARS_MAX = 4096
FRAMES_MAX = 40

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def read_error_file(path: Path) -> WorkerError | None:
    """The exception in it; None when there is no file, or none that can be understood: the exit itself is reported anyway."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(FILE_BYTES_MAX))
        return _parse(record["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse(message: object) -> WorkerError:
    if isinstance(message, str):  # torch writes a bare string for a child that could not say more
        return WorkerError(*_split(message))
    if not isinstance(message, dict):
        raise TypeError(f"a message or an object, not {message!r}")
    extra = message.get("extraInfo", {})
    at = float(extra.get("timestamp", 0))
    if isinstance(ours := extra.get("exception"), dict):
        frames = tuple(str(frame) for frame in ours["frames"][-FRAMES_MAX:])
        return WorkerError(str(ours["type"]), str(ours["message"])[:MESSAGE_CHARS_MAX], frames, float(ours["at"]))
    kind, text = _split(str(message["message"]))
    return WorkerError(kind, text, _frames(str(extra.get("py_callstack", ""))), at)


def _split(message: str) -> tuple[str, str]:
    """torch words it "ValueError: no such thing"; a message without a type is kept whole."""
    kind, colon, text = message.partition(": ")
    return (kind, text[:MESSAGE_CHARS_MAX]) if colon and kind.isidentifier() else ("", message[:MESSAGE_CHARS_MAX])


def _frames(callstack: str) -> tuple[str, ...]:
    found = [f"{match['file']}:{match['line']} {match['function']}" for match in _FRAME.finditer(callstack)]
    return tuple(found[-FRAMES_MAX:])

"""torchelastic's error file: the exception that ended a worker. The first handler that catches the exception writes it.

The format is torch's own, which torchrun's failure summary reads, with the exception's type and frames added for detectors.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

ENV: Final = "TORCHELASTIC_ERROR_FILE"
MESSAGE_CHARS_MAX: Final = 4096
CALLSTACK_CHARS_MAX: Final = 64 * 1024  # at most 12 bytes each in JSON; the agent reads at most 1 MiB
FRAMES_MAX: Final = 40
GROUPS_MAX: Final = 64
CALLS_MAX: Final = 8  # per group


def write(path: str, error: BaseException) -> None:
    """Write the file atomically. An empty path writes nothing. A failure to write is printed to standard error."""
    if not path:
        return
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    text = "\n".join([_message(error), *map(str, getattr(error, "__notes__", ()))])[:MESSAGE_CHARS_MAX]
    record: dict[str, Any] = {
        "message": {
            "message": f"{type(error).__name__}: {text}",
            "extraInfo": {
                "py_callstack": _ends("".join(traceback.format_exception(error)), CALLSTACK_CHARS_MAX),
                "timestamp": str(int(time.time())),
                "exception": {
                    "type": _type_name(error),
                    "message": text,
                    "frames": frames[-FRAMES_MAX:],
                    "at": time.time(),
                    "uptime_s": time.monotonic(),
                    "collectives": _collectives(),
                },
            },
        }
    }
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(record))
        temporary.replace(path)
    except OSError as failed:  # the traceback, printed next, matters more than the file
        print(f"holdfast: the error file {path} could not be written: {failed}", file=sys.stderr)  # noqa: T201


def _message(error: BaseException) -> str:
    """Return the message; a placeholder if the script's own exception class cannot make one."""
    try:
        return str(error)
    except Exception as failed:
        return f"<its message could not be made: {type(failed).__name__}>"


def _ends(text: str, chars_max: int) -> str:
    """Return the text, or its beginning and its end if it is longer."""
    half = chars_max // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"


def _collectives() -> list[tuple[str, int, str]]:
    """Return the last collectives that this rank has entered: (group, number, operation and sizes), from torch's recorder.

    They show whether this rank has skipped a collective. Empty if torch is not loaded or records no collectives.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return []
    calls: dict[str, dict[int, str]] = {}
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        try:
            recorded = json.loads(getattr(c10d, dump)()).get("entries", [])
            for entry in recorded:
                if not entry["is_p2p"]:
                    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
                    of_group = calls.setdefault(str(entry["process_group"][0]), {})
                    of_group[int(entry["collective_seq_id"])] = (
                        f"{name} {entry['input_dtypes']} {entry['input_sizes']}"[:200]
                    )
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
            # Another torch version may have another format, and the script's exception must be reported in any case.
            continue
    return [
        (group, seq, of_group[seq])
        for group, of_group in sorted(calls.items())[:GROUPS_MAX]
        for seq in sorted(of_group)[-CALLS_MAX:]
    ]


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )

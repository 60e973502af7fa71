"""torchelastic's error file: the exception that ended a worker, for its launcher. Written by whoever catches it first.

The format is torch's own, which torchrun's failure summary reads; the exception's type and frames are added for detectors.
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
FRAMES_MAX: Final = 40


def write(path: str, error: BaseException) -> None:
    """Whole or not at all. An empty path: nobody wants it. A file that cannot be written is said on standard error."""
    if not path:
        return
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    text = str(error)[:MESSAGE_CHARS_MAX]
    record: dict[str, Any] = {
        "message": {
            "message": f"{type(error).__name__}: {text}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
                "exception": {
                    "type": _type_name(error),
                    "message": text,
                    "frames": frames[-FRAMES_MAX:],
                    "at": time.time(),
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


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )

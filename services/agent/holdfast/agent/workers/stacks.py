"""Stack samples as text → the innermost frames of the main thread. Pure."""

from __future__ import annotations

import re

FRAMES_MAX = 12
FRAME_CHARS_MAX = 160

_PYSPY_THREAD = re.compile(r'Thread .*: "(?P<name>.*)"')
_FAULTHANDLER_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


def of_pyspy(text: str) -> str:
    """The main thread's frames of `py-spy dump`."""
    frames: list[str] = []
    main = False
    for line in text.splitlines():
        if (thread := _PYSPY_THREAD.match(line)) is not None:
            main = thread["name"] == "MainThread"
        elif main and line.startswith("    ") and len(frames) < FRAMES_MAX:
            frames.append(line.strip()[:FRAME_CHARS_MAX])
    return "\n".join(frames)


def of_faulthandler(text: str) -> str:
    """The frames of the thread that faulthandler prints last: the main one."""
    last = re.split(r"^(?:Current )?[Tt]hread .*$", text, flags=re.MULTILINE)[-1]
    frames = [f"{f['function']} ({f['file']}:{f['line']})" for f in _FAULTHANDLER_FRAME.finditer(last)]
    return "\n".join(frame[:FRAME_CHARS_MAX] for frame in frames[:FRAMES_MAX])

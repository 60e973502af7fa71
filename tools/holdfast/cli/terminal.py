"""The console of every command: shows control characters in texts from other sources as text.

Names, reasons, exception texts and paths come from scripts, kernels and other machines. A control character in them could
move the cursor, rename the window or forge lines; it is shown as its number instead.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# All of C0 except tab and line feed, DEL, C1, and characters that reorder text: "\u202e" reverses the rest of a line.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


_LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})  # EIO: of a terminal that was closed


class Terminal(Console):
    """rich's console, but control characters in texts are shown as `\\x1b`. Styles and live displays are not affected."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and _CONTROL.search(segment.text):
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment


def worker_output(line: str) -> Text:
    """Return a line that a worker has written, with its colours, but without other escape sequences."""
    return Text.from_ansi(line.replace("\r", ""))


def visible(text: str) -> str:
    """Return text in which control characters are shown as their numbers."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@contextmanager
def output_may_be_lost() -> Iterator[None]:
    """Let the command go on if its standard output cannot be written, on a full disk or in a closed terminal: what is printed
    then is dropped. For a command with whose end a job may end."""
    if (stream := sys.stdout) is None:
        yield
        return
    try:
        with redirect_stdout(cast("TextIO", _Lossy(stream))):
            yield
    finally:
        try:
            stream.flush()
        except OSError as error:
            if error.errno in _LOST:  # else the interpreter would fail at its own flush, and change the exit code
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


class _Lossy:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in _LOST:
                raise

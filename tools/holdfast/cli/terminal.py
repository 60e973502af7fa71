"""The console of every command: shows control characters in texts from other sources as text.

Names, reasons, exception texts and paths come from scripts, kernels and other machines. A control character in them could
move the cursor, rename the window or forge lines; it is shown as its number instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# All of C0 except tab and line feed, DEL, C1, and characters that reorder text: "\u202e" reverses the rest of a line.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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

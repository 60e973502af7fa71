"""Layout of tables that never truncates text, on a terminal of any width and on a pipe.

Names, ids and numbers are never broken, so that they can be copied. If a terminal is too narrow for all columns, those that do
not fit are printed below their row, indented. The same applies to prose whose column would be too narrow to read:

    id               job            kind          state     node    rank  action
        generation · cause
    i-1a2009b9af8-1  gpt-two-nodes  worker_crash  resolved  node-2  1     restart
        generation 1 · Rank 1 on node-2 was killed by SIGKILL after step 59.

On a pipe a row is one line of any length, which suits grep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from holdfast.cli.terminal import Terminal

PIPE_WIDTH = 1_000_000
PROSE_MIN = 30  # minimum width of a column with sentences
GAP = "  "
INDENT = "    "
EMPTY = "–"
# Columns that are printed below a row without their name; the value of any other column has its name before it.
PROSE = frozenset({"", "reason", "cause", "verdict", "detail", "problem"})


def screen() -> Console:
    """Console for standard output. Names and messages are shown unchanged: `:100:` is a line number, not an emoji."""
    console = Terminal(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


@dataclass(frozen=True, slots=True)
class Listing:
    """A table. Every row has one cell for each of `columns`; only the last column may be wrapped."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]
    title: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(PROSE_MIN, options.max_width), min(_joined(self._widths()), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        widths = self._widths()
        shown = _leading(widths, options.max_width)
        header = [Text(column, style="bold") for column in self.columns]
        whole = shown == len(widths)
        for row in (header, *self.rows):
            if whole:
                yield from _in_place(row, widths, console, options)
                continue
            yield _line(row[:shown], widths)
            below = header[shown:] if row is header else self._below(row, shown)
            yield from _below(below, console, options)

    def _widths(self) -> list[int]:
        cells = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.columns)
        return [max([cell_len(name), *map(_width, column)]) for name, column in zip(self.columns, cells, strict=True)]

    def _below(self, row: Sequence[Text], shown: int) -> list[Text]:
        """Return the non-empty cells of a row in the columns that do not fit."""
        left = [(name, cell) for name, cell in zip(self.columns, row, strict=True)][shown:]
        said = [(name, cell) for name, cell in left if cell.plain not in ("", EMPTY)]
        return [cell if name in PROSE else Text.assemble((f"{name} ", "dim"), cell) for name, cell in said]


@dataclass(frozen=True, slots=True)
class Fields:
    """One object: a name and a value on each line. A long value is wrapped next to its name."""

    fields: tuple[tuple[str, RenderableType], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = max((cell_len(name) for name, _ in self.fields), default=0) + len(GAP)
        room = options.update(width=max(1, options.max_width - margin))
        for name, value in self.fields:
            label = Text(name.ljust(margin), style="bold")
            for line in console.render_lines(value, room, pad=False):
                yield from label.render(console)
                yield from line
                yield Segment.line()
                label = Text(" " * margin)


def _leading(widths: Sequence[int], room: int) -> int:
    """Return how many columns fit on a row's first line: all if the last one is wide enough to be read; at least one."""
    *fixed, last = widths
    if _joined([*fixed, min(last, PROSE_MIN)]) <= room:
        return len(widths)
    return max(1, *(count for count in range(len(widths)) if _joined(widths[:count]) <= room))


def _joined(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * max(0, len(widths) - 1)


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.splitlines()), default=0)


def _in_place(row: Sequence[Text], widths: Sequence[int], console: Console, options: ConsoleOptions) -> Iterable[Text]:
    """Return the lines of a row whose last cell is wrapped inside its column."""
    margin = _joined([*widths[:-1], 0])
    first, *more = row[-1].wrap(console, max(1, options.max_width - margin)) or [Text()]
    yield _line([*row[:-1], first], widths)
    yield from _indented(" " * margin, more)


def _below(cells: Sequence[Text], console: Console, options: ConsoleOptions) -> Iterable[Text]:
    lines = Text(" · ").join(cells).wrap(console, max(1, options.max_width - len(INDENT)))
    yield from _indented(INDENT, lines)


def _indented(margin: str, lines: Iterable[Text]) -> Iterable[Text]:
    for line in lines:
        line.rstrip()
        if line.plain:
            yield Text(margin) + line


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    """Return the cells as one line. Only a single column can be wider than the terminal and is wrapped."""
    padded = []
    for cell, width in zip(cells, widths, strict=False):
        padded.append(cell := Text(" ").join(cell.split("\n")))
        cell.pad_right(max(0, width - cell.cell_len))
    line = Text(GAP, overflow="fold").join(padded)
    line.rstrip()
    return line

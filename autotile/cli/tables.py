"""Tables of the command line: thin rules, aligned figures, and a fall-back for narrow terminals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotile.core.text import NOTHING

RIGHT = ">"
"""Put before a heading: figures under it are aligned at their ends."""

COLUMN_GAP = 3
"""Characters between two columns of a table: two of padding and the divider."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The same without the spaces that fill lines up to the width of their table or of the terminal."""

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it line by line."""
        for line in Segment.split_lines(console.render(self.renderable, options)):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                yield from (*line, Segment(last.text.rstrip(), last.style))
            yield Segment.line()


def table(*headings: str, wrap: bool = True) -> Table:
    """A table with a thin line under its headings.

    Parameters
    ----------
    *headings
        One a column; `RIGHT` before a heading aligns the column at the right.
    wrap
        Break texts that are too long; figures are never broken.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        figures = heading.startswith(RIGHT)
        made.add_column(
            plain_heading(heading),
            justify="right" if figures else "left",
            no_wrap=figures or not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    return made


def plain_heading(heading: str) -> str:
    """A heading as it is shown."""
    return heading.removeprefix(RIGHT)


def facts(rows: Iterable[tuple[str, RenderableType]], *, at_least: int = 0) -> Table:
    """Labels with what they say, one a line; the labels' column is ``at_least`` so many characters wide."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=at_least)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, value)
    return grid


def lines(texts: Iterable[str]) -> RenderableType:
    """Texts under one another; where one is broken, what follows keeps its indent."""
    bare = [(text.lstrip(), len(text) - len(text.lstrip())) for text in texts]
    return Group(*(Padding(Text(text, overflow="fold"), (0, 0, 0, indent), expand=False) for text, indent in bare))


def title(text: str) -> RenderableType:
    """A report's first line, with an empty line under it."""
    return Padding(Text(text, style="bold"), (0, 0, 1, 0), expand=False)


def below(renderable: RenderableType) -> RenderableType:
    """The same with an empty line above it."""
    return Padding(renderable, (1, 0, 0, 0), expand=False)


_HEAD_LINES = 2
"""Headings and the line under them."""
_INDENT = 2


@dataclass(frozen=True, slots=True)
class Listing:
    """A table that breaks no word: columns that do not fit move to lines of their own under each row.

    Attributes
    ----------
    headings
        As for `autotile.cli.tables.table`.
    rows
        One text a column, each on one line.
    movable
        Headings of the columns to move first, in order; others follow from the right, the first column never.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    movable: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many columns side by side as fit, and under each row what does not."""
        kept = self._kept(options.max_width)
        lines = console.render_lines(self._table(kept), options, pad=False)
        moved = [index for index in range(len(self.headings)) if index not in kept]
        for head in lines[:_HEAD_LINES]:
            yield from (*head, Segment.line())
        for line, row in zip(lines[_HEAD_LINES:], self.rows, strict=True):
            yield from (*line, Segment.line())
            details = list(self._details(row, moved))
            if details:
                yield Padding(facts(details, at_least=self._label_width(moved)), (0, 0, 0, _INDENT), expand=False)

    def _kept(self, most: int) -> list[int]:
        """Columns that stay side by side within so many characters."""
        columns = zip(map(plain_heading, self.headings), *self.rows, strict=True)
        widths = [max(map(cell_len, column)) for column in columns]
        kept = list(range(len(widths)))
        for index in self._moving_order():
            if sum(widths[column] for column in kept) + COLUMN_GAP * (len(kept) - 1) <= most:
                break
            kept.remove(index)
        return kept

    def _moving_order(self) -> list[int]:
        names = [plain_heading(heading) for heading in self.headings]
        first = [names.index(name) for name in self.movable if name in names]
        return first + [index for index in reversed(range(1, len(names))) if index not in first]

    def _table(self, kept: Sequence[int]) -> Table:
        made = table(*(self.headings[index] for index in kept), wrap=False)
        for row in self.rows:
            made.add_row(*(row[index] for index in kept))
        return made

    def _details(self, row: Sequence[str], moved: Sequence[int]) -> Iterator[tuple[str, str]]:
        for index in moved:
            if row[index] not in ("", NOTHING):
                yield plain_heading(self.headings[index]), row[index]

    def _label_width(self, moved: Sequence[int]) -> int:
        return max((len(plain_heading(self.headings[index])) for index in moved), default=0)

"""The look that all reports share: thin tables, aligned figures, no decoration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

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

"""Results on a terminal: tables with thin rules and aligned figures, and a layout for narrow terminals."""

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

from autotile.core.text import NOTHING, RIGHT, Part, Result, plain_heading, shown_text

COLUMN_GAP = 3
"""Characters between two columns of a table: two of padding and one of the divider."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Renderable without the trailing spaces that fill its lines up to the width of the table or of the terminal.

    Characters that a terminal would act upon are escaped.
    """

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render it line by line."""
        for rendered in Segment.split_lines(console.render(self.renderable, options)):
            line = [segment._replace(text=shown_text(segment.text)) for segment in rendered if not segment.control]
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                yield from (*line, Segment(last.text.rstrip(), last.style))
            yield Segment.line()


def table(*headings: str, wrap: bool = True) -> Table:
    """Return an empty table with a thin line under its headings.

    Parameters
    ----------
    *headings
        Heading of each column; the prefix `RIGHT` aligns the column at the right.
    wrap
        Whether texts that are too long are wrapped; figures never are.
    """
    empty = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        figures = heading.startswith(RIGHT)
        empty.add_column(
            plain_heading(heading),
            justify="right" if figures else "left",
            no_wrap=figures or not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    return empty


def render(result: Result) -> RenderableType:
    """Render the heading and the parts of a result."""
    heading, parts = result._heading(), [_rendered(part) for part in result._parts()]
    return Group(*([title(heading)] if heading else []), *parts[:1], *map(below, parts[1:]))


def _rendered(part: Part) -> RenderableType:
    if isinstance(part, str):
        return Text(shown_text(part, lines=True))
    if isinstance(part, list):
        return facts((label, text if isinstance(text, str) else lines(text)) for label, text in part)
    shown: RenderableType = Listing(part.headings, part.rows, part.movable)
    if part.is_wrapped:
        shown = table(*part.headings)
        for index, row in enumerate(part.rows):
            cells = (shown_text(cell, lines=True) for cell in row)
            shown.add_row(*cells, style=(part.styles[index] or None) if part.styles else None)
    return Group(Text(shown_text(part.caption)), shown) if part.caption else shown


def facts(rows: Iterable[tuple[str, RenderableType]], *, min_label_width: int = 0) -> Table:
    """Return labels with their values, one pair a line.

    Parameters
    ----------
    rows
        Labels and values; a value of several lines is a renderable, see `lines`.
    min_label_width
        Minimum width of the column of labels, in characters.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=min_label_width)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(shown_text(label), shown_text(value, lines=True) if isinstance(value, str) else value)
    return grid


def lines(texts: Iterable[str]) -> RenderableType:
    """Return texts below one another; the wrapped lines of a text keep its indentation."""
    bare = [(shown_text(text.lstrip()), len(text) - len(text.lstrip())) for text in texts]
    return Group(*(Padding(Text(text, overflow="fold"), (0, 0, 0, indent), expand=False) for text, indent in bare))


def title(text: str) -> RenderableType:
    """Return the first line of a result, with an empty line below."""
    return Padding(Text(shown_text(text), style="bold"), (0, 0, 1, 0), expand=False)


def below(renderable: RenderableType) -> RenderableType:
    """Return a renderable with an empty line above."""
    return Padding(renderable, (1, 0, 0, 0), expand=False)


_HEADING_LINES = 2
"""Headings, and the line under them."""
_INDENT = 2


@dataclass(frozen=True, slots=True)
class Listing:
    """Table that wraps no text: columns that do not fit move to lines of their own under each row.

    Attributes
    ----------
    headings
        As for `table`.
    rows
        Texts of the columns of each row.
    movable
        Headings of the columns to move first, in this order. The other columns follow from the right; the first column
        never moves.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    movable: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Escape the texts."""
        object.__setattr__(self, "rows", [tuple(map(shown_text, row)) for row in self.rows])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as many columns side by side as fit, and the others under each row."""
        kept = self._kept(options.max_width)
        lines = console.render_lines(self._table(kept), options, pad=False)
        moved = [index for index in range(len(self.headings)) if index not in kept]
        for head in lines[:_HEADING_LINES]:
            yield from (*head, Segment.line())
        for line, row in zip(lines[_HEADING_LINES:], self.rows, strict=True):
            yield from (*line, Segment.line())
            details = list(self._details(row, moved))
            if details:
                yield Padding(
                    facts(details, min_label_width=self._label_width(moved)), (0, 0, 0, _INDENT), expand=False
                )

    def _kept(self, max_width: int) -> list[int]:
        """Return the columns that fit side by side."""
        columns = zip(map(plain_heading, self.headings), *self.rows, strict=True)
        widths = [max(map(cell_len, column)) for column in columns]
        kept = list(range(len(widths)))
        for index in self._moving_order():
            if sum(widths[column] for column in kept) + COLUMN_GAP * (len(kept) - 1) <= max_width:
                break
            kept.remove(index)
        return kept

    def _moving_order(self) -> list[int]:
        names = [plain_heading(heading) for heading in self.headings]
        first = [names.index(name) for name in self.movable if name in names]
        return first + [index for index in reversed(range(1, len(names))) if index not in first]

    def _table(self, kept: Sequence[int]) -> Table:
        filled = table(*(self.headings[index] for index in kept), wrap=False)
        for row in self.rows:
            filled.add_row(*(row[index] for index in kept))
        return filled

    def _details(self, row: Sequence[str], moved: Sequence[int]) -> Iterator[tuple[str, str]]:
        for index in moved:
            if row[index] not in ("", NOTHING):
                yield plain_heading(self.headings[index]), row[index]

    def _label_width(self, moved: Sequence[int]) -> int:
        return max((len(plain_heading(self.headings[index])) for index in moved), default=0)

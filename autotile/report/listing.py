"""Many rows with columns of very different widths: one line each where they fit, a few labelled lines where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table

from autotile.report.layout import COLUMN_GAP, facts, plain_heading, table
from autotile.report.text import NOTHING

_HEAD_LINES = 2
"""Headings and the line under them."""
_INDENT = 2


@dataclass(frozen=True, slots=True)
class Listing:
    """A table that breaks no word: columns that do not fit move to lines of their own under each row.

    Attributes
    ----------
    headings
        As for `autotile.report.layout.table`.
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

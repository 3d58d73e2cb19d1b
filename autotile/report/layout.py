"""The look that all reports share: thin tables, aligned figures, no decoration."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

RIGHT = ">"
"""Put before a heading: figures under it are aligned at their ends."""


def table(*headings: str) -> Table:
    """A table with a thin line under its headings.

    Parameters
    ----------
    *headings
        One a column; `RIGHT` before a heading aligns the column at the right.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        figures = heading.startswith(RIGHT)
        made.add_column(
            heading.removeprefix(RIGHT),
            justify="right" if figures else "left",
            no_wrap=figures,
            overflow="fold",
        )
    return made


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Labels with what they say, one a line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, value)
    return grid


def title(text: str) -> RenderableType:
    """A report's first line, with an empty line under it."""
    return Padding(Text(text, style="bold"), (0, 0, 1, 0), expand=False)


def below(renderable: RenderableType) -> RenderableType:
    """The same with an empty line above it."""
    return Padding(renderable, (1, 0, 0, 0), expand=False)

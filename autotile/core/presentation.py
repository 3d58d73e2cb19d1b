"""Results of public functions: data, whose headline, facts and tables are stated once.

``repr``, notebooks and the command line render the same parts, and ``to_json`` returns the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotile.core.text import plural, shown_text

RIGHT = ">"
"""Prefix of a heading whose column is aligned at the right."""


def plain_heading(heading: str) -> str:
    """Return a heading without the prefix `RIGHT`."""
    return heading.removeprefix(RIGHT)


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Table of a result.

    Attributes
    ----------
    headings
        Heading of each column; the prefix `RIGHT` aligns the column at the right.
    rows
        Texts of the columns of each row.
    movable
        Headings of the columns that move first, in this order, to lines of their own under each row where the terminal
        is too narrow for all of them. The other columns follow from the right; the first one never moves.
    is_wrapped
        Whether texts that are too long are wrapped within their columns instead.
    styles
        Style of each row on a terminal, such as ``"bold red"``; empty for none.
    caption
        Line above the table; empty for none.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    movable: Sequence[str] = ()
    is_wrapped: bool = False
    styles: Sequence[str] = ()
    caption: str = ""


Facts = list[tuple[str, str | Sequence[str]]]
"""Labels with their texts; a text of several lines is a sequence of them."""
Part = str | Facts | ResultTable
"""A paragraph, facts or a table."""


class Result:
    """Base class of the results of public functions.

    A subclass states its headline, its title and its parts; dataclasses that derive from it need ``repr=False``.
    """

    __slots__ = ()

    def _headline(self) -> str:
        """Return one line with what was found; it states ``(replayed)`` if its times were not measured here."""
        raise NotImplementedError

    def _heading(self) -> str:
        """Return the line above the parts on a terminal; empty for none."""
        return ""

    def _parts(self) -> Iterable[Part]:
        """Return the paragraphs, facts and tables of the result."""
        return ()

    def to_json(self) -> Any:
        """Return JSON values: the document that the command line prints with ``--json``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {shown_text(self._headline())}>"

    def _repr_html_(self) -> str:
        return html_of(self._headline(), self._parts())


def html_of(headline: str, parts: Iterable[Part]) -> str:
    """Return a result as HTML for a notebook, with every text escaped and at most 100 rows of each table.

    There are no colours in it, so that it has those of the notebook's theme.
    """
    return "".join([f"<p><b>{_escaped(headline)}</b></p>", *map(_html_of, parts)])


_MAX_HTML_ROWS = 100
"""Rows that a notebook shows of a table; a study may have twenty thousand trials."""


def _escaped(text: str) -> str:
    from html import escape  # a program without a notebook does not need it

    return escape(shown_text(text, lines=True))


def _html_of(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{_escaped(part)}</p>"
    if isinstance(part, ResultTable):
        head = "".join(f"<th>{_escaped(plain_heading(heading))}</th>" for heading in part.headings)
        body = "".join(f"<tr>{_cells(row)}</tr>" for row in part.rows[:_MAX_HTML_ROWS])
        hidden = len(part.rows) - _MAX_HTML_ROWS
        left = f"<p>and {plural(hidden, 'more row')}</p>" if hidden > 0 else ""
        caption = f"<p>{_escaped(part.caption)}</p>" if part.caption else ""
        return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{left}"
    rows = ((label, text if isinstance(text, str) else "\n".join(text)) for label, text in part)
    return f"<table>{''.join(f'<tr><th>{_escaped(label)}</th>{_cells([text])}</tr>' for label, text in rows)}</table>"


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{_escaped(text)}</td>" for text in texts)

"""Display of results in interactive sessions: a one-line repr, and an HTML table in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autotile.core.text import shown_text


class Displayed:
    """Base class of the results of public functions.

    A subclass defines a headline and, for notebooks, facts or rows; ``__repr__`` and IPython's ``_repr_html_`` are
    derived from them. Dataclasses that derive from it need ``repr=False``.
    """

    __slots__ = ()

    def _headline(self) -> str:
        """Return one line that identifies the result; it states ``(replayed)`` if its times were not measured here."""
        raise NotImplementedError

    def _facts(self) -> Iterable[tuple[str, str]]:
        """Return pairs of a label and its text."""
        return ()

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        """Return the column headings and the rows of a table; no headings for a result without a table."""
        return (), ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {shown_text(self._headline())}>"

    def _repr_html_(self) -> str:
        """Return the headline, the facts and the rows as HTML, with every text escaped."""
        headings, rows = self._rows()
        facts = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in self._facts())
        head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts = [f"<p><b>{escape(self._headline())}</b></p>"]
        if facts:
            parts.append(f"<table>{facts}</table>")
        if head:
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return "".join(parts)

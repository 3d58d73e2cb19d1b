"""Display of results in an interactive session: a one-line repr and an HTML table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Displayed:
    """Base of the values that public functions return.

    A subclass states its headline and, for notebooks, facts or rows; `repr` and IPython's ``_repr_html_`` follow from
    them. Dataclasses that derive from it need ``repr=False``.
    """

    __slots__ = ()

    def _headline(self) -> str:
        """Return one line that identifies the value; it states ``(replayed)`` if the times were not measured here."""
        raise NotImplementedError

    def _facts(self) -> Iterable[tuple[str, str]]:
        """Return labels with their texts."""
        return ()

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        """Return column headings and rows of texts, for values that hold a list."""
        return (), ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks; every text is escaped."""
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

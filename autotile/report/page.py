"""One self-contained HTML page: escaped text, charts that are drawn when they are seen, tables, a strict policy.

All HTML is made by `tag`, which escapes whatever is not `Markup` already. The page states a content-security policy
with the hashes of its own scripts and styles, and loads nothing.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from html import escape
from importlib import resources
from pathlib import Path

from autotile.core.documents import encode_json
from autotile.core.text import plain_heading, shown_text
from autotile.database.paths import write_output
from autotile.errors import InputError
from autotile.report.theme import DARK, LIGHT, Chart, load_plotly
from autotile.version import __version__

_MAX_TABLE_ROWS = 200
"""Rows of a table behind a chart."""


class Markup(str):
    """Text that is HTML: made by `tag`, with everything inside it escaped."""

    __slots__ = ()


Content = str | Markup | None | Iterable["Content"]

_VOID = frozenset({"meta", "link", "br", "input", "hr"})


def tag(name: str, /, *content: Content, **attributes: str | int | bool | None) -> Markup:
    """Return an HTML element of content that is escaped: text, markup, iterables of both, or None.

    In the name of an attribute an underscore at the end is left out, and others become hyphens. The value True is an
    attribute without a value; False and None leave it out.
    """
    given = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            attribute = key.rstrip("_").replace("_", "-")
            given += f" {attribute}" if value is True else f' {attribute}="{escape(str(value))}"'
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """Return content one after the other, with text escaped."""
    found: list[str] = []
    for part in content:
        if isinstance(part, Markup):
            found.append(part)
        elif isinstance(part, str):
            found.append(escape(shown_text(part, lines=True)))
        elif part is not None:
            found.append(joined(*part))
    return Markup("".join(found))


DataColumn = tuple[str, str, bool]
"""Heading of a column, its unit, and whether it holds numbers."""


def words(*names: str) -> list[DataColumn]:
    """Return columns of text."""
    return [(name, "", False) for name in names]


def number(name: str, unit: str = "") -> DataColumn:
    """Return a column of numbers."""
    return (name, unit, True)


DataTable = tuple[Sequence[DataColumn], Sequence[Sequence[str | float | int | None]]]
"""Columns and rows of a table; a cell without a value is None."""


@dataclass(slots=True)
class Page:
    """A page that is being made: its title is that of the window, too, and the subtitle a line below the heading."""

    title: str
    subtitle: str = ""
    body: list[Markup] = field(default_factory=list)
    size_bytes: int = 0
    """Size of the figures and tables so far."""
    _links: list[Markup] = field(default_factory=list)
    _figures: dict[str, str] = field(default_factory=dict)
    _tables: dict[str, str] = field(default_factory=dict)

    def section(self, anchor: str, heading: str, *content: Content, link: str = "") -> Markup:
        """Return a section with a heading; with ``link``, the navigation leads to it under that name."""
        if link:
            self._links.append(tag("a", link, href=f"#{anchor}"))
        return tag("section", tag("h2", heading), *content, id=anchor, class_="section")

    def add(self, anchor: str, heading: str, *content: Content, link: str) -> None:
        """Add a section to the page; see `section`."""
        self.body.append(self.section(anchor, heading, *content, link=link))

    def chart(self, chart: Chart, prefix: str = "", *, wide: bool = False, table: str = "") -> Markup:
        """Return a chart with its summary, the numbers behind it and what was left out.

        The prefix makes its name unique on the page. A narrow screen scrolls a wide one sideways. A selection in it
        filters the table of data with the id ``table``.
        """
        name = f"{prefix}{chart.name}-chart"
        heading = tag("h3", chart.title, id=f"{name}-title")
        if chart.figure is None:
            return tag("div", heading, tag("p", chart.summary, class_="empty"), class_="chart")
        document = chart.figure.to_json(engine="json")
        self.size_bytes += len(document)
        self._figures[name] = document
        numbers: Markup | None = None
        if rows := chart.table.rows:
            shown = rows[:_MAX_TABLE_ROWS]
            more = f" (the first {len(shown):,} of {len(rows):,})" if len(shown) < len(rows) else ""
            heading_of_numbers = tag("summary", f"The numbers behind it{more}")
            numbers = tag("details", heading_of_numbers, static_table(chart.table.headings, shown))
        plot = tag(
            "div",
            id=name,
            class_="plot wide" if wide else "plot",
            role="img",
            aria_labelledby=f"{name}-title",
            aria_describedby=f"{name}-summary",
            data_table=table or None,
            style=f"min-height:{int(chart.figure.layout.height)}px",
        )
        return tag(
            "figure",
            heading,
            tag("p", chart.summary, class_="summary", id=f"{name}-summary"),
            tag("div", plot, class_="scroll"),
            tag("p", chart.note, class_="note") if chart.note else None,
            numbers,
            class_="chart",
        )

    def data_table(self, file: str, table: DataTable, prefix: str = "") -> Markup:
        """Return a table to be sorted, filtered and exported in the browser; its id ends in ``-table``."""
        name, (columns, rows) = f"{prefix}{file}-table", table
        document = encode_json({"file": file, "columns": columns, "rows": rows}, compact=True)
        self.size_bytes += len(document)
        self._tables[name] = document
        without = tag("noscript", tag("p", "The table of all trials needs JavaScript.", class_="empty"))
        return tag("div", without, id=name, class_="data-table")

    def html(self) -> str:
        """Return the document; for charts Plotly must be installed, else it is a `ToolchainError`."""
        style = asset("page.css")
        plotly = plotly_script() if self._figures else ""
        if "</script" in plotly.lower():
            raise InputError("this version of Plotly cannot be embedded; install another with `pip install -U plotly`")
        scripts = [text for text in (plotly, asset("page.js")) if text]
        # Plotly adds style elements with these ids unless they are there; the policy would refuse them.
        styles = sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly)))
        of_scripts, of_styles = (
            " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
            for texts in (scripts, (style, ""))
        )
        # Plotly sets style attributes, which can neither load nor send anything under this policy.
        policy = (
            f"default-src 'none'; script-src {of_scripts}; style-src-elem {of_styles}; "
            "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{self.title} \N{EN DASH} autotile"),
            tag("style", Markup(style)),
            [tag("style", id=name) for name in (*styles, "plotly.js-style-global") if plotly],
        )
        header = tag(
            "header",
            tag("h1", self.title),
            tag("p", self.subtitle, class_="subtitle") if self.subtitle else None,
            tag("button", "Dark", type="button", id="theme", aria_label="Switch between light and dark"),
            tag("nav", self._links, aria_label="Sections") if self._links else None,
        )
        body = tag(
            "body",
            tag("a", "Skip to the content", href="#main", class_="skip"),
            header,
            tag("main", *self.body, id="main"),
            tag("footer", tag("p", f"Made by autotile {__version__}. This page loads nothing and sends nothing.")),
            _data("colours", encode_json({"light": LIGHT, "dark": DARK})),
            *(
                _data(name, "{" + ",".join(f"{encode_json(key)}:{text}" for key, text in documents.items()) + "}")
                for name, documents in (("figures", self._figures), ("tables", self._tables))
            ),
            [Markup(f"<script>{text}</script>") for text in scripts],
        )
        return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def static_table(headings: Sequence[str], rows: Iterable[Sequence[Content]], *, caption: str = "") -> Markup:
    """Return a table as it is, without sorting."""
    head = tag("thead", tag("tr", [tag("th", plain_heading(heading), scope="col") for heading in headings]))
    body = tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
    title = tag("caption", caption) if caption else None
    return tag(
        "div",
        tag("table", title, head, body),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption or "Table",
    )


def write_page(text: str, path: Path) -> None:
    """Write a page, as a whole or not at all; a file that cannot be written is an `InputError`."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the path of a file, such as {path / 'report.html'}")
    write_output(path, text.encode("utf-8", "replace"))


def _data(name: str, document: str) -> Markup:
    """Return a block of JSON, in which nothing can end the element."""
    safe = document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    safe = safe.replace("\N{LINE SEPARATOR}", "\\u2028").replace("\N{PARAGRAPH SEPARATOR}", "\\u2029")
    return Markup(f'<script type="application/json" id="data-{name}">{safe}</script>')


def asset(name: str) -> str:
    """Return a file of the package that pages embed or load."""
    return resources.files("autotile.report").joinpath("assets", name).read_text("utf-8")


@cache
def plotly_script() -> str:
    """Return Plotly's script; errors as for `load_plotly`."""
    load_plotly()
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())

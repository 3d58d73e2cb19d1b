"""Results of public functions as headline, facts and tables, and the formatting of figures, names and messages in them.

A result states its parts once; ``repr``, notebooks and the command line render the same ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from autotile.core.device import DeviceProperties
from autotile.core.model import Measurement, Occupancy, Outcome, config_text

NOTHING = "-"
"""Placeholder for a missing value."""


_BREAK = r" *[\n\t\r\v\f][\n\t\r\v\f ]*"


def shown_text(text: str, *, lines: bool = False) -> str:
    """Escape the characters of a text from outside that are not printable, as in a Python string.

    These move the cursor, reverse the direction of a text, cannot be seen or cannot be encoded. A line break with the
    space around it becomes one space, as does a tab; with ``lines``, line breaks are kept.
    """
    if text.isprintable():
        return text
    kept = "\n" if lines else ""
    text = text.replace("\r\n", "\n").expandtabs(4) if lines else re.sub(_BREAK, " ", text)
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def time_text(time_us: float | None, source: str = "") -> str:
    """Format microseconds with at least four significant digits, as for `source_text`: ``4,790 us (replayed)``."""
    return NOTHING if time_us is None else source_text(f"{_significant(time_us)} us", source)


def interval_text(measured: Measurement | None) -> str:
    """Format the 95 % confidence interval of a time in microseconds: ``4,788 to 4,795``."""
    return NOTHING if measured is None else f"{_significant(measured.low_us)} to {_significant(measured.high_us)}"


def energy_text(energy_mj: float) -> str:
    """Format millijoules with at least four significant digits: ``1,250 mJ``, ``0.125 mJ``."""
    return f"{_significant(energy_mj)} mJ"


def bytes_text(count: float) -> str:
    """Format bytes in the largest binary unit that does not exceed the count: ``228 KiB``, ``141 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return _amount(count / size, unit)
    return f"{count:,.0f} B"


def percent_text(fraction: float, decimals: int = 1) -> str:
    """Format a fraction of 1 as a percentage: ``42.9 %``."""
    return f"{100 * fraction:.{decimals}f} %"


def short_text(value: float, digits: int = 5) -> str:
    """Format a number with so many significant digits, and no exponent where it is large: ``104,960``."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def flops_text(flops_per_s: float) -> str:
    """Format a compute rate: ``1,979 TFLOP/s``, ``28.7 TFLOP/s``, ``812 GFLOP/s``."""
    return _amount(flops_per_s / 1e12, "TFLOP/s") if flops_per_s >= 1e12 else _amount(flops_per_s / 1e9, "GFLOP/s")


def bandwidth_text(bytes_per_s: float) -> str:
    """Format a memory bandwidth: ``4,276 GB/s``."""
    return _amount(bytes_per_s / 1e9, "GB/s")


def _amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def duration_text(seconds: float) -> str:
    """Format a wall time: ``3.7 ms``, ``54 ms``, ``6.67 s``, ``21.3 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if seconds < 0.1:
        milliseconds = 1e3 * seconds
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def moment_text(moment: datetime | None) -> str:
    """Format a date and time in the local time zone, to the minute: ``2025-01-02 03:04``."""
    if moment is None:
        return NOTHING
    with suppress(OverflowError):  # in year 1 or 9999
        moment = moment.astimezone()
    return f"{moment:%Y-%m-%d %H:%M}"


sizes_text = config_text
"""Format problem sizes as on the command line: ``M=4096 N=4096``."""


def device_text(device: DeviceProperties) -> str:
    """Return a device's name, followed by the source of its properties unless CUDA reported them."""
    return device.name if device.source == "cuda" else f"{device.name} ({device.source})"


def source_text(name: str, source: str) -> str:
    """Return a device's name, followed by ``(replayed)`` if the times were replayed from a recording."""
    return f"{name} (replayed)" if source == "replayed" else name


def occupancy_text(device: DeviceProperties, occupancy: Occupancy) -> str:
    """Format an occupancy: ``66.7 %: 1 block on an SM, 32 of 48 warps; limited by threads``."""
    limits = ", ".join(name.replace("_", " ") for name in occupancy.limited_by)
    if occupancy.blocks_per_sm == 0:
        return f"no block fits on an SM; limited by {limits}"
    return (
        f"{percent_text(occupancy.occupancy)}: {plural(occupancy.blocks_per_sm, 'block')} on an SM, "
        f"{occupancy.warps_per_sm} of {device.max_warps_per_sm} warps; limited by {limits}"
    )


def funnel_text(gates: Mapping[str, int], outcomes: Mapping[Outcome, int]) -> str:
    """Format the counts of a session: ``8,294,400 combinations -> 24,906 valid -> 200 tried: 180 ok, 20 pruned``."""
    tried = sum(outcomes.values())
    counts = f"{plural(gates['combinations'], 'combination')} -> {gates['limits']:,} valid -> {tried:,} tried"
    return f"{counts}: {outcomes_text(outcomes)}" if tried else counts


def outcomes_text(outcomes: Mapping[Outcome, int]) -> str:
    """Format the outcomes that occurred, in pipeline order: ``180 ok, 8 compile_failed, 12 pruned``."""
    return ", ".join(f"{outcomes[outcome]:,} {outcome}" for outcome in Outcome if outcomes.get(outcome))


def plural(count: int, singular: str, several: str = "") -> str:
    """Format a count with its noun: ``1 trial``, ``1,200 trials``."""
    return f"{count:,} {singular if count == 1 else several or singular + 's'}"


def _significant(value: float) -> str:
    """Format a value with four significant digits, or as an integer if it has more."""
    if value >= 1000:
        return f"{value:,.0f}"
    decimals = 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{decimals}f}"


_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_OTHERS = r"[^A-Za-z0-9_]+"
_MAX_WORD = 100
_MAX_STEM = 180
"""With a suffix and the marks of an unfinished file, a name stays below the 255 bytes that file systems allow."""
_DIGEST = 12


def file_name(*words: str, separator: str = "-", suffix: str = "") -> str:
    """Return the name of a file: a single component of a path, which leads to no other folder.

    Plain words are kept, with hyphens for spaces. Any other, such as ``"../x"`` or one with a line break, is replaced
    by its letters and digits and a hash, so that different words give different names: ``"nvidia h200"`` and
    ``"matmul"`` give ``"nvidia-h200-matmul"``, ``"../x"`` gives ``"x-d6b96a97d147"``.
    """
    parts = []
    for word in words:
        joined = word.replace(" ", "-")
        if not (re.fullmatch(_PLAIN, joined) and len(joined) <= _MAX_WORD):
            letters = re.sub(_OTHERS, "-", joined).strip("-")[:_MAX_WORD]
            joined = "-".join(filter(None, (letters, _digest(word))))
        parts.append(joined)
    stem = separator.join(parts)
    if len(stem) > _MAX_STEM:
        stem = f"{stem[: _MAX_STEM - _DIGEST - 1]}-{_digest(stem)}"
    return stem + suffix


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]


RIGHT = ">"
"""Prefix of a heading whose column is aligned at the right."""


def plain_heading(heading: str) -> str:
    """Return a heading without the prefix `RIGHT`."""
    return heading.removeprefix(RIGHT)


class ResultTable(NamedTuple):
    """Table of a result, with a text for each column of each row."""

    headings: Sequence[str]
    """The prefix `RIGHT` aligns a column at the right."""
    rows: Sequence[Sequence[str]]
    movable: Sequence[str] = ()
    """Headings of the columns that move first, in this order, to lines of their own under each row where the terminal
    is too narrow for all of them. The other columns follow from the right; the first one never moves."""
    is_wrapped: bool = False
    """Whether texts that are too long are wrapped within their columns instead."""
    styles: Sequence[str] = ()
    """Style of each row on a terminal, such as ``"bold red"``; empty for none."""
    caption: str = ""
    """Line above the table; empty for none."""


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


@dataclass(frozen=True, slots=True, repr=False)
class Written(Result):
    """Outcome of writing or reading a file; ``file`` is None where there is none, such as of a plan."""

    file: Path | None
    headline: str
    parts: Sequence[Part]
    document: Mapping[str, Any]
    """Everything that is known of it, as ``--json`` prints it: the ``digest`` of a bundle, the ``cubins`` of a header,
    the number of ``configurations`` of an export."""

    def _headline(self) -> str:
        return self.headline

    def _parts(self) -> Iterable[Part]:
        return self.parts

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        return dict(self.document)


_MAX_HTML_ROWS = 100
"""Rows that a notebook shows of a table; a study may have twenty thousand trials."""


def html_of(headline: str, parts: Iterable[Part]) -> str:
    """Return a result as HTML for a notebook, with every text escaped and at most 100 rows of each table.

    There are no colours in it, so that it has those of the notebook's theme.
    """
    from html import escape  # a program without a notebook does not need it

    def tagged(tag: str, text: str) -> str:
        return f"<{tag}>{escape(shown_text(text, lines=True))}</{tag}>"

    found = [f"<p>{tagged('b', headline)}</p>"]
    for part in parts:
        if isinstance(part, str):
            found.append(tagged("p", part))
        elif isinstance(part, ResultTable):
            head = "".join(tagged("th", plain_heading(heading)) for heading in part.headings)
            rows = ("".join(tagged("td", text) for text in row) for row in part.rows[:_MAX_HTML_ROWS])
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            hidden = len(part.rows) - _MAX_HTML_ROWS
            found += [tagged("p", part.caption)] if part.caption else []
            found.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
            found += [tagged("p", f"and {plural(hidden, 'more row')}")] if hidden > 0 else []
        else:
            facts = ((label, text if isinstance(text, str) else "\n".join(text)) for label, text in part)
            lines = "".join(f"<tr>{tagged('th', label)}{tagged('td', text)}</tr>" for label, text in facts)
            found.append(f"<table>{lines}</table>")
    return "".join(found)

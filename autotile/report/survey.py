"""Compilation of the configurations of a space: resources, occupancy, waves and failures, in columns; their page."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.documents import to_document
from autotile.core.model import Outcome, Problem, Trial, Value, config_text
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    Result,
    ResultTable,
    device_text,
    duration_text,
    percent_text,
    plural,
    short_text,
    time_text,
)
from autotile.exchange.column_table import ColumnTable, TypedColumn, narrowest_column
from autotile.report.charts import failures_chart
from autotile.report.page import DataColumn, DataTable, Page, number, static_table, tag, words
from autotile.report.study import FailureGroup, add_failure, most_frequent
from autotile.report.theme import INK, SOFT, Chart, bars, figure, hover_text, label, points
from autotile.space.search_space import SearchSpace

Figures = NDArray[np.float64]

_SHOWN_FAILURES = 8
"""Reasons of failures in the table, at most."""
_MAX_ROWS = 20_000
"""Configurations in the table of the page: more take a browser long to open."""
_SIZES_PX = (7, 22)
"""Least and greatest diameter of a point, which grows with the number of configurations."""
_LIMITS = ("threads", "registers", "shared_memory", "blocks")
"""Limits of the occupancy, in the order of the bits of the column ``limited_by``."""
_OUTCOMES = tuple(Outcome)
_MISSING = -1
_NAMES = (
    *("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "static_smem_bytes", "dynamic_smem_bytes"),
    *("threads", "blocks", "blocks_per_sm", "warps_per_sm"),
)
_HEADINGS = {name: name for name in _NAMES} | {"registers": "registers_per_thread", "threads": "threads_per_block"}
"""Heading of each column of whole numbers in `Survey.table`."""
_COLUMNS = ("outcome", "failure", *_HEADINGS, "limited_by")
"""Whole numbers that are kept of each configuration; `_MISSING` for what is not known."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Survey(Result):
    """Configurations of a space as compiled, without a GPU. All arrays are of shape (configurations,)."""

    problem: Problem
    device: DeviceProperties
    space: SearchSpace
    """All valid configurations."""
    rows: NDArray[np.int64]
    """Rows of the space that were compiled, ascending."""
    columns: Mapping[str, NDArray[np.int64]]
    """Whole numbers of each configuration by name, -1 for what is not known. Of a kernel of several steps: those of the
    one with the most threads."""
    compile_s: Figures
    """About 0 if the cubin was in the cache."""
    estimated_us: Figures | None
    """Estimated times, of which the order counts; None if the search-space file does not say enough."""
    failures: tuple[FailureGroup, ...]
    """Configurations that cannot be launched, by reason, the most frequent first."""
    reasons: tuple[str, ...]
    """Reason of each value of the column ``failure``."""
    distinct: int
    """Number of distinct codes among the configurations that compiled."""
    planned: int
    """Number of configurations that were to be compiled."""
    seconds: float
    interrupted: bool
    notices: tuple[str, ...] = ()
    shown: int = 12
    """Configurations in the table; 0 for none."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_usable(self) -> NDArray[np.bool_]:
        """Which configurations can be launched, shape (configurations,)."""
        return np.equal(self.columns["outcome"], _OUTCOMES.index(Outcome.OK))

    @property
    def is_compiled(self) -> NDArray[np.bool_]:
        """Which configurations compiled, shape (configurations,)."""
        return np.not_equal(self.columns["registers"], _MISSING)

    @property
    def occupancy(self) -> Figures:
        """Resident warps as a fraction of the SM's maximum, shape (configurations,); NaN if it did not compile."""
        return self._known("warps_per_sm") / self.device.max_warps_per_sm

    @property
    def waves(self) -> Figures:
        """Blocks of the grid over those that the device holds at a time, shape (configurations,); NaN if unknown."""
        resident = self._known("blocks_per_sm") * self.device.sm_count
        return self._known("blocks") / np.where(resident > 0, resident, np.nan)

    @property
    def spill_bytes(self) -> Figures:
        """Bytes of register spills, stores and loads, shape (configurations,); NaN if it did not compile."""
        return self._known("spill_store_bytes") + self._known("spill_load_bytes")

    def config(self, index: int) -> dict[str, Value]:
        """Return the configuration of an entry of `rows`."""
        return self.space.config(int(self.rows[index]))

    def limited_by(self, index: int) -> tuple[str, ...]:
        """Return the limits of the occupancy of an entry; none if it did not compile."""
        bits = int(self.columns["limited_by"][index])
        return tuple(name for bit, name in enumerate(_LIMITS) if bits > 0 and bits >> bit & 1)

    def reason(self, index: int) -> str:
        """Return why an entry cannot be launched; "" if it can. Numbers in it are those of the first such entry."""
        failure = int(self.columns["failure"][index])
        return self.reasons[failure] if failure >= 0 else ""

    def ranges(self) -> list[tuple[str, str, float, float, float]]:
        """Return each quantity of the configurations that compiled: name, unit, least, median and greatest."""
        quantities: list[tuple[str, str, Figures]] = [
            ("registers", "a thread", self._known("registers")),
            ("register spills", "B", self.spill_bytes),
            ("stack", "B", self._known("stack_bytes")),
            ("static shared memory", "B", self._known("static_smem_bytes")),
            ("dynamic shared memory", "B", np.where(self.is_compiled, self._known("dynamic_smem_bytes"), np.nan)),
            ("threads", "a block", np.where(self.is_compiled, self._known("threads"), np.nan)),
            ("blocks", "an SM", self._known("blocks_per_sm")),
            ("occupancy", "%", 100 * self.occupancy),
            ("waves", "", self.waves),
        ]
        return [
            (name, unit, float(np.nanmin(values)), float(np.nanmedian(values)), float(np.nanmax(values)))
            for name, unit, values in quantities
            if np.isfinite(values).any()
        ]

    def limit_counts(self) -> list[tuple[str, int]]:
        """Return how many configurations each limit keeps from more blocks on an SM, the most frequent first."""
        bits = self.columns["limited_by"]
        counts = Counter({name: int(((bits > 0) & (bits >> bit & 1 == 1)).sum()) for bit, name in enumerate(_LIMITS)})
        return [(name, count) for name, count in counts.most_common() if count]

    def table(self) -> ColumnTable:
        """Return a row for each configuration, as typed columns with units in their names."""

        def real(name: str, values: Figures) -> TypedColumn:
            return name, "real", [value if np.isfinite(value) else None for value in values.tolist()]

        parameters = [
            narrowest_column(f"param.{p.name}", [p.values[code] for code in self.space.codes[self.rows, n].tolist()])
            for n, p in enumerate(self.space.parameters)
        ]
        whole: list[TypedColumn] = [
            (heading, "whole", [None if value < 0 else value for value in self.columns[name].tolist()])
            for name, heading in _HEADINGS.items()
        ]
        indices = range(len(self))
        return ColumnTable(
            (
                *parameters,
                ("outcome", "text", [str(_OUTCOMES[n]) for n in self.columns["outcome"].tolist()]),
                ("reason", "text", [self.reason(index) or None for index in indices]),
                *whole,
                real("occupancy_fraction", self.occupancy),
                ("limited_by", "text", [" ".join(self.limited_by(index)) or None for index in indices]),
                real("waves", self.waves),
                *([real("estimated_us", self.estimated_us)] if self.estimated_us is not None else []),
                real("compile_s", self.compile_s),
            )
        )

    def _known(self, name: str) -> Figures:
        """Return a column as real numbers, with NaN for what is not known."""
        column = self.columns[name]
        return np.where(column == _MISSING, np.nan, column)

    def _headline(self) -> str:
        what = plural(int(self.is_compiled.sum()), "configuration")
        end = ", interrupted" if self.interrupted else ""
        return f"{self._heading()}: {what} compiled, {self.is_usable.sum():,} usable{end}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _facts(self) -> list[tuple[str, str]]:
        part = "" if self.planned == len(self.space) else f", a sample of {self.planned:,}"
        compiled, usable = int(self.is_compiled.sum()), int(self.is_usable.sum())
        tried = "" if compiled == len(self) else f", {len(self):,} tried"
        facts = [("configurations", f"{len(self.space):,} valid{part}{tried}, {compiled:,} compiled")]
        if len(self):
            share = percent_text(usable / len(self))
            facts.append(("usable", f"{usable:,} ({share}); {len(self) - usable:,} cannot be launched"))
        if compiled:
            spilled = int(np.nansum(self.spill_bytes > 0))
            limits = [f"{name.replace('_', ' ')} {percent_text(n / compiled)}" for name, n in self.limit_counts()]
            facts += [
                ("spills", f"{spilled:,} ({percent_text(spilled / compiled)}) spill registers"),
                ("distinct code", f"{self.distinct:,} of {compiled:,}"),
                ("occupancy limited by", ", ".join(limits)),
            ]
        return [*facts, ("took", duration_text(self.seconds))]

    def _parts(self) -> Iterator[Part]:
        yield list(self._facts())
        if ranges := self.ranges():
            rows = [(f"{name}, {unit}" if unit else name, *map(short_text, values)) for name, unit, *values in ranges]
            headings = ("of those that compiled", *(f"{RIGHT}{name}" for name in ("least", "median", "greatest")))
            yield ResultTable(headings, rows, is_wrapped=True)
        if self.failures:
            failed = [
                (f"{group.count:,}", str(group.outcome), f"{group.reason}\n{config_text(group.examples[0])}")
                for group in self.failures[:_SHOWN_FAILURES]
            ]
            if left := self.failures[_SHOWN_FAILURES:]:
                count = sum(group.count for group in left)
                failed.append((f"{count:,}", NOTHING, f"{plural(len(left), 'further reason')}; --json has all"))
            yield ResultTable((f"{RIGHT}failed", "outcome", "reason, and an example"), failed, is_wrapped=True)
        usable = np.flatnonzero(self.is_usable)
        # the last key counts most
        order, keys = "highest occupancy", [-self.occupancy[usable], self.spill_bytes[usable]]
        if self.estimated_us is not None:
            order, keys = "least estimated time", [self.estimated_us[usable]]
        indices = usable[np.lexsort(keys)][: self.shown].tolist()
        if not indices:
            return
        sizes = ("registers", "spills, B", "static, B", "dynamic, B", "threads", "occupancy")
        estimated, columns = self.estimated_us, self.columns
        estimate = [] if estimated is None else [f"{RIGHT}estimate"]
        names = [*(f"{RIGHT}{name}" for name in sizes), "limited by", f"{RIGHT}waves", *estimate, "configuration"]
        configs = [
            [
                f"{columns['registers'][index]:,}",
                f"{self.spill_bytes[index]:,.0f}",
                *(f"{columns[name][index]:,}" for name in ("static_smem_bytes", "dynamic_smem_bytes", "threads")),
                percent_text(self.occupancy[index]),
                ", ".join(self.limited_by(index)).replace("_", " "),
                f"{self.waves[index]:,.2f}",
                *([time_text(estimated[index])] if estimated is not None else []),
                config_text(self.config(index)),
            ]
            for index in indices
        ]
        caption = f"{plural(len(indices), 'configuration')} of the {order}:"
        yield ResultTable(names, configs, ("configuration", "limited by"), caption=caption)

    def to_json(self) -> dict[str, Any]:
        """Return the survey, with an entry for each configuration."""
        columns = [(name, values) for name, _, values in self.table().columns if not name.startswith("param.")]
        return {
            **self.problem.document(),
            "device": self.device.identity,
            "valid": len(self.space),
            "planned": self.planned,
            "compiled": int(self.is_compiled.sum()),
            "usable": int(self.is_usable.sum()),
            "distinct_code": self.distinct,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "ranges": {
                name: {"unit": unit, "least": least, "median": median, "greatest": greatest}
                for name, unit, least, median, greatest in self.ranges()
            },
            "failures": to_document(self.failures),
            "configurations": [
                {"config": self.config(index), **{name: values[index] for name, values in columns}}
                for index in range(len(self))
            ],
        }

    def page(self) -> str:
        """Return the page as HTML: ranges, occupancy and its limits, resources by parameter, failures, all rows."""
        page = Page(f"Survey of {self.problem}", f"On {device_text(self.device)}, as compiled; nothing was run.")
        *facts, (took, length) = self._facts()
        end = ", interrupted" if self.interrupted else ""
        ranges = [(name, unit or NOTHING, *map(short_text, values)) for name, unit, *values in self.ranges()]
        headings = ("quantity", "unit", "least", "median", "greatest")
        page.add(
            "summary",
            "What compiles",
            static_table(("", ""), [*facts, (took, length + end)], caption="The survey in numbers"),
            static_table(headings, ranges, caption="Configurations that compiled") if ranges else None,
            [tag("p", notice, class_="note") for notice in self.notices],
            link="Summary",
        )
        if self.is_compiled.any():
            charts = [page.chart(made) for made in (registers_chart(self), blocks_chart(self), limits_chart(self))]
            page.add("occupancy", "Registers and occupancy", charts, link="Occupancy")
            about = "Medians are of the configurations that compiled with this value, whatever the others are."
            resources = page.data_table("survey-parameters", parameter_table(self))
            page.add("parameters", "Resources by parameter", tag("p", about), resources, link="Parameters")
        page.add("failures", "What fails", page.chart(failures_chart(self.failures)), link="Failures")
        columns = self.table().columns
        # of very many configurations an even selection
        chosen = np.unique(np.linspace(0, len(self) - 1, min(len(self), _MAX_ROWS)).round().astype(np.int64)).tolist()
        rows = [[_cell(values[index]) for _, _, values in columns] for index in chosen] if len(self) else []
        left_out = f"{len(rows):,} of {len(self):,} configurations; --csv writes all."
        own: list[DataColumn] = [
            (name.removeprefix("param."), "", kind in ("whole", "real")) for name, kind, _ in columns
        ]
        page.add(
            "configurations",
            "Configurations",
            tag("p", left_out, class_="note") if len(rows) < len(self) else None,
            page.data_table("survey", (own, rows)),
            link="Configurations",
        )
        return page.html()


def survey_of(
    space: SearchSpace,
    trials: Iterable[tuple[int, Trial]],
    *,
    planned: int,
    estimated_us: Figures | None,
    **described: Any,
) -> Survey:
    """Return the survey of rows of a space, each with its trial after the gate that follows the compilation.

    They are taken up as they arrive, of each a few dozen bytes. Other parameters are those of `Survey`.
    """
    started_s, numbers, compile_s = time.monotonic(), array("q"), array("d")
    columns = {name: array("q") for name in _COLUMNS}
    groups, reasons = dict[tuple[Outcome, str, str], FailureGroup](), dict[str, int]()
    code: set[bytes] = set()
    for row, trial in trials:
        found: dict[str, int] = {"outcome": _OUTCOMES.index(trial.outcome)}
        if trial.outcome is not Outcome.OK:
            found["failure"] = reasons.setdefault(add_failure(groups, trial).reason, len(reasons))
        for part in (trial.resources, trial.geometry, trial.occupancy):
            found |= {name: getattr(part, name) for name in _HEADINGS if hasattr(part, name)}
        if trial.occupancy is not None:
            limits = (name for name in trial.occupancy.limited_by if name in _LIMITS)
            found["limited_by"] = sum(1 << _LIMITS.index(name) for name in limits)
        numbers.append(row)
        for name, column in columns.items():
            column.append(found.get(name, _MISSING))
        compile_s.append(trial.seconds.get("compile", 0.0))
        if trial.cubin_hash:
            code.add(bytes.fromhex(trial.cubin_hash)[:16])
    rows = np.array(numbers, np.int64)
    order = np.argsort(rows)
    return Survey(
        space=space,
        rows=rows[order],
        columns={name: np.array(column, np.int64)[order] for name, column in columns.items()},
        compile_s=np.array(compile_s, np.float64)[order],
        estimated_us=estimated_us[rows[order]] if estimated_us is not None else None,
        failures=most_frequent(groups),
        reasons=tuple(reasons),
        distinct=len(code),
        planned=planned,
        seconds=time.monotonic() - started_s,
        interrupted=len(rows) < planned,
        **described,
    )


def _cell(value: object) -> str | float | int | None:
    if isinstance(value, float):
        return round(value, 6)
    return value if value is None or type(value) is int else str(value)


def registers_chart(survey: Survey) -> Chart:
    """Return the occupancy over the registers of a thread; a point is of all configurations with the same of both."""
    compiled = np.flatnonzero(survey.is_compiled)
    registers = survey.columns["registers"][compiled].tolist()
    percent = np.round(100 * survey.occupancy[compiled], 1).tolist()
    spills = (survey.spill_bytes[compiled] > 0).tolist()
    grouped: dict[tuple[int, float, bool], list[int]] = {}
    for key, index in zip(zip(registers, percent, spills, strict=True), compiled.tolist(), strict=True):
        grouped.setdefault(key, []).append(index)
    most, (least_px, most_px) = max(map(len, grouped.values())), _SIZES_PX
    traces = []
    for spilling, name, symbol, color in ((False, "no spills", "circle", SOFT), (True, "spills", "diamond", INK)):
        marks, grown = [], []
        for (used, occupied, spills_too), indices in grouped.items():
            if spills_too == spilling:
                place = f"{used} registers a thread, occupancy {occupied:g} %, {name}"
                example = f"such as {config_text(survey.config(indices[0]))}"
                marks.append((used, occupied, hover_text(place, plural(len(indices), "configuration"), example)))
                grown.append(round(least_px + (most_px - least_px) * (len(indices) / most) ** 0.5, 1))
        size, marker = grown if most > 1 else least_px, {"opacity": 0.8, "line": {"width": 0}}
        traces += points(marks, name=name, symbol=symbol, color=color, size=size, marker=marker)
    made = figure(
        traces,
        height=380,
        x={"title": "registers a thread", "rangemode": "tozero"},
        y={"title": "occupancy, %", "range": [0, 108]},
        showlegend=True,
    )
    spilled, share = sum(spills), percent_text(sum(spills) / len(compiled))
    what = f"{spilled:,} of {plural(len(compiled), 'configuration')}"
    rows = [
        (f"{key[0]}", f"{key[1]:g}", "yes" if key[2] else "no", f"{len(indices):,}")
        for key, indices in sorted(grouped.items())
    ]
    table = ResultTable(("registers a thread", "occupancy, %", "spills", "configurations"), rows)
    summary = f"{what} that compiled spill registers ({share})."
    return Chart("registers", "Occupancy by registers", made, summary, table)


def blocks_chart(survey: Survey) -> Chart:
    """Return the number of configurations by the number of blocks on an SM."""
    blocks = survey.columns["blocks_per_sm"][survey.is_compiled]
    named = [(f"{count:,}", configs) for count, configs in sorted(Counter(blocks.tolist()).items())]
    summary = f"Between {named[0][0]} and {named[-1][0]} blocks of a configuration are resident on an SM at a time."
    return _counts("blocks", "Blocks on an SM", "blocks on an SM", named, summary)


def limits_chart(survey: Survey) -> Chart:
    """Return how many configurations each resource keeps from a higher occupancy."""
    named = [(name.replace("_", " "), count) for name, count in survey.limit_counts()]
    first = f"{named[0][0].capitalize()} limit the most" if named else "Nothing limits any"
    summary = f"{first}. Several resources may limit a configuration alike."
    return _counts("limits", "What limits the occupancy", "limited by", named, summary)


def _counts(name: str, title: str, quantity: str, named: Sequence[tuple[str, int]], summary: str) -> Chart:
    counts = [count for _, count in named]
    made = bars(
        [label(each) for each, _ in named],
        counts,
        x={"title": "configurations", "range": [0, 1.15 * max(counts, default=1)]},
        y={"title": quantity},
        text=[f"{count:,}" for count in counts],
    )
    table = ResultTable((quantity, "configurations"), [(each, f"{count:,}") for each, count in named])
    return Chart(name, title, made, summary, table)


def parameter_table(survey: Survey) -> DataTable:
    """Return a row for each value of each parameter: how many can be launched, and their median resources."""
    usable, compiled, spills = survey.is_usable, survey.is_compiled, survey.spill_bytes
    figures = (survey.columns["registers"], 100 * survey.occupancy, survey.waves)
    codes = survey.space.codes[survey.rows]
    rows: list[list[str | float | int | None]] = []
    for place, parameter in enumerate(survey.space.parameters):
        for code, value in enumerate(parameter.values):
            here = codes[:, place] == code
            if not here.any():
                continue
            there = here & compiled
            medians = [round(float(np.median(each[there])), 2) if there.any() else None for each in figures]
            spilled = round(100 * float((spills[there] > 0).mean()), 1) if there.any() else None
            share = round(100 * float(usable[here].mean()), 1)
            rows.append([parameter.name, str(value), int(here.sum()), share, medians[0], spilled, *medians[1:]])
    columns = [
        *words("parameter", "value"),
        number("configurations"),
        number("usable", "%"),
        number("median registers", "a thread"),
        number("spilling", "%"),
        number("median occupancy", "%"),
        number("median waves"),
    ]
    return columns, rows

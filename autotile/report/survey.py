"""Compilation of the configurations of a space: resources, occupancy, waves and failures, in columns."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
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
    time_text,
)
from autotile.exchange.column_table import ColumnTable, TypedColumn
from autotile.report.failures import FailureGroup, FailureGroups
from autotile.space.search_space import SearchSpace

Figures = NDArray[np.float64]

_SHOWN_FAILURES = 8
"""Reasons of failures in the table, at most."""

LIMITS = ("threads", "registers", "shared_memory", "blocks")
"""Limits of the occupancy, in the order of the bits of the column ``limited_by``."""

_OUTCOMES = tuple(Outcome)
_MISSING = -1
_COLUMNS = (
    "outcome",
    "failure",
    "registers",
    "spill_store_bytes",
    "spill_load_bytes",
    "stack_bytes",
    "static_smem_bytes",
    "dynamic_smem_bytes",
    "threads",
    "blocks",
    "blocks_per_sm",
    "warps_per_sm",
    "limited_by",
)
"""Whole numbers that are kept of each configuration; `_MISSING` for what is not known."""


@dataclass(frozen=True, slots=True)
class QuantityRange:
    """A quantity of the configurations that compiled.

    Attributes
    ----------
    name, unit
        Its name, and its unit; empty for a number without one.
    least, median, greatest
        Over all configurations that compiled.
    """

    name: str
    unit: str
    least: float
    median: float
    greatest: float


class SurveyTable:
    """Results of compiling configurations as they arrive, a few dozen bytes for each.

    Parameters
    ----------
    space
        Space of the configurations.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._rows = array("q")
        self._columns = {name: array("q") for name in _COLUMNS}
        self._compile_s = array("d")
        self._failures = FailureGroups()
        self._code: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def failed(self) -> int:
        """Number of configurations that cannot be launched."""
        return self._failures.count

    def add(self, row: int, trial: Trial) -> None:
        """Add the trial of a row after the gate that follows the compilation."""
        resources, geometry, occupancy = trial.resources, trial.geometry, trial.occupancy
        found: dict[str, int] = {"outcome": _OUTCOMES.index(trial.outcome)}
        if trial.outcome is not Outcome.OK:
            found["failure"] = self._failures.add(trial)
        if resources is not None:
            found |= {name: getattr(resources, name) for name in _COLUMNS if hasattr(resources, name)}
        if geometry is not None:
            found |= {name: getattr(geometry, name) for name in ("threads", "blocks", "dynamic_smem_bytes")}
        if occupancy is not None:
            found |= {name: getattr(occupancy, name) for name in ("blocks_per_sm", "warps_per_sm")}
            found["limited_by"] = sum(1 << LIMITS.index(name) for name in occupancy.limited_by if name in LIMITS)
        self._rows.append(row)
        for name, column in self._columns.items():
            column.append(found.get(name, _MISSING))
        self._compile_s.append(trial.seconds.get("compile", 0.0))
        if trial.cubin_hash:
            self._code.add(bytes.fromhex(trial.cubin_hash)[:16])

    def survey(
        self,
        problem: Problem,
        device: DeviceProperties,
        *,
        planned: int,
        seconds: float,
        interrupted: bool,
        estimated_us: Figures | None = None,
        notices: tuple[str, ...] = (),
    ) -> Survey:
        """Return the results, ordered by the rows of the space; parameters are those of `Survey`."""
        rows = np.array(self._rows, np.int64)
        order = np.argsort(rows)
        return Survey(
            problem=problem,
            device=device,
            space=self._space,
            rows=rows[order],
            columns={name: np.array(column, np.int64)[order] for name, column in self._columns.items()},
            compile_s=np.array(self._compile_s, np.float64)[order],
            estimated_us=estimated_us[rows[order]] if estimated_us is not None else None,
            failures=self._failures.groups,
            reasons=self._failures.reasons,
            distinct=len(self._code),
            planned=planned,
            seconds=seconds,
            interrupted=interrupted,
            notices=notices,
        )


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Survey(Result):
    """Configurations of a space as compiled, without a GPU.

    Attributes
    ----------
    problem, device
        Problem and device that they were compiled for.
    space
        All valid configurations.
    rows
        Rows of the space that were compiled, ascending: int64, shape (configurations,).
    columns
        Whole numbers of each configuration by name, int64, shape (configurations,), -1 for what is not known. Of a
        kernel of several steps: those of the one with the most threads.
    compile_s
        Time that each compilation took, in seconds; about 0 if the cubin was in the cache.
    estimated_us
        Estimated time of each configuration in microseconds, of which the order counts; None if the search-space file
        does not say enough.
    failures
        Configurations that cannot be launched, by reason, the most frequent first.
    reasons
        Reason of each value of the column ``failure``.
    distinct
        Number of distinct codes among the configurations that compiled.
    planned
        Number of configurations that were to be compiled.
    seconds
        Wall time, in seconds.
    interrupted
        Whether the user ended it before all of them were.
    notices
        Remarks for the user, one line each.
    shown
        Configurations in the table; 0 for none.
    """

    problem: Problem
    device: DeviceProperties
    space: SearchSpace
    rows: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.int64]]
    compile_s: Figures
    estimated_us: Figures | None
    failures: tuple[FailureGroup, ...]
    reasons: tuple[str, ...]
    distinct: int
    planned: int
    seconds: float
    interrupted: bool
    notices: tuple[str, ...] = ()
    shown: int = 12

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
        return tuple(name for bit, name in enumerate(LIMITS) if bits > 0 and bits >> bit & 1)

    def reason(self, index: int) -> str:
        """Return why an entry cannot be launched; "" if it can. Numbers in it are those of the first such entry."""
        failure = int(self.columns["failure"][index])
        return self.reasons[failure] if failure >= 0 else ""

    def promising(self, count: int) -> list[int]:
        """Return entries that can be launched: of the least estimates, else of the highest occupancy without spills."""
        usable = np.flatnonzero(self.is_usable)
        if self.estimated_us is not None:
            keys: Sequence[Figures] = (self.estimated_us[usable],)
        else:
            keys = (-self.occupancy[usable], self.spill_bytes[usable])
        found: list[int] = usable[np.lexsort(keys)][:count].tolist()
        return found

    def ranges(self) -> list[QuantityRange]:
        """Return the range of each quantity over the configurations that compiled."""
        if not self.is_compiled.any():
            return []
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
            QuantityRange(name, unit, *(float(of(values)) for of in (np.nanmin, np.nanmedian, np.nanmax)))
            for name, unit, values in quantities
            if np.isfinite(values).any()
        ]

    def limit_counts(self) -> list[tuple[str, int]]:
        """Return how many configurations each limit keeps from more blocks on an SM, the most frequent first."""
        bits = self.columns["limited_by"]
        counts = Counter({name: int(((bits > 0) & (bits >> bit & 1 == 1)).sum()) for bit, name in enumerate(LIMITS)})
        return [(name, count) for name, count in counts.most_common() if count]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what was compiled, and how it went, as pairs of a label and its text."""
        part = "" if self.planned == len(self.space) else f", a sample of {self.planned:,}"
        yield "configurations", f"{len(self.space):,} valid{part}, {len(self):,} compiled"
        compiled, usable = int(self.is_compiled.sum()), int(self.is_usable.sum())
        if len(self):
            yield (
                "usable",
                f"{usable:,} ({percent_text(usable / len(self))}); {len(self) - usable:,} cannot be launched",
            )
        if compiled:
            spilled = int(np.nansum(self.spill_bytes > 0))
            yield "spills", f"{spilled:,} ({percent_text(spilled / compiled)}) spill registers"
            yield "distinct code", f"{self.distinct:,} of {compiled:,}"
            limits = (
                f"{name.replace('_', ' ')} {percent_text(count / compiled)}" for name, count in self.limit_counts()
            )
            yield "occupancy limited by", ", ".join(limits)

    def table(self) -> ColumnTable:
        """Return a row for each configuration, as typed columns with units in their names."""
        parameters = [
            TypedColumn.of_values(
                f"param.{p.name}", [p.values[code] for code in self.space.codes[self.rows, n].tolist()]
            )
            for n, p in enumerate(self.space.parameters)
        ]
        whole = [
            TypedColumn(heading, "whole", [None if value < 0 else value for value in self.columns[name].tolist()])
            for name, heading in _HEADINGS.items()
        ]
        indices = range(len(self))
        return ColumnTable(
            (
                *parameters,
                TypedColumn("outcome", "text", [str(_OUTCOMES[n]) for n in self.columns["outcome"].tolist()]),
                TypedColumn("reason", "text", [self.reason(index) or None for index in indices]),
                *whole,
                _real("occupancy_fraction", self.occupancy),
                TypedColumn("limited_by", "text", [" ".join(self.limited_by(index)) or None for index in indices]),
                _real("waves", self.waves),
                *([_real("estimated_us", self.estimated_us)] if self.estimated_us is not None else []),
                _real("compile_s", self.compile_s),
            )
        )

    def _known(self, name: str) -> Figures:
        """Return a column as real numbers, with NaN for what is not known."""
        column = self.columns[name]
        return np.where(column == _MISSING, np.nan, column)

    def _headline(self) -> str:
        what = plural(len(self), "configuration")
        end = ", interrupted" if self.interrupted else ""
        return f"{self.problem} on {device_text(self.device)}: {what} compiled, {self.is_usable.sum():,} usable{end}"

    def _heading(self) -> str:
        return f"{self.problem} on {device_text(self.device)}"

    def _parts(self) -> Iterator[Part]:
        """Yield counts, the range of each quantity, failures by reason, and some configurations."""
        yield [*self.facts(), ("took", duration_text(self.seconds))]
        if quantities := self.ranges():
            headings = ("of those that compiled", *(f"{RIGHT}{name}" for name in ("least", "median", "greatest")))
            ranges = [
                (
                    f"{one.name}, {one.unit}" if one.unit else one.name,
                    *(f"{value:,.5g}" for value in (one.least, one.median, one.greatest)),
                )
                for one in quantities
            ]
            yield ResultTable(headings, ranges, is_wrapped=True)
        if self.failures:
            failed = [
                (f"{group.count:,}", str(group.outcome), f"{group.reason}\n{config_text(group.examples[0])}")
                for group in self.failures[:_SHOWN_FAILURES]
            ]
            if left := self.failures[_SHOWN_FAILURES:]:
                count = sum(group.count for group in left)
                failed.append((f"{count:,}", NOTHING, f"{plural(len(left), 'further reason')}; --json has all"))
            yield ResultTable((f"{RIGHT}failed", "outcome", "reason, and an example"), failed, is_wrapped=True)
        if self.shown and (indices := self.promising(self.shown)):
            order = "least estimated time" if self.estimated_us is not None else "highest occupancy"
            yield self._configs_table(indices, f"{plural(len(indices), 'configuration')} of the {order}:")

    def _configs_table(self, indices: Sequence[int], caption: str) -> ResultTable:
        sizes = ("registers", "spills, B", "static, B", "dynamic, B", "threads", "occupancy")
        estimate = [f"{RIGHT}estimate"] if self.estimated_us is not None else []
        headings = [*(f"{RIGHT}{name}" for name in sizes), "limited by", f"{RIGHT}waves", *estimate, "configuration"]
        columns = self.columns
        rows = [
            [
                f"{columns['registers'][index]:,}",
                f"{self.spill_bytes[index]:,.0f}",
                f"{columns['static_smem_bytes'][index]:,}",
                f"{columns['dynamic_smem_bytes'][index]:,}",
                f"{columns['threads'][index]:,}",
                percent_text(self.occupancy[index]),
                ", ".join(self.limited_by(index)).replace("_", " "),
                f"{self.waves[index]:,.2f}",
                *([time_text(self.estimated_us[index])] if self.estimated_us is not None else []),
                config_text(self.config(index)),
            ]
            for index in indices
        ]
        return ResultTable(headings, rows, ("configuration", "limited by"), caption=caption)

    def to_json(self) -> dict[str, Any]:
        """Return the survey, with an entry for each configuration."""
        columns = self.table().columns
        names = [column.name for column in columns if not column.name.startswith("param.")]
        values = {column.name: column.values for column in columns}
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": self.device.identity,
            "valid": len(self.space),
            "planned": self.planned,
            "compiled": len(self),
            "usable": int(self.is_usable.sum()),
            "distinct_code": self.distinct,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "ranges": {
                one.name: {"unit": one.unit, "least": one.least, "median": one.median, "greatest": one.greatest}
                for one in self.ranges()
            },
            "failures": [
                {
                    "outcome": str(group.outcome),
                    "stage": group.stage,
                    "reason": group.reason,
                    "count": group.count,
                    "examples": [dict(config) for config in group.examples],
                }
                for group in self.failures
            ],
            "configurations": [
                {"config": self.config(index), **{name: values[name][index] for name in names}}
                for index in range(len(self))
            ],
        }


_HEADINGS = {
    "registers": "registers_per_thread",
    "spill_store_bytes": "spill_store_bytes",
    "spill_load_bytes": "spill_load_bytes",
    "stack_bytes": "stack_bytes",
    "static_smem_bytes": "static_smem_bytes",
    "dynamic_smem_bytes": "dynamic_smem_bytes",
    "threads": "threads_per_block",
    "blocks": "blocks",
    "blocks_per_sm": "blocks_per_sm",
    "warps_per_sm": "warps_per_sm",
}
"""Heading of each column of whole numbers in `Survey.table`."""


def _real(name: str, values: Figures) -> TypedColumn:
    return TypedColumn(name, "real", [value if np.isfinite(value) else None for value in values.tolist()])

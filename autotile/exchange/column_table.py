"""Trials as a table of typed columns, and its files: CSV, which spreadsheets open, and Parquet."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO

from autotile.core.documents import encode_json, storable
from autotile.core.text import shown_text
from autotile.database.database import StoredTrial
from autotile.database.keys import TuningKey
from autotile.errors import ToolchainError

if TYPE_CHECKING:
    import pandas
    import pyarrow

Kind = Literal["whole", "real", "flag", "text", "moment", "reals"]
"""Type of a column: 64-bit integers, doubles, booleans, texts, times in UTC, or lists of doubles."""

_CHUNK_ROWS = 1000
_MAX_WHOLE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """A column of a table."""

    name: str
    """Heading, with the unit at its end: ``time_us``."""
    kind: Kind
    """Type of the values."""
    values: Sequence[Any]
    """One for each row; None where it is missing."""

    @classmethod
    def of_values(cls, name: str, values: Sequence[Any]) -> TypedColumn:
        """Return a column with the narrowest type that holds all values; text if their types differ."""
        kinds = {_kind(value) for value in values if value is not None}
        if kinds == {"whole", "real"}:
            kinds = {"real"}
        if len(kinds) == 1:
            return cls(name, kinds.pop(), values)
        texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
        return cls(name, "text", [None if value is None else text for value, text in zip(values, texts, strict=True)])


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """A table of typed columns of equal length."""

    columns: tuple[TypedColumn, ...]

    def __len__(self) -> int:
        return len(self.columns[0].values) if self.columns else 0

    def write_csv(self, stream: TextIO) -> None:
        """Write the table as CSV, which a spreadsheet shows and does not execute.

        Numbers are plain, with a point; flags are ``true`` and ``false``; times are ISO 8601 in UTC; a list is JSON; a
        missing value is empty. A text that a spreadsheet would take for a formula gets an apostrophe before it, as
        OWASP recommends, and characters that are not printable are escaped.
        """
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_inert(column.name) for column in self.columns)
        # A missing value, None, is written as an empty cell.
        cells = [
            [None if value is None else _CELL_OF[column.kind](value) for value in column.values]
            if column.kind in _CELL_OF
            else column.values
            for column in self.columns
        ]
        rows: Iterator[tuple[Any, ...]] = zip(*cells, strict=True)
        while chunk := list(islice(rows, _CHUNK_ROWS)):
            writer.writerows(chunk)

    def to_arrow(self) -> pyarrow.Table:
        """Return the table as one of pyarrow; a `ToolchainError` if it is not installed."""
        try:
            import pyarrow as pa
        except ImportError:
            raise ToolchainError(
                "Parquet files need pyarrow; install it with `pip install 'autotile[parquet]'`"
            ) from None
        types = {"whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_(), "text": pa.string()}
        types |= {"moment": pa.timestamp("us", tz="UTC"), "reals": pa.list_(pa.float64())}
        arrays = {
            column.name: pa.array(
                [None if v is None else storable(v) for v in column.values] if column.kind == "text" else column.values,
                types[column.kind],
            )
            for column in self.columns
        }
        return pa.table(arrays)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table as one of pandas, with nullable types of whole numbers, flags and texts.

        A `ToolchainError` is raised if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ToolchainError(
                "data frames need pandas; install it with `pip install 'autotile[notebook]'`"
            ) from None
        types = {"whole": "Int64", "real": "float64", "flag": "boolean", "text": "string"}
        types |= {"moment": "datetime64[us, UTC]", "reals": "object"}
        series = {c.name: pd.Series(list(c.values), dtype=types[c.kind]) for c in self.columns}
        return pd.DataFrame(series)

    def write_parquet(self, stream: IO[bytes]) -> None:
        """Write the table as Parquet, with the types of the columns; texts are as they were stored."""
        table = self.to_arrow()
        from pyarrow import parquet

        parquet.write_table(table, stream)


Read = Callable[[TuningKey, StoredTrial], Any]

_STAGES = ("compile", "load", "verify", "measure")
_LIMITS = ("threads", "registers", "shared_memory", "blocks")


def trial_table(trials: Iterable[tuple[TuningKey, StoredTrial]]) -> ColumnTable:
    """Return trials as a table: a row for each, failures too, and a column for everything that is stored of it.

    The columns and their order depend on the kernel only, not on what happened in the trials; columns of telemetry, and
    of further stages, are there if a trial has them.
    """
    rows = list(trials)

    def column(name: str, kind: Kind, read: Read) -> TypedColumn:
        return TypedColumn(name, kind, [read(*row) for row in rows])

    def mapped(prefix: str, read: Read, *, ordered: bool = False) -> list[TypedColumn]:
        """Return a column for each name of a mapping; the prefix keeps its names apart from all others."""
        found = [read(*row) for row in rows]
        names: Iterable[str] = dict.fromkeys(name for values in found for name in values)
        return [
            TypedColumn.of_values(f"{prefix}{name}", [values.get(name) for values in found])
            for name in (sorted(names) if ordered else names)
        ]

    further = sorted({name for _, stored in rows for name in stored.trial.seconds} - {*_STAGES})
    columns = [
        *(column(*each) for each in _IDENTITY),
        *mapped("size.", lambda key, stored: key.sizes),
        *mapped("param.", lambda key, stored: stored.trial.config),
        *(column(*each) for each in _RESULT),
        *(
            TypedColumn(f"stage.{name}_s", "real", [stored.trial.seconds.get(name) for _, stored in rows])
            for name in (*_STAGES, *further)
        ),
        *mapped("telemetry.", lambda key, stored: stored.trial.telemetry, ordered=True),
    ]
    return ColumnTable(tuple(columns))


def _of(part: str, name: str) -> Read:
    """Read an attribute of a part of the trial that a failed one may lack."""
    return lambda key, stored: getattr(getattr(stored.trial, part), name, None)


def _limit(name: str) -> Read:
    return lambda key, stored: stored.trial.occupancy.limits.get(name) if stored.trial.occupancy is not None else None


def _extent(part: str, axis: int) -> Read:
    return lambda key, stored: getattr(stored.trial.geometry, part)[axis] if stored.trial.geometry is not None else None


_IDENTITY: tuple[tuple[str, Kind, Read], ...] = (
    ("trial_id", "whole", lambda key, stored: stored.trial_id),
    ("study_id", "whole", lambda key, stored: stored.study_id),
    ("run_id", "whole", lambda key, stored: stored.run_id),
    ("created_at", "moment", lambda key, stored: stored.created_at.astimezone(UTC)),
    ("phase", "text", lambda key, stored: stored.phase),
    ("rank", "whole", lambda key, stored: stored.rank),
    ("kernel", "text", lambda key, stored: key.kernel),
    ("dtype", "text", lambda key, stored: key.dtype),
    ("device", "text", lambda key, stored: key.gpu_name),
    ("compute_capability", "text", lambda key, stored: key.compute_capability),
    ("source", "text", lambda key, stored: stored.trial.source),
    ("l2_mode", "text", lambda key, stored: key.l2_mode),
    ("nvrtc_version", "text", lambda key, stored: key.nvrtc_version),
    ("template_hash", "text", lambda key, stored: key.template_hash),
)

_RESULT: tuple[tuple[str, Kind, Read], ...] = (
    ("outcome", "text", lambda key, stored: str(stored.trial.outcome)),
    ("stage", "text", lambda key, stored: stored.trial.stage),
    ("reason", "text", lambda key, stored: stored.trial.reason),
    ("time_us", "real", _of("measurement", "time_us")),
    ("time_low_us", "real", _of("measurement", "low_us")),
    ("time_high_us", "real", _of("measurement", "high_us")),
    ("samples_us", "reals", _of("measurement", "samples_us")),
    *((f"{part}_{axis}", "whole", _extent(part, i)) for part in ("grid", "block") for i, axis in enumerate("xyz")),
    ("dynamic_smem_bytes", "whole", _of("geometry", "dynamic_smem_bytes")),
    ("static_smem_bytes", "whole", _of("resources", "static_smem_bytes")),
    ("registers_per_thread", "whole", _of("resources", "registers")),
    *((name, "whole", _of("resources", name)) for name in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")),
    ("occupancy_fraction", "real", _of("occupancy", "occupancy")),
    ("blocks_per_sm", "whole", _of("occupancy", "blocks_per_sm")),
    ("warps_per_sm", "whole", _of("occupancy", "warps_per_sm")),
    ("limited_by", "text", lambda key, stored: " ".join(getattr(stored.trial.occupancy, "limited_by", ())) or None),
    *((f"blocks_allowed_by_{name}", "whole", _limit(name)) for name in _LIMITS),
    ("cubin_hash", "text", lambda key, stored: stored.trial.cubin_hash or None),
)


def _kind(value: object) -> Kind:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "whole" if -_MAX_WHOLE <= value <= _MAX_WHOLE else "real"
    return "real" if isinstance(value, float) else "text"


_FORMULA = re.compile(r"(?:\A|(?<=[,;|\t\r\n]))([\s\"']*)(?=[=+\-@\t\r\uff1d\uff0b\uff0d\uff20])")
"""Beginnings of what a spreadsheet takes for a formula, in a cell or after what may separate cells:
https://owasp.org/www-community/attacks/CSV_Injection."""


def _inert(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula, and no terminal acts upon."""
    return _FORMULA.sub(r"\1'", shown_text(text, lines=True))


_CELL_OF: dict[Kind, Callable[[Any], str]] = {
    "flag": lambda value: "true" if value else "false",
    "text": _inert,
    "moment": lambda value: str(value.isoformat(timespec="microseconds")),
    "reals": lambda value: encode_json(list(value)),
}
"""Text of a value that is no number, by the type of its column."""

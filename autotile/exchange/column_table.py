"""Trials as a table of typed columns, and its files: CSV, which spreadsheets open, and Parquet."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from operator import itemgetter, methodcaller
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO

from autotile.core.documents import encode_json, storable
from autotile.core.text import shown_text
from autotile.database.database import StoredTrial
from autotile.database.keys import TuningKey
from autotile.errors import ToolchainError

if TYPE_CHECKING:
    import pandas

Kind = Literal["whole", "real", "flag", "text", "moment", "reals"]
"""Type of a column: 64-bit integers, doubles, booleans, texts, times in UTC, or lists of doubles."""

_MAX_WHOLE = 2**63 - 1


TypedColumn = tuple[str, Kind, Sequence[Any]]
"""Heading of a column, with the unit at its end, such as ``time_us``; its type; and a value for each row, None where it
is missing."""


def narrowest_column(name: str, values: Sequence[Any]) -> TypedColumn:
    """Return a column with the narrowest type that holds all values; text if their types differ."""
    kinds = {_kind(value) for value in values if value is not None}
    if kinds == {"whole", "real"}:
        kinds = {"real"}
    if len(kinds) == 1:
        return name, kinds.pop(), values
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return name, "text", [None if value is None else text for value, text in zip(values, texts, strict=True)]


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """A table of typed columns of equal length."""

    columns: tuple[TypedColumn, ...]

    def __len__(self) -> int:
        return len(self.columns[0][2]) if self.columns else 0

    def write_csv(self, stream: TextIO) -> None:
        """Write the table as CSV, which a spreadsheet shows and does not execute.

        Numbers are plain, with a point; flags are ``true`` and ``false``; times are ISO 8601 in UTC; a list is JSON; a
        missing value is empty. A text that a spreadsheet would take for a formula gets an apostrophe before it, as
        OWASP recommends, and characters that are not printable are escaped.
        """
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_inert(name) for name, _, _ in self.columns)
        # A missing value, None, is written as an empty cell.
        cells = [
            [None if value is None else _CELL_OF[kind](value) for value in values] if kind in _CELL_OF else values
            for _, kind, values in self.columns
        ]
        writer.writerows(zip(*cells, strict=True))

    def write_parquet(self, stream: IO[bytes]) -> None:
        """Write the table as Parquet, with the types of the columns; texts are as they were stored.

        A `ToolchainError` is raised if pyarrow is not installed.
        """
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError:
            raise ToolchainError(
                "Parquet files need pyarrow; install it with `pip install 'autotile[parquet]'`"
            ) from None
        types = {"whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_(), "text": pa.string()}
        types |= {"moment": pa.timestamp("us", tz="UTC"), "reals": pa.list_(pa.float64())}
        arrays = {
            name: pa.array(
                [None if v is None else storable(v) for v in values] if kind == "text" else values, types[kind]
            )
            for name, kind, values in self.columns
        }
        parquet.write_table(pa.table(arrays), stream)

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
        return pd.DataFrame({name: pd.Series([*found], dtype=types[kind]) for name, kind, found in self.columns})


_STAGES = ("compile", "load", "verify", "measure")
_PARTS = ("measurement", "geometry", "resources", "occupancy")
"""Parts of a trial that a failed one may lack."""

_IDENTITY: tuple[tuple[str, Kind, str], ...] = (
    ("stored", "whole", "trial_id study_id run_id"),
    ("stored", "moment", "created_at"),
    ("stored", "text", "phase"),
    ("stored", "whole", "rank"),
    ("key", "text", "kernel dtype device=gpu_name compute_capability"),
    ("trial", "text", "source"),
    ("key", "text", "l2_mode nvrtc_version template_hash"),
)
_RESULT: tuple[tuple[str, Kind, str], ...] = (
    ("trial", "text", "outcome stage reason"),
    ("measurement", "real", "time_us time_low_us=low_us time_high_us=high_us"),
    ("measurement", "reals", "samples_us"),
    ("geometry", "whole", "grid_x=grid.0 grid_y=grid.1 grid_z=grid.2 block_x=block.0 block_y=block.1 block_z=block.2"),
    ("geometry", "whole", "dynamic_smem_bytes"),
    ("resources", "whole", "static_smem_bytes registers_per_thread=registers"),
    ("resources", "whole", "stack_bytes spill_store_bytes spill_load_bytes"),
    ("occupancy", "real", "occupancy_fraction=occupancy"),
    ("occupancy", "whole", "blocks_per_sm warps_per_sm"),
    ("occupancy", "text", "limited_by"),
    ("occupancy", "whole", "blocks_allowed_by_threads=limits.threads blocks_allowed_by_registers=limits.registers"),
    (
        "occupancy",
        "whole",
        "blocks_allowed_by_shared_memory=limits.shared_memory blocks_allowed_by_blocks=limits.blocks",
    ),
    ("trial", "text", "cubin_hash"),
)
"""Columns of a part with their attributes, if these have other names, and the name or the index in its value."""
_SHOWN: dict[str, Callable[[Any], Any]] = {
    "created_at": lambda moment: moment.astimezone(UTC),
    "outcome": str,
    "limited_by": lambda limits: " ".join(limits) or None,
    "cubin_hash": lambda text: text or None,
}


def trial_table(trials: Iterable[tuple[TuningKey, StoredTrial]]) -> ColumnTable:
    """Return trials as a table: a row for each, failures too, and a column for everything that is stored of it.

    The columns and their order depend on the kernel only, not on what happened in the trials; columns of telemetry, and
    of further stages, are there if a trial has them.
    """
    rows = list(trials)
    found = [stored.trial for _, stored in rows]
    parts: dict[str, list[Any]] = {part: [getattr(trial, part) for trial in found] for part in _PARTS}
    parts |= {"key": [key for key, _ in rows], "stored": [stored for _, stored in rows], "trial": found}

    def column(part: str, kind: Kind, entry: str) -> TypedColumn:
        name, _, path = entry.partition("=")
        attribute, _, inner = (path or name).partition(".")
        values = [None if each is None else getattr(each, attribute) for each in parts[part]]
        shown = _SHOWN.get(name)
        if inner:
            shown = methodcaller("get", inner) if attribute == "limits" else itemgetter(int(inner))
        if shown is not None:
            values = [None if value is None else shown(value) for value in values]
        return name, kind, values

    def mapped(prefix: str, found: Sequence[Mapping[str, Any]], *, ordered: bool = False) -> list[TypedColumn]:
        """Return a column for each name of a mapping; the prefix keeps its names apart from all others."""
        names: Iterable[str] = dict.fromkeys(name for values in found for name in values)
        return [
            narrowest_column(f"{prefix}{name}", [values.get(name) for values in found])
            for name in (sorted(names) if ordered else names)
        ]

    further = sorted({name for trial in found for name in trial.seconds} - {*_STAGES})
    columns: list[TypedColumn] = [
        *(column(part, kind, entry) for part, kind, names in _IDENTITY for entry in names.split()),
        *mapped("size.", [key.sizes for key, _ in rows]),
        *mapped("param.", [trial.config for trial in found]),
        *(column(part, kind, entry) for part, kind, names in _RESULT for entry in names.split()),
        *((f"stage.{name}_s", "real", [trial.seconds.get(name) for trial in found]) for name in (*_STAGES, *further)),
        *mapped("telemetry.", [trial.telemetry for trial in found], ordered=True),
    ]
    return ColumnTable(tuple(columns))


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

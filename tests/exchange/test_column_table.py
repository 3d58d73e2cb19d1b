"""Trials as typed columns: their order and types, CSV that spreadsheets do not execute, Parquet."""

import csv
import io
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from stored_runs import KEY

from autotile.core.model import LaunchGeometry, Measurement, Occupancy, Outcome, Resources, Trial
from autotile.database.database import StoredTrial
from autotile.errors import ToolchainError
from autotile.exchange.column_table import ColumnTable, narrowest_column, trial_table

SIZED = structs.replace(KEY, sizes={"M": 64, "N": 32})
OK = Trial(
    {"BM": 64, "FAST": True, "SCALE": 1, "T": "half"},
    Outcome.OK,
    stage="measure",
    geometry=LaunchGeometry((16, 8, 1), (256, 1, 1), 1024),
    resources=Resources(40, 8, 12, 24, 2048),
    occupancy=Occupancy(4, 32, 0.5, ("registers", "threads"), {"registers": 4, "threads": 4}),
    measurement=Measurement(10.5, 10.0, 11.0, (10.0, 11.0)),
    cubin_hash="c",
    seconds={"compile": 0.25, "measure": 0.5, "inspect": 1.0},
    telemetry={"power_w": 300.5, "sm_clock_mhz": 1980},
)
FAILED = Trial(
    {"BM": 128, "FAST": False, "SCALE": 0.5, "T": 3}, Outcome.COMPILE_FAILED, '=cmd|" /C calc"!A0', "compile"
)


def table(*trials: Trial) -> ColumnTable:
    moment = datetime(2026, 1, 2, 3, 4, 5, 600000, UTC)
    return trial_table((SIZED, StoredTrial(n, 1, 1, "search", None, moment, t)) for n, t in enumerate(trials, 1))


def csv_text(columns: ColumnTable) -> str:
    stream = io.StringIO()
    columns.write_csv(stream)
    return stream.getvalue()


def csv_rows(columns: ColumnTable) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(columns), newline="")))


class TestTrialTable:
    def test_every_trial_is_a_row_whatever_its_outcome(self):
        ok, failed = csv_rows(table(OK, FAILED))
        assert (ok["outcome"], failed["outcome"]) == ("ok", "compile_failed")
        assert (ok["time_us"], ok["time_low_us"], ok["time_high_us"]) == ("10.5", "10.0", "11.0")
        assert failed["time_us"] == failed["registers_per_thread"] == failed["grid_x"] == ""

    def test_all_that_is_stored_has_a_column(self):
        row = csv_rows(table(OK))[0]
        assert (row["created_at"], row["size.M"], row["size.N"]) == ("2026-01-02T03:04:05.600000+00:00", "64", "32")
        assert (row["param.BM"], row["param.FAST"], row["param.T"]) == ("64", "true", "half")
        assert (row["grid_x"], row["grid_y"], row["block_x"], row["dynamic_smem_bytes"]) == ("16", "8", "256", "1024")
        assert (row["registers_per_thread"], row["spill_store_bytes"], row["spill_load_bytes"]) == ("40", "8", "12")
        assert (row["occupancy_fraction"], row["limited_by"]) == ("0.5", "registers threads")
        assert row["blocks_allowed_by_registers"] == "4"
        assert (row["stage.compile_s"], row["stage.inspect_s"]) == ("0.25", "1.0")
        assert (row["telemetry.power_w"], row["telemetry.sm_clock_mhz"]) == ("300.5", "1980")
        assert row["samples_us"] == "[10.0, 11.0]"

    def test_names_do_not_depend_on_the_outcomes_and_those_of_a_kernel_are_kept_apart_from_our_own(self):
        def names(*trials: Trial) -> list[str]:
            names = [name for name, _, _ in table(*trials).columns]
            return [name for name in names if not name.startswith(("telemetry.", "stage."))]

        assert names(OK, FAILED) == names(FAILED, OK) == names(FAILED)
        assert csv_text(table()).startswith("trial_id,")
        assert csv_text(table()).count("\n") == 1
        found = names(replace(OK, config={"time_us": 3, "=1+1": 4}))
        assert len(set(found)) == len(found)
        assert {"time_us", "param.time_us", "param.=1+1"} < set(found)


class TestTypes:
    @pytest.mark.parametrize(
        ("values", "kind"),
        [
            ([1, None, 2], "whole"),
            ([1, 2.5], "real"),
            ([2**63], "real"),
            ([True, False, None], "flag"),
            ([True, 1], "text"),
            (["half", 3], "text"),
            ([None], "text"),
        ],
    )
    def test_a_column_has_the_narrowest_type_of_its_values(self, values, kind):
        assert narrowest_column("x", values)[1] == kind

    def test_parquet_keeps_types_and_values(self):
        pytest.importorskip("pyarrow", reason="the extra autotile[parquet] is not installed")
        from pyarrow import parquet

        stream = io.BytesIO()
        table(OK, FAILED, replace(FAILED, reason="a\ud800b")).write_parquet(stream)
        found = parquet.read_table(io.BytesIO(stream.getvalue()))
        types = {field.name: str(field.type) for field in found.schema}
        assert (types["param.BM"], types["param.FAST"], types["param.SCALE"]) == ("int64", "bool", "double")
        assert (types["created_at"], types["samples_us"]) == ("timestamp[us, tz=UTC]", "list<element: double>")
        rows = found.to_pylist()
        assert rows[0]["created_at"] == datetime(2026, 1, 2, 3, 4, 5, 600000, UTC)
        assert (rows[0]["param.T"], rows[1]["param.T"]) == ("half", "3")
        assert rows[1]["reason"] == FAILED.reason  # no spreadsheet reads it as text
        assert rows[1]["time_us"] is None
        assert len(rows) == 3  # also of text that no encoding has

    def test_without_pyarrow_the_error_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(ToolchainError, match=r"autotile\[parquet\]"):
            table(OK).write_parquet(io.BytesIO())


class TestFormulas:
    @given(st.text())
    @example("=1+1")
    @example(" \t@SUM(A1)")
    @example('x;"=1+1"')
    @example("x\n-1")
    @example("\uff1dcmd")
    def test_no_cell_begins_as_a_formula(self, text):
        columns = ColumnTable((("reason", "text", [text]), ("time_us", "real", [1.5])))
        (_, (cell, number)) = list(csv.reader(io.StringIO(csv_text(columns), newline="")))
        assert number == "1.5"
        for part in re.split(r"[,;|\t\r\n]", cell):  # what a spreadsheet may take for cells
            assert not re.match(r"[\s\"]*[=+\-@\uff1d\uff0b\uff0d\uff20]", part)

    def test_other_texts_are_kept_but_for_control_characters(self):
        text = 'error: expected a ";" at a-b = c\nline 2'
        plain, coloured = csv_rows(table(replace(FAILED, reason=text), replace(FAILED, reason="\x1b[2J")))
        assert plain["reason"] == text
        assert "\x1b" not in coloured["reason"]

    def test_a_heading_is_no_formula_and_negative_numbers_stay_numbers(self):
        assert csv_text(ColumnTable((("=1+1", "whole", [1]),))) == "'=1+1\n1\n"
        assert csv_text(ColumnTable((narrowest_column("param.SHIFT", [-3]),))) == "param.SHIFT\n-3\n"

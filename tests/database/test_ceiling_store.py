"""Ceilings in the database: the newest of each GPU wins, also in a merge, and altered rows are skipped."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from stored_rows import CEILINGS, GPU

from autotile.database.care import check_database, copy_missing_rows
from autotile.database.database import Database
from autotile.database.engine import CEILINGS as TABLE
from autotile.database.learned import read_ceilings, save_ceilings
from autotile.errors import DataWarning

NEWER = replace(CEILINGS, measured_at=CEILINGS.measured_at + timedelta(days=1), warnings=())
OTHER = replace(CEILINGS, gpu_uuid=f"{GPU[:-1]}1", gpu_name="Other")


def test_a_measurement_replaces_the_older_one_of_its_gpu(database: Database) -> None:
    for measured in (CEILINGS, OTHER, NEWER):
        save_ceilings(database, measured)
    assert read_ceilings(database) == [NEWER, OTHER]
    assert read_ceilings(database, gpu_name="Other") == [OTHER]
    assert read_ceilings(database, gpu_uuid=GPU) == [NEWER]
    assert read_ceilings(database, gpu_uuid="GPU-none") == []


def test_a_merge_keeps_the_newer_measurement(database: Database, tmp_path: Path) -> None:
    save_ceilings(database, CEILINGS)
    with Database.open(tmp_path / "other.db") as other:
        save_ceilings(other, NEWER)
        save_ceilings(other, OTHER)
        copy_missing_rows(database, other)
        assert read_ceilings(other, gpu_uuid=GPU) == [NEWER]
        copy_missing_rows(other, database)
    assert read_ceilings(database) == [NEWER, OTHER]


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_uuid": "<script>"},
        {"measured_at": "soon"},
        {"ceilings": [{"name": "warp", "value": 1.0, "low": 1.0, "high": 1.0, "method": ""}]},
        {"ceilings": {"dram_read": 1e12}},
        {"warnings": [1]},
    ],
)
def test_an_altered_row_is_skipped_and_named(database: Database, change: dict[str, object]) -> None:
    save_ceilings(database, CEILINGS)
    with database.writing() as connection:
        connection.execute(update(TABLE).values(**change))
    with pytest.warns(DataWarning, match="ceilings 1"):
        assert read_ceilings(database) == []
    assert [row.table for row in check_database(database).bad_rows] == ["ceilings"]

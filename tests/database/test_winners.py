"""Conversions of winners and rules: JSON, and the columns of the database."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import JSON

from autotile.core.device import DeviceProperties
from autotile.core.documents import convert
from autotile.core.model import Measurement, Resources
from autotile.database.engine import METADATA
from autotile.database.keys import TuningKey
from autotile.database.winners import (
    JSON_COLUMNS,
    RESOURCE_COLUMNS,
    RULE_COLUMNS,
    WINNER_COLUMNS,
    Winner,
    WinnerDocument,
)

SELECTED = {**WINNER_COLUMNS, "families": RULE_COLUMNS}


@pytest.fixture
def winner(key: TuningKey, device: DeviceProperties) -> Winner:
    tuned_at = datetime(2026, 5, 1, 12, 30, 15, tzinfo=UTC)
    return Winner(key, device, {"b": 2, "a": True}, Resources(24, 0, 8, 16, 32), Measurement(2.5, 2.4, 2.75), tuned_at)


@pytest.mark.parametrize(
    "changes", [{}, {"device": None, "resources": None, "measurement": None}, {"shipped": True}], ids=str
)
def test_a_winner_survives_json(winner: Winner, changes: dict[str, object]) -> None:
    expected = replace(winner, **changes)  # type: ignore[arg-type]
    assert convert(expected.to_json(), WinnerDocument).winner() == expected
    assert list(expected.to_json()) == ["key", "device", "config", "resources", "measurement", "tuned_at", "shipped"]


@pytest.mark.parametrize("table", SELECTED)
def test_the_columns_are_those_of_the_schema(table: str) -> None:
    columns = METADATA.tables[table].c
    assert set(SELECTED[table]) <= set(columns.keys())
    assert JSON_COLUMNS & set(SELECTED[table]) == {n for n in SELECTED[table] if isinstance(columns[n].type, JSON)}


def test_no_two_columns_of_a_winner_have_one_name() -> None:
    names = [name for columns in WINNER_COLUMNS.values() for name in columns]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("driver", "expected"), [("", "13.0"), ("13.0", "13.0"), ("14.2", "14.2")])
def test_the_driver_is_that_of_the_run(winner: Winner, device: DeviceProperties, driver: str, expected: str) -> None:
    row = {
        **winner.key.to_json(),
        "config": winner.config,
        **dict.fromkeys([*RESOURCE_COLUMNS, "time_us", "low_us", "high_us", "l2"]),
        "created_at": winner.tuned_at.isoformat(),
        "driver": driver,
    }
    found = Winner.from_row(row, replace(device, driver="13.0"))
    assert found.device == replace(device, driver=expected)
    assert (found.key, found.resources, found.measurement) == (winner.key, None, None)
    assert Winner.from_row(row, None).device is None

"""What is learned: the newest of each is kept, also in a merge, state survives a kill, altered rows are skipped."""

import json
import sqlite3
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from stored_rows import CEILINGS, GPU

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Resources
from autotile.database.care import check_database, copy_missing_rows
from autotile.database.database import Database
from autotile.database.engine import CEILINGS as TABLE
from autotile.database.keys import TuningKey
from autotile.database.learned import (
    FamilyState,
    family_state,
    read_ceilings,
    read_models,
    save_ceilings,
    save_family_state,
    save_model,
    save_rule,
)
from autotile.database.winners import CHANGES, MODEL, RULES, read_file
from autotile.errors import DataWarning
from autotile.families.family import Extent, Family, FamilyRule, Leaf, RuleConfig, RulePoint, Split
from autotile.families.features import Feature


def found(database: Database, **chosen: Any) -> list[tuple[str, str, str, Any]]:
    return [(one.operation, one.dtype, one.gpu_name, one.model) for one in read_models(database, **chosen)]


def test_a_model_replaces_the_older_one_of_its_gpu(database: Database, device: DeviceProperties) -> None:
    other = replace(device, name="Other")
    save_model(database, "matmul", "float32", device, {"format": 1, "number": 1})
    save_model(database, "matmul", "float32", other, {"format": 1, "number": 2})
    save_model(database, "matmul", "float32", device, {"format": 1, "number": 3})
    assert found(database) == [
        ("matmul", "float32", device.name, {"format": 1, "number": 3}),
        ("matmul", "float32", "Other", {"format": 1, "number": 2}),
    ]
    assert [one[3]["number"] for one in found(database, gpu_name="Other")] == [2]
    assert found(database, dtype="float16") == []


def test_a_fast_read_finds_it_and_notices_a_new_one(database: Database, device: DeviceProperties) -> None:
    location = str(database.path)
    of = {"operation": "matmul", "dtype": "float32", "gpu_name": device.name}
    assert read_file(location, MODEL, **of) == []
    before = read_file(location, CHANGES)
    save_model(database, "matmul", "float32", device, {"format": 1})
    assert read_file(location, MODEL, **of) == [{"format": 1}]
    assert read_file(location, CHANGES) != before


NEWER = replace(CEILINGS, measured_at=CEILINGS.measured_at + timedelta(days=1), warnings=())
OTHER = replace(CEILINGS, gpu_uuid=f"{GPU[:-1]}1", gpu_name="Other")


def test_a_measurement_replaces_the_older_one_of_its_gpu(database: Database) -> None:
    for measured in (CEILINGS, OTHER, NEWER):
        save_ceilings(database, measured)
    assert read_ceilings(database) == [NEWER, OTHER]
    assert read_ceilings(database, gpu_name="Other") == [OTHER]
    assert read_ceilings(database, gpu_uuid=GPU) == [NEWER]
    assert read_ceilings(database, gpu_uuid="GPU-none") == []


def store(database: Database, kind: str, number: int, device: DeviceProperties) -> None:
    """Store the first or the second of what is learned."""
    if kind == "models":
        save_model(database, "matmul", "float32", device, {"format": 1, "number": number})
    else:
        save_ceilings(database, CEILINGS if number == 1 else NEWER)


def numbers(database: Database, kind: str) -> list[int]:
    if kind == "models":
        return [one.model["number"] for one in read_models(database)]
    return [1 if one == CEILINGS else 2 for one in read_ceilings(database, gpu_uuid=GPU)]


@pytest.mark.parametrize("kind", ["models", "ceilings"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_merge_keeps_the_newer_one_unless_its_date_has_yet_to_come(
    database: Database, device: DeviceProperties, tmp_path: Path, kind: str, ahead: bool
) -> None:
    store(database, kind, 1, device)
    with Database.open(tmp_path / "other.db") as other:
        store(other, kind, 2, device)
        if ahead:
            date = "measured_at" if kind == "ceilings" else "learned_at"
            with database.writing() as connection:
                connection.execute(text(f"UPDATE {kind} SET {date} = '2140-01-01T00:00:00.000000+00:00'"))
        copy_missing_rows(database, other)
        assert numbers(other, kind) == [2]
        copy_missing_rows(other, database)
    assert numbers(database, kind) == [2]


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


H200 = device_profile("h200")
FAMILY = Family({"M": Extent(((1, 8192),)), "N": Extent(((4096, 4096), (7168, 7168)))})


def a_rule(family: Family = FAMILY) -> FamilyRule:
    return FamilyRule(
        family,
        (RuleConfig({"BM": 64}, Resources(32, 0, 0, 0, 1024), 4), RuleConfig({"BM": 128}, None, 2)),
        Split(Feature("waves", config=1), 0.75, Leaf((0, 1)), Leaf((1, 0))),
        (
            RulePoint({"M": 1, "N": 4096}, ((3.0, 2.9, 3.1), None), 3.0, 0.0, 0.25),
            RulePoint({"M": 8192, "N": 7168}, ((9.0, 8.9, 9.1), (8.0, 7.9, 8.1)), 7.5, 0.5 / 7.5, None),
        ),
    )


@pytest.fixture
def family_key(key: TuningKey) -> TuningKey:
    return replace(key, sizes={})


class TestState:
    def test_it_is_kept_until_there_is_a_rule(self, database: Database, family_key: TuningKey) -> None:
        state = FamilyState({"points": [{"M": 1}]}, tuned=1, measured=0, seconds=2.5)
        assert family_state(database, family_key, FAMILY) is None
        save_family_state(database, family_key, FAMILY, H200, state)
        assert family_state(database, family_key, FAMILY) == state
        save_family_state(database, family_key, FAMILY, H200, replace(state, tuned=2))
        assert family_state(database, family_key, FAMILY) == replace(state, tuned=2)
        assert database.rules() == []
        save_rule(database, family_key, H200, a_rule())
        assert family_state(database, family_key, FAMILY) is None

    def test_a_rule_stays_in_force_while_its_family_is_tuned_anew(
        self, database: Database, family_key: TuningKey
    ) -> None:
        save_family_state(database, family_key, FAMILY, H200, FamilyState({}))
        save_rule(database, family_key, H200, a_rule())
        save_family_state(database, family_key, FAMILY, H200, FamilyState({}, tuned=1))
        assert [stored.rule for stored in database.rules()] == [a_rule()]


class TestRules:
    @pytest.mark.parametrize("date", ["1970-01-01T00:00:00.000000+00:00", "2140-01-01T00:00:00.000000+00:00"])
    def test_the_one_that_was_learned_last_is_first_whatever_the_clock(
        self, database: Database, family_key: TuningKey, tmp_path: Path, date: str
    ) -> None:
        first, second = FAMILY, Family({**FAMILY.extents, "M": Extent(((1, 2),))})
        for family in (first, second, first):
            save_family_state(database, family_key, family, H200, FamilyState({}))
            save_rule(database, family_key, H200, a_rule(family))
        with database.writing() as connection:
            wrong = text("UPDATE families SET learned_at = :date WHERE id = (SELECT min(id) FROM families)")
            if date < "2000":
                wrong = text("UPDATE families SET learned_at = :date WHERE id = (SELECT max(id) FROM families)")
            connection.execute(wrong, {"date": date})
        assert [stored.rule.family for stored in database.rules()] == [first, second]
        fast = read_file(str(tmp_path / "tuning.db"), RULES, kernel=family_key.kernel, dtype=family_key.dtype) or []
        assert [stored.rule.family for stored in fast] == [first, second]

    def test_both_readers_return_them_unchanged(
        self, database: Database, family_key: TuningKey, tmp_path: Path
    ) -> None:
        other = Family({**FAMILY.extents, "M": Extent(((1, 2),))})
        for family in (FAMILY, other):
            save_family_state(database, family_key, family, H200, FamilyState({}))
            save_rule(database, family_key, H200, a_rule(family))
        found = database.rules(family_key.kernel, family_key.dtype)
        assert {str(stored.rule.family) for stored in found} == {str(FAMILY), str(other)}
        assert all((stored.key, stored.device) == (family_key, H200) for stored in found)
        assert read_file(str(tmp_path / "tuning.db"), RULES, kernel=family_key.kernel, dtype=family_key.dtype) == found
        assert database.rules("other") == []
        assert read_file(str(tmp_path / "tuning.db"), RULES, kernel="other", dtype=family_key.dtype) == []

    @pytest.mark.parametrize(
        "damage",
        [
            {"format": 99},
            {"tree": {"serve": [0]}},
            {"tree": {"if": {"feature": "exec"}, "at_most": 1, "then": {"serve": [0, 1]}, "else": {"serve": [0, 1]}}},
            {"configs": []},
            {"points": [{"sizes": {}}]},
            {"family": {"M": "1..2"}},
        ],
    )
    def test_a_damaged_one_is_passed_over(
        self, database: Database, family_key: TuningKey, tmp_path: Path, damage: dict[str, Any]
    ) -> None:
        save_family_state(database, family_key, FAMILY, H200, FamilyState({}))
        save_rule(database, family_key, H200, a_rule())
        with sqlite3.connect(tmp_path / "tuning.db") as connection:
            connection.execute("UPDATE families SET rule = ?", (json.dumps({**a_rule().to_json(), **damage}),))
        with pytest.warns(DataWarning, match="families 1: rule"):
            assert database.rules() == []
        with pytest.raises(ValueError, match=r"."):
            FamilyRule.from_json({**a_rule().to_json(), **damage})


def test_a_rule_reads_as_lines() -> None:
    assert list(a_rule().lines()) == ["waves of #1 <= 0.75:", "  #0, else #1", "else:", "  #1, else #0"]


def test_figures_of_a_rule() -> None:
    rule = a_rule()
    assert rule.mean_loss == pytest.approx(0.25 / 7.5)
    assert rule.worst.sizes == {"M": 8192, "N": 7168}
    assert (rule.held_out_losses, rule.mean_held_out) == ([0.25], 0.25)
    nearest = rule.nearest_point(1, {"M": 2, "N": 4096})
    assert nearest is not None
    assert nearest.sizes == {"M": 8192, "N": 7168}  # it was not timed at the nearer one


@pytest.mark.parametrize(
    "damage",
    [
        ("family", '{"M": "2..1"}', "family"),
        ("family", '{"M": "1..x"}', "family"),
        ("family", "[]", "family"),
        ("family", "{", "family"),
        ("digest", "x", "digest"),
        ("digest", "A" * 64, "digest"),
        ("device", '{"name": "H200"}', "device"),
        ("key", '{"kernel": "sgemm"}', "key"),
        ("kernel", "k" * 2000, "kernel"),
        ("progress", '{"tuned": "x"}', "progress"),
        ("rule", '{"format": 99}', "rule"),
        ("learned_at", "yesterday", "learned_at"),
    ],
)
@pytest.mark.parametrize("has_rule", [False, True])
def test_a_check_of_the_database_finds_a_damaged_family(
    database: Database, family_key: TuningKey, tmp_path: Path, damage: tuple[str, str, str], has_rule: bool
) -> None:
    column, value, said = damage
    save_family_state(database, family_key, FAMILY, H200, FamilyState({}))
    if has_rule:
        save_rule(database, family_key, H200, a_rule())
    path = str(tmp_path / "tuning.db")
    assert check_database(database).bad_rows == ()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE families SET {column} = ?", (value,))
    (row,) = check_database(database).bad_rows
    assert row.table == "families"
    assert row.field.startswith(said if has_rule or column != "rule" else "learned_at")  # a rule has its date

"""Families in the database: state that survives a kill, rules that are read back, damaged rules that are skipped."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from autotile.api.databases import db_check
from autotile.core.device import device_profile
from autotile.core.model import Resources
from autotile.database.database import BadRowError, Database
from autotile.database.keys import TuningKey
from autotile.database.learned import FamilyState, family_state, save_family_state, save_rule
from autotile.database.winners import RULES, read_file
from autotile.errors import DataWarning
from autotile.families.family import Extent, Family, FamilyRule, Leaf, RuleConfig, RulePoint, Split
from autotile.families.features import Feature

DEVICE = device_profile("h200")
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
        save_family_state(database, family_key, FAMILY, DEVICE, state)
        assert family_state(database, family_key, FAMILY) == state
        save_family_state(database, family_key, FAMILY, DEVICE, replace(state, tuned=2))
        assert family_state(database, family_key, FAMILY) == replace(state, tuned=2)
        assert database.rules() == []
        save_rule(database, family_key, DEVICE, a_rule())
        assert family_state(database, family_key, FAMILY) is None

    def test_a_rule_stays_in_force_while_its_family_is_tuned_anew(
        self, database: Database, family_key: TuningKey
    ) -> None:
        save_family_state(database, family_key, FAMILY, DEVICE, FamilyState({}))
        save_rule(database, family_key, DEVICE, a_rule())
        save_family_state(database, family_key, FAMILY, DEVICE, FamilyState({}, tuned=1))
        assert [stored.rule for stored in database.rules()] == [a_rule()]


class TestRules:
    @pytest.mark.parametrize("date", ["1970-01-01T00:00:00.000000+00:00", "2140-01-01T00:00:00.000000+00:00"])
    def test_the_one_that_was_learned_last_is_first_whatever_the_clock(
        self, database: Database, family_key: TuningKey, tmp_path: Path, date: str
    ) -> None:
        first, second = FAMILY, Family({**FAMILY.extents, "M": Extent(((1, 2),))})
        for family in (first, second, first):
            save_family_state(database, family_key, family, DEVICE, FamilyState({}))
            save_rule(database, family_key, DEVICE, a_rule(family))
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
            save_family_state(database, family_key, family, DEVICE, FamilyState({}))
            save_rule(database, family_key, DEVICE, a_rule(family))
        found = database.rules(family_key.kernel, family_key.dtype)
        assert {str(stored.rule.family) for stored in found} == {str(FAMILY), str(other)}
        assert all((stored.key, stored.device) == (family_key, DEVICE) for stored in found)
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
        save_family_state(database, family_key, FAMILY, DEVICE, FamilyState({}))
        save_rule(database, family_key, DEVICE, a_rule())
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
    save_family_state(database, family_key, FAMILY, DEVICE, FamilyState({}))
    if has_rule:
        save_rule(database, family_key, DEVICE, a_rule())
    path = str(tmp_path / "tuning.db")
    assert _bad_rows(path) == ()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE families SET {column} = ?", (value,))
    (row,) = _bad_rows(path)
    assert row.table == "families"
    assert row.field.startswith(said if has_rule or column != "rule" else "learned_at")  # a rule has its date


def _bad_rows(path: str) -> tuple[BadRowError, ...]:
    found = db_check(path).check
    assert found is not None
    return tuple(found.bad_rows)

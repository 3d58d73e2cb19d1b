"""Families in the database: progress that outlives a kill, rules that are read back, damage that is passed over."""

import json
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autotile.core.device import device_profile
from autotile.core.model import Resources
from autotile.database.database import Database
from autotile.database.families import Families, FamilyProgress
from autotile.database.fast_read import read_rules_quickly
from autotile.database.keys import TuningKey
from autotile.database.winners import StoredRule, read_rules_file, write_rules_file
from autotile.errors import InputError
from autotile.families.family import Extent, Family
from autotile.families.features import Feature
from autotile.families.rule import FamilyRule, Leaf, RuleConfig, RulePoint, Split
from autotile.settings import data_folder

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


class TestProgress:
    def test_it_is_kept_until_there_is_a_rule(self, database: Database, family_key: TuningKey) -> None:
        progress = FamilyProgress({"points": [{"M": 1}]}, tuned=1, measured=0, seconds=2.5)
        assert Families(database).progress(family_key, FAMILY) is None
        Families(database).save_progress(family_key, FAMILY, DEVICE, progress)
        assert Families(database).progress(family_key, FAMILY) == progress
        Families(database).save_progress(family_key, FAMILY, DEVICE, replace(progress, tuned=2))
        assert Families(database).progress(family_key, FAMILY) == replace(progress, tuned=2)
        assert Families(database).rules() == []
        Families(database).save_rule(family_key, DEVICE, a_rule())
        assert Families(database).progress(family_key, FAMILY) is None

    def test_a_rule_stays_in_force_while_its_family_is_tuned_anew(
        self, database: Database, family_key: TuningKey
    ) -> None:
        Families(database).save_progress(family_key, FAMILY, DEVICE, FamilyProgress({}))
        Families(database).save_rule(family_key, DEVICE, a_rule())
        Families(database).save_progress(family_key, FAMILY, DEVICE, FamilyProgress({}, tuned=1))
        assert [stored.rule for stored in Families(database).rules()] == [a_rule()]


class TestRules:
    def test_they_are_read_back_whole_by_both_ways(
        self, database: Database, family_key: TuningKey, tmp_path: Path
    ) -> None:
        other = Family({**FAMILY.extents, "M": Extent(((1, 2),))})
        for family in (FAMILY, other):
            Families(database).save_progress(family_key, family, DEVICE, FamilyProgress({}))
            Families(database).save_rule(family_key, DEVICE, a_rule(family))
        found = Families(database).rules(family_key.kernel, family_key.dtype)
        assert {str(stored.rule.family) for stored in found} == {str(FAMILY), str(other)}
        assert all((stored.key, stored.device) == (family_key, DEVICE) for stored in found)
        assert read_rules_quickly(str(tmp_path / "tuning.db"), family_key.kernel, family_key.dtype) == found
        assert Families(database).rules("other") == []
        assert read_rules_quickly(str(tmp_path / "tuning.db"), "other", family_key.dtype) == []

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
        Families(database).save_progress(family_key, FAMILY, DEVICE, FamilyProgress({}))
        Families(database).save_rule(family_key, DEVICE, a_rule())
        with sqlite3.connect(tmp_path / "tuning.db") as connection:
            connection.execute("UPDATE families SET rule = ?", (json.dumps({**a_rule().to_json(), **damage}),))
        assert Families(database).rules() == []
        with pytest.raises(ValueError, match=r"."):
            FamilyRule.from_json({**a_rule().to_json(), **damage})


class TestFiles:
    def test_rules_are_written_and_read_back(self, family_key: TuningKey, tmp_path: Path) -> None:
        stored = StoredRule(family_key, DEVICE, a_rule(), datetime.now(UTC))
        assert write_rules_file(tmp_path / "rules.json", [stored, stored]) == 2
        assert read_rules_file(tmp_path / "rules.json") == (stored, stored)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "is no file of rules"),
            ('{"format": 2}', "this autotile reads 1"),
            ('{"format": 1}', "is no file of rules"),
        ],
    )
    def test_a_damaged_file_is_refused(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "rules.json").write_text(text)
        with pytest.raises(InputError, match=said):
            read_rules_file(tmp_path / "rules.json")

    def test_a_file_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot read the rules"):
            read_rules_file(tmp_path / "none.json")

    def test_every_rule_that_comes_with_autotile_can_be_read(self) -> None:
        for path in (data_folder("tuned") / "families").glob("*.json"):
            assert read_rules_file(path)


def test_a_rule_reads_as_lines() -> None:
    assert list(a_rule().lines()) == ["waves of #1 <= 0.75:", "  #0, else #1", "else:", "  #1, else #0"]


def test_figures_of_a_rule() -> None:
    rule = a_rule()
    assert rule.mean_loss == pytest.approx(0.25 / 7.5)
    assert rule.worst.sizes == {"M": 8192, "N": 7168}
    assert (rule.held_out_losses, rule.mean_held_out) == ([0.25], 0.25)
    nearest = rule.nearest_point(1, {"M": 2, "N": 4096})
    assert nearest is not None
    assert nearest.sizes == {"M": 8192, "N": 7168}  # at the nearer one it was not timed

"""Reading without an SQL engine returns what the database returns."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Resources, Trial, config_key
from autotile.database.database import Database
from autotile.database.fast_access import (
    CHECKS_SQL,
    RULES_SQL,
    WINNERS_SQL,
    read_checks_fast,
    read_winners_fast,
)
from autotile.database.keys import TuningKey
from autotile.database.learned_store import rules_query
from autotile.database.schema import STUDIES
from autotile.database.structure import VERSION_TABLE
from autotile.database.studies import WINNER_SELECTION, best_query, checks_query


def _fill(path: Path, key: TuningKey) -> None:
    with Database.open(path) as database:
        study = database.study(key, device_profile("h200"))
        run = database.start_run(study, sampler="random", seed=0, driver="99.9")
        trial = Trial(
            {"b": 2, "a": True},
            Outcome.OK,
            resources=Resources(32, 8, 4, 16, 1024),
            measurement=Measurement(10.0, 9.5, 10.5, (10.0, 10.25)),
        )
        database.add_trial(study, run, trial, phase="final", rank=1)
        database.end_run(run)


def test_it_returns_what_the_database_returns(tmp_path: Path, key: TuningKey) -> None:
    path = tmp_path / "autotile.db"
    _fill(path, key)
    with Database.open(path) as database:
        expected = [best.winner for best in database.best(key.kernel, dtype=key.dtype)]
    found = read_winners_fast(str(path), key.kernel, key.dtype)
    assert found == expected
    assert [winner.device.driver for winner in found if winner.device] == ["99.9"]
    assert list(found[0].config) == ["b", "a"]
    assert read_winners_fast(str(path), "another", key.dtype) == []


def _statement(query: Select[Any]) -> str:
    return " ".join(str(query.compile(dialect=sqlite.dialect())).replace(chr(34), "").split())  # it quotes "key"


def _anonymous(statement: str) -> str:
    return " ".join(re.sub(r":\w+", "?", statement).split())


def test_the_statements_are_those_of_the_schema() -> None:
    winners = best_query(*WINNER_SELECTION).where(STUDIES.c.kernel == "k", STUDIES.c.dtype == "float32")
    assert _anonymous(WINNERS_SQL) == _statement(winners)
    assert _anonymous(RULES_SQL) == _statement(rules_query("k", "float32"))
    assert _anonymous(CHECKS_SQL) == _statement(checks_query("k", "float32"))


def test_verdicts_on_unranked_configurations(tmp_path: Path, key: TuningKey) -> None:
    path, config = tmp_path / "tuning.db", {"b": 2, "a": True}
    _fill(path, key)
    with Database.open(path) as database:
        study = database.study(key, None)
        run = database.start_run(study, sampler="verify")
        for outcome in (Outcome.WRONG_RESULT, Outcome.OK):
            database.add_trial(study, run, Trial(config, outcome), phase="final")
        stored = database.checks(key.kernel, key.dtype)
    assert [check.passed for check in stored] == [False, True]
    assert {check.config for check in stored} == {config_key(config)}
    assert all(check.key == key for check in stored)
    assert read_checks_fast(str(path), key.kernel, key.dtype) == stored
    assert read_checks_fast(str(path), key.kernel, "float64") == []


def test_no_database(tmp_path: Path) -> None:
    assert read_winners_fast(str(tmp_path / "absent.db"), "k", "float32") == []
    assert not (tmp_path / "absent.db").exists()


def test_every_other_case_is_left_to_the_database(tmp_path: Path, key: TuningKey) -> None:
    newer, other, damaged = tmp_path / "newer.db", tmp_path / "other.db", tmp_path / "damaged.db"
    _fill(newer, key)
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.commit()
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.commit()
    damaged.write_bytes(b"SQLite format 3\0" + bytes(5000))
    for place in (newer, other, damaged, tmp_path):
        assert read_winners_fast(str(place), key.kernel, key.dtype) is None
    assert read_winners_fast("postgresql://host/name", key.kernel, key.dtype) is None

"""What dispatch reads without an SQL engine is what the database says."""

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from autotile.core.model import Measurement, Outcome, Resources, Trial
from autotile.database.database import Database
from autotile.database.fast_read import VERSION_TABLE, read_winners_quickly
from autotile.database.keys import TuningKey


def _fill(path: Path, key: TuningKey) -> None:
    with Database.open(path) as database:
        study = database.study(key, None)
        run = database.start_run(study, sampler="random", seed=0)
        trial = Trial(
            {"b": 2, "a": True},
            Outcome.OK,
            resources=Resources(32, 8, 4, 16, 1024),
            measurement=Measurement(10.0, 9.5, 10.5, (10.0, 10.25)),
        )
        database.add_trial(study, run, trial, phase="final", rank=1)
        database.end_run(run)


def test_the_same_as_the_database_says(tmp_path: Path, key: TuningKey) -> None:
    path = tmp_path / "autotile.db"
    _fill(path, key)
    with Database.open(path) as database:
        slow = [best.winner for best in database.best(key.kernel, dtype=key.dtype)]
    quick = read_winners_quickly(str(path), key.kernel, key.dtype)
    assert quick is not None
    assert [_without_samples(w) for w in slow] == [_without_samples(w) for w in quick]
    assert list(quick[0].config) == ["b", "a"]
    assert abs(quick[0].tuned_at - slow[0].tuned_at) < timedelta(microseconds=1)
    assert read_winners_quickly(str(path), "another", key.dtype) == []


def test_no_database(tmp_path: Path) -> None:
    assert read_winners_quickly(str(tmp_path / "absent.db"), "k", "float32") == []
    assert not (tmp_path / "absent.db").exists()


def test_what_is_out_of_the_ordinary_is_left_to_others(tmp_path: Path, key: TuningKey) -> None:
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
        assert read_winners_quickly(str(place), key.kernel, key.dtype) is None
    assert read_winners_quickly("postgresql://host/name", key.kernel, key.dtype) is None


def _without_samples(winner: Any) -> tuple[Any, ...]:
    time = winner.measurement
    return (winner.key, winner.device, winner.config, winner.resources, (time.time_us, time.low_us, time.high_us))

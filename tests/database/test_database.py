import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from stored_runs import add_trial, add_trials, begin, end_run, failed, measured, record_miss, start_run

from autotile import __version__
from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, Trial, config_key
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.engine import RUNS, TRIALS
from autotile.database.keys import TuningKey
from autotile.database.winners import SCHEMA_REVISION, WINNERS, read_file
from autotile.errors import DatabaseError


@pytest.fixture
def study(database: Database, key: TuningKey, device: DeviceProperties) -> int:
    return database.study(key, device)


@pytest.fixture
def run(database: Database, study: int) -> int:
    return start_run(database, study, sampler="tpe", seed=7)


def test_a_key_has_one_study(database: Database, key: TuningKey, device: DeviceProperties, study: int) -> None:
    assert database.study(key, device) == study
    assert database.find_study(key) == study
    other = replace(key, source="replayed")
    assert database.find_study(other) is None
    assert database.study(other, device) != study


def test_a_run_remembers_how_it_was_made(database: Database, study: int) -> None:
    run = start_run(
        database,
        study,
        sampler="tpe",
        seed=2**40,
        settings={"budget": 64},
        driver="580.1",
        host="node1",
        gates={"rules": 24906},
    )
    before = database.runs(study)[0]
    assert (before.run_id, before.ended_at, before.summary) == (run, None, {})
    assert (before.sampler, before.seed, before.driver, before.host) == ("tpe", 2**40, "580.1", "node1")
    assert (before.settings, before.gates) == ({"budget": 64}, {"rules": 24906})
    assert before.autotile_version == __version__
    end_run(database, run, {"winner": "BM=64"})
    after = database.runs(study)[0]
    assert after.summary == {"winner": "BM=64"}
    assert after.ended_at is not None
    assert timedelta() <= datetime.now(UTC) - after.started_at < timedelta(minutes=1)


def test_a_trial_needs_its_study_and_run(database: Database, study: int, run: int) -> None:
    for study_id, run_id in ((study, 99), (99, run)):
        with pytest.raises(DatabaseError, match="FOREIGN KEY"):
            add_trial(database, study_id, run_id, failed({"BM": 1}, Outcome.CRASHED))


def test_the_newest_trial_of_a_configuration_counts_for_resuming(database: Database, study: int, run: int) -> None:
    add_trial(database, study, run, failed({"BM": 64, "BN": 32}, Outcome.TIMED_OUT))
    add_trial(database, study, run, failed({"BM": 128, "BN": 32}, Outcome.INFEASIBLE))
    second = start_run(database, study, sampler="tpe")
    add_trial(database, study, second, measured({"BN": 32, "BM": 64}, 50.0))
    tried = database.tried(study)
    assert {text: trial.outcome for text, trial in tried.items()} == {
        config_key({"BM": 64, "BN": 32}): Outcome.OK,
        config_key({"BM": 128, "BN": 32}): Outcome.INFEASIBLE,
    }
    assert [trial.time_us for trial in database.trials(study, run_id=second)] == [50.0]


def test_before_any_finals_the_fastest_ok_trial_is_best(database: Database, study: int, run: int) -> None:
    assert database.best("sgemm") == []
    add_trial(database, study, run, failed({"BM": 8}, Outcome.WRONG_RESULT))
    assert database.best("sgemm") == []
    add_trial(database, study, run, replace(measured({"BM": 16}, 1.0), outcome=Outcome.PRUNED))
    for time_us in (30.0, 20.0, 25.0):
        add_trial(database, study, run, measured({"BM": int(time_us)}, time_us))
    (best,) = database.best("sgemm")
    assert best.trial.config == {"BM": 20}
    assert not best.confirmed


def test_the_winner_of_the_newest_finished_finals_is_best(
    database: Database, key: TuningKey, study: int, run: int
) -> None:
    def finals(run_id: int, *configs: int) -> None:
        for rank, value in enumerate(configs, start=1):
            add_trial(database, study, run_id, measured({"BM": value}, 100.0 + rank), phase="final", rank=rank)

    add_trial(database, study, run, measured({"BM": 1}, 90.0))
    finals(run, 64, 128)
    assert database.best("sgemm")[0].trial.config == {"BM": 1}, "a run that was killed confirms nothing"
    end_run(database, run)
    finals(start_run(database, study, sampler="tpe"), 256)
    (best,) = database.best("sgemm")
    assert best.trial.config == {"BM": 64}
    assert (best.confirmed, best.run.run_id, best.study_id, best.key) == (True, run, study, key)
    assert best.device is not None
    assert best.device.name == key.gpu_name
    third = start_run(database, study, sampler="tpe")
    finals(third, 512, 64)
    end_run(database, third)
    assert database.best("sgemm")[0].trial.config == {"BM": 512}


@pytest.mark.parametrize("date", ["1970-01-01T00:00:00.000000+00:00", "2140-01-01T00:00:00.000000+00:00"])
def test_the_clock_of_a_run_does_not_make_it_the_newest(database: Database, study: int, run: int, date: str) -> None:
    key = database.studies()[0].key

    def finals(run_id: int, value: int) -> None:
        add_trial(database, study, run_id, measured({"BM": value}, 100.0), phase="final", rank=1)
        end_run(database, run_id)

    finals(run, 1)
    second = start_run(database, study, sampler="tpe")
    finals(second, 2)
    with database.writing() as connection:
        later = run if date > "2100" else second
        connection.execute(update(RUNS).where(RUNS.c.id == later).values(started_at=date, ended_at=date))
        connection.execute(update(TRIALS).where(TRIALS.c.run_id == later).values(created_at=date))
    assert database.best("sgemm")[0].trial.config == {"BM": 2}
    (winner,) = read_file(database.location, WINNERS, kernel=key.kernel, dtype=key.dtype) or []
    assert winner.config == {"BM": 2}


def test_what_the_finals_refused_is_best_no_more(database: Database, study: int, run: int) -> None:
    fast, slow = measured({"BM": 64}, 10.0), measured({"BM": 128}, 20.0)
    add_trials(database, study, run, [fast, slow])
    add_trial(database, study, run, fast, phase="final", rank=1)
    end_run(database, run, {})
    again = start_run(database, study, sampler="tpe")
    add_trial(database, study, again, failed({"BM": 64}, Outcome.WRONG_RESULT), phase="final")
    assert [best.trial.config for best in database.best(study_id=study)] == [{"BM": 128}]
    add_trial(database, study, again, measured({"BM": 64}, 11.0))  # measured again since
    assert [best.trial.config for best in database.best(study_id=study)] == [{"BM": 64}]


def test_best_is_one_a_study_and_can_be_narrowed(database: Database, key: TuningKey, device: DeviceProperties) -> None:
    others = {"sizes": {"M": 1, "N": 1, "K": 1}, "dtype": "float16", "gpu_name": "NVIDIA A100", "kernel": "stencil"}
    keys = [key, *(replace(key, **{name: value}) for name, value in others.items())]
    for number, one in enumerate(keys):
        study, run = begin(database, one, device)
        add_trial(database, study, run, measured({"BM": number}, 10.0 + number))
    assert [best.trial.config["BM"] for best in database.best()] == [4, 3, 2, 1, 0]
    assert [best.trial.config["BM"] for best in database.best("sgemm")] == [3, 2, 1, 0]
    exact = database.best("sgemm", dtype="float32", sizes=dict(reversed(key.sizes.items())), gpu_name=key.gpu_name)
    assert [best.key for best in exact] == [key]
    assert [best.trial.config["BM"] for best in database.best(study_id=2)] == [1]


def test_studies_are_listed_with_the_configurations_that_were_tried(
    database: Database, key: TuningKey, study: int, run: int
) -> None:
    database.study(replace(key, kernel="copy"), None)
    add_trial(database, study, run, measured({"BM": 64}, 12.5))
    add_trial(database, study, run, Trial({"BM": 32}, Outcome.CRASHED))
    add_trial(database, study, run, measured({"BM": 64}, 12.5), phase="final", rank=1)
    assert [(one.runs, one.trials, one.ok) for one in database.studies("sgemm")] == [(1, 2, 1)]
    anew = start_run(database, study, sampler="random")
    add_trial(database, study, anew, Trial({"BM": 32}, Outcome.CRASHED))
    add_trial(database, study, anew, measured({"BM": 64}, 13.0))
    copy, sgemm = database.studies()
    assert (copy.last_at, sgemm.last_at) == (None, database.stored_trials(study)[-1].created_at)
    assert (copy.key.kernel, copy.device, copy.runs, copy.trials, copy.best_config) == ("copy", None, 0, 0, None)
    assert (sgemm.key, sgemm.runs, sgemm.trials, sgemm.ok) == (key, 2, 2, 1)
    assert (sgemm.best_config, sgemm.best_time_us) == ({"BM": 64}, 12.5)
    assert [summary.study_id for summary in database.studies("sgemm")] == [study]


def test_reading_only_writes_nothing(database: Database, key: TuningKey, study: int, tmp_path: Path) -> None:
    reader = Database.open_readonly(tmp_path / "tuning.db")
    assert reader is not None
    with reader:
        assert reader.find_study(key) == study
        with pytest.raises(DatabaseError, match="reading only"):
            record_miss(reader, key.problem, "H200", "default")


def test_a_check_counts_rows_and_finds_orphans(database: Database, study: int, run: int, tmp_path: Path) -> None:
    add_trial(database, study, run, measured({"BM": 64}, 1.0))
    report = check_database(database)
    assert report.ok
    empty = dict.fromkeys(("misses", "families", "models", "ceilings", "claims"), 0)
    assert report.counts == {"studies": 1, "runs": 1, "trials": 1, **empty}
    assert (report.unfinished_runs, report.revision) == (1, SCHEMA_REVISION)
    connection = sqlite3.connect(tmp_path / "tuning.db")
    connection.execute("DELETE FROM runs")
    connection.commit()
    connection.close()
    assert check_database(database).problems == ("1 rows of trials name a row of runs that is missing",)

"""Studies, runs, trials and what is learned come back as they were stored, and decide what is served."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from declared import documents_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from sqlalchemy import update
from stored_rows import CEILINGS, GPU
from stored_runs import add_trial, add_trials, begin, change, change_file, end_run, failed, measured, start_run

from autotile import __version__
from autotile.core import model
from autotile.core.ceilings import DeviceCeilings
from autotile.core.device import device_profile
from autotile.core.documents import convert
from autotile.core.model import Config, Measurement, Outcome, Problem, Trial
from autotile.database import learned, winners
from autotile.database.care import check_database, copy_missing_rows
from autotile.database.database import Database, insert_trials, trial_row
from autotile.database.engine import RUNS, TRIALS, now_text
from autotile.database.keys import TuningKey
from autotile.database.learned import FamilyState, save_family_state, save_model
from autotile.database.winners import WINNERS, Winner, miss_row, read_file, write_file
from autotile.errors import DatabaseError, DataWarning
from autotile.families.family import Extent, Family, FamilyRule, RuleConfig, RulePoint, Split
from autotile.families.features import Feature


@pytest.fixture
def study(database, key, device):
    return database.study(key, device)


@pytest.fixture
def run(database, study):
    return start_run(database, study, sampler="tpe", seed=7)


def test_a_run_remembers_how_it_was_made(database, study):
    given = {"seed": 2**40, "settings": {"budget": 64}, "driver": "580.1", "host": "node1", "gates": {"rules": 24906}}
    run = start_run(database, study, sampler="tpe", **given)
    before = database.runs(study)[0]
    assert (before.run_id, before.ended_at, before.summary) == (run, None, {})
    assert {name: getattr(before, name) for name in given} == given
    assert (before.sampler, before.autotile_version) == ("tpe", __version__)
    end_run(database, run, {"winner": "BM=64"})
    after = database.runs(study)[0]
    assert after.summary == {"winner": "BM=64"}
    assert timedelta() <= datetime.now(UTC) - after.started_at < timedelta(minutes=1)


def test_before_any_finals_the_fastest_ok_trial_is_best_and_what_they_refuse_no_more(database, study, run):
    assert database.best("sgemm") == []
    add_trial(database, study, run, failed({"BM": 8}, Outcome.WRONG_RESULT))
    assert database.best("sgemm") == []
    add_trial(database, study, run, replace(measured({"BM": 16}, 1.0), outcome=Outcome.PRUNED))
    add_trials(database, study, run, [measured({"BM": int(time_us)}, time_us) for time_us in (30.0, 20.0, 25.0)])
    (best,) = database.best("sgemm")
    assert best.trial.config == {"BM": 20}
    assert not best.confirmed
    database.add_run(study, [best.trial], sampler="tpe", phase="final", is_ranked=True)
    again = start_run(database, study, sampler="tpe")
    add_trial(database, study, again, failed({"BM": 20}, Outcome.WRONG_RESULT), phase="final")
    assert [best.trial.config for best in database.best(study_id=study)] == [{"BM": 25}]
    add_trial(database, study, again, measured({"BM": 20}, 11.0))  # measured again since
    assert [best.trial.config for best in database.best(study_id=study)] == [{"BM": 20}]


def test_the_winner_of_the_newest_finished_finals_is_best(database, key, study, run):
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
    assert best.winner.device.name == key.gpu_name
    third = start_run(database, study, sampler="tpe")
    finals(third, 512, 64)
    end_run(database, third)
    assert database.best("sgemm")[0].trial.config == {"BM": 512}


@pytest.mark.parametrize("date", ["1970-01-01T00:00:00.000000+00:00", "2140-01-01T00:00:00.000000+00:00"])
def test_the_clock_of_a_run_does_not_make_it_the_newest(database, key, date):
    for value in (1, 2):
        database.add_run(key, [measured({"BM": value}, 100.0)], sampler="tpe", phase="final", is_ranked=True)
    later = 1 if date > "2100" else 2
    change(
        database,
        update(RUNS).where(RUNS.c.id == later).values(started_at=date, ended_at=date),
        update(TRIALS).where(TRIALS.c.run_id == later).values(created_at=date),
    )
    assert database.best("sgemm")[0].trial.config == {"BM": 2}
    (winner,) = read_file(database.location, WINNERS, kernel=key.kernel, dtype=key.dtype) or []
    assert winner.config == {"BM": 2}


def test_best_is_one_a_study_and_can_be_narrowed(database, key, device):
    others = {"sizes": {"M": 1, "N": 1, "K": 1}, "dtype": "float16", "gpu_name": "NVIDIA A100", "kernel": "stencil"}
    keys = [key, *(structs.replace(key, **{name: value}) for name, value in others.items())]
    for number, one in enumerate(keys):
        study, run = begin(database, one, device)
        add_trial(database, study, run, measured({"BM": number}, 10.0 + number))
    assert [best.trial.config["BM"] for best in database.best()] == [4, 3, 2, 1, 0]
    assert [best.trial.config["BM"] for best in database.best("sgemm")] == [3, 2, 1, 0]
    exact = database.best("sgemm", dtype="float32", sizes=dict(reversed(key.sizes.items())), gpu_name=key.gpu_name)
    assert [best.key for best in exact] == [key]
    assert [best.trial.config["BM"] for best in database.best(study_id=2)] == [1]


def test_studies_are_listed_with_the_configurations_that_were_tried(database, key, study, run):
    database.study(structs.replace(key, kernel="copy"), None)
    add_trials(database, study, run, [measured({"BM": 64}, 12.5), Trial({"BM": 32}, Outcome.CRASHED)])
    add_trial(database, study, run, measured({"BM": 64}, 12.5), phase="final", rank=1)
    assert [(one.runs, one.trials, one.ok) for one in database.studies("sgemm")] == [(1, 2, 1)]
    anew = start_run(database, study, sampler="random")
    add_trials(database, study, anew, [Trial({"BM": 32}, Outcome.CRASHED), measured({"BM": 64}, 13.0)])
    copy, sgemm = database.studies()
    assert (copy.last_at, sgemm.last_at) == (None, database.stored_trials(study)[-1].created_at)
    assert (copy.key.kernel, copy.device, copy.runs, copy.trials, copy.best_config) == ("copy", None, 0, 0, None)
    assert (sgemm.key, sgemm.runs, sgemm.trials, sgemm.ok) == (key, 2, 2, 1)
    assert (sgemm.best_config, sgemm.best_time_us) == ({"BM": 64}, 12.5)
    assert [summary.study_id for summary in database.studies("sgemm")] == [study]


def test_a_check_counts_rows_and_finds_orphans(database, study, run):
    add_trial(database, study, run, measured({"BM": 64}, 1.0))
    report = check_database(database)
    assert report.ok
    empty = dict.fromkeys(("misses", "families", "models", "ceilings", "claims"), 0)
    assert report.counts == {"studies": 1, "runs": 1, "trials": 1, **empty}
    assert (report.unfinished_runs, report.revision) == (1, winners.SCHEMA_REVISION)
    change_file(Path(database.location), "DELETE FROM runs", "CREATE TABLE foreign_one (id)")
    assert check_database(database).problems == (
        "it has a table 'foreign_one' that autotile did not create",
        "1 row of trials without a row of runs",
    )


NO_NUL = documents_of(Trial).filter(lambda document: "\\u0000" not in json.dumps(document))
EXAMPLES = NO_NUL.map(lambda document: convert(document, Trial))
"""Trials of any values that every database takes."""


def test_a_trial_comes_back_as_it_was_stored(database, study):
    @settings(max_examples=25)
    @given(trials=st.lists(EXAMPLES, min_size=1, max_size=4))
    def store_and_read(trials: list[Trial]) -> None:
        run = start_run(database, study, sampler="random")
        for trial in trials:
            add_trial(database, study, run, trial)
        add_trials(database, study, run, trials)
        back = [one.trial for one in database.stored_trials(study) if one.run_id == run]
        assert back == trials + trials
        for trial, stored in zip(trials, back, strict=False):
            assert list(stored.config) == list(trial.config)
            assert model.config_key(stored.config) == model.config_key(trial.config)
            assert [type(value) for value in stored.config.values()] == [type(value) for value in trial.config.values()]

    store_and_read()


def test_a_file_holds_the_same_by_either_way_and_nothing_of_a_transaction_that_fails(database, study, run):
    refused = replace(failed({"BM": 2}, Outcome.COMPILE_FAILED, "line 1\n\tµ \x00"), telemetry={"x": float("inf")})
    position = {"study_id": study, "run_id": run, "phase": "search", "rank": None, "created_at": now_text()}
    trials = measured({"BM": 1, "LAYOUT": "größer", "FLAG": True}, 10.0), refused
    rows = [{**position, **trial_row(trial)} for trial in trials]
    with closing(database.connect()) as held:
        with pytest.raises(DatabaseError, match="NOT NULL"), database.writing(held) as connection:
            insert_trials(connection, [*rows, {**rows[0], "outcome": None}])
        with database.writing(held) as connection:  # the connection is as good as before
            insert_trials(connection, rows)
    with database.writing() as connection:
        connection.execute(TRIALS.insert(), rows)
    with closing(sqlite3.connect(str(database.path))) as connection:
        stored = [row[1:] for row in connection.execute("SELECT * FROM trials ORDER BY id")]
    assert stored[:2] == stored[2:]
    assert len(stored) == 4


CONFIG: Config = {"b": 2, "a": True}


@pytest.fixture
def winner(key, device):
    tuned_at = datetime(2026, 5, 1, 12, 30, 15, tzinfo=UTC)
    return Winner(key, device, CONFIG, model.Resources(24, 0, 8, 16, 32), Measurement(2.5, 2.4, 2.75), tuned_at)


@pytest.mark.parametrize(
    "changes", [{}, {"device": None, "resources": None, "measurement": None}, {"shipped": True}], ids=str
)
def test_a_winner_survives_json(winner, changes):
    expected = structs.replace(winner, **changes)
    assert convert(expected.to_json(), winners.WinnerDocument).winner() == expected
    assert list(expected.to_json()) == ["key", "device", "config", "resources", "measurement", "tuned_at", "shipped"]


@pytest.mark.parametrize(("driver", "expected"), [("", "13.0"), ("13.0", "13.0"), ("14.2", "14.2")])
def test_the_driver_is_that_of_the_run(winner, device, driver, expected):
    row = winner.key.to_json() | dict.fromkeys([*winners.RESOURCE_COLUMNS, "time_us", "low_us", "high_us", "l2"])
    row |= {"config": winner.config, "created_at": winner.tuned_at.isoformat(), "driver": driver}
    found = Winner.from_row(row, structs.replace(device, driver="13.0"))
    assert found.device == structs.replace(device, driver=expected)
    assert (found.key, found.resources, found.measurement) == (winner.key, None, None)
    assert Winner.from_row(row, None).device is None


def test_both_readers_return_the_winner_and_the_verdicts_on_unranked_configurations(database, key, study):
    times = Measurement(10.0, 9.5, 10.5, (10.0, 10.25))
    trial = Trial(CONFIG, Outcome.OK, resources=model.Resources(32, 8, 4, 16, 1024), measurement=times)
    database.add_run(study, [trial], sampler="random", driver="99.9", phase="final", is_ranked=True)
    of = {"kernel": key.kernel, "dtype": key.dtype}
    found = read_file(database.location, WINNERS, **of)
    assert found == [best.winner for best in database.best(key.kernel, dtype=key.dtype)]
    assert [winner.device.driver for winner in found if winner.device] == ["99.9"]
    assert list(found[0].config) == ["b", "a"]
    assert read_file(database.location, WINNERS, kernel="another", dtype=key.dtype) == []
    verdicts = [Trial(CONFIG, outcome) for outcome in (Outcome.WRONG_RESULT, Outcome.OK)]
    database.add_run(study, verdicts, sampler="random", phase="final")
    stored = database.read(winners.CHECKS, **of)
    assert stored == [(key, model.config_key(CONFIG), passed) for passed in (False, True)]
    assert read_file(database.location, winners.CHECKS, **of) == stored
    assert read_file(database.location, winners.CHECKS, kernel=key.kernel, dtype="float64") == []


def add(tuning_db: Path) -> bool:
    rows = [miss_row(Problem("sgemm", {"M": 1, "N": 2}, "float32"), "H200", "nearest", 1)]
    return write_file(tuning_db, winners.ADD_MISSES, rows, timeout_s=0.05)


def test_no_file_is_made_and_a_server_is_left_to_the_engine(tmp_path):
    assert read_file("postgresql://host/name", WINNERS, kernel="sgemm", dtype="float32") is None
    assert read_file(str(tmp_path / "none.db"), WINNERS, kernel="k", dtype="float32") == []
    assert not add(tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_a_locked_database_is_given_up_after_the_given_time(tuning_db, monkeypatch):
    connect, timeouts = sqlite3.connect, []
    with closing(connect(tuning_db, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(
            sqlite3, "connect", lambda *to, **how: timeouts.append(how["timeout"]) or connect(*to, **how)
        )
        assert not add(tuning_db)
        assert timeouts == [0.05]
        other.execute("ROLLBACK")
    assert add(tuning_db)


@pytest.mark.parametrize(("journal", "written"), [("WAL", False), ("DELETE", True)])
def test_a_log_on_a_network_file_system_is_left_to_the_engine(tuning_db, monkeypatch, journal, written):
    change_file(tuning_db, f"PRAGMA journal_mode={journal}")
    monkeypatch.setattr(winners, "network_file_system", lambda _: "nfs4")
    assert add(tuning_db) is written
    monkeypatch.undo()
    with Database.open(tuning_db) as database:
        assert len(database.misses()) == written


def test_a_model_and_ceilings_replace_the_older_ones_of_their_gpu_and_a_fast_read_notices(database, device):
    of = {"operation": "matmul", "dtype": "float32", "gpu_name": device.name}
    assert read_file(database.location, winners.MODEL, **of) == []
    seen = [read_file(database.location, winners.CHANGES)]
    for number, one in enumerate((device, structs.replace(device, name="Other"), device), 1):
        save_model(database, "matmul", "float32", one, {"format": 1, "number": number})
        seen.append(read_file(database.location, winners.CHANGES))
    assert all(after != before for before, after in pairwise(seen))
    assert read_file(database.location, winners.MODEL, **of) == [{"format": 1, "number": 3}]
    found = [(one.operation, one.dtype, one.gpu_name, one.model["number"]) for one in learned.read_models(database)]
    assert found == [("matmul", "float32", device.name, 3), ("matmul", "float32", "Other", 2)]
    assert learned.read_models(database, dtype="float16") == []
    for one in (CEILINGS, OTHER, NEWER):
        learned.save_ceilings(database, one)
    assert learned.read_ceilings(database) == [NEWER, OTHER]
    assert learned.read_ceilings(database, gpu_name="Other") == [OTHER]
    assert learned.read_ceilings(database, gpu_name="None") == []


NEWER = replace(CEILINGS, measured_at=CEILINGS.measured_at + timedelta(days=1), warnings=())
OTHER = replace(CEILINGS, gpu_uuid=f"{GPU[:-1]}1", gpu_name="Other")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_merge_keeps_the_newer_one_unless_its_date_has_yet_to_come(database, device, tmp_path, ahead):
    def known(of: Database) -> tuple[list[int], list[DeviceCeilings]]:
        return [one.model["number"] for one in learned.read_models(of)], learned.read_ceilings(of)

    with Database.open(tmp_path / "other.db") as other:
        for one, number, measured_ceilings in ((database, 1, CEILINGS), (other, 2, NEWER)):
            save_model(one, "matmul", "float32", device, {"format": 1, "number": number})
            learned.save_ceilings(one, measured_ceilings)
        if ahead:
            for table, date in (("models", "learned_at"), ("ceilings", "measured_at")):
                change(database, f"UPDATE {table} SET {date} = '2140-01-01T00:00:00.000000+00:00'")
        copy_missing_rows(database, other)
        assert known(other) == ([2], [NEWER])
        copy_missing_rows(other, database)
    assert known(database) == ([2], [NEWER])


H200 = device_profile("h200")
FAMILY = Family({"M": Extent(((1, 8192),)), "N": Extent(((4096, 4096), (7168, 7168)))})
OTHER_FAMILY = Family({**FAMILY.extents, "M": Extent(((1, 2),))})


def a_rule(family: Family = FAMILY) -> FamilyRule:
    return FamilyRule(
        family,
        (RuleConfig({"BM": 64}, 4, model.Resources(32, 0, 0, 0, 1024)), RuleConfig({"BM": 128}, 2, None)),
        Split(Feature("waves", config=1), 0.75, (0, 1), (1, 0)),
        (
            RulePoint({"M": 1, "N": 4096}, ((3.0, 2.9, 3.1), None), 3.0, 0.0, 0.25),
            RulePoint({"M": 8192, "N": 7168}, ((9.0, 8.9, 9.1), (8.0, 7.9, 8.1)), 7.5, 0.5 / 7.5, None),
        ),
    )


@pytest.fixture
def family_key(key):
    return structs.replace(key, sizes={})


def store_rule(database: Database, key: TuningKey, family: Family = FAMILY) -> None:
    save_family_state(database, key, family, H200, FamilyState({}))
    learned.save_rule(database, key, H200, a_rule(family))


def fast_rules(database: Database, key: TuningKey) -> Any:
    return read_file(database.location, winners.RULES, kernel=key.kernel, dtype=key.dtype)


class TestRules:
    def test_a_state_is_kept_until_there_is_a_rule_which_stays_in_force_while_tuned_anew(self, database, family_key):
        state = FamilyState({"points": [{"M": 1}]}, tuned=1, measured=0, seconds=2.5)
        assert learned.family_state(database, family_key, FAMILY) is None
        save_family_state(database, family_key, FAMILY, H200, state)
        assert learned.family_state(database, family_key, FAMILY) == state
        save_family_state(database, family_key, FAMILY, H200, replace(state, tuned=2))
        assert learned.family_state(database, family_key, FAMILY) == replace(state, tuned=2)
        assert database.rules() == []
        learned.save_rule(database, family_key, H200, a_rule())
        assert learned.family_state(database, family_key, FAMILY) is None
        save_family_state(database, family_key, FAMILY, H200, FamilyState({}, tuned=1))
        assert [stored.rule for stored in database.rules()] == [a_rule()]

    @pytest.mark.parametrize("date", ["1970-01-01T00:00:00.000000+00:00", "2140-01-01T00:00:00.000000+00:00"])
    def test_both_readers_return_first_what_was_learned_last_whatever_the_clock(self, database, family_key, date):
        for family in (FAMILY, OTHER_FAMILY, FAMILY):
            store_rule(database, family_key, family)
        wrong = f"(SELECT {'max' if date < '2000' else 'min'}(id) FROM families)"
        change(database, f"UPDATE families SET learned_at = '{date}' WHERE id = {wrong}")
        for found in (database.rules(), fast_rules(database, family_key)):
            assert [stored.rule for stored in found] == [a_rule(), a_rule(OTHER_FAMILY)]
            assert all((stored.key, stored.device) == (family_key, H200) for stored in found)
        assert fast_rules(database, family_key) == database.rules(family_key.kernel, family_key.dtype)
        assert database.rules("other") == fast_rules(database, structs.replace(family_key, kernel="other")) == []

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
    def test_a_damaged_one_is_passed_over(self, database, family_key, damage):
        store_rule(database, family_key)
        with closing(sqlite3.connect(database.path)) as connection, connection:
            connection.execute("UPDATE families SET rule = ?", (json.dumps({**a_rule().to_json(), **damage}),))
        with pytest.warns(DataWarning, match="families 1: rule"):
            assert database.rules() == []
        with pytest.raises(ValueError, match=r"."):
            FamilyRule.from_json({**a_rule().to_json(), **damage})


def test_lines_and_figures_of_a_rule():
    rule = a_rule()
    assert list(rule.lines()) == ["waves of #1 <= 0.75:", "  #0, else #1", "else:", "  #1, else #0"]
    assert rule.mean_loss == pytest.approx(0.25 / 7.5)
    assert rule.worst.sizes == {"M": 8192, "N": 7168}
    assert (rule.held_out_losses, rule.mean_held_out) == ([0.25], 0.25)
    nearest = rule.nearest_point(1, {"M": 2, "N": 4096})
    assert nearest.sizes == {"M": 8192, "N": 7168}  # it was not timed at the nearer one

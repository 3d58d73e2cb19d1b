"""What a report shows of a study."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from report_studies import ROUNDS, SCRIPT, Session, read_one, recording_of, store_session
from stored_runs import add_trial

from autotile.core.model import Outcome, config_key
from autotile.core.statistics import paired_ratio, widen_by_session_spread
from autotile.database.database import Database
from autotile.errors import InputError
from autotile.report.charts import study_effects
from autotile.report.report_data import read_report
from autotile.report.study import RunData, StudyData, StudyReader, study_of_recording


def test_the_finals_are_as_the_session_ranked_them_by_the_rounds_of_the_race(study: StudyData) -> None:
    finals = study.finals
    assert [one.rank for one in finals.ranked] == list(range(1, len(finals.ranked) + 1))
    assert [one.rank for one in finals.ranked if one.is_tie] == [2, 3]
    (default,) = [one for one in finals.ranked if one.is_default]
    assert study.default is default.trial
    assert study.winner is finals.ranked[0].trial
    assert [trial.outcome for trial in finals.refused] == [Outcome.OUT_OF_BOUNDS]
    first, other = (study.finals.ranked[place].trial.measurement for place in (0, 4))
    assert len(first.samples_us) == ROUNDS
    expected = widen_by_session_spread(paired_ratio(first.samples_us, other.samples_us))
    assert study.finals.ranked[4].ratio == expected


def test_gates_only_hold_back_and_failures_are_grouped_by_their_reason_whatever_its_numbers(study: StudyData) -> None:
    counts = [count for _, count in study.gates]
    assert counts == sorted(counts, reverse=True)
    found = dict(study.gates)
    assert found["combinations"] == 93312
    assert found["tried"] == len(study.newest) == 120
    assert found["correct"] == sum(one.trial.outcome.has_time for one in study.newest)
    assert list(study.elapsed_s) == sorted(study.elapsed_s)
    assert len(study.elapsed_s) == len(study.trials)
    wrong = [group for group in study.failures if group.outcome is Outcome.WRONG_RESULT]
    assert len(wrong) == 1
    assert wrong[0].count == sum(one.trial.outcome is Outcome.WRONG_RESULT for one in study.newest)
    assert wrong[0].reason in {one.trial.reason for one in study.newest}
    assert [group.count for group in study.failures] == sorted((g.count for g in study.failures), reverse=True)
    assert any(group.stage == "sanitize" for group in study.failures)


def test_what_matters_is_as_the_session_found_it_or_is_computed_and_the_nearest_ceiling_binds(study: StudyData) -> None:
    assert study_effects(study)[0][0].parameter == study.parameters[0]
    tiled = study_of_recording(recording_of("matmul_tiled-nvidia-h200-2048x2048x2048-float32"), "")
    (other, *_), _ = study_effects(tiled)
    assert other.parameter == "TILE"
    assert other.share > 0.5
    bound = study.bound(study.winner)
    assert not study.roofline.is_measured
    assert "datasheet" in bound.roof.label
    assert 0.4 < bound.share < 1.0


def test_a_running_session_is_read_on_and_has_the_best_of_its_search(tmp_path: Path) -> None:
    key = store_session(tmp_path / "a.db", Session(trials=30, finals=False, ended=False))
    with Database.open(tmp_path / "a.db") as database:
        (summary,) = database.studies()
        reader = StudyReader(database, summary)
        first = reader.read()
        newest = replace(first.trials[0].trial, config={**first.trials[0].trial.config, "BM": 999})
        add_trial(database, summary.study_id, first.runs[0].run.run_id, newest)
        second = reader.read()
    assert second.key == key
    assert len(second.trials) == len(first.trials) + 1
    assert config_key(second.trials[-1].trial.config) == config_key(newest.config)
    assert second.is_running
    assert second.finals is None
    assert second.winner.time_us == min(one.trial.time_us for one in second.trials if one.trial.outcome is Outcome.OK)


def test_a_summary_of_any_shape_is_read(study: StudyData) -> None:
    names = ["speedup", "ties", "default", "gates", "stopped", "importance", "notices"]
    names += ["seconds", "flops", "objectives"]
    for wrong in (None, 3, -1.5, "x" * 10, [[]], {"ratio": "a"}, [{"config": 1}], True):
        stated: Any = dict.fromkeys(names, wrong)
        run = RunData.of(replace(study.runs[0].run, summary=stated, settings=stated))
        found = replace(study, runs=(run,))
        assert isinstance(found.summary.notices, tuple)
        assert found.winner is not None
        assert found.gates
        assert any(study_effects(found))


def test_a_kernel_that_a_database_names_by_a_path_is_not_read(hostile_database: Path, study: StudyData) -> None:
    assert read_one(hostile_database).kernel is None
    assert study.kernel is not None
    assert replace(study, key=structs.replace(study.key, kernel="/etc/passwd.toml")).kernel is None


def test_what_is_not_there_is_told(database: Path, tmp_path: Path) -> None:
    with Database.open(tmp_path / "empty.db") as empty, pytest.raises(InputError, match="run `autotile tune KERNEL`"):
        read_report(empty)
    with Database.open_readonly(database) as opened:
        with pytest.raises(InputError, match="has no trials of sgemm_2d M=7; it has sgemm_2d M=4096"):
            read_report(opened, "sgemm_2d", {"M": 7})
        with pytest.raises(InputError):
            read_report(opened, SCRIPT)

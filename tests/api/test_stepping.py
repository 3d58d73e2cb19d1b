"""Sessions that a search of the caller's own drives, and configurations that are named to be tried."""

from __future__ import annotations

import pytest

import autotile
from autotile.core.model import Outcome
from autotile.database.database import Database
from autotile.errors import ConfigError, InputError

N = 1048576
DEFAULT = {"THREADS": 128, "WORK": 1}
THREADS = (32, 64, 128, 256)


@pytest.fixture
def options(recording):
    return autotile.TuneOptions(replay=recording)


@pytest.fixture
def opened(scale_toml, options):
    with autotile.session(scale_toml, n=N, options=options) as session:
        yield session
        session.close()


def stored(phase):
    with Database.open(autotile.db_path()) as database:
        (study,) = database.studies()
        return database.trials(study.study_id, phase=phase)


class TestEvaluate:
    def test_a_trial_for_each_configuration_in_their_order(self, opened):
        configs = [{"THREADS": 64, "WORK": 2}, {"THREADS": 32, "WORK": 4}, {"THREADS": 256, "WORK": 4}]
        trials = opened.evaluate(configs)
        assert [dict(trial.config) for trial in trials] == configs
        assert [trial.outcome for trial in trials] == [Outcome.OK, Outcome.WRONG_RESULT, Outcome.OK]
        assert trials[1].reason == "y[3] is 0, expected 1"
        assert trials[0].time_us == pytest.approx(1000 / 64 + 1)
        assert opened.best.config == {"THREADS": 256, "WORK": 4}

    def test_an_invalid_configuration_is_an_outcome_and_is_not_stored(self, scale_toml, options):
        with autotile.session(scale_toml, n=N, options=options) as session:
            (trial,) = session.evaluate({"THREADS": 48})
            assert trial.outcome is Outcome.INFEASIBLE
            assert "48 is not among its values" in trial.reason
            session.close()
        assert stored("search") == []

    def test_a_configuration_is_run_once_with_the_defaults_of_parameters_that_are_left_out(self, opened):
        first, again = opened.evaluate([{"WORK": 2}, {"WORK": 2}])
        assert first is again
        assert first.config == {"THREADS": 128, "WORK": 2}
        assert opened.evaluate({"WORK": 2}) == [first]
        assert len(opened.trials) == 1
        assert repr(opened) == (
            f"<TuningSession: scale n={N} float32 on NVIDIA H200 (replayed): open, 1 trial, best 8.812 us>"
        )


class TestAskAndTell:
    def test_every_configuration_is_proposed_once_the_default_first(self, opened):
        asked = [opened.ask(5), opened.ask(5), opened.ask(5), opened.ask(5)]
        assert [len(one) for one in asked] == [5, 5, 2, 0]
        assert asked[0][0] == DEFAULT
        distinct = {tuple(config.items()) for one in asked for config in one}
        assert len(distinct) == 12

    def test_what_was_evaluated_is_not_proposed(self, opened):
        opened.evaluate([DEFAULT, {"WORK": 2}])
        asked = opened.ask(12)
        assert len(asked) == 10
        opened.evaluate(asked)
        assert DEFAULT not in asked
        assert opened.ask() == []

    def test_proposals_follow_what_is_told(self, scale_toml, options):
        with autotile.session(scale_toml, n=N, options=options) as session:
            asked = session.ask(4)
            for config in asked:
                session.tell(config, 1.0 if config["WORK"] == 4 else None)
            session.tell({"THREADS": 32}, 5.0)
            assert {"THREADS": 32, "WORK": 1} not in session.ask(12)
            session.evaluate(asked)
            session.close()
        assert len(stored("search")) == 4  # what is told is not stored

    def test_what_is_refused(self, opened):
        for time_us in (0.0, -1.0, float("nan"), float("inf"), "5"):
            with pytest.raises(InputError, match="expected a positive number"):
                opened.tell(DEFAULT, time_us)
        with pytest.raises(InputError, match="THREADS=48 WORK=1 is not in the space"):
            opened.tell({"THREADS": 48}, 1.0)
        with pytest.raises(ConfigError, match="WORK = '4' is not among its values"):
            opened.evaluate({"WORK": "4"})
        for count, said in ((0, "n is 0"), (1001, "at most 1000")):
            with pytest.raises(InputError, match=said):
                opened.ask(count)


class TestTheSession:
    def test_it_finishes_with_a_winner_that_is_served_until_a_later_one_finds_another(self, scale_toml, options):
        with autotile.session(scale_toml, n=N, options=options) as session:
            session.evaluate({"THREADS": 256, "WORK": 2})
        assert session.result.winner.config == {"THREADS": 256, "WORK": 2}
        assert session.result.default.config == DEFAULT  # was tried for the comparison
        assert session.result.speedup.value > 1.5
        assert autotile.best(scale_toml, n=N, device="h200").config == {"THREADS": 256, "WORK": 2}
        assert session.finish() is session.result
        (before,) = (trial for trial in stored("search") if trial.config == {"THREADS": 256, "WORK": 2})
        with autotile.session(scale_toml, n=N, options=options) as session:  # a later one knows the trials
            assert {"THREADS": 256, "WORK": 2} not in session.ask(12)
            assert session.evaluate({"THREADS": 256, "WORK": 2})[0].time_us == before.time_us
            assert len(session.evaluate([{"THREADS": t, "WORK": w} for t in THREADS for w in (1, 2, 4)])) == 12
        assert len(stored("search")) == 12
        assert session.result.winner.config == {"THREADS": 256, "WORK": 4}

    def test_an_exception_closes_it_without_a_result(self, scale_toml, options):
        session = autotile.session(scale_toml, n=N, options=options)

        def search():
            with session:
                session.evaluate({"WORK": 2})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            search()
        assert session.result is None
        assert len(stored("search")) == 1
        assert autotile.db_check().check.unfinished_runs == 0
        with pytest.raises(InputError, match="the session is closed"):
            session.ask()


def test_what_is_named_to_be_tried_is_tried_first_and_takes_part_in_the_finals(scale_toml, options):
    tries = ({"THREADS": 32, "WORK": 1}, {"THREADS": 32, "WORK": 4})
    result = autotile.tune(scale_toml, n=N, options=options, tries=tries, trials=8, finals=2, progress=False)
    assert [dict(trial.config) for trial in stored("search")[:2]] == list(tries)
    assert [trial.outcome for trial in result.tried] == [Outcome.OK, Outcome.WRONG_RESULT]
    assert tries[0] in [dict(trial.config) for trial in stored("final")]
    assert sum(result.outcomes.values()) == 8

"""Verification of what is served for problems that are not tuned, by replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stored_runs import record_miss

from autotile.api import targets
from autotile.api import tuning as tuning_api
from autotile.api.verification import verify
from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.database.database import Database
from autotile.errors import InputError
from autotile.serving import dispatcher
from autotile.serving.dispatcher import find_best_kernel, forget_served
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import assess_misses
from autotile.tuning.start import find_served

ASKED = 8192
WINNER = {"THREADS": 256, "WORK": 4}
DEFAULT = {"THREADS": 128, "WORK": 1}


@pytest.fixture
def check(bench: Any) -> Any:
    """Tune for n=4096, miss n=8192, and verify what is served there by replay of a function of the configuration."""
    bench.tune(bench.record())
    with Database.open(read_settings().database) as database:
        record_miss(database, bench.problem(ASKED), bench.device.name, "nearest", 3)

    def run(judge: Any, *arguments: Any, **named: Any) -> Any:
        options = TuneOptions(replay=bench.record(judge, n=ASKED), workers=1)
        return verify(bench.kernel.spec.source, *arguments, options=options, served=True, **named)

    return run


def served(bench: Any, n: int = ASKED) -> Any:
    forget_served()
    return find_best_kernel(str(bench.kernel.spec.source), None, None, read_settings().database, {"n": n})


def wrong_if(faulty: Config, by_threads: Any) -> Any:
    def judge(config: Config) -> Trial:
        if config_key(config) == config_key(faulty):
            return Trial(config, Outcome.WRONG_RESULT, "y[7] is 1, expected 2", "verify")
        return by_threads(config)  # type: ignore[no-any-return]

    return judge


def test_what_is_correct_there_is_confirmed_once(bench: Any, check: Any, judges: Any) -> None:
    (row,) = check(judges["by_threads"]).problems
    assert (row.verdict, row.before, row.after, row.reason) == ("confirmed", WINNER, WINNER, "")
    assert row.before_measurement is None
    assert row.after_measurement.time_us == judges["by_threads"](WINNER).time_us
    assert row.speedup.value > 1
    assert (served(bench).tier, served(bench).config) == ("nearest", WINNER)
    assert check(judges["by_threads"]).problems == ()


def test_the_problem_still_counts_as_not_tuned(bench: Any, check: Any, judges: Any) -> None:
    check(judges["by_threads"])
    with Database.open(read_settings().database) as database:
        (missed,) = assess_misses(database, bench.kernel.spec.source)
    assert not missed.tuned
    assert bench.tune(bench.record(n=ASKED), n=ASKED).winner.config == WINNER
    assert served(bench).tier == "exact"


def test_what_is_wrong_there_is_not_served_for_it(bench: Any, check: Any, judges: Any) -> None:
    rows = check(wrong_if(WINNER, judges["by_threads"])).problems
    assert [(row.verdict, row.before, row.after) for row in rows] == [
        ("demoted", WINNER, DEFAULT),
        ("confirmed", DEFAULT, DEFAULT),
    ]
    assert rows[0].reason == "wrong_result: y[7] is 1, expected 2"
    assert (served(bench).tier, served(bench).config) == ("default", DEFAULT)
    assert (served(bench, 4096).tier, served(bench, 4096).config) == ("exact", WINNER)


def test_a_tuning_that_measures_it_lifts_the_refusal(bench: Any, check: Any, judges: Any) -> None:
    check(wrong_if(WINNER, judges["by_threads"]))
    bench.tune(bench.record(n=ASKED), n=ASKED)
    assert (served(bench).tier, served(bench).config) == ("exact", WINNER)


def test_a_default_that_is_wrong_is_reported_and_stays_the_last_resort(bench: Any, check: Any, judges: Any) -> None:
    def judge(config: Config) -> Trial:
        return Trial(config, Outcome.WRONG_RESULT, "y[7] is 1", "verify")

    rows = check(judge).problems
    assert [row.verdict for row in rows] == ["demoted", "failed"]
    assert served(bench).config == DEFAULT


def test_given_sizes_are_verified_without_a_miss(bench: Any, check: Any, judges: Any) -> None:
    with Database.open(read_settings().database) as database, database.writing() as connection:
        from autotile.database.engine import MISSES

        connection.execute(MISSES.delete())
    assert check(judges["by_threads"]).problems == ()
    (row,) = check(judges["by_threads"], {"n": ASKED}).problems
    assert row.verdict == "confirmed"


def test_a_configuration_that_cannot_run_there_gets_no_verdict(bench: Any, check: Any, judges: Any) -> None:
    options = TuneOptions(replay=bench.record(configs=[DEFAULT], n=ASKED), workers=1)
    (row,) = verify(bench.kernel.spec.source, options=options, served=True).problems
    assert row.verdict == "failed"
    assert served(bench).config == WINNER


def test_aged_and_served_exclude_each_other(check: Any, judges: Any) -> None:
    with pytest.raises(InputError, match="give one of them"):
        check(judges["by_threads"], aged=True)


class TestTuningAProblemThatWasServed:
    def test_what_was_served_is_tried_right_after_the_default(self, bench: Any) -> None:
        chosen = {"THREADS": 64, "WORK": 2}
        bench.tune(bench.record(), served=chosen, trials=4, sampler="random", finals=0)
        assert [trial.config for trial in bench.stored()][:2] == [DEFAULT, chosen]

    def test_a_session_that_resumes_repeats_it_whatever_is_served_by_now(self, bench: Any) -> None:
        chosen = {"THREADS": 64, "WORK": 2}
        bench.tune(bench.record(), served=chosen, trials=3, sampler="random", finals=0)
        with Database.open(read_settings().database) as database:
            (study,) = database.studies()
            assert find_served(database, study.study_id, TuneOptions(served=WINNER)) == chosen
            assert find_served(database, study.study_id, TuneOptions(served=WINNER, fresh=True)) == WINNER
            assert find_served(database, study.study_id + 1, TuneOptions(served=WINNER)) == WINNER

    @pytest.mark.parametrize(
        ("tier", "options", "expected"),
        [
            ("nearest", {}, WINNER),
            ("default", {}, None),
            ("nearest", {"fresh": True}, None),
            ("nearest", {"transfer": False}, None),
            ("nearest", {"only": (DEFAULT,)}, None),
        ],
    )
    def test_the_call_finds_it_unless_earlier_results_are_excluded(
        self, bench: Any, monkeypatch: pytest.MonkeyPatch, tier: str, options: Any, expected: Config | None
    ) -> None:
        seen: list[TuneOptions] = []
        monkeypatch.setattr(targets, "device_count", lambda: 1)
        monkeypatch.setattr(tuning_api, "check_gpu", lambda _: None)
        monkeypatch.setattr(dispatcher, "find_best_result", lambda *_: SimpleNamespace(tier=tier, config=WINNER))
        monkeypatch.setattr("autotile.tuning.session.tune", lambda *arguments: seen.append(arguments[3]))
        tuning_api.tune_problem(bench.kernel, bench.problem(), TuneOptions(**options))
        assert seen[0].served == expected

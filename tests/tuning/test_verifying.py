"""Verification of stored results, and of what is served for problems that are not tuned, by replay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update
from stored_runs import record_miss

from autotile.api import targets
from autotile.api.verification import verify
from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.database.database import Database
from autotile.database.engine import MISSES, STUDIES
from autotile.errors import InputError
from autotile.serving import dispatcher
from autotile.serving.dispatcher import find_best_kernel, forget_served
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import assess_misses
from autotile.tuning.start import find_served

SIZE, ASKED = 4096, 8192
WINNER = {"THREADS": 256, "WORK": 4}
SECOND = {"THREADS": 256, "WORK": 2}
DEFAULT = {"THREADS": 128, "WORK": 1}


@pytest.fixture
def by_threads(judges: dict[str, Any]) -> Any:
    return judges["by_threads"]


@pytest.fixture
def again(bench: Any) -> Any:
    """Verify by replay of a recording made from a function of the configuration."""

    def run(judge: Any, *arguments: Any, at: int = SIZE, **named: Any) -> Any:
        options = TuneOptions(replay=bench.record(judge, n=at), workers=1)
        return verify(bench.kernel.spec.source, *arguments, options=options, **named)

    return run


def kernel_for(bench: Any, n: int = SIZE) -> Any:
    """Return what is served."""
    forget_served()
    return find_best_kernel(str(bench.kernel.spec.source), None, None, read_settings().database, {"n": n})


def wrong_if(faulty: Config, others: Any) -> Any:
    """Return a judge that finds one configuration wrong."""

    def judge(config: Config) -> Trial:
        if config_key(config) == config_key(faulty):
            return Trial(config, Outcome.WRONG_RESULT, "y[7] is 1, expected 2", "verify")
        return others(config)  # type: ignore[no-any-return]

    return judge


def all_wrong(config: Config) -> Trial:
    return Trial(config, Outcome.WRONG_RESULT, "y[7] is 1", "verify")


@pytest.fixture
def tuned(bench: Any) -> Any:
    """Tune by replay; ``nvrtc`` replaces the version of the compiler."""

    def tune(nvrtc: str = "") -> None:
        bench.tune(bench.record())
        if nvrtc:
            with Database.open(read_settings().database) as database, database.writing() as connection:
                key = replace(bench.key(), nvrtc_version=nvrtc, source="replayed")
                connection.execute(update(STUDIES).values(nvrtc_version=nvrtc, digest=key.digest))

    return tune


def test_what_is_still_best_is_confirmed(bench: Any, tuned: Any, again: Any, by_threads: Any) -> None:
    tuned()
    result = again(by_threads)
    (row,) = result.problems
    assert repr(result) == "<VerifyResult: 1 problem on NVIDIA H200 (replayed): 1 confirmed>"
    assert "<td>scale n=4096 float32</td><td>confirmed</td>" in result._repr_html_()
    assert (row.verdict, row.before, row.after, row.aged) == ("confirmed", WINNER, WINNER, ())
    assert row.speedup.value > 1
    retimed = [trial.config for trial in bench.stored("final")][-4:]
    assert {config_key(config) for config in retimed} == {
        config_key(config) for config in (WINNER, SECOND, DEFAULT, {"THREADS": 256, "WORK": 1})
    }


def test_what_has_become_faster_is_served(bench: Any, tuned: Any, again: Any, judges: Any) -> None:
    def judge(config: Config) -> Trial:
        return judges["timed"](config, 1.0 if config == SECOND else 10.0)  # type: ignore[no-any-return]

    tuned()
    (row,) = again(judge).problems
    assert (row.verdict, row.before, row.after) == ("replaced", WINNER, SECOND)
    assert kernel_for(bench).config == SECOND


def test_what_is_wrong_now_is_served_no_more(bench: Any, tuned: Any, again: Any, by_threads: Any) -> None:
    tuned()
    (row,) = again(wrong_if(WINNER, by_threads)).problems
    assert (row.verdict, row.after) == ("demoted", SECOND)
    assert row.reason == "wrong_result: y[7] is 1, expected 2"
    assert kernel_for(bench).config == SECOND


def test_another_compiler_marks_a_result_as_aged_until_it_is_verified(
    bench: Any, tuned: Any, again: Any, by_threads: Any
) -> None:
    tuned(nvrtc="12.0")
    kernel = kernel_for(bench)
    assert (kernel.tier, kernel.config) == ("nearest", WINNER)
    assert "It has aged (NVRTC 12.0, now" in kernel.explain()
    assert "`autotile verify scale` measures it again" in kernel.explain()
    (row,) = again(by_threads, aged=True).problems
    assert row.verdict == "confirmed"
    assert row.aged[0].startswith("NVRTC 12.0, now")
    kernel = kernel_for(bench)
    assert (kernel.tier, kernel.config, kernel.choice.aged) == ("exact", WINNER, ())
    nothing = again(by_threads, aged=True)
    assert nothing.problems == ()
    assert "nothing to verify" in repr(nothing)


@pytest.mark.parametrize("nvrtc", ["", "12.0"])
def test_where_all_are_wrong_nothing_of_them_is_served(bench: Any, tuned: Any, again: Any, nvrtc: str) -> None:
    """Not even results of another compiler version, as the installed one would compile them."""
    tuned(nvrtc)
    (row,) = again(all_wrong).problems
    assert (row.verdict, row.before) == ("demoted", WINNER)
    assert kernel_for(bench).config not in (WINNER, SECOND)


def test_one_problem_of_several(bench: Any, tuned: Any, again: Any, by_threads: Any) -> None:
    tuned()
    bench.tune(bench.record(n=2048), n=2048)
    for result in (again(by_threads, {"n": 4096}), again(by_threads, n=4096)):
        (row,) = result.problems
        assert dict(row.problem.sizes) == {"n": 4096}
    with pytest.raises(InputError, match="n is given twice"):
        again(by_threads, {"n": 4096}, n=4096)


def test_what_is_not_tuned(bench: Any, tuned: Any, again: Any, by_threads: Any) -> None:
    with pytest.raises(InputError, match="scale is not tuned, so there is nothing to verify"):
        again(by_threads)
    tuned()
    with pytest.raises(InputError, match="scale n=8 float32 is not tuned"):
        again(by_threads, {"n": 8})


def test_without_a_gpu_nothing_can_be_verified(bench: Any, tuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned()
    monkeypatch.setattr("autotile.api.verification.device_count", lambda: 0)
    with pytest.raises(InputError, match="there is no CUDA device here"):
        verify(bench.kernel.spec.source)


@pytest.fixture
def check(bench: Any, again: Any) -> Any:
    """Tune for one size, miss another, and verify what is served there by replay of a function of the configuration."""
    bench.tune(bench.record())
    with Database.open(read_settings().database) as database:
        record_miss(database, bench.problem(ASKED), bench.device.name, "nearest", 3)
    return partial(again, at=ASKED, served=True)


def test_what_is_correct_there_is_confirmed_once(bench: Any, check: Any, by_threads: Any) -> None:
    (row,) = check(by_threads).problems
    assert (row.verdict, row.before, row.after, row.reason) == ("confirmed", WINNER, WINNER, "")
    assert row.before_measurement is None
    assert row.after_measurement.time_us == by_threads(WINNER).time_us
    assert row.speedup.value > 1
    assert (kernel_for(bench, ASKED).tier, kernel_for(bench, ASKED).config) == ("nearest", WINNER)
    assert check(by_threads).problems == ()


def test_the_problem_still_counts_as_not_tuned(bench: Any, check: Any, by_threads: Any) -> None:
    check(by_threads)
    with Database.open(read_settings().database) as database:
        (missed,) = assess_misses(database, bench.kernel.spec.source)
    assert not missed.tuned
    assert bench.tune(bench.record(n=ASKED), n=ASKED).winner.config == WINNER
    assert kernel_for(bench, ASKED).tier == "exact"


def test_what_is_wrong_there_is_not_served_for_it(bench: Any, check: Any, by_threads: Any) -> None:
    rows = check(wrong_if(WINNER, by_threads)).problems
    assert [(row.verdict, row.before, row.after) for row in rows] == [
        ("demoted", WINNER, DEFAULT),
        ("confirmed", DEFAULT, DEFAULT),
    ]
    assert rows[0].reason == "wrong_result: y[7] is 1, expected 2"
    assert (kernel_for(bench, ASKED).tier, kernel_for(bench, ASKED).config) == ("default", DEFAULT)
    assert (kernel_for(bench).tier, kernel_for(bench).config) == ("exact", WINNER)


def test_a_tuning_that_measures_it_lifts_the_refusal(bench: Any, check: Any, by_threads: Any) -> None:
    check(wrong_if(WINNER, by_threads))
    bench.tune(bench.record(n=ASKED), n=ASKED)
    assert (kernel_for(bench, ASKED).tier, kernel_for(bench, ASKED).config) == ("exact", WINNER)


def test_a_default_that_is_wrong_is_reported_and_stays_the_last_resort(bench: Any, check: Any) -> None:
    rows = check(all_wrong).problems
    assert [row.verdict for row in rows] == ["demoted", "failed"]
    assert kernel_for(bench, ASKED).config == DEFAULT


def test_given_sizes_are_verified_without_a_miss(bench: Any, check: Any, by_threads: Any) -> None:
    with Database.open(read_settings().database) as database, database.writing() as connection:
        connection.execute(MISSES.delete())
    assert check(by_threads).problems == ()
    (row,) = check(by_threads, {"n": ASKED}).problems
    assert row.verdict == "confirmed"


@pytest.mark.usefixtures("check")
def test_a_configuration_that_cannot_run_there_gets_no_verdict(bench: Any) -> None:
    options = TuneOptions(replay=bench.record(configs=[DEFAULT], n=ASKED), workers=1)
    (row,) = verify(bench.kernel.spec.source, options=options, served=True).problems
    assert row.verdict == "failed"
    assert kernel_for(bench, ASKED).config == WINNER


def test_aged_and_served_exclude_each_other(check: Any, by_threads: Any) -> None:
    with pytest.raises(InputError, match="give one of them"):
        check(by_threads, aged=True)


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
        monkeypatch.setattr(targets, "check_gpu", lambda _: None)
        monkeypatch.setattr(dispatcher, "find_best_result", lambda *_: SimpleNamespace(tier=tier, config=WINNER))
        monkeypatch.setattr("autotile.tuning.session.tune", lambda *arguments: seen.append(arguments[3]))
        targets.tune_problem(bench.kernel, bench.problem(), TuneOptions(**options))
        assert seen[0].served == expected

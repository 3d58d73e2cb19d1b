"""Verification of stored results, by replay of recordings that have changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotile.api.verification import verify
from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.database.database import Database
from autotile.errors import InputError
from autotile.serving.dispatcher import find_best_kernel
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions

WINNER = {"THREADS": 256, "WORK": 4}
SECOND = {"THREADS": 256, "WORK": 2}
DEFAULT = {"THREADS": 128, "WORK": 1}


@pytest.fixture
def again(bench: Any) -> Any:
    """Verify by replay of a recording made from a function of the configuration."""

    def run(judge: Any, *arguments: Any, **named: Any) -> Any:
        options = TuneOptions(replay=bench.record(judge), workers=1)
        return verify(bench.kernel.spec.source, *arguments, options=options, **named)

    return run


@pytest.fixture
def tuned(bench: Any) -> Any:
    """Tune by replay; ``nvrtc`` replaces the version of the compiler."""

    def tune(nvrtc: str = "") -> None:
        bench.tune(bench.record())
        if nvrtc:
            with Database.open(read_settings().database) as database, database.writing() as connection:
                from sqlalchemy import update

                from autotile.database.engine import STUDIES

                key = replace(bench.key(), nvrtc_version=nvrtc, source="replayed")
                connection.execute(update(STUDIES).values(nvrtc_version=nvrtc, digest=key.digest))

    return tune


def served(bench: Any) -> Any:
    source = str(bench.kernel.spec.source)
    return find_best_kernel(source, None, None, read_settings().database, {"n": 4096})


def outcome_of(config: Config, what: Outcome, by_threads: Any) -> Any:
    """Return a judge that gives one configuration another outcome."""

    def judge(asked: Config) -> Trial:
        if config_key(asked) == config_key(config):
            return Trial(asked, what, "y[7] is 1, expected 2", "verify")
        return by_threads(asked)  # type: ignore[no-any-return]

    return judge


def test_what_is_still_best_is_confirmed(bench: Any, tuned: Any, again: Any, judges: Any) -> None:
    tuned()
    result = again(judges["by_threads"])
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
    assert served(bench).config == SECOND


def test_what_is_wrong_now_is_served_no_more(bench: Any, tuned: Any, again: Any, judges: Any) -> None:
    tuned()
    (row,) = again(outcome_of(WINNER, Outcome.WRONG_RESULT, judges["by_threads"])).problems
    assert (row.verdict, row.after) == ("demoted", SECOND)
    assert row.reason == "wrong_result: y[7] is 1, expected 2"
    assert served(bench).config == SECOND


def test_another_compiler_marks_a_result_as_aged_until_it_is_verified(
    bench: Any, tuned: Any, again: Any, judges: Any
) -> None:
    tuned(nvrtc="12.0")
    kernel = served(bench)
    assert (kernel.tier, kernel.config) == ("nearest", WINNER)
    assert "It has aged (NVRTC 12.0, now" in kernel.explain()
    assert "`autotile verify scale` measures it again" in kernel.explain()
    (row,) = again(judges["by_threads"], aged=True).problems
    assert row.verdict == "confirmed"
    assert row.aged[0].startswith("NVRTC 12.0, now")
    kernel = served(bench)
    assert (kernel.tier, kernel.config, kernel.choice.aged) == ("exact", WINNER, ())
    nothing = again(judges["by_threads"], aged=True)
    assert nothing.problems == ()
    assert "nothing to verify" in repr(nothing)


@pytest.mark.parametrize("nvrtc", ["", "12.0"])
def test_where_all_are_wrong_nothing_of_them_is_served(
    bench: Any, tuned: Any, again: Any, judges: Any, nvrtc: str
) -> None:
    """Not even results of another compiler version, as the installed one would compile them."""
    tuned(nvrtc)

    def judge(config: Config) -> Trial:
        return judges["failed"](config, Outcome.WRONG_RESULT)  # type: ignore[no-any-return]

    (row,) = again(judge).problems
    assert (row.verdict, row.before) == ("demoted", WINNER)
    assert served(bench).config not in (WINNER, SECOND)


def test_one_problem_of_several(bench: Any, tuned: Any, again: Any, judges: Any) -> None:
    tuned()
    bench.tune(bench.record(n=2048), n=2048)
    for result in (again(judges["by_threads"], {"n": 4096}), again(judges["by_threads"], n=4096)):
        (row,) = result.problems
        assert dict(row.problem.sizes) == {"n": 4096}
    with pytest.raises(InputError, match="n is given twice"):
        again(judges["by_threads"], {"n": 4096}, n=4096)


def test_what_is_not_tuned(bench: Any, tuned: Any, again: Any, judges: Any) -> None:
    with pytest.raises(InputError, match="scale is not tuned, so there is nothing to verify"):
        again(judges["by_threads"])
    tuned()
    with pytest.raises(InputError, match="scale n=8 float32 is not tuned"):
        again(judges["by_threads"], {"n": 8})


def test_without_a_gpu_nothing_can_be_verified(bench: Any, tuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned()
    monkeypatch.setattr("autotile.api.verification.device_count", lambda: 0)
    with pytest.raises(InputError, match="there is no CUDA device here"):
        verify(bench.kernel.spec.source)

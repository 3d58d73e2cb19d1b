"""Comparison of two databases: what is slower with confidence, and that noise is not."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from stored_runs import change_file
from typer.testing import CliRunner

from autotile.api.results import read_percentage
from autotile.cli.application import app
from autotile.cli.derivation import read_subject
from autotile.core.device import device_profile
from autotile.core.model import Config, Measurement, Outcome, Problem, Trial
from autotile.core.statistics import median_interval
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.errors import InputError
from autotile.report.comparison import DatabaseComparison, _ratio_of_sessions, changes_chart, compare

FAST: Config = {"THREADS": 256, "WORK": 4}
SLOW: Config = {"THREADS": 64, "WORK": 2}
NOISE = 0.005
HASHES = {"template_hash": "t" * 64, "space_hash": "s" * 64}
VERSIONS: dict[str, Any] = {**HASHES, "options": (), "nvrtc_version": "13.0", "l2_mode": "cold"}


def samples(time_us: float, seed: int, count: int = 30, noise: float = NOISE) -> tuple[float, ...]:
    """Times as a GPU gives them: skewed to the right."""
    rng = np.random.default_rng(seed)
    return tuple(time_us * np.exp(noise * rng.standard_normal(count) + noise * rng.exponential(0.5, count)))


def measured(config: Config, times_us: Sequence[float], **telemetry: float) -> Trial:
    interval = median_interval(times_us)
    measurement = Measurement(interval.value, interval.low, interval.high, tuple(times_us))
    return Trial(config, Outcome.OK, "", "measure", measurement=measurement, cubin_hash="c", telemetry=telemetry)


def fast(time_us: float, seed: int, count: int = 30, **telemetry: float) -> Trial:
    return measured(FAST, samples(time_us, seed, count), **telemetry)


class Book:
    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, n: int, *trials: Trial, gpu: str = "h200", driver: str = "580.65", **changes: Any) -> None:
        """A session; the first trial won its finals, if it has a time."""
        device = structs.replace(device_profile(gpu), source="cuda")
        problem = Problem(changes.pop("kernel", "scale"), {"n": n}, "float32")
        key = TuningKey.for_device(problem, device, **{**VERSIONS, **changes})
        columns: dict[str, Any] = {"sampler": "random", "driver": driver, "host": "a host"}
        with Database.open(self.path) as database:
            study = database.add_run(key, trials, device=device, **columns)
            if trials[0].outcome.has_time:
                database.add_run(study, trials[:1], phase="final", is_ranked=True, **columns)


@pytest.fixture
def a(tmp_path):
    return Book(tmp_path / "a.db")


@pytest.fixture
def b(tmp_path):
    return Book(tmp_path / "b.db")


def both(a: Book, b: Book, slower: float, seed: int = 0, count: int = 30) -> DatabaseComparison:
    a.put(1024, fast(10.0, 2 * seed, count))
    b.put(1024, fast(10.0 * slower, 2 * seed + 1, count))
    return compare(a.path, b.path)


WRONG = Trial(FAST, Outcome.WRONG_RESULT, "y differs", "verify")


class TestOneProblem:
    def test_slower_with_its_interval_and_within_the_limit_by_that(self, a, b):
        (found,) = both(a, b, 1.08).problems
        assert found.verdict == "slower"
        assert 1.06 < found.ratio.low < 1.08 < found.ratio.high < 1.1
        assert found.is_slower_by(0.05)
        assert found.ratio.value > 1.075
        assert not found.is_slower_by(0.075)
        assert (found.same_config, found.retimed) == (True, found.ratio)

    @pytest.mark.parametrize(("slower", "verdict"), [(0.9, "faster"), (1.0, "unresolved")])
    def test_faster_and_noise(self, a, b, slower, verdict):
        (found,) = both(a, b, slower).problems
        assert found.verdict == verdict
        assert not found.is_slower_by(0.0)

    def test_few_samples_and_an_imported_time_without_its_spread_prove_nothing(self, a, b):
        found = both(a, b, 1.5, count=5)
        assert [one.verdict for one in found.problems] == ["unknown"]
        assert found.slower_by(0.0) == ()
        assert changes_chart(found).figure is None
        for side, time_us in ((a, 10.0), (b, 20.0)):
            side.put(2048, replace(measured(FAST, [1.0]), measurement=Measurement(time_us, time_us, time_us)))
        assert [one.verdict for one in compare(a.path, b.path).problems] == ["unknown"] * 2

    def test_another_winner_and_the_former_one_timed_again(self, a, b):
        a.put(1024, fast(10.0, 1), measured(SLOW, samples(12.0, 2)))
        b.put(1024, measured(SLOW, samples(9.0, 3)), fast(10.0, 4))
        (found,) = compare(a.path, b.path).problems
        assert (found.same_config, found.verdict) == (False, "faster")
        assert found.retimed.contains(1.0)
        assert (found.common, found.common_count) == (None, 2)

    def test_all_that_both_have_measured(self, a, b):
        for side, factor in ((a, 1.0), (b, 1.03)):
            configs = [{"THREADS": 32 * i, "WORK": 1} for i in range(1, 9)]
            side.put(1024, *(measured(one, samples(factor * (10 + i), i)) for i, one in enumerate(configs)))
        (found,) = compare(a.path, b.path).problems
        assert found.common_count == 8
        assert found.common.value == pytest.approx(1.03)


class TestUncertainty:
    def test_repeats_of_one_database_that_differ_widen_the_interval(self, a, b):
        a.put(1024, fast(10.0, 1))
        b.put(1024, fast(10.0, 2))
        b.put(1024, fast(10.3, 3))  # a second session: 3 % slower on the same machine
        (found,) = compare(a.path, b.path).problems
        assert found.repeat_spread == pytest.approx(0.03, abs=0.005)
        assert found.verdict == "unresolved"

    def test_a_repeat_of_another_binary_is_none(self, a, b):
        a.put(1024, fast(10.0, 1))
        b.put(1024, replace(fast(8.0, 2), cubin_hash="older"))
        b.put(1024, fast(10.5, 3))
        (found,) = compare(a.path, b.path).problems
        assert found.repeat_spread < 0.01
        assert found.verdict == "slower"

    @pytest.mark.parametrize(("gpu", "verdict"), [("h200", "unresolved"), ("a100-sxm4-80gb", "slower")])
    def test_a_lower_clock_of_the_same_gpu_may_explain_it(self, a, b, gpu, verdict):
        a.put(1024, fast(10.0, 1, reference_us=20.0))
        b.put(1024, fast(10.6, 2, reference_us=21.2), gpu=gpu)
        found = compare(a.path, b.path)
        (one,) = found.problems
        assert one.clock_ratio == found.clock_ratio == (pytest.approx(1.06) if gpu == "h200" else None)
        assert one.verdict == verdict
        assert ("took 6.0 % longer in B" in found._repr_html_()) == (gpu == "h200")
        assert "took as long in B" in compare(a.path, a.path)._repr_html_()

    def test_of_many_equal_problems_none_is_slower_as_their_intervals_are_wider(self, a, b):
        (alone,) = (one.ratio for one in both(a, b, 1.0).problems)
        for i in range(1, 8):
            a.put(64 + i, fast(10.0, 2 * i))
            b.put(64 + i, fast(10.0, 2 * i + 1))
        found = compare(a.path, b.path)
        among = [one.ratio for one in found.problems if one.ratio.value == alone.value]
        assert [one.low < alone.low < alone.high < one.high for one in among] == [True]
        assert (len(found.problems), found.slower_by(0.0)) == (8, ())


class TestMatching:
    def test_another_gpu_and_another_compiler_but_the_same_gpu_first(self, a, b):
        a.put(1024, fast(10.0, 1))
        b.put(1024, fast(20.0, 2), gpu="a100-sxm4-80gb", nvrtc_version="12.9", driver="570.1")
        differences = {name: (mine, other) for (name, mine, other), _ in compare(a.path, b.path).differences}
        assert differences["compiler"] == ("13.0", "12.9")
        assert differences["driver"] == ("580.65", "570.1")
        assert differences["GPU"][0] == "NVIDIA H200"
        assert not {"kernel", "sizes", "dtype", "objective"} & differences.keys()
        change_file(b.path, """UPDATE runs SET settings = '{"objective": "1 / time_us"}'""")
        assert ("objective", "time", "1 / time_us") in dict(compare(a.path, b.path).differences)
        a.put(1024, fast(20.0, 2), gpu="a100-sxm4-80gb")
        b.put(1024, fast(10.0, 1))
        found = compare(a.path, b.path)
        assert [one.a.key.gpu_name == one.b.key.gpu_name for one in found.problems] == [True, True]

    def test_the_newest_version_of_a_kernel(self, a, b):
        a.put(1024, fast(10.0, 1))
        for side in (a, b):
            side.put(1024, fast(5.0, 2), template_hash="u" * 64)
        found = compare(a.path, b.path)
        assert (found.superseded, found.differences) == (1, ())
        assert [one.ratio.value for one in found.problems if one.ratio is not None] == [1.0]

    def test_problems_of_one_only_or_that_fail_in_the_second(self, a, b, tmp_path):
        for n in (1024, 2048):
            a.put(n, fast(10.0, 1))
        b.put(1024, fast(10.0, 1), l2_mode="hot")
        found = compare(a.path, b.path)
        assert (len(found.problems), len(found.only_a), len(found.only_b), found.broken) == (0, 2, 1, ())
        b.put(1024, WRONG)
        found = compare(a.path, b.path)
        assert [one.key.kernel for one in found.broken] == ["scale"]
        assert "failed in B" in found.page()
        assert compare(b.path, a.path).broken == ()
        with pytest.raises(InputError, match=r"there is no database .*missing\.db"):
            compare(a.path, tmp_path / "missing.db")

    def test_a_row_that_does_not_match_its_schema_is_skipped(self, a, b):
        for side in (a, b):
            side.put(1024, fast(10.0, 1), measured(SLOW, samples(11.0, 1)))
        change_file(b.path, "UPDATE trials SET time_us = -1.0 WHERE phase = 'final'")
        with pytest.warns(UserWarning, match="skipped 1 unusable row"):
            found = compare(a.path, b.path)
        assert [one.same_config for one in found.problems] == [True]


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(a, b):
    """The command on both databases: exit code, output and remarks."""

    def outcome(*options: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["report", str(a.path), str(b.path), *options], catch_exceptions=False)
        return done.exit_code, done.stdout, done.stderr

    return outcome


class TestExitCode:
    @pytest.mark.parametrize(
        "case", [(1.08, "5%", 3), (1.08, "10%", 0), (1.0, "0%", 0), (0.5, "5 %", 0), (2.0, None, 0)]
    )
    def test_slower_beyond_the_limit(self, a, b, run, case):
        slower, limit, code = case
        both(a, b, slower)
        found, out, err = run(*(["--fail-if-slower", limit] if limit is not None else []))
        assert found == code
        assert ("1 problem slower by more than" in err) == (code == 3)
        assert ("by more than" in out) == (code == 3)

    def test_a_problem_that_fails_and_nothing_to_compare(self, a, b, run):
        a.put(512, fast(10.0, 1))
        b.put(256, fast(10.0, 1))
        code, _, err = run("--fail-if-slower", "5%")
        assert (code, "no problem in common" in err) == (1, True)
        both(a, b, 1.5)
        a.put(2048, fast(10.0, 1))
        b.put(2048, WRONG)
        code, out, err = run("--fail-if-slower", "5%")
        assert code == 1
        assert "1 problem with no valid result in B: scale n=2048" in err
        assert "1 problem slower" in err
        assert "no configuration works in the other" in out

    def test_what_is_no_percentage(self):
        for text in ("5", "0.05", "-5%", "five%", "", "1e3%", "5%%", -0.05, math.nan, math.inf):
            with pytest.raises(InputError, match="expected one such as 5%"):
                read_percentage(text)


class TestAnswer:
    def test_the_document(self, a, b, run):
        found = both(a, b, 1.08)
        assert "1 problem compared: 1 slower" in repr(found)
        assert "+8." in found._repr_html_()
        code, out, _ = run("--fail-if-slower", "5%", "--json")
        document = json.loads(out)
        assert code == 3
        assert (document["limit"], document["slower_than_limit"]) == (0.05, 1)
        (problem,) = document["problems"]
        low, high = problem["ratio"]["interval"]
        assert 1.05 < low < problem["ratio"]["value"] < high
        assert (problem["verdict"], problem["slower_than_limit"]) == ("slower", True)
        assert (problem["a"]["samples"], problem["a"]["driver"], problem["b"]["config"]) == (30, "580.65", FAST)

    def test_the_table(self, a, b, run):
        for side, gpu in ((a, "h200"), (b, "a100-sxm4-80gb")):
            trials = [measured({"THREADS": t, "WORK": 1}, samples(10.0 + t, t)) for t in range(1, 9)]
            side.put(1024, *trials, gpu=gpu)
        a.put(512, fast(3.0, 1))
        _, out, _ = run()
        parts = "GPU: NVIDIA H200 -> ", "not told apart", "all 8 that both measured: +0.0 %", "only in A", "n=512"
        assert [text for text in parts if text not in out] == []
        for side in (a, b):  # and no hostile name reaches the terminal
            side.put(1, fast(1.0, 1), kernel="\x1b[31mred\u202e")
        _, out, _ = run()
        assert "red" in out
        assert not {"\x1b", "\u202e"} & set(out)


class TestPage:
    def test_it_is_written(self, a, b, run, tmp_path):
        for side, factor, gpu in ((a, 1.0, "h200"), (b, 1.2, "a100-sxm4-80gb")):
            side.put(1, fast(factor, 1), kernel="<script>alert(1)</script>")
            side.put(2, fast(factor, 1), gpu=gpu)
        a.put(3, fast(1.0, 1))
        page = tmp_path / "page.html"
        code, _, err = run("-o", str(page), "--fail-if-slower", "5%")
        assert (code, f"page: {page}" in err) == (3, True)
        text = page.read_text()
        assert "<script>alert" not in text
        parts = "2 problems slower by more than 5.0 %", "Only in A", "GPU", "Content-Security-Policy"
        assert [part for part in parts if part not in text] == []

    def test_many_problems_are_drawn_in_part(self, a, b):
        found = both(a, b, 1.1)
        chart = changes_chart(replace(found, problems=found.problems * 100, limit=0.05))
        assert chart.note == "60 of 100 problems are drawn, those that changed most."
        assert len(chart.figure.data[0].y) == len(set(chart.figure.data[0].y)) == 60
        assert len(chart.table.rows) == 100


def test_two_databases_or_a_kernel_and_its_sizes(tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(b"SQLite format 3\0")
    for words in (["a.db", "b.sqlite"], ["a.db", str(plain)], ["a.db", "postgresql://host/name"]):
        assert read_subject(words) == {"kernel": words[0], "other": words[1]}
    assert read_subject(["sgemm_2d", "M=4096"]) == {"kernel": "sgemm_2d", "sizes": {"M": 4096}}
    assert read_subject(["a.db"]) == {"kernel": "a.db", "sizes": {}}
    assert read_subject(["mine.toml", "N=4096"]) == {"kernel": "mine.toml", "sizes": {"N": 4096}}
    with pytest.raises(InputError, match="is another"):
        read_subject(["a.db", "b.db", "c.db"])


@given(st.floats(0.5, 2.0), st.integers(1, 1000))
def test_intervals_grow_with_the_number_of_problems(factor, level):
    a, b = Measurement(10.0, 9.9, 10.1), Measurement(10.0 * factor, 9.8 * factor, 10.1 * factor)
    one, many = (_ratio_of_sessions(a, b, count, 0.002, None) for count in (1, level))
    assert many.low <= one.low < one.value == many.value < one.high <= many.high
    assert math.isclose(one.low, 9.8 * factor / 10.1 / 1.002)


@pytest.mark.parametrize("level", [1, 20])
def test_noise_alone_is_found_in_one_comparison_of_twenty_at_most(level):
    def median_of(seed: int) -> Measurement:
        found = median_interval(samples(10.0, seed, 9))
        return Measurement(found.value, found.low, found.high)

    alarms, comparisons = 0, 400 // level
    for i in range(comparisons):
        pairs = [(median_of(2 * (level * i + j)), median_of(2 * (level * i + j) + 1)) for j in range(level)]
        alarms += any(not _ratio_of_sessions(a, b, level, 0.0, None).contains(1.0) for a, b in pairs)
    assert alarms <= comparisons / 20

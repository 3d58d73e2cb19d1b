from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from autotile.cli.tables import render
from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Problem, Trial
from autotile.core.statistics import Interval
from autotile.kernel.problem import Workrate
from autotile.search.importance import Effect, ParameterEffects, Threshold
from autotile.search.transfer import MisleadingSource
from autotile.tuning.progress_state import Stopped
from autotile.tuning.result import TuneResult

H200 = device_profile("h200")
PROBLEM = Problem("sgemm", {"M": 4096, "N": 4096, "K": 4096}, "float32")
RATE = Workrate(flops=2 * 4096**3, bytes=12 * 4096**2, dtype="float32")


def trial(tile: int, time_us: float) -> Trial:
    return Trial({"BM": tile}, Outcome.OK, measurement=Measurement(time_us, time_us - 2, time_us + 5))


RESULT = TuneResult(
    problem=PROBLEM,
    device=H200,
    combinations=8294400,
    valid=24906,
    gates={"combinations": 8294400, "limits": 24906},
    outcomes={Outcome.OK: 45, Outcome.PRUNED: 5},
    winner=trial(128, 4790),
    default=trial(64, 7185),
    speedup=Interval(1.5, 1.49, 1.51),
    ties=(),
    seconds=21.3,
    resumed=20,
    interrupted=False,
    database="tuning.db",
    flops=RATE.flops,
    bytes=RATE.bytes,
)


def shown(result: TuneResult, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(render(replace(result, call='kernel = autotile.get_best_kernel("sgemm", M=4096)')))
    return console.file.getvalue()


class TestTable:
    def test_winner_and_default_stand_side_by_side(self):
        lines = shown(RESULT).splitlines()
        assert any(
            "winner" in line and "4,790 us" in line and "28.7 TFLOP/s (42.9 % of fp32 peak)" in line for line in lines
        )
        assert any("default" in line and "7,185 us" in line for line in lines)

    def test_the_speed_up_comes_with_its_interval(self):
        assert "1.500x over the default, 95 % interval 1.490x to 1.510x" in shown(RESULT)

    def test_what_is_not_resolved_is_said(self):
        assert "not told apart from the default" in shown(replace(RESULT, speedup=Interval(1.001, 0.99, 1.01)))

    def test_a_default_that_wins_is_no_speed_up(self):
        assert "the default configuration is the winner" in shown(replace(RESULT, default=RESULT.winner))

    def test_studies_that_mislead_are_named(self):
        found = replace(RESULT, learnt_from=("n=1",), not_learnt_from=(MisleadingSource("n=512", -0.13, 12),))
        text = shown(found)
        assert "from n=1\n" in "\n".join(line.rstrip() for line in text.splitlines())
        assert "from n=512 (rank correlation -0.1 over 12 trials)" in text

    def test_few_ties_are_listed_and_many_counted(self):
        assert "1 configuration cannot be told apart" in shown(replace(RESULT, ties=({"BM": 256},)))
        many = shown(replace(RESULT, ties=tuple({"BM": tile} for tile in range(9))))
        assert "BM=4" in many
        assert "BM=5" not in many
        assert "and 4 more" in many

    def test_a_default_that_failed_says_how(self):
        failed = Trial({"BM": 64}, Outcome.RESOURCE_EXCEEDED, "spills")
        assert "resource_exceeded" in shown(replace(RESULT, default=failed, speedup=None))
        assert "not run" in shown(replace(RESULT, default=None, speedup=None))

    def test_nothing_that_ran_is_said(self):
        assert "none: no configuration ran" in shown(replace(RESULT, winner=None, default=None, speedup=None))

    def test_what_matters_is_one_line_of_the_report(self):
        effects = (Effect("BK", 0.614, 0.5, True), Effect("PAD", 0.0, 0.0, False))
        insight = ParameterEffects(
            effects, {"BK": (16, 32)}, (Threshold("threads", "above", 256, 48, 0.129, "256 threads"),)
        )
        lines = shown(replace(RESULT, insight=insight), width=200).splitlines()
        assert [line.removeprefix("matters").strip() for line in lines if line.startswith("matters")] == [
            "BK explains 61 % of the differences (best at 16 or 32); no effect is seen of PAD; "
            "none of 48 trials beyond 256 threads came within 12 % of the best"
        ]

    def test_a_search_that_expected_nothing_more_says_so(self):
        said = shown(replace(RESULT, stopped=Stopped("settled", 0.0002)), width=200)
        assert "nothing more is expected: 0.02 % from 32 more trials; --spend uses the budget up" in said
        assert "less than 0.001 % from 32 more" in shown(replace(RESULT, stopped=Stopped("settled", 1e-90)), width=200)

    def test_a_search_that_stopped_for_want_of_gain_says_so(self):
        said = shown(replace(RESULT, stopped=Stopped("until", 0.00432)))
        assert "all the candidates that lay ready were expected to gain 0.43 %, less than --until asks for" in said
        assert "stopped" not in shown(replace(RESULT, stopped=Stopped("trials", 0.00432)))
        document = replace(RESULT, stopped=Stopped("until", 0.00432)).to_json()
        assert document["stopped"] == {"rule": "until", "expected_gain": 0.00432, "more_trials": 32}

    def test_an_interrupted_session_has_no_winner_yet(self):
        lines = shown(replace(RESULT, interrupted=True)).splitlines()
        assert "cut short after 50 configurations; the same command goes on from there" in "\n".join(lines)
        assert [line for line in lines if line.startswith("winner")] == []
        assert len([line for line in lines if line.startswith("best so far")]) == 2

    def test_without_finals_an_interrupted_session_says_so(self):
        lines = shown(replace(RESULT, interrupted=True, speedup=None))
        assert "cut short after 50 configurations, before the best were timed side by side; the same" in lines

    def test_an_interrupt_before_anything_ran(self):
        lines = shown(replace(RESULT, interrupted=True, winner=None, default=None, speedup=None, outcomes={}))
        assert "best so far  none: no configuration ran" in lines
        assert "cut short after 0 configurations" in lines
        assert "serve it" not in lines

    def test_a_session_that_ends_by_itself_was_not_cut_short(self):
        assert "interrupted" not in shown(RESULT)

    def test_replayed_results_say_so(self):
        assert "NVIDIA H200 (replayed)" in shown(replace(RESULT, device=replace(H200, source="replayed")))

    def test_it_fits_eighty_columns(self):
        assert max(len(line) for line in shown(RESULT, width=80).splitlines()) <= 80
        assert "4,790 us" in shown(RESULT, width=80)

    def test_every_outcome_is_counted_in_the_document(self):
        outcomes = RESULT.to_json()["outcomes"]
        assert outcomes == {**dict.fromkeys(map(str, Outcome), 0), "ok": 45, "pruned": 5}

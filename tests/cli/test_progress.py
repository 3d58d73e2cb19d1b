from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from autotile.api.progress import left_text, plain_line
from autotile.cli.progress import TuneProgress, completion
from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Problem, Trial
from autotile.kernel.problem import Workrate
from autotile.tuning.result import Progress

PROBLEM = Problem("sgemm", {"M": 4096, "N": 4096, "K": 4096}, "float32")
RATE = Workrate(flops=2 * 4096**3, bytes=12 * 4096**2, dtype="float32")
PROGRESS = Progress(
    phase="searching",
    device=device_profile("h200"),
    done=30,
    target=200,
    elapsed_s=3.0,
    budget_s=None,
    outcomes={Outcome.OK: 45, Outcome.PRUNED: 5},
    gates={"combinations": 8294400, "limits": 24906},
    best=Trial({"BM": 128}, Outcome.OK, measurement=Measurement(4790, 4788, 4795)),
    remaining_s=15.0,
)


class TestProgress:
    def test_a_plain_line_says_it_all(self):
        assert plain_line(PROGRESS, RATE) == (
            "searching: 50/200 trials; best 4,790 us, 28.7 TFLOP/s (42.9 % of fp32 peak), BM=128; "
            "8,294,400 combinations -> 24,906 valid -> 50 tried: 45 ok, 5 pruned; 3.00 s elapsed; about 15.0 s left"
        )

    def test_a_small_space_is_the_target(self):
        small = replace(PROGRESS, gates={"combinations": 90, "limits": 60})
        assert "50/60 trials" in plain_line(small, RATE)

    def test_a_budget_alone_counts_seconds(self):
        budget = replace(PROGRESS, target=None, budget_s=60.0)
        assert "50 trials" in plain_line(budget, RATE)

    def test_the_finals_have_a_time_left_too(self):
        assert plain_line(replace(PROGRESS, phase="finals", remaining_s=2.0), RATE).endswith("; about 2.00 s left")
        assert "left" not in plain_line(replace(PROGRESS, remaining_s=None), RATE)
        assert plain_line(replace(PROGRESS, remaining_s=0.0), RATE).endswith("elapsed")
        assert "; at most 15.0 s left" in plain_line(replace(PROGRESS, may_end_earlier=True), RATE)

    def test_without_a_target_the_bar_says_nothing(self):
        assert completion(replace(PROGRESS, target=None), 0.0) == (50, None)
        assert completion(PROGRESS, 0.0) == (50, 200)

    def test_before_anything_ran(self):
        assert "best: none yet" in plain_line(replace(PROGRESS, best=None, outcomes={}, done=0), RATE)

    def test_elsewhere_than_on_a_terminal_lines_are_rare(self):
        stream = io.StringIO()
        with TuneProgress(Console(file=stream, width=200, markup=False), PROBLEM, RATE) as progress:
            for phase in ("starting", "searching", "searching", "searching", "finals"):
                progress(replace(PROGRESS, phase=phase))
        assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == ["starting", "searching", "finals"]

    @pytest.mark.parametrize("budget_s", [None, 60.0])
    @pytest.mark.parametrize("phase", ["starting", "searching", "finals"])
    def test_a_terminal_shows_a_live_picture(self, phase, budget_s):
        console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None, markup=False)
        target = None if budget_s else 200
        with TuneProgress(console, PROBLEM, RATE) as progress:
            progress(replace(PROGRESS, phase=phase, budget_s=budget_s, target=target))
        drawn = console.file.getvalue()
        assert "sgemm M=4096 N=4096 K=4096 float32 on NVIDIA H200" in drawn
        assert "28.7 TFLOP/s (42.9 % of fp32 peak)" in drawn
        assert "45 ok, 5 pruned" in drawn
        assert ("trials" in drawn.split("best")[0]) == (phase == "searching")


def test_a_time_left_falls_and_is_not_shown_once_it_is_over():
    finals = replace(PROGRESS, phase="finals", remaining_s=0.4)
    assert left_text(finals, 0.1) == "about 0.30 s left"
    assert left_text(finals, 0.4) == left_text(finals, 60.0) == ""

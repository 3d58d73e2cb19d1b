import io
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from stored_runs import SEARCHING

from autotile.api.inspection import SurveyProgress
from autotile.api.progress import left_text, plain_line
from autotile.cli import progress as progress_module
from autotile.cli.progress import TuneProgress, completion, count_progress
from autotile.core.model import Outcome, Problem
from autotile.kernel.problem import Workrate
from autotile.tuning.progress_state import Place, Progress

PROBLEM = Problem("sgemm", {"M": 4096, "N": 4096, "K": 4096}, "float32")
RATE = Workrate(flops=2 * 4096**3, bytes=12 * 4096**2, dtype="float32")
PROGRESS = replace(SEARCHING, problem=PROBLEM, rate=RATE)
COUNTED = SurveyProgress(1, 100, failed=0, elapsed_s=1.0, notices=())


class TestProgress:
    def test_a_plain_line_says_it_all(self):
        assert plain_line(PROGRESS) == (
            "searching: 50/200 trials; best 4,790 us, 28.7 TFLOP/s (42.9 % of fp32 peak), BM=128; "
            "8,294,400 combinations -> 24,906 valid -> 50 tried: 45 ok, 5 pruned; 3.00 s elapsed; about 15.0 s left"
        )
        for changes, said in (
            ({"gates": {"combinations": 90, "limits": 60}}, "50/60 trials"),
            ({"target": None, "budget_s": 60.0}, "50 trials"),
            ({"best": None, "outcomes": {}, "done": 0}, "best: none yet"),
        ):
            assert said in plain_line(replace(PROGRESS, **changes))

    def test_a_time_left_is_that_of_the_finals_too_falls_and_is_not_shown_once_it_is_over(self):
        assert plain_line(replace(PROGRESS, phase="finals", remaining_s=2.0)).endswith("; about 2.00 s left")
        assert "left" not in plain_line(replace(PROGRESS, remaining_s=None))
        assert plain_line(replace(PROGRESS, remaining_s=0.0)).endswith("elapsed")
        assert "; at most 15.0 s left" in plain_line(replace(PROGRESS, may_end_earlier=True))
        finals = replace(PROGRESS, phase="finals", remaining_s=0.4)
        assert left_text(finals, 0.1) == "about 0.30 s left"
        assert left_text(finals, 0.4) == left_text(finals, 60.0) == ""

    def test_without_a_target_the_bar_says_nothing(self):
        assert completion(replace(PROGRESS, target=None), 0.0) == (50, None)
        assert completion(PROGRESS, 0.0) == (50, 200)

    @pytest.mark.parametrize("budget_s", [None, 60.0])
    @pytest.mark.parametrize("phase", ["starting", "searching", "finals"])
    def test_a_terminal_shows_a_live_picture(self, phase, budget_s):
        console = terminal()
        target = None if budget_s else 200
        with TuneProgress(console) as progress:
            progress(replace(PROGRESS, phase=phase, budget_s=budget_s, target=target))
        drawn = console.file.getvalue()
        assert "sgemm M=4096 N=4096 K=4096 float32 on NVIDIA H200" in drawn
        assert "28.7 TFLOP/s (42.9 % of fp32 peak)" in drawn
        assert "45 ok, 5 pruned" in drawn
        assert ("trials" in drawn.split("best")[0]) == (phase == "searching")


def placed(of: str) -> Callable[..., Progress]:
    """Return what makes states of sessions in a schedule."""

    def state(number: int = 1, phase: str = "searching", **changes: Any) -> Progress:
        return replace(PROGRESS, phase=phase, path=(Place(of, number, 2),), **changes)

    return state


STEPS = {"family": placed("tuning point"), "operation": placed("round"), "plan": placed("problem")}
SWEEP = replace(PROGRESS, phase="measuring", target=None, gates={}, best=None, outcomes={Outcome.OK: 1}, done=1)

Shown = Callable[[Console], tuple[Any, Any]]
DISPLAYS: dict[str, Shown] = {
    "tune": lambda console: (TuneProgress(console), PROGRESS),
    "count": lambda console: (count_progress(console), COUNTED),
    "family": lambda console: (TuneProgress(console), STEPS["family"]()),
    "operation": lambda console: (TuneProgress(console), STEPS["operation"]()),
    "plan": lambda console: (TuneProgress(console), STEPS["plan"]()),
    "sweep": lambda console: (TuneProgress(console), SWEEP),
}
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, markup=False)


def elsewhere(width: int = 400) -> Console:
    return Console(file=io.StringIO(), width=width, markup=False)


def only_these_remain(threads: set[threading.Thread]) -> bool:
    for other in {*threading.enumerate()} - threads:
        other.join(60)
    return {*threading.enumerate()} <= threads


WAITING = "the scheduler does not answer; it is waited for"


@pytest.mark.parametrize("name", ["tune", "plan"])
def test_a_terminal_shows_what_a_session_waits_for_and_elsewhere_a_line_says_so_at_once(name):
    console = terminal(200)
    display, state = DISPLAYS[name](console)
    with display as observe:
        observe(replace(state, waiting=WAITING))
    assert WAITING in console.file.getvalue()
    console = elsewhere()
    display, state = DISPLAYS[name](console)
    with display as observe:
        for waiting in ("", "", WAITING, WAITING, WAITING):
            observe(replace(state, waiting=waiting))
    assert sum(WAITING in line for line in console.file.getvalue().splitlines()) == 1


class TestClosing:
    """A live picture is drawn by a thread, and hides the cursor: both end with its block."""

    @pytest.mark.parametrize("name", DISPLAYS)
    @pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
    def test_the_picture_ends_with_its_block(self, name, error):
        console, before = terminal(), {*threading.enumerate()}
        display, state = DISPLAYS[name](console)
        ending = pytest.raises(error, match="it ends early") if error is not None else nullcontext()
        with ending, display as observe:
            observe(state)
            assert {*threading.enumerate()} - before
            assert HIDE_CURSOR in console.file.getvalue()
            assert SHOW_CURSOR not in console.file.getvalue()
            if error is not None:
                raise error("it ends early")
        drawn = console.file.getvalue()
        assert drawn.rindex(SHOW_CURSOR) > drawn.rindex(HIDE_CURSOR)
        assert only_these_remain(before)

    @pytest.mark.parametrize("name", ["family", "operation", "plan"])
    def test_one_picture_serves_all_sessions(self, name):
        console, before = terminal(), {*threading.enumerate()}
        display, _ = DISPLAYS[name](console)
        with display as observe:
            observe(STEPS[name](1))
            drawing = {*threading.enumerate()} - before
            observe(STEPS[name](2))
            assert {*threading.enumerate()} - before == drawing
            assert len(drawing) == 1
        assert only_these_remain(before)


class TestSchedules:
    @pytest.mark.parametrize(("name", "of"), [("family", "tuning point"), ("operation", "round")])
    def test_each_session_has_a_heading_and_of_those_at_the_same_time_the_last_is_shown(self, name, of):
        console = elsewhere()
        display, _ = DISPLAYS[name](console)
        for number, phase in [(1, "starting"), (2, "starting"), (1, "searching"), (2, "searching")]:
            display(STEPS[name](number, phase))
        lines = console.file.getvalue().splitlines()
        assert [line for line in lines if PROBLEM.kernel in line] == [f"{of} {n} of 2: {PROBLEM}" for n in (1, 2)]
        assert [line.partition(":")[0] for line in lines] == [
            *(f"{of} 1 of 2", "starting"),
            *(f"{of} 2 of 2", "starting", "searching"),
        ]

    def test_the_end_of_a_problem_of_a_plan_is_said(self):
        console = elsewhere()
        display = TuneProgress(console)
        display(STEPS["plan"](1))
        ended = replace(PROGRESS, phase="ended", ending="failed: it does not fit")
        display(replace(ended, path=(Place("problem", 1, 2, ended=1),)))
        assert console.file.getvalue() == f"1 of 2: {PROBLEM}: failed: it does not fit\n"

    def test_a_terminal_shows_all_problems_that_run(self):
        console = terminal(200)
        with TuneProgress(console) as display:
            display(STEPS["plan"](1))
            display(STEPS["plan"](2, "finals"))
        drawn = console.file.getvalue()
        assert "0 of 2 problems" in drawn
        assert f"{PROBLEM}: searching, 50 of 200 trials, best 4,790 us" in drawn
        assert f"{PROBLEM}: finals, 50 of 200 trials" in drawn


class TestThrottling:
    """Elsewhere than on a terminal, a line is printed at most every 15 seconds, and as a phase begins."""

    @pytest.fixture
    def clock(self, monkeypatch):
        now = SimpleNamespace(s=1000.0)
        monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now.s))
        return now

    @staticmethod
    def printed(console: Console) -> int:
        return len(console.file.getvalue().splitlines())

    @pytest.mark.parametrize("name", ["tune", "family", "operation", "sweep"])
    def test_lines_of_a_phase(self, clock, name):
        console = elsewhere()
        display, state = DISPLAYS[name](console)
        headings = 1 if name in {"family", "operation"} else 0
        counts = []
        with display as observe:
            for at_s in (0.0, 14.9, 15.0, 29.9, 30.0, 31.0, 45.9, 46.0):
                clock.s = 1000.0 + at_s
                observe(replace(state, phase="one" if at_s < 31 else "two"))
                counts.append(self.printed(console) - headings)
        assert counts == [1, 1, 2, 2, 3, 4, 4, 5]

    @pytest.mark.parametrize("name", ["count", "plan"])
    def test_lines_of_a_whole(self, clock, name):
        console = elsewhere()
        display, state = DISPLAYS[name](console)
        counts = []
        with display as observe:
            for intervals in (0.0, 0.99, 1.01, 1.1, 2.0, 2.02, 2.1):
                clock.s = 1000.0 + 15.0 * intervals
                observe(state)
                counts.append(self.printed(console))
        assert counts == [0, 0, 1, 1, 1, 2, 2]

    def test_a_line_of_a_whole_says_how_much_time_is_left(self, clock):
        console = elsewhere(width=40)
        display, _ = DISPLAYS["count"](console)
        with display as observe:
            for done in range(1, 11):
                clock.s = 1000.0 + 2.0 * done
                observe(replace(COUNTED, done=done, failed=3, elapsed_s=2.0 * done))
        (line,) = console.file.getvalue().splitlines()  # however narrow the console is
        assert line == "compiling 8/100, 3 cannot be launched, 16.0 s elapsed, about 3 min 04 s left"

    def test_a_line_of_a_plan_has_no_target_below_what_was_tried(self, clock):
        console = elsewhere()
        observe, _ = DISPLAYS["plan"](console)
        clock.s = 1031.0
        observe(STEPS["plan"](target=1))
        assert "50 of 50 trials" in console.file.getvalue()

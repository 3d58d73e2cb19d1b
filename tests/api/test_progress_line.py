"""The line of progress that functions of the API show: on a terminal, in a notebook, and nothing elsewhere."""

import io
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stored_runs import SEARCHING

import autotile
from autotile.api import progress as module
from autotile.api.progress import default_display, progress_line, short_line
from autotile.core.model import Measurement, Outcome, Problem, Trial
from autotile.kernel.problem import Workrate
from autotile.tuning.progress_state import Place, Progress

PROBLEM = Problem("scale", {"n": 4096}, "float32")
PROGRESS = replace(SEARCHING, problem=PROBLEM, notices=("launches are replayed",))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """Lines as they are seen: a carriage return goes back to the beginning of the line."""
        lines = []
        for line in self.getvalue().split("\n"):
            seen = ""
            for part in line.split("\r"):
                seen = part + seen[len(part) :]
            lines.append(seen.rstrip())
        return lines


class Cell:
    """IPython, as far as a line of progress needs it; it keeps what each display id showed last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
        self.shown: list[str] = []
        self.updates = 0
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.shown.append(data["text/plain"])
        return SimpleNamespace(update=self.update)

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown[-1] = data["text/plain"]
        self.updates += 1


@pytest.fixture
def terminal(monkeypatch):
    """Standard error of `autotile.api.progress` alone: pytest sets that of the process anew before each test."""
    stream = Terminal()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    return stream


@pytest.fixture
def tune(scale_toml, recording):
    options = autotile.TuneOptions(replay=recording)
    return lambda **given: autotile.tune(scale_toml, n=1048576, options=options, **given)


class TestTune:
    def test_on_a_terminal_one_line_is_rewritten(self, tune, terminal):
        result = tune()
        notice, line, rest = terminal.screen
        assert "launches are replayed from measurements recorded on NVIDIA H200" in notice
        assert line.startswith("scale: finals 12/12, best 4.406 us (replayed), ")
        assert rest == ""
        assert "\x1b" not in terminal.getvalue()
        assert result.notices == (notice,)

    def test_elsewhere_nothing_is_shown(self, tune, capsys):
        tune()
        assert capsys.readouterr() == ("", "")

    def test_a_callable_observes(self, tune, terminal):
        for name in ("progress", "observe"):
            seen: list[Progress] = []
            tune(**{name: seen.append}, fresh=True)
            assert {one.phase for one in seen} == {"starting", "searching", "finals"}
        tune(progress=False)
        assert terminal.getvalue() == ""

    def test_in_a_notebook_one_output_is_updated(self, tune, monkeypatch):
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
        cell = Cell(monkeypatch, SimpleNamespace(kernel=object()))
        tune()
        (text,) = cell.shown
        assert text.splitlines()[0].startswith("replay was asked for")
        assert text.splitlines()[1].startswith("scale: finals 12/12, best 4.406 us (replayed), ")
        assert cell.updates >= 2

    def test_in_a_notebook_with_widgets_a_bar_moves(self, tune, monkeypatch):
        pytest.importorskip("ipywidgets")
        boxes: list[Any] = []
        cell = Cell(monkeypatch, SimpleNamespace(kernel=object()))
        monkeypatch.setattr(sys.modules["IPython.display"], "display", boxes.append)
        tune()
        (box,) = boxes
        notices, row = box.children
        bar, line = row.children
        assert "replay was asked for" in notices.value
        assert "finals 12/12, best 4.406 us (replayed), " in line.value
        assert bar.value == 1.0
        assert bar.layout.display == "none"  # nothing runs any more
        assert cell.shown == []

    def test_texts_of_widgets_are_escaped(self):
        pytest.importorskip("ipywidgets")
        display = module.NotebookDisplay()
        display._handle = object()  # it is shown
        display.notice("<script>")
        display.show("a < b", 1.5)
        assert [text.value for text in display._texts] == ["<span>&lt;script&gt;</span>", "<span>a &lt; b</span>"]
        assert display._bar.value == 1.0

    @pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(kernel=None)])
    def test_ipython_on_a_terminal_is_no_notebook(self, terminal, monkeypatch, shell):
        cell = Cell(monkeypatch, shell)
        with module.observing(True) as observe:
            observe(PROGRESS)
        assert cell.shown == []
        assert "searching" in terminal.getvalue()

    @pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file")])
    def test_a_terminal_that_is_gone_or_none_at_all_does_not_end_the_session(self, tune, terminal, monkeypatch, error):
        attempts = []

        def write(text: str) -> int:
            attempts.append(text)
            raise error

        monkeypatch.setattr(terminal, "write", write)
        assert tune().winner.config == {"THREADS": 256, "WORK": 4}
        assert len(attempts) == 1
        terminal.close()
        for stream in (terminal, None):
            monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stream, modules={}))
            assert default_display() is None


@pytest.mark.usefixtures("own_recordings")
def test_a_family_names_its_points(scale_toml, terminal):
    autotile.tune_family(scale_toml, n="1000..2000000", options=autotile.TuneOptions(replay="auto"))
    lines = terminal.screen
    assert [line for line in lines if "launches are replayed" in line] == lines[:1]
    assert lines[1].startswith("scale tuning point 1/1, n=1048576: finals 12/12, ")


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"path": (Place("round", 1, 1),)}, "12/200"),
        ({"phase": "measuring", "target": None, "gates": {}, "best": None}, "12 times"),
    ],
)
def test_the_line_ends_with_its_block_and_the_last_state(terminal, changes, shown, error):
    def show() -> None:
        with module.observing(True) as observe:
            for tried in range(3):
                observe(replace(PROGRESS, outcomes={Outcome.OK: 10 + tried}, **changes))
            assert terminal.getvalue()[-1] != "\n"
            if error is not None:
                raise error("it ends early")

    with nullcontext() if error is None else pytest.raises(error, match="it ends early"):
        show()
    assert terminal.getvalue()[-1] == "\n"
    assert shown in terminal.screen[1]


class TestLine:
    @pytest.fixture
    def line(self, terminal):
        return progress_line(default_display())

    @pytest.fixture
    def show(self, line):
        with line as show:
            yield show

    def test_it_waits_for_its_interval_and_shows_the_last_state_at_the_end(self, line, terminal, monkeypatch):
        now_s, counts = [10.0], []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        with line as show:
            for at_s, phase in [(0.0, "a"), (0.2, "a"), (0.26, "a"), (0.5, "a"), (0.52, "a"), (0.53, "b"), (0.54, "b")]:
                now_s[0] = 10.0 + at_s
                show(replace(PROGRESS, phase=phase))
                counts.append(terminal.getvalue().count("\rscale: "))
            assert counts == [1, 1, 2, 2, 3, 4, 4]
        assert terminal.getvalue().count("\rscale: ") == 5

    def test_it_says_at_once_what_a_session_waits_for(self, show, terminal):
        show(PROGRESS)
        show(replace(PROGRESS, waiting="the scheduler does not answer"))
        assert terminal.screen[1].startswith("scale: the scheduler does not answer; searching 50/200, ")
        show(PROGRESS)
        assert terminal.screen[1].startswith("scale: searching 50/200, ")

    def test_a_longer_line_leaves_nothing_behind(self, show, terminal):
        show(replace(PROGRESS, problem=replace(PROBLEM, kernel="a_long_head_of_the_line")))
        show(replace(PROGRESS, best=None, problem=replace(PROBLEM, kernel="x")))
        assert terminal.screen[1] == "x: searching 50/200, 3.00 s elapsed, 15.0 s left"

    def test_a_notice_is_shown_once_and_above_the_line(self, line, terminal):
        with line as show:
            show(replace(PROGRESS, notices=()))
            for _ in range(2):
                show(PROGRESS)
        assert (terminal.screen[0], terminal.getvalue().count("launches are replayed")) == ("launches are replayed", 1)

    @pytest.mark.parametrize("columns", [40, 200])
    def test_it_is_cut_to_the_width_of_the_terminal(self, show, terminal, monkeypatch, columns):
        monkeypatch.setattr(terminal, "fileno", lambda: 2)
        monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
        show(PROGRESS)
        shown = terminal.screen[1]
        assert len(shown) < columns
        assert shown.endswith("..." if columns == 40 else "BM=128")


def test_the_line_says_where_times_are_replayed():
    rate = Workrate(flops=None, bytes=2**31, dtype="float32")
    best = Trial({"BM": 128}, Outcome.OK, measurement=Measurement(4790, 4788, 4795), source="replayed")
    unknown = Workrate(flops=None, bytes=None, dtype="float32")
    assert short_line(replace(PROGRESS, best=best, rate=unknown)).endswith("left; BM=128")
    assert short_line(replace(PROGRESS, best=best, rate=rate)) == (
        "searching 50/200, best 4,790 us (replayed), 3.00 s elapsed, 15.0 s left; 448 GB/s (9.3 % of bandwidth), BM=128"
    )

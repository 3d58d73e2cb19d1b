"""The live page in a browser: it follows a replayed session to its end, and hostile names do nothing."""

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from browsing import OpenPage, script, served
from child_python import python
from report_studies import SCRIPT, Session, store_session
from stored_runs import change_file

from autotile.report.live import LiveServer


class Watching(OpenPage):
    def __init__(self, browser: Any, server: LiveServer) -> None:
        self.server = server
        super().__init__(browser, server.url, width=1500)

    def check(self, *own: str) -> None:
        super().check(self.server.url, "data:", "blob:", *own)


@pytest.fixture
def watch(browser):
    with ExitStack() as servers:
        yield lambda *databases: Watching(browser, servers.enter_context(served(*databases)))
        browser.get("about:blank")


def test_a_replayed_session_to_its_end_and_that_of_the_server(watch, tmp_path, scale_toml, recording):
    path = tmp_path / "live.db"
    page = watch(path)
    page.wait(lambda: "holds nothing yet" in page.text("#messages"), "no message")
    assert page.text("#connection") == "nothing is running"
    done = python("-m", "autotile", "tune", scale_toml, "n=1048576", f"--replay={recording}", "--db", path)
    assert done.returncode == 0, done.stderr
    page.wait(lambda: page.text(".session .state").startswith("ended after"), "not ended")
    page.wait(lambda: "winner" in page.text(".session dl"), "no winner")
    for name in ("best_over_trials", "finals"):
        assert page.draw(f"figure[data-chart={name}] .plot") == 1
        chart = f"document.querySelector('figure[data-chart={name}] .main-svg')"
        assert page.run(f"return {chart}.getBoundingClientRect().width") > 100
    assert page.text(".session h2") == "scale n=1048576 float32"
    assert page.count(".latest tbody tr") > 3
    assert page.text("#messages") == ""
    page.check()
    page.server._server.should_exit = True
    page.wait(lambda: "cannot be reached" in page.text("#connection"), "no message")
    assert page.count(".session figure") > 0


def test_a_session_with_its_progress_beside_one_of_hostile_names_and_one_of_one_trial(watch, tmp_path):
    running, hostile, silent = (tmp_path / f"{name}.db" for name in "abc")
    start = datetime.now(UTC) - timedelta(seconds=30)
    store_session(running, Session(trials=50, ended=False, finals=False))
    settings = '{"trial_target": 200, "objectives": ["time"]}'
    change_file(running, f"UPDATE runs SET settings = '{settings}', started_at = '{start.isoformat()}'")
    for number in range(50):
        moment = (start + timedelta(seconds=0.5 * number)).isoformat(timespec="microseconds")
        change_file(running, f"UPDATE trials SET created_at = '{moment}' WHERE id = {number + 1}")
    store_session(hostile, Session(trials=60, hostile=True))
    store_session(silent, Session(trials=1, ended=False, finals=False))
    page, own = watch(running, hostile, silent), ".session[data-state=running]"
    page.wait(lambda: "of 200 configurations tried" in page.text(f"{own} .progress"), "no progress")
    assert "50 of 200 configurations tried, about 1 min 1" in page.text(f"{own} .progress")
    assert page.run(f"return document.querySelector('{own} progress').value") == 0.25
    (listed,) = page.run(
        "return [...document.querySelectorAll('#sessions tr')].filter(r => r.cells[5]?.textContent === 'running')"
        ".map(r => r.cells[8].textContent)"
    )
    assert listed.startswith("about 1 min 1")

    states = "return [...document.querySelectorAll('.session')].map(s => s.dataset.state).sort().join()"
    page.wait(lambda: page.run(states) == "ended,running,silent", "not shown")
    page.wait(lambda: page.draw(".session[data-state=ended] .plot") > 6, "not drawn")
    state = page.text(".session[data-state=silent] .state")
    assert "no trial for" in state
    assert state.endswith("; 1 trial")
    assert SCRIPT in page.text(".session[data-state=ended] h2")
    assert page.count("img") == page.count("body script") == page.count("i") == 0

    name = page.run(f"return document.querySelector('{own}').id")
    change_file(running, f"UPDATE runs SET ended_at = '{datetime.now(UTC).isoformat()}'")
    page.wait(lambda: page.text(f"#{name} .state").startswith("ended"), "not ended")
    hidden = f"return document.querySelector('#{name} .progress').hidden"
    page.wait(lambda: page.run(hidden), "the progress is still shown")
    page.check()


PARALLEL = '.session figure[data-chart="parallel"]'


def test_all_parameters_are_drawn_without_webgl_and_a_phone_need_not_scroll_sideways(watch, tmp_path):
    """With the canvas of the report, whose selected ranges stay when trials are added."""
    path = tmp_path / "a.db"
    store_session(path, Session(trials=60, ended=False, finals=False))
    page = watch(path)
    page.wait(lambda: page.count(f"{PARALLEL} .plot") == 1, "no figure")
    page.draw(f"{PARALLEL} .plot")
    assert page.run(script("colours"), f"{PARALLEL} canvas") > 10  # of the lines
    assert "WebGL" not in page.text("body")
    assert page.count(f"{PARALLEL} .main-svg") == 0
    value = page.run(script("choose"), f"{PARALLEL} select")
    assert "lines are selected" in page.text(f"{PARALLEL} .note")
    before = page.text(f"{PARALLEL} figcaption")
    store_session(path, Session(trials=90, seed=1, ended=False, finals=False))
    page.wait(lambda: page.text(f"{PARALLEL} figcaption") != before, "not updated")
    page.wait(lambda: "lines are selected" in page.text(f"{PARALLEL} .note"), "the selection is lost")
    kept = f"return document.querySelectorAll('{PARALLEL} select')[0].selectedOptions[0].textContent"
    assert page.run(kept) == value
    page.check()
    page.resize(390)
    page.browser.refresh()
    page.wait(lambda: page.count(f"{PARALLEL} .plot") == 1 and page.draw() > 6, "not drawn")
    assert page.does_not_scroll_sideways()
    page.wait(lambda: not page.run(script("overlapping")), "the titles of the panels overlap")

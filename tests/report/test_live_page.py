"""The live page in a browser: it follows a replayed session to its end, and hostile names do nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from child_python import python
from report_studies import SCRIPT, Session, store_session
from stored_runs import change_file

from autotile.report.live import LiveServer

LIMIT_S = 120.0


class Watching:
    """A server in a thread, and the browser on its page."""

    def __init__(self, browser: Any, *databases: Path) -> None:
        self.browser = browser
        self.server = LiveServer(databases)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        metrics = {"width": 1500, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get_log("browser")
        browser.get(self.server.url)

    def text(self, selector: str) -> str:
        found = self.browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(found)

    def count(self, selector: str) -> int:
        return int(self.browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.text('body')[:2000]}"
            time.sleep(0.2)

    def drawn(self) -> set[str]:
        """Names of the charts that are drawn, after each has been brought into view."""
        script = """
            const done = arguments[0], figures = [...document.querySelectorAll('figure')];
            const isDrawn = (one) => one.querySelector('.main-svg')?.getBoundingClientRect().width > 100;
            (async () => {
                for (const one of figures.filter((each) => !isDrawn(each))) {
                    one.scrollIntoView();
                    await new Promise((resolve) => setTimeout(resolve, 100));
                }
                done(figures.filter(isDrawn).map((one) => one.dataset.chart));
            })();
        """
        return set(self.browser.execute_async_script(script))

    def check(self) -> None:
        """No error in the console, and no request to anywhere else."""
        severe = [one["message"] for one in self.browser.get_log("browser") if one["level"] == "SEVERE"]
        assert severe == []
        requests = "return performance.getEntriesByType('resource').map((one) => one.name)"
        for url in self.browser.execute_script(requests):
            assert url.startswith((self.server.url, "data:", "blob:")), url

    def end(self) -> None:
        self.server._server.should_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[..., Watching]]:
    opened: list[Watching] = []

    def start(*databases: Path) -> Watching:
        opened.append(Watching(browser, *databases))
        return opened[-1]

    yield start
    browser.get("about:blank")
    for one in opened:
        one.end()


def test_a_replayed_session_to_its_end_and_that_of_the_server(
    watch: Any, tmp_path: Path, scale_toml: Path, recording: Path
) -> None:
    path = tmp_path / "live.db"
    page = watch(path)
    page.wait(lambda: "holds nothing yet" in page.text("#messages"), "no message")
    assert page.text("#connection") == "nothing is running"
    done = python("-m", "autotile", "tune", scale_toml, "n=1048576", f"--replay={recording}", "--db", path)
    assert done.returncode == 0, done.stderr
    page.wait(lambda: page.text(".session .state").startswith("ended after"), "not ended")
    page.wait(lambda: "winner" in page.text(".session dl"), "no winner")
    page.wait(lambda: {"best_over_trials", "finals"} <= page.drawn(), "not drawn")
    assert page.text(".session h2") == "scale n=1048576 float32"
    assert page.count(".latest tbody tr") > 3
    assert page.text("#messages") == ""
    page.check()
    page.server._server.should_exit = True
    page.wait(lambda: "cannot be reached" in page.text("#connection"), "no message")
    assert page.count(".session figure") > 0


def test_two_sessions_one_of_hostile_names_one_of_one_trial(watch: Any, tmp_path: Path) -> None:
    running, hostile = tmp_path / "a.db", tmp_path / "b.db"
    store_session(running, Session(trials=1, ended=False, finals=False))
    store_session(hostile, Session(trials=60, hostile=True))
    page = watch(running, hostile)
    page.wait(lambda: page.count(".session") == 2 and len(page.drawn()) > 6, "not drawn")
    states = page.browser.execute_script("return [...document.querySelectorAll('.session')].map(s => s.dataset.state)")
    assert sorted(states) == ["ended", "silent"]
    state = page.text(".session[data-state=silent] .state")
    assert "no trial for" in state
    assert state.endswith("; 1 trial")
    assert SCRIPT in page.text(".session[data-state=ended] h2")
    assert page.count("img") == page.count("body script") == page.count("i") == 0
    page.check()


PARALLEL = '.session figure[data-chart="parallel"]'


def test_all_parameters_are_drawn_without_webgl_and_a_phone_need_not_scroll_sideways(
    watch: Any, tmp_path: Path
) -> None:
    """With the canvas of the report, whose selected ranges stay when trials are added."""
    path = tmp_path / "a.db"
    store_session(path, Session(trials=60, ended=False, finals=False))
    page = watch(path)
    page.wait(lambda: page.count(f"{PARALLEL} .plot") == 1, "no figure")
    page.browser.execute_script(f"document.querySelector('{PARALLEL}').scrollIntoView()")
    page.wait(lambda: page.count(f"{PARALLEL} canvas") == 1, "not drawn")
    script = f"""
        const canvas = document.querySelector('{PARALLEL} canvas'), pen = canvas.getContext('2d');
        return new Set(new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
    """
    assert page.browser.execute_script(script) > 10  # lines of many colours
    assert "WebGL" not in page.text("body")
    assert page.count(f"{PARALLEL} .main-svg") == 0
    chosen = f"""
        const select = document.querySelectorAll('{PARALLEL} select')[0];
        select.selectedIndex = 1;
        select.dispatchEvent(new Event('change'));
        return select.selectedOptions[0].textContent;
    """
    value = page.browser.execute_script(chosen)
    assert "lines are selected" in page.text(f"{PARALLEL} .note")
    before = page.text(f"{PARALLEL} figcaption")
    store_session(path, Session(trials=90, seed=1, ended=False, finals=False))
    page.wait(lambda: page.text(f"{PARALLEL} figcaption") != before, "not updated")
    page.wait(lambda: "lines are selected" in page.text(f"{PARALLEL} .note"), "the selection is lost")
    kept = f"return document.querySelectorAll('{PARALLEL} select')[0].selectedOptions[0].textContent"
    assert page.browser.execute_script(kept) == value
    page.check()
    metrics = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.browser.refresh()
    page.wait(lambda: page.count(f"{PARALLEL} .plot") == 1 and len(page.drawn()) > 6, "not drawn")
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= 390
    overlapping = """
        const found = [...document.querySelectorAll('figure[data-chart="limits"] .annotation')].map(
            (one) => one.getBoundingClientRect());
        return found.length < 3 || found.some((one, place) => found.slice(place + 1).some(
            (other) => Math.abs(one.top - other.top) < 5 && one.left < other.right && other.left < one.right));
    """
    page.wait(lambda: not page.browser.execute_script(overlapping), "the titles of the panels overlap")


def test_progress_and_the_time_left(watch: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    start = datetime.now(UTC) - timedelta(seconds=30)
    store_session(path, Session(trials=50, ended=False, finals=False))
    settings = '{"trial_target": 200, "objectives": ["time"]}'
    change_file(path, f"UPDATE runs SET settings = '{settings}', started_at = '{start.isoformat()}'")
    for number in range(50):
        moment = (start + timedelta(seconds=0.5 * number)).isoformat(timespec="microseconds")
        change_file(path, f"UPDATE trials SET created_at = '{moment}' WHERE id = {number + 1}")
    page = watch(path)
    page.wait(lambda: "of 200 configurations tried" in page.text(".session .progress"), "no progress")
    assert "50 of 200 configurations tried, about 1 min 1" in page.text(".session .progress")
    assert page.browser.execute_script("return document.querySelector('.session progress').value") == 0.25
    assert page.text("#sessions tr td:nth-child(9)").startswith("about 1 min 1")
    change_file(path, f"UPDATE runs SET ended_at = '{datetime.now(UTC).isoformat()}'")
    page.wait(lambda: page.text(".session .state").startswith("ended"), "not ended")
    hidden = "return document.querySelector('.session .progress').hidden"
    page.wait(lambda: page.browser.execute_script(hidden), "the progress is still shown")
    page.check()

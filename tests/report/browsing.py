"""A page in the browser, as the tests of the report, of a survey and of the live page drive it, and a live server."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_until

from autotile.report.live import LiveServer


def script(name: str) -> str:
    return Path(__file__).with_name("scripts").joinpath(f"{name}.js").read_text()


class OpenPage:
    """A page that was opened at a width, in one of the themes."""

    def __init__(self, browser: Any, url: str, *, width: int = 1280, dark: bool = False) -> None:
        self.browser, self.url = browser, url
        self.run = browser.execute_script
        self.wait_for = browser.execute_async_script
        self.resize(width)
        self.media("screen", dark=dark)
        browser.get_log("browser")  # of other pages
        browser.get(url)

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def media(self, kind: str, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": [scheme]})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, lambda: f"{what}: {self.text('body')[:2000]}")

    def draw(self, selector: str = ".plot") -> int:
        """Bring charts into view until they are drawn, and return their number."""
        return int(self.wait_for(script("draw"), selector))

    def does_not_scroll_sideways(self) -> bool:
        return int(self.run("return document.documentElement.scrollWidth")) <= 390

    def check(self, *own: str) -> None:
        """No complaint in the console, and no request but for addresses that begin as some of the page's own."""
        complaints = [
            one["message"] for one in self.browser.get_log("browser") if one["level"] in ("SEVERE", "WARNING")
        ]
        assert complaints == []
        requests = self.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert [url for url in requests if not url.startswith(own)] == []


@contextmanager
def served(*databases: Path) -> Iterator[LiveServer]:
    server = LiveServer(databases)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    wait_until(lambda: server._server is not None and server._server.started)
    server._server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()

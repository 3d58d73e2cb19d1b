"""Size of a report, time to write it, and time to open it in Chromium, at 200, 2,000 and 20,000 trials.

    python benchmarks/report.py [--json benchmarks/results/report.json]
    python benchmarks/report.py --images docs/images

The second command photographs the sections of a page for the documentation.

Opening is measured from the start of the navigation to the end of the page's scripts, when text, tables and the charts
in view are there; the time on the CPU of the page's main thread is stated beside it, as other programs lengthen the
former.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).parents[1] / "tests")

from report_studies import Session, store_session  # noqa: E402

import autotile  # noqa: E402

TRIALS = (200, 2_000, 20_000)
OPENINGS = 5
LIMIT_S, LIMIT_BYTES = 3.0, 15_000_000


def started_browser() -> Any:
    """Return headless Chromium; None where it is not installed."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        return None
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    return browser


def opening(browser: Any, page: Path) -> tuple[float, float]:
    """Return the seconds until the page is there, and those of its main thread on the CPU."""
    browser.get("about:blank")
    browser.get(page.as_uri())
    wall_ms = browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return wall_ms / 1e3, next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def measure(folder: Path, trials: int, browser: Any) -> dict[str, Any]:
    """Write and open the report of a study."""
    database, page = folder / f"{trials}.db", folder / f"{trials}.html"
    store_session(database, Session(trials=trials))
    start, start_cpu = time.perf_counter(), time.process_time()
    written = autotile.report(database=database, output=page)
    found: dict[str, Any] = {
        "trials": trials,
        "size_bytes": written.document["size_bytes"],
        "write_s": round(time.perf_counter() - start, 2),
        "write_cpu_s": round(time.process_time() - start_cpu, 2),
    }
    if browser is not None:
        times = [opening(browser, page) for _ in range(OPENINGS)]
        found["open_s"] = round(median(wall for wall, _ in times), 2)
        found["open_cpu_s"] = round(median(cpu for _, cpu in times), 2)
    return found


VIEWS = ("answer", "finals", "limits", "progress", "parameters", "gates", "trials", "session")
DARK_VIEWS = ("progress",)
MAX_HEIGHT = 1100
DRAW = """
const done = arguments[1], places = [...document.querySelectorAll(`#${arguments[0]} .plot`)];
const step = () => {
  const next = places.find((place) => !place.dataset.drawn);
  if (!next) { document.getElementById(arguments[0]).scrollIntoView(); setTimeout(done, 300); return; }
  next.scrollIntoView();
  setTimeout(step, 50);
};
step();
"""
BOX = (
    "const box = document.getElementById(arguments[0]).getBoundingClientRect(); return [box.top + scrollY, box.height]"
)


def photograph(browser: Any, folder: Path) -> None:
    """Write an image of each section of a report, one of them in the dark theme and one as a phone shows it."""
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "report.html"
        store_session(Path(temporary) / "a.db", Session())
        autotile.report(database=Path(temporary) / "a.db", output=page)
        views = [(name, name, 1120, "dark" if name in DARK_VIEWS else "light") for name in VIEWS]
        for name, section, width, theme in [*views, ("phone", "answer", 390, "light")]:
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            browser.get(page.as_uri())
            browser.execute_async_script(DRAW, section)
            top, height = browser.execute_script(BOX, section)
            clip = {"x": 0, "y": top, "width": width, "height": min(height, MAX_HEIGHT), "scale": 1}
            image = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
            (folder / f"report-{name}.png").write_bytes(base64.b64decode(image["data"]))


def main() -> None:
    """Print the table, and write the record or the images where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--images", type=Path)
    arguments = parser.parse_args()
    path, browser = arguments.json, started_browser()
    if browser is not None:
        browser.set_script_timeout(300)
    if arguments.images is not None:
        photograph(browser, arguments.images)
        browser.quit()
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder), trials, browser) for trials in TRIALS]
    load = os.getloadavg()[0]
    print(f"{'trials':>8} {'size, MB':>9} {'write, s':>9} {'on CPU':>7} {'open, s':>8} {'on CPU':>7}")
    for row in rows:
        figures = (
            row["size_bytes"] / 1e6,
            row["write_s"],
            row["write_cpu_s"],
            row.get("open_s"),
            row.get("open_cpu_s"),
        )
        shown = ["-" if value is None else f"{value:.2f}" for value in figures]
        print(f"{row['trials']:>8,} {shown[0]:>9} {shown[1]:>9} {shown[2]:>7} {shown[3]:>8} {shown[4]:>7}")
    print(f"load {load:.1f} on {os.cpu_count()} cores; limits: {LIMIT_S:g} s to open, {LIMIT_BYTES / 1e6:g} MB")
    if browser is not None:
        version = browser.capabilities["browserVersion"]
        browser.quit()
        if path is not None:
            machine = {"cores": os.cpu_count(), "load": round(load, 1), "system": platform.platform()}
            made = {"command": "python benchmarks/report.py", "date": time.strftime("%Y-%m-%d")}
            record = {**made, "chromium": version, "machine": machine, "rows": rows}
            path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

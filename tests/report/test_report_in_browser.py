"""The page in a browser: every chart drawn, tables, brushing, themes, a phone, print; hostile names do no harm."""

import csv
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_studies import SCRIPT, read_one

from autotile.report.page import write_page
from autotile.report.report_data import report_of_study
from autotile.report.sections import report_page
from autotile.report.theme import DARK, LIGHT

DRAW = """
const [selector, done] = arguments, places = [...document.querySelectorAll(selector)];
let next = 0;
const step = () => {
  while (next < places.length && places[next].dataset.drawn) next += 1;
  if (next === places.length) { done(places.length); return; }
  places[next].scrollIntoView();
  setTimeout(step, 50);
};
step();
"""

TOUCHING = """
return [...document.querySelectorAll('.plot')].filter(plot => {
  const buttons = plot.querySelector('.modebar')?.getBoundingClientRect();
  return buttons && [...plot.querySelectorAll('.legend .traces')].some(one => {
    const place = one.getBoundingClientRect();
    return place.right > buttons.left && place.bottom > buttons.top && place.top < buttons.bottom;
  });
}).map(plot => plot.id)
"""
"""Charts whose buttons touch their legends."""


@pytest.fixture(scope="module")
def pages(database: Path, hostile_database: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, path in (("plain", database), ("hostile", hostile_database)):
        write_page(report_page(report_of_study(read_one(path))), folder / f"{name}.html")
        found[name] = (folder / f"{name}.html").as_uri()
    return found


def opened(browser: Any, address: str, *, width: int = 1120, dark: bool = False) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": [scheme]})
    browser.get_log("browser")
    browser.get(address)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def draw(browser: Any, selector: str = ".plot") -> int:
    """Bring charts into view until they are drawn, and return their number."""
    return browser.execute_async_script(DRAW, selector)


def rows(browser: Any) -> list[list[str]]:
    return browser.execute_script(
        "return [...document.querySelectorAll('#trials tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )


def count(browser: Any) -> str:
    return browser.execute_script("return document.querySelector('#trials .count').textContent")


def filtered(browser: Any, text: str) -> None:
    browser.execute_script(
        "const f = document.querySelector('#trials input'); f.value = arguments[0];"
        "f.dispatchEvent(new Event('input', { bubbles: true }))",
        text,
    )


def exported(browser: Any) -> list[list[str]]:
    """Rows of the file that the table of trials is saved to."""
    browser.execute_script(
        "window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { window.saved.push(blob.text()); return make.call(URL, blob) };"
        "document.querySelector('#trials .export').click()"
    )
    text = browser.execute_async_script("const done = arguments[0]; window.saved[0].then(done)")
    return list(csv.reader(io.StringIO(text)))


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_every_chart_is_drawn_without_a_complaint_or_a_request(browser: Any, pages: dict[str, str], name: str) -> None:
    opened(browser, pages[name], width=1280)
    browser.execute_script("window.alert = () => { window.alerted = true }")
    assert draw(browser) >= 15
    marks = (
        "return [...document.querySelectorAll('.plot')].filter(p => !p.querySelector('.trace, .hm, .lines, canvas'))"
    )
    assert browser.execute_script(marks + ".map(p => p.id)") == []
    assert browser.execute_script("return document.querySelectorAll('.modebar').length") > 0
    assert browser.execute_script(TOUCHING) == []
    assert complaints(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert not browser.execute_script("return window.alerted")
    assert browser.execute_script("return document.querySelectorAll('main img, main i').length") == 0
    if name == "hostile":
        assert SCRIPT in browser.execute_script("return document.querySelector('h1').textContent")
        cells = [cell for row in exported(browser) for cell in row]
        assert {"'=1+1", 'a"b'} <= set(cells)
        assert not any(cell.startswith("=") for cell in cells), "a formula"


def test_the_table_sorts_filters_and_is_exported(browser: Any, pages: dict[str, str]) -> None:
    opened(browser, pages["plain"])
    assert count(browser) == "1\N{EN DASH}50 of 120 rows"
    heading = "document.querySelectorAll('#trials th button')[2]"
    from selenium.webdriver.common.keys import Keys

    button = browser.execute_script(f"{heading}.scrollIntoView(); return {heading}")
    button.send_keys(Keys.ENTER)  # as the keyboard does
    times = [float(row[2].replace(",", "")) for row in rows(browser) if row[2]]
    assert times == sorted(times)
    button.send_keys(Keys.ENTER)
    times = [float(row[2].replace(",", "")) for row in rows(browser) if row[2]]
    assert times == sorted(times, reverse=True)
    assert browser.execute_script(f"return {heading}.parentElement.getAttribute('aria-sort')") == "descending"
    filtered(browser, "outcome=ok BM=64")
    assert {(row[1], row[9]) for row in rows(browser)} == {("ok", "64")}
    table = exported(browser)
    assert table[0][:3] == ["trial", "outcome", "time (µs)"]
    assert len(table) - 1 == int(count(browser).split(" of ")[1].split()[0])
    filtered(browser, "no such word")
    assert rows(browser) == []
    assert count(browser).startswith("0 rows")


def test_brushing_selects_lines_and_rows(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import ActionChains

    opened(browser, pages["plain"])
    draw(browser, "#parallel-chart")
    browser.execute_script("document.getElementById('parallel-chart').scrollIntoView({ block: 'center' })")
    canvas = browser.find_element("css selector", "#parallel-chart canvas")
    left, bottom = -canvas.size["width"] // 2 + 46, canvas.size["height"] // 2 - 22
    drag = ActionChains(browser).move_to_element_with_offset(canvas, left, bottom + 6).click_and_hold()
    drag.move_to_element_with_offset(canvas, left, bottom - 40).release().perform()
    assert "lines are selected" in browser.execute_script(
        "return document.querySelector('#parallel-chart .note').textContent"
    )
    assert {row[9] for row in rows(browser)} == {"32"}  # the lowest value of the first parameter
    browser.execute_script("document.querySelector('#parallel-chart .brushes button').click()")
    assert "120 rows" in count(browser)
    browser.execute_script(
        "const s = document.querySelectorAll('#parallel-chart select')[1]; s.selectedIndex = 1;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert {row[10] for row in rows(browser)} == {"32"}


def test_both_themes_the_switch_and_print(browser: Any, pages: dict[str, str]) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    ground = "return document.querySelector('#finals .bglayer, #finals .main-svg').closest('svg').style.background"
    opened(browser, pages["plain"], dark=True)
    assert browser.execute_script(paper) == rgb(DARK["paper"])
    draw(browser, "#finals .plot")
    assert rgb(DARK["paper"]) in browser.execute_script(ground)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    left = browser.execute_async_script(
        "const done = arguments[0], all = [...document.querySelectorAll('.plot')];"
        "const step = () => all.every(p => p.dataset.drawn) ? done(0) : setTimeout(step, 100); step()"
    )
    assert left == 0
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.execute_script(paper) == "rgb(255, 255, 255)"
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": [scheme]})
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script(paper) == rgb(LIGHT["paper"])
    assert rgb(LIGHT["paper"]) in browser.execute_script(ground)


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def contrast(one: str, other: str) -> float:
    """Contrast of two colours: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast() -> None:
    for theme in (LIGHT, DARK):
        assert min(contrast(theme[role], theme["paper"]) for role in ("ink", "muted", "accent")) >= 4.5


ELEMENTS = """
const all = (selector) => [...document.querySelectorAll(selector)];
return {
  language: document.documentElement.lang,
  unnamed: all('.plot').filter(p => !document.getElementById(p.getAttribute('aria-labelledby'))).length,
  withoutNumbers: all('figure.chart').filter(f => !f.querySelector('details table'))
    .map(f => f.querySelector('h3').textContent),
  levels: all('h1, h2, h3').map(h => Number(h.tagName[1])),
  unlabelled: all('input, select, button').filter(e => !e.labels?.length && !e.ariaLabel && !e.textContent).length,
};
"""


def test_a_phone_shows_it_without_scrolling_sideways_and_a_screen_reader_finds_its_way(
    browser: Any, pages: dict[str, str]
) -> None:
    opened(browser, pages["plain"], width=390)
    draw(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    found = browser.execute_script(ELEMENTS)
    assert found["language"] == "en"
    assert found["unnamed"] == found["unlabelled"] == 0
    assert found["withoutNumbers"] == ["All parameters at once"]  # whose table is that of all trials
    assert found["levels"][0] == 1
    assert all(after - before <= 1 for before, after in pairwise(found["levels"]))

"""The page in a browser: every chart drawn, tables, brushing, themes, a phone, print; hostile names do no harm."""

import csv
import io
import re
from itertools import pairwise

import pytest
from browsing import OpenPage, script
from report_studies import SCRIPT, read_one

from autotile.report.page import write_page
from autotile.report.report_data import report_of_study
from autotile.report.sections import report_page
from autotile.report.theme import DARK, LIGHT


@pytest.fixture(scope="module")
def pages(database, hostile_database, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, path in (("plain", database), ("hostile", hostile_database)):
        write_page(report_page(report_of_study(read_one(path))), folder / f"{name}.html")
        found[name] = (folder / f"{name}.html").as_uri()
    return found


@pytest.fixture
def opened(browser, pages):
    return lambda name="plain", **how: OpenPage(browser, pages[name], **how)


def rows(page: OpenPage) -> list[list[str]]:
    return page.run(
        "return [...document.querySelectorAll('#trials tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )


def filtered(page: OpenPage, text: str) -> None:
    page.run(
        "const f = document.querySelector('#trials input'); f.value = arguments[0];"
        "f.dispatchEvent(new Event('input', { bubbles: true }))",
        text,
    )


def exported(page: OpenPage) -> list[list[str]]:
    """Rows of the file that the table of trials is saved to."""
    page.run(
        "window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { window.saved.push(blob.text()); return make.call(URL, blob) };"
        "document.querySelector('#trials .export').click()"
    )
    text = page.wait_for("const done = arguments[0]; window.saved[0].then(done)")
    return list(csv.reader(io.StringIO(text)))


def is_drawn_in_peace(page: OpenPage) -> None:
    """Assert that every chart is drawn, without a complaint or a request, and that none hides another's buttons."""
    assert page.draw() >= 15
    empty = "[...document.querySelectorAll('.plot')].filter(p => !p.querySelector('.trace, .hm, .lines, canvas'))"
    assert page.run(f"return {empty}.map(p => p.id)") == []
    assert page.count(".modebar") > 0
    assert page.run(script("touching")) == []
    page.check()


def test_hostile_names_do_no_harm(opened):
    page = opened("hostile")
    page.run("window.alert = () => { window.alerted = true }")
    is_drawn_in_peace(page)
    assert not page.run("return window.alerted")
    assert page.count("main img, main i") == 0
    assert SCRIPT in page.text("h1")
    cells = [cell for row in exported(page) for cell in row]
    assert {"'=1+1", 'a"b'} <= set(cells)
    assert not any(cell.startswith("=") for cell in cells), "a formula"


def test_the_table_sorts_filters_and_is_exported(opened):
    from selenium.webdriver.common.keys import Keys

    page, heading, count = opened(), "document.querySelectorAll('#trials th button')[2]", "#trials .count"
    assert page.text(count) == "1\N{EN DASH}50 of 120 rows"
    button = page.run(f"{heading}.scrollIntoView(); return {heading}")
    for is_descending in (False, True):
        button.send_keys(Keys.ENTER)  # as the keyboard does
        times = [float(row[2].replace(",", "")) for row in rows(page) if row[2]]
        assert times == sorted(times, reverse=is_descending)
        digits = {len(re.sub(r"\D", "", text.lstrip("0."))) for row in rows(page) for text in row[2:5] if text}
        assert digits == {6}, "zeros at the end are left out"
    assert page.run(f"return {heading}.parentElement.getAttribute('aria-sort')") == "descending"
    filtered(page, "outcome=ok BM=64")
    assert {(row[1], row[9]) for row in rows(page)} == {("ok", "64")}
    table = exported(page)
    assert table[0][:3] == ["trial", "outcome", "time (µs)"]
    assert len(table) - 1 == int(page.text(count).split(" of ")[1].split()[0])
    filtered(page, "no such word")
    assert rows(page) == []
    assert page.text(count).startswith("0 rows")


def test_every_chart_is_drawn_and_brushing_selects_lines_and_rows(browser, opened):
    from selenium.webdriver import ActionChains

    page = opened()
    is_drawn_in_peace(page)
    page.run("document.getElementById('parallel-chart').scrollIntoView({ block: 'center' })")
    canvas = page.browser.find_element("css selector", "#parallel-chart canvas")
    left, bottom = -canvas.size["width"] // 2 + 46, canvas.size["height"] // 2 - 22
    drag = ActionChains(page.browser).move_to_element_with_offset(canvas, left, bottom + 6).click_and_hold()
    drag.move_to_element_with_offset(canvas, left, bottom - 40).release().perform()
    assert "lines are selected" in page.text("#parallel-chart .note")
    assert {row[9] for row in rows(page)} == {"32"}  # the lowest value of the first parameter
    page.run("document.querySelector('#parallel-chart .brushes button').click()")
    assert "120 rows" in page.text("#trials .count")
    page.run(
        "const s = document.querySelectorAll('#parallel-chart select')[1]; s.selectedIndex = 1;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert {row[10] for row in rows(page)} == {"32"}


def test_both_themes_the_switch_and_print(opened):
    paper = "return getComputedStyle(document.body).backgroundColor"
    ground = "return document.querySelector('#finals .bglayer, #finals .main-svg').closest('svg').style.background"
    page = opened(dark=True)
    assert page.run(paper) == rgb(DARK["paper"])
    page.draw("#finals .plot")
    assert rgb(DARK["paper"]) in page.run(ground)
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    left = page.wait_for(
        "const done = arguments[0], all = [...document.querySelectorAll('.plot')];"
        "const step = () => all.every(p => p.dataset.drawn) ? done(0) : setTimeout(step, 100); step()"
    )
    assert left == 0
    page.media("print")
    assert page.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.run(paper) == "rgb(255, 255, 255)"
    page.media("screen", dark=True)
    page.run("window.dispatchEvent(new Event('afterprint'))")
    page.run("document.getElementById('theme').click()")
    assert page.run(paper) == rgb(LIGHT["paper"])
    page.wait(lambda: rgb(LIGHT["paper"]) in page.run(ground), "the chart is dark")


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


def test_text_has_contrast():
    for theme in (LIGHT, DARK):
        assert min(contrast(theme[role], theme["paper"]) for role in ("ink", "muted", "accent")) >= 4.5


def test_a_phone_shows_it_without_scrolling_sideways_and_a_screen_reader_finds_its_way(opened):
    page = opened(width=390)
    page.draw()
    assert page.does_not_scroll_sideways()
    found = page.run(script("elements"))
    assert found["language"] == "en"
    assert found["unnamed"] == found["unlabelled"] == 0
    assert found["withoutNumbers"] == ["All parameters at once"]  # whose table is that of all trials
    assert found["levels"][0] == 1
    assert all(after - before <= 1 for before, after in pairwise(found["levels"]))

"""Page of a survey: charts, tables, failures with the compiler's words, hostile names, the browser's console."""

import html
import json
import re
from pathlib import Path

import pytest

from autotile.api.inspection import survey
from autotile.report.survey import Survey, blocks_chart, limits_chart, parameter_table, registers_chart


@pytest.fixture
def failing_toml(scale_toml: Path) -> Path:
    """A kernel of which blocks of 64 threads do not compile, with hostile words of the compiler."""
    template = scale_toml.with_suffix(".cu")
    template.write_text(
        template.read_text() + '\n#if THREADS == 64\n#error "</script><script>alert(1)</script>"\n#endif\n'
    )
    return scale_toml


@pytest.fixture
def found(failing_toml: Path) -> Survey:
    return survey(failing_toml, device="h200", n=4096)


class TestPage:
    def test_it_has_every_section_and_every_configuration(self, found):
        text = found.page()
        assert "<script>alert(1)" not in text
        assert "alert(1)" in html.unescape(text)
        for anchor in ("summary", "occupancy", "parameters", "failures", "configurations"):
            assert f'id="{anchor}"' in text
        (data,) = re.findall(r'<script type="application/json" id="data-tables">(.*?)</script>', text, re.DOTALL)
        tables = json.loads(data)
        assert len(tables["survey-table"]["rows"]) == 12
        headings = [name for name, _, _ in tables["survey-table"]["columns"]]
        assert {"THREADS", "WORK", "outcome", "registers_per_thread", "waves"} < set(headings)

    def test_nothing_that_compiles_is_a_page_too(self, scale_toml):
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text() + "\n#error nothing compiles\n")
        text = survey(scale_toml, device="h200", n=4096).page()
        assert "nothing compiles" in text
        assert 'id="occupancy"' not in text


class TestCharts:
    def test_numbers_behind_the_charts_add_up(self, found):
        for chart in (registers_chart(found), blocks_chart(found)):
            assert sum(int(row[-1]) for row in chart.table.rows) == 9
        assert dict(limits_chart(found).table.rows) == {
            name.replace("_", " "): f"{count:,}" for name, count in found.limit_counts()
        }

    def test_resources_by_parameter(self, found):
        rows = {(row[0], row[1]): row[2:] for row in parameter_table(found).rows}
        assert set(rows) == {("THREADS", t) for t in ("32", "64", "128", "256")} | {("WORK", w) for w in "124"}
        configurations, usable, registers, *_ = rows["THREADS", "64"]
        assert (configurations, usable, registers) == (3, 0.0, None)
        assert rows["THREADS", "128"][:2] == [3, 100.0]


class TestInABrowser:
    def test_it_is_drawn_without_an_error(self, browser, found, tmp_path):
        path = tmp_path / "survey.html"
        path.write_text(found.page())
        browser.get(path.as_uri())
        for name in ("registers", "blocks", "limits", "failures"):
            plot = browser.find_element("id", f"{name}-chart")
            browser.execute_script("arguments[0].scrollIntoView()", plot)
            drawn = "return arguments[0].querySelectorAll('.main-svg').length"
            browser.execute_async_script(
                "const [plot, done] = arguments; const wait = () => plot.querySelector('.main-svg') ? done() : "
                "setTimeout(wait, 50); wait();",
                plot,
            )
            assert browser.execute_script(drawn, plot) > 0
        assert len(browser.find_elements("css selector", "#survey-table tbody tr")) == 12
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

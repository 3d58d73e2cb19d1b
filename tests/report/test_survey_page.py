"""Page of a survey: charts, tables, failures with the compiler's words, hostile names, the browser's console."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Page

from autotile.api.inspection import survey
from autotile.report.survey import Survey, blocks_chart, limits_chart, parameter_table, registers_chart

HOSTILE = '#if THREADS == 64\n#error "</script><script>alert(1)</script>"\n#endif'


def surveyed(search_space: Path, code: str) -> Survey:
    """Survey of a kernel with a line of code more."""
    template = search_space.with_suffix(".cu")
    template.write_text(f"{template.read_text()}\n{code}\n")
    return survey(search_space, device="h200", n=4096)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, write_scale: Callable[[Path], Path], cubin_cache_folder: Path
) -> Survey:
    """A kernel of which blocks of 64 threads do not compile, with hostile words of the compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTILE_CACHE", str(cubin_cache_folder))
        return surveyed(write_scale(tmp_path_factory.mktemp("survey") / "kernels"), HOSTILE)


def test_the_page_has_every_section_and_every_configuration(found: Survey) -> None:
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


def test_nothing_that_compiles_is_a_page_too(scale_toml: Path) -> None:
    text = surveyed(scale_toml, "#error nothing compiles").page()
    assert "nothing compiles" in text
    assert 'id="occupancy"' not in text


def test_numbers_behind_the_charts_and_resources_by_parameter_add_up(found: Survey) -> None:
    for chart in (registers_chart(found), blocks_chart(found)):
        assert sum(int(row[-1]) for row in chart.table.rows) == 9
    assert dict(limits_chart(found).table.rows) == {
        name.replace("_", " "): f"{count:,}" for name, count in found.limit_counts()
    }
    rows = {(row[0], row[1]): row[2:] for row in parameter_table(found)[1]}
    assert set(rows) == {("THREADS", t) for t in ("32", "64", "128", "256")} | {("WORK", w) for w in "124"}
    configurations, usable, registers, *_ = rows["THREADS", "64"]
    assert (configurations, usable, registers) == (3, 0.0, None)
    assert rows["THREADS", "128"][:2] == [3, 100.0]


def test_it_is_drawn_in_a_browser_without_an_error(browser: Any, found: Survey, tmp_path: Path) -> None:
    path = tmp_path / "survey.html"
    path.write_text(found.page())
    page = Page(browser, path.as_uri())
    charts = [f"#{name}-chart" for name in ("registers", "blocks", "limits", "failures")]
    assert page.draw(", ".join(charts)) == 4
    assert all(page.count(f"{chart} .main-svg") for chart in charts)
    assert page.count("#survey-table tbody tr") == 12
    page.check()

"""The page: escaping, its content policy, the order of its sections, and charts with their numbers."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_studies import COMPILER_WORDS, SCRIPT, Session, read_one, store_session

from autotile.core.text import shown_text
from autotile.errors import InputError
from autotile.report.charts import (
    best_so_far_chart,
    drift_chart,
    front_chart,
    heat_map_chart,
    parallel_coordinates_chart,
    roofline_chart,
)
from autotile.report.page import Page, joined, tag, write_page
from autotile.report.report_data import report_of_study
from autotile.report.sections import report_page, trial_table
from autotile.report.study import StudyData
from autotile.report.theme import DARK, LIGHT, hover_text, label, log_axis, themed


class Reader(HTMLParser):
    """Collects the elements, the text and the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name in ("script", "style"):
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.text += data
        else:
            self.scripts[-1] += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == name]


@pytest.fixture(scope="module")
def page(study: StudyData) -> str:
    return report_page(report_of_study(study))


@pytest.fixture(scope="module")
def hostile_page(hostile_database: Path) -> str:
    return report_page(report_of_study(read_one(hostile_database)))


@given(st.text(max_size=60), st.text(max_size=60))
def test_text_comes_back_as_it_was(text: str, attribute: str) -> None:
    found = Reader(tag("p", text, title=attribute))
    assert found.elements == [("p", {"title": attribute})] or "\r" in attribute or "\0" in attribute
    assert found.text == shown_text(text, lines=True)


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", tag("b", "<"), ["&", None, joined("x")], hidden=True, id=None) == (
        "<p hidden><b>&lt;</b>&amp;x</p>"
    )


def test_the_sections_are_in_order(page: str) -> None:
    anchors = [attributes["id"] for attributes in Reader(page).named("section")]
    assert anchors == [
        "answer", "finals", "limits", "progress", "parameters", "gates", "trials", "roofline", "session",
    ]  # fmt: skip


def test_the_answer_states_what_was_found(page: str, study: StudyData) -> None:
    text = Reader(page).text
    assert study.speedup is not None
    times = "\N{MULTIPLICATION SIGN}"
    assert f"{study.speedup.value:.3f}{times} faster than the default" in text
    assert f"95 % interval {study.speedup.low:.3f}{times}" in text
    assert 'kernel = autotile.get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096, dtype="float32")' in text
    assert "2 configurations tie: #2, #3" in text
    assert "compute-sanitizer found nothing" in text
    assert "the clocks are not locked" in text


def policy_of(text: str) -> dict[str, list[str]]:
    (content,) = [a["content"] for a in Reader(text).named("meta") if a.get("http-equiv")]
    assert content is not None
    return {name: rest for name, *rest in (part.split() for part in content.split(";"))}


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(page: str) -> None:
    policy = policy_of(page)
    assert policy["default-src"] == ["'none'"]
    assert policy["img-src"] == ["data:", "blob:"]
    assert not any(
        "unsafe" in word or "http" in word for name, words in policy.items() for word in words if "attr" not in name
    )
    found = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    assert policy["script-src"] == [f"'sha256-{one}'" for one in hashes]
    assert len(found) == 2


def test_a_page_names_no_address(page: str) -> None:
    for name, attributes in Reader(page).elements:
        assert not {"src", "action", "onclick", "onerror"} & attributes.keys(), name
        assert (attributes.get("href") or "#").startswith("#")


def test_hostile_names_are_text(hostile_page: str) -> None:
    found = Reader(hostile_page)
    assert SCRIPT in found.text
    assert shown_text(COMPILER_WORDS) in found.text
    assert not found.named("img")
    assert not found.named("i")
    kinds = [attributes.get("type") for attributes in found.named("script")]
    assert kinds == ["application/json"] * 3 + [None, None]
    blocks = re.findall(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', hostile_page, re.DOTALL)
    documents = {name: json.loads(text) for name, text in blocks}
    assert documents["tables"]["trials-table"]["columns"][-2][0] == SCRIPT
    texts = json.dumps([values_of(figure) for figure in documents["figures"].values()])
    assert "<script" not in texts
    assert "<img" not in texts


def values_of(figure: Any) -> list[str]:
    """What Plotly shows as text: all strings of a figure but those that only the page's own table reads."""
    found: list[str] = []

    def visit(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key != "meta":
                    visit(part, key)
        elif isinstance(value, list):
            for part in value:
                visit(part, name)
        elif isinstance(value, str):
            found.append(value)

    visit(figure)
    return found


def test_every_axis_of_times_has_its_unit(study: StudyData) -> None:
    for chart in (best_so_far_chart(study), best_so_far_chart(study, "seconds")):
        assert chart.figure.layout.yaxis.title.text == "time of a run, µs"
    assert roofline_chart(study).figure.layout.yaxis.title.text == "TFLOP/s"
    assert "MHz" in str(drift_chart(study).figure.layout.annotations)


def test_the_table_has_a_row_for_each_trial(study: StudyData) -> None:
    table = trial_table(study)
    assert len(table.rows) == 120
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_heat_map_is_of_the_fastest_times(study: StudyData) -> None:
    figure = heat_map_chart(study, "BM", "BN").figure
    cells = [cell for row in figure.data[0].z for cell in row if np.isfinite(cell)]
    timed = [one.trial.time_us for one in study.trials if one.trial.outcome.has_time]
    assert min(cells) == min(timed)


def test_several_objectives_have_a_front(tmp_path: Path) -> None:
    store_session(tmp_path / "a.db", Session(trials=60, objectives=("time", "registers")))
    found = read_one(tmp_path / "a.db")
    best = [point.values for point in found.front if point.is_on_front]
    assert 0 < len(best) < len(found.front)
    for time_us, registers in best:
        assert not any(p.values[0] < time_us and p.values[1] < registers for p in found.front)
    assert [trace.name for trace in front_chart(found).figure.data] == ["dominated", "front"]
    assert "front" in [attributes["id"] for attributes in Reader(report_page(report_of_study(found))).named("section")]


def test_the_dark_theme_exchanges_every_colour(study: StudyData) -> None:
    text = themed(parallel_coordinates_chart(study).figure, dark=True).to_json()
    assert DARK["accent"] in text
    assert not any(colour in text for colour in LIGHT.values())


def test_labels_cannot_be_tags() -> None:
    assert label("<a href='javascript:x'>") == "&lt;a href='javascript:x'&gt;"
    assert len(label("x" * 500)) == 60
    assert "<br>" in hover_text("a", "<b>")
    assert "<b>" not in hover_text("a", "<b>")


@given(st.floats(1e-3, 1e6), st.floats(1.01, 1e4))
def test_a_logarithmic_axis_has_ticks(low: float, ratio: float) -> None:
    axis = log_axis(low, low * ratio)
    assert len(axis["tickvals"]) == len(axis["ticktext"]) > 0


def test_where_a_page_cannot_be_written(tmp_path: Path, database: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        write_page("x", tmp_path)
    with pytest.raises(InputError, match="give another path with -o"):
        write_page("x", tmp_path / "missing" / "x.html")
    before = database.read_bytes()
    with pytest.raises(InputError, match="it is a database"):
        write_page("x", database)
    assert database.read_bytes() == before


def test_a_page_without_charts_needs_no_plotly() -> None:
    page = Page("Nothing")
    page.body.append(page.section("a", "A", tag("p", "text"), link="A"))
    text = page.html()
    assert len(text) < 60_000
    assert len(re.findall("<script>", text)) == 1

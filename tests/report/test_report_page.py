"""Reports and surveys: what is shown of a study, and the pages: escaping, content policy, sections, charts."""

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import OpenPage
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from report_studies import COMPILER_WORDS, ROUNDS, SCRIPT, SGEMM, Session, read_one, recording_of, store_session
from stored_rows import CEILINGS
from stored_runs import add_trial, end_run, start_run

from autotile.api.inspection import survey
from autotile.core.ceilings import Ceiling
from autotile.core.model import COST, OBJECTIVE, Measurement, Outcome, Trial, config_key
from autotile.core.statistics import paired_ratio, widen_by_session_spread
from autotile.core.text import shown_text
from autotile.database.database import Database
from autotile.database.keys import library_key
from autotile.database.learned import FamilyState, save_ceilings, save_family_state, save_rule
from autotile.errors import InputError
from autotile.exchange.shipped import shipped_rules
from autotile.kernel.operation import load_operation
from autotile.report.charts import (
    best_so_far_chart,
    drift_chart,
    front_chart,
    heat_map_chart,
    parallel_coordinates_chart,
    roofline_chart,
    rule_tree_chart,
    study_effects,
    timed_trials,
    tree_lines,
)
from autotile.report.page import Page, joined, tag, write_page
from autotile.report.report_data import ReportData, read_report, report_of_study
from autotile.report.sections import answer, report_page, trial_table
from autotile.report.study import StudyData, read_study, study_of_recording
from autotile.report.survey import Survey, blocks_chart, limits_chart, parameter_table, registers_chart
from autotile.report.theme import DARK, LIGHT, figure, hover_text, label, log_axis, themed


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
def page(study):
    return report_page(report_of_study(study))


@given(st.text(max_size=60), st.text(max_size=60))
def test_text_comes_back_as_it_was(text, attribute):
    found = Reader(tag("p", text, title=attribute))
    assert found.elements == [("p", {"title": attribute})] or "\r" in attribute or "\0" in attribute
    assert found.text == shown_text(text, lines=True)
    shown = tag("p", tag("b", "<"), ["&", None, joined("x")], hidden=True, id=None)  # markup is not escaped twice
    assert shown == "<p hidden><b>&lt;</b>&amp;x</p>"


def test_the_sections_are_in_order_and_the_answer_states_what_was_found(page, study):
    first = ["answer", "finals", "limits", "progress", "parameters", "gates"]
    anchors = [attributes["id"] for attributes in Reader(page).named("section")]
    assert anchors == [*first, "trials", "roofline", "session"]
    text = Reader(page).text
    times = "\N{MULTIPLICATION SIGN}"
    assert f"{study.speedup.value:.3f}{times} faster than the default" in text
    assert f"95 % interval {study.speedup.low:.3f}{times}" in text
    assert 'kernel = autotile.get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096, dtype="float32")' in text
    assert "2 configurations tie: #2, #3" in text
    assert "compute-sanitizer found nothing" in text
    assert "the clocks are not locked" in text
    unknown = structs.replace(study.key, template_hash="", compute_capability="")
    text = Reader(answer(replace(study, key=unknown))).text
    assert "SMs, driver" in text
    assert "imported" in text
    assert "Verifiedunknown: the file does not say" in text


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else_and_the_page_names_no_address(page):
    (content,) = [a["content"] for a in Reader(page).named("meta") if a.get("http-equiv")]
    policy = {name: rest for name, *rest in (part.split() for part in content.split(";"))}
    assert policy["default-src"] == ["'none'"]
    assert policy["img-src"] == ["data:", "blob:"]
    assert not any(
        "unsafe" in word or "http" in word for name, words in policy.items() for word in words if "attr" not in name
    )
    found = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    assert policy["script-src"] == [f"'sha256-{one}'" for one in hashes]
    assert len(found) == 2
    for name, attributes in Reader(page).elements:
        assert not {"src", "action", "onclick", "onerror"} & attributes.keys(), name
        assert (attributes.get("href") or "#").startswith("#")


def without_meta(document: dict[str, Any]) -> dict[str, Any]:
    """What Plotly shows of a figure: all but what only the page's own table reads."""
    return {name: part for name, part in document.items() if name != "meta"}


def test_hostile_names_are_text(hostile_database):
    hostile_page = report_page(report_of_study(read_one(hostile_database)))
    found = Reader(hostile_page)
    assert SCRIPT in found.text
    assert shown_text(COMPILER_WORDS) in found.text
    assert not found.named("img")
    assert not found.named("i")
    kinds = [attributes.get("type") for attributes in found.named("script")]
    assert kinds == ["application/json"] * 3 + [None, None]
    blocks = re.findall(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', hostile_page, re.DOTALL)
    documents = {name: json.loads(text, object_hook=without_meta) for name, text in blocks}
    assert documents["tables"]["trials-table"]["columns"][-2][0] == SCRIPT
    texts = json.dumps(list(documents["figures"].values()))
    assert "<script" not in texts
    assert "<img" not in texts


def test_every_axis_of_times_has_its_unit(study):
    for chart in (best_so_far_chart(study), best_so_far_chart(study, "seconds")):
        assert chart.figure.layout.yaxis.title.text == "time of a run, µs"
    assert roofline_chart(study).figure.layout.yaxis.title.text == "TFLOP/s"
    panels = drift_chart(study).figure.layout
    assert "MHz" in str(panels.annotations)
    assert {note.font.size for note in panels.annotations} == {12}
    assert (panels.margin.t, panels.yaxis2.nticks, panels.yaxis2.anchor) == (30, 4, "x2")
    made = figure([], height=100, x={"title": "n", "type": "log"}, margin={"t": 40}).layout
    assert (made.margin.t, made.margin.l) == (40, 8)  # its own properties stand beside those of all figures
    assert (made.xaxis.title.text, made.xaxis.title.font.color) == ("n", LIGHT["muted"])
    assert (made.xaxis.type, made.xaxis.tickangle, made.yaxis.type) == ("log", 0, None)


def test_the_table_has_a_row_for_each_trial_and_the_heat_map_the_fastest_times(study):
    columns, rows = trial_table(study)
    assert len(rows) == 120
    assert {len(row) for row in rows} == {len(columns)}
    figure = heat_map_chart(study, "BM", "BN").figure
    cells = [cell for row in figure.data[0].z for cell in row if np.isfinite(cell)]
    timed = [one.trial.time_us for one in study.trials if one.trial.outcome.has_time]
    assert min(cells) == min(timed)


def test_several_objectives_have_a_front(tmp_path):
    store_session(tmp_path / "a.db", Session(trials=60, objectives=("time", "registers")))
    found = read_one(tmp_path / "a.db")
    best = [values for _, values, is_on_front in found.front if is_on_front]
    assert 0 < len(best) < len(found.front)
    for time_us, registers in best:
        assert not any(values[0] < time_us and values[1] < registers for _, values, _ in found.front)
    assert [trace.name for trace in front_chart(found).figure.data] == ["dominated", "front"]
    alone = replace(found, stored=tuple(one for one in found.trials if one.trial.outcome is Outcome.OK)[:1])
    assert [trace.name for trace in front_chart(alone).figure.data] == ["front"]
    sections = Reader(report_page(report_of_study(found))).named("section")
    assert "front" in [attributes["id"] for attributes in sections]


def test_values_of_another_objective_are_not_compared(study):
    (run,) = study.runs
    first, last = (replace(run, run_id=number, settings={"objective": text}) for number, text in ((1, "a"), (2, "b")))
    scored = [
        replace(one, run_id=number, trial=replace(one.trial, telemetry={OBJECTIVE: value, COST: value}))
        for one, number, value in zip(study.trials, (1, 2, 2), (1.0, 30.0, 20.0), strict=False)
    ]
    mixed = replace(study, runs=(first, last), stored=tuple(scored))
    assert [mixed.score(one) for one in scored] == [None, 30.0, 20.0]
    assert "found after trial 3" in best_so_far_chart(mixed).summary
    assert [cost for cost, _ in mixed.ranked(*Outcome)] == [20.0, 30.0]
    by_time = replace(mixed, runs=(first, replace(last, settings={})))
    times_us = sorted(one.trial.time_us for one in scored if one.trial.time_us is not None)
    assert [cost for cost, _ in by_time.ranked(*Outcome)] == times_us
    assert [trial.time_us for trial in timed_trials(by_time)] == times_us


def test_the_dark_theme_exchanges_every_colour_and_labels_cannot_be_tags(study):
    text = themed(parallel_coordinates_chart(study).figure).to_json()
    assert DARK["accent"] in text
    assert not any(colour in text for colour in LIGHT.values())
    assert label("<a href='javascript:x'>") == "&lt;a href='javascript:x'&gt;"
    assert len(label("x" * 500)) == 60
    assert "<br>" in hover_text("a", "<b>")
    assert "<b>" not in hover_text("a", "<b>")


@given(st.floats(1e-3, 1e6), st.floats(1.01, 1e4))
def test_a_logarithmic_axis_has_ticks(low, ratio):
    axis = log_axis(low, low * ratio)
    assert len(axis["tickvals"]) == len(axis["ticktext"]) > 0


def test_where_a_page_cannot_be_written_and_one_without_charts_needs_no_plotly(tmp_path, database):
    with pytest.raises(InputError, match="is a folder"):
        write_page("x", tmp_path)
    with pytest.raises(InputError, match=r"missing.*: No such file or directory; name another file"):
        write_page("x", tmp_path / "missing" / "x.html")
    before = database.read_bytes()
    with pytest.raises(InputError, match="it is a database"):
        write_page("x", database)
    assert database.read_bytes() == before
    page = Page("Nothing")
    page.body.append(page.section("a", "A", tag("p", "text"), link="A"))
    text = page.html()
    assert len(text) < 60_000
    assert len(re.findall("<script>", text)) == 1


KILO = "sgemm-nvidia-h200-1024x1024x1024-float32"


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two problems, the rule of a family, and the time of a library."""
    path = tmp_path_factory.mktemp("several") / "a.db"
    store_session(path, Session(trials=40))
    store_session(path, Session(trials=40), KILO)
    (rule, *_) = shipped_rules("sgemm", "float32")
    header = recording_of(KILO).header
    operation = load_operation("matmul")
    problem = operation.resolve({"M": 1024, "N": 1024, "K": 1024}, "float32")
    key = library_key(operation, problem, header.device, "cublas", "13.1", nvrtc_version="13.0")
    library = Trial({}, Outcome.OK, measurement=Measurement(55.0, 54.5, 55.6))
    with Database.open(path) as database:
        save_family_state(database, rule.key, rule.rule.family, rule.device, FamilyState(plan={}))
        save_rule(database, rule.key, rule.device, rule.rule)
        study_id = database.study(key, header.device)
        run_id = start_run(database, study_id, sampler="contest")
        add_trial(database, study_id, run_id, library, phase="final", rank=1)
        end_run(database, run_id, {"operation": "matmul"})
    return path


def report_of(path: Path, kernel: str | None = None, *, matmul: dict[str, int] | None = None) -> ReportData:
    """Report of a kernel or of all, or of the operation at some sizes."""
    with Database.open_readonly(path) as opened:
        if matmul is not None:
            return read_report(opened, load_operation("matmul"), matmul)
        return read_report(opened, kernel)


RATES = {"dram_read": 4.1e12, "dram_copy": 4.0e12, "fma_float32": 5.8e13, "tensor_tf32": 4.0e14}


def measured_study(path: Path, recording: str, rates: dict[str, float]) -> StudyData:
    """A study on a GPU whose ceilings were measured."""
    store_session(path, Session(trials=40), recording)
    rated = tuple(Ceiling(name, rate, 0.99 * rate, 1.01 * rate, "test") for name, rate in rates.items())
    with Database.open(path) as database:
        save_ceilings(database, replace(CEILINGS, ceilings=rated))
    return read_one(path)


def test_the_overview_lists_every_problem_and_leads_to_it_and_draws_the_rule_of_a_family(several):
    found = report_of(several)
    assert [study.key.kernel for study in found.studies] == ["sgemm", "sgemm_2d"]
    page = Reader(report_page(found))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {(attributes["href"] or "")[1:] for attributes in page.named("a")}
    assert {"s1", "s2"} <= links <= set(ids)
    (family,) = found.families
    assert "Loss by size" in page.text
    lines = tree_lines(family.rule.tree)
    leaves = [text for _, text in lines if "configuration #" in text]
    assert len(leaves) == sum("?" in text for _, text in lines) + 1
    assert [text for _, text in lines if text not in page.text] == []
    assert len(rule_tree_chart(family).figure.layout.annotations) == len(lines)


def test_the_roofline_is_of_the_ceilings_that_were_measured(tmp_path):
    study = measured_study(tmp_path / "a.db", SGEMM, RATES)
    bound = study.bound(study.winner)
    assert (bound.label, bound.rate) == ("fp32 FMA", 5.8e13)
    chart = roofline_chart(study)
    names = {trace.name for trace in chart.figure.data}
    assert {"DRAM, read 4,100 GB/s", "tf32 tensor cores 400 TFLOP/s"} <= names
    assert "measured on NVIDIA H200" in chart.note
    faster = replace(study.winner, measurement=Measurement(1000.0, 999.0, 1001.0))
    assert study.bound(faster).label == "tf32 tensor cores"  # faster than FMA allows
    bare = structs.replace(study.device, fp32_lanes_per_sm=1, clock_mhz=0.0)  # without a rate of arithmetic,
    (memory, *_) = roofline_chart(replace(study, device=bare, ceilings=None)).figure.data
    work = study.work_of(study.winner)
    assert max(memory.x) == pytest.approx(work.flops / work.bytes)  # the memory's line ends at the last point


@pytest.fixture(scope="module")
def text(several):
    found = report_of(several, matmul={"M": 1024, "N": 1024, "K": 1024})
    ((*title, contenders, _),) = found.operations
    assert [(one.name, one.is_library) for one in contenders] == [("cublas", True), ("sgemm", False)]
    assert [study.key.kernel for study in found.studies] == ["sgemm"]
    assert [one[:2] for one in report_of(several, matmul={}).operations] == [tuple(title)]
    return report_page(found)


class TestPageOfAnOperation:
    """What won stands first: problem, winner, library, ratio and the race, before any kernel of its own."""

    def test_the_head_and_the_first_headline_name_what_won_and_who_cannot_compute_it_is_not_applicable(self, text):
        page = Reader(text)
        assert "cublas is the fastest" in page.text
        assert "(replayed)" not in page.text
        assert "matmul M=1024 N=1024 K=1024 float32 on NVIDIA H200" in page.text
        assert "The answer" in page.text
        first = text[text.index('class="headline"') :]
        headline = Reader(first[: first.index("</p>") + 4].partition(">")[2]).text
        assert re.match(r"cublas is 1\.\d{3}\N{MULTIPLICATION SIGN} faster than sgemm", headline.strip())
        assert "95 % interval" in headline
        assert "Serve cublas" in page.text
        line = 'kernel = autotile.get_best_kernel("matmul", M=1024, N=1024, K=1024, dtype="float32")'
        assert line in page.text
        assert page.text.index(line) < page.text.index("Serve this kernel alone")
        assert "Serve it" not in page.text
        assert "not applicable: it computes bfloat16, float16" in page.text
        assert "not applicable: the rule 'vector_like' leaves none of" in page.text
        assert "not tuned" in page.text
        assert "failed:" not in page.text

    def test_kernels_are_in_the_order_of_their_times_and_replayed_ones_are_marked(self, tmp_path):
        """The slowest was tuned first, and none of them was raced with a library."""
        path = tmp_path / "a.db"
        slow, fast = (f"{name}-nvidia-h200-4096x4096x4096-bfloat16" for name in ("gemm_mma", "gemm_wgmma"))
        store_session(path, Session(trials=30), slow, source="replayed")
        store_session(path, Session(trials=30), fast, source="replayed")
        found = report_of(path, matmul={})
        ((_, _, contenders, _),) = found.operations
        assert found.title == "matmul M=4096 N=4096 K=4096 bfloat16 on NVIDIA H200 (replayed)"
        assert [one.name for one in contenders] == ["gemm_wgmma", "gemm_mma"]
        assert [study.key.kernel for study in found.studies] == ["gemm_wgmma", "gemm_mma"]
        text = Reader(report_page(found)).text
        assert "gemm_wgmma is the fastest" in text
        assert "no library was timed" in text
        assert "Serve gemm_wgmma" in text
        time = contenders[0].time_text
        assert time.endswith(" us (replayed)")
        assert text.count(time.replace(" us", " \N{MICRO SIGN}s")) >= 3  # headline, table, chart


def test_a_problem_is_that_of_the_sizes_of_a_kernel():
    matmul = load_operation("matmul")
    sizes = dict(recording_of(KILO).header.key.sizes)
    problem = matmul.problem_of("sgemm", sizes, "float32")
    assert problem == matmul.resolve({"M": 1024, "N": 1024, "K": 1024}, "float32")
    assert matmul.stated(problem).sizes == {"M": 1024, "N": 1024, "K": 1024}
    assert matmul.problem_of("sgemm", {**sizes, "TRANS_A": 1}, "float32").sizes["TRANS_A"] == 1
    assert matmul.problem_of("sgemm", {"M": 1024}, "float32") is None
    assert matmul.problem_of("sgemm_2d", sizes, "float32") is None
    rows = load_operation(str(Path(__file__).parents[2] / "examples" / "row_sums" / "row_sums.toml"))
    kernel, *_ = rows.members
    named = dict.fromkeys(kernel.load().spec.sizes, 7)
    found = rows.problem_of(kernel.name, named, rows.dtypes[0])
    assert set(found.sizes.values()) == {7}


GEMM_MMA = "gemm_mma-nvidia-h200-4096x4096x4096-bfloat16"
BF16X6 = "sgemm_bf16x6_ws-nvidia-h200-4096x4096x4096-float32"


@pytest.mark.parametrize(
    ("recording", "label", "rate"),
    [
        (GEMM_MMA, "bf16 tensor cores (datasheet)", 989.4e12),
        (BF16X6, "bf16 tensor cores over 6 products (datasheet)", 989.4e12 / 6),
    ],
)
def test_tensor_cores_bind_the_kernels_that_use_them(tmp_path, recording, label, rate):
    store_session(tmp_path / "a.db", Session(trials=40), recording)
    study = read_one(tmp_path / "a.db")
    bound = study.bound(study.winner)
    assert bound.label == label
    assert bound.rate == pytest.approx(rate, rel=1e-3)
    assert 0.3 < bound.share < 1.0
    memory, *compute = roofline_chart(study).figure.data[:2]
    assert "DRAM" in memory.name
    assert [trace.name.partition(" (")[0] for trace in compute] == [label.partition(" (")[0]]
    assert max(memory.y) == pytest.approx(rate / 1e12, rel=1e-3)  # the line of the memory ends at the other
    assert label in answer(study)
    measured = measured_study(tmp_path / "b.db", recording, {**RATES, "tensor_bfloat16": 7.2e14})
    roof = measured.bound(measured.winner)
    assert (roof.label, roof.rate) == (label.partition(" (")[0], pytest.approx(rate * 7.2e14 / 989.4e12, rel=1e-3))


HOSTILE = '#if THREADS == 64\n#error "</script><script>alert(1)</script>"\n#endif'


def surveyed(search_space: Path, code: str) -> Survey:
    """Survey of a kernel with a line of code more."""
    template = search_space.with_suffix(".cu")
    template.write_text(f"{template.read_text()}\n{code}\n")
    return survey(search_space, device="h200", n=4096)


@pytest.fixture(scope="module")
def found(tmp_path_factory, write_scale, cubin_cache_folder):
    """A kernel of which blocks of 64 threads do not compile, with hostile words of the compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOTILE_CACHE", str(cubin_cache_folder))
        return surveyed(write_scale(tmp_path_factory.mktemp("survey") / "kernels"), HOSTILE)


def test_the_page_of_a_survey_has_every_section_and_every_configuration(found):
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


def test_a_survey_in_which_nothing_compiles_is_a_page_too(scale_toml):
    text = surveyed(scale_toml, "#error nothing compiles").page()
    assert "nothing compiles" in text
    assert 'id="occupancy"' not in text


def test_numbers_behind_the_charts_of_a_survey_add_up(found):
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


def test_a_survey_is_drawn_in_a_browser_without_an_error(browser, found, tmp_path):
    path = tmp_path / "survey.html"
    path.write_text(found.page())
    page = OpenPage(browser, path.as_uri())
    charts = [f"#{name}-chart" for name in ("registers", "blocks", "limits", "failures")]
    assert page.draw(", ".join(charts)) == 4
    assert all(page.count(f"{chart} .main-svg") for chart in charts)
    assert page.count("#survey-table tbody tr") == 12
    page.check()


def test_the_finals_are_as_the_session_ranked_them_by_the_rounds_of_the_race(study):
    assert [one.rank for one in study.finals] == list(range(1, len(study.finals) + 1))
    assert [one.rank for one in study.finals if one.is_tie] == [2, 3]
    (default,) = [one.trial for one in study.finals if one.is_default]
    assert study.default is default
    assert study.winner is study.finals[0].trial
    assert [trial.outcome for trial in study.refused] == [Outcome.OUT_OF_BOUNDS]
    first, other = (study.finals[place].trial.measurement for place in (0, 4))
    assert len(first.samples_us) == ROUNDS
    expected = widen_by_session_spread(paired_ratio(first.samples_us, other.samples_us))
    assert study.finals[4].ratio == expected


def test_gates_only_hold_back_and_failures_are_grouped_by_their_reason_whatever_its_numbers(study):
    counts = [count for _, count in study.gates]
    assert counts == sorted(counts, reverse=True)
    found = dict(study.gates)
    assert found["combinations"] == 93312
    assert found["tried"] == len(study.newest) == 120
    assert found["correct"] == sum(one.trial.outcome.has_time for one in study.newest)
    assert list(study.elapsed_s) == sorted(study.elapsed_s)
    assert len(study.elapsed_s) == len(study.trials)
    (wrong,) = [group for group in study.failures if group.outcome is Outcome.WRONG_RESULT]
    assert wrong.count == sum(one.trial.outcome is Outcome.WRONG_RESULT for one in study.newest)
    assert wrong.reason in {one.trial.reason for one in study.newest}
    assert [group.count for group in study.failures] == sorted((g.count for g in study.failures), reverse=True)
    assert any(group.stage == "sanitize" for group in study.failures)


def test_what_matters_is_as_the_session_found_it_or_is_computed_and_the_nearest_ceiling_binds(study):
    assert study_effects(study)[0][0].parameter == study.parameters[0]
    tiled = study_of_recording(recording_of("matmul_tiled-nvidia-h200-2048x2048x2048-float32"), "")
    (other, *_), _ = study_effects(tiled)
    assert other.parameter == "TILE"
    assert other.share > 0.5
    bound = study.bound(study.winner)
    assert study.ceilings is None
    assert "datasheet" in bound.label
    assert 0.4 < bound.share < 1.0


def test_a_running_session_is_read_on_and_has_the_best_of_its_search(tmp_path):
    key = store_session(tmp_path / "a.db", Session(trials=30, finals=False, ended=False))
    with Database.open(tmp_path / "a.db") as database:
        (summary,) = database.studies()
        first = read_study(database, summary)
        newest = replace(first.trials[0].trial, config={**first.trials[0].trial.config, "BM": 999})
        add_trial(database, summary.study_id, first.runs[0].run_id, newest)
        second = read_study(database, summary, first.stored)
    assert second.key == key
    assert len(second.trials) == len(first.trials) + 1
    assert config_key(second.trials[-1].trial.config) == config_key(newest.config)
    assert second.is_running
    assert second.finals == ()
    assert second.winner.time_us == min(one.trial.time_us for one in second.trials if one.trial.outcome is Outcome.OK)


def test_a_summary_of_any_shape_is_read(study):
    names = ["speedup", "ties", "default", "gates", "stopped", "importance", "notices"]
    names += ["seconds", "flops", "objectives"]
    for wrong in (None, 3, -1.5, "x" * 10, [[]], {"ratio": "a"}, [{"config": 1}], True):
        stated: Any = dict.fromkeys(names, wrong)
        found = replace(study, runs=(replace(study.runs[0], summary=stated, settings=stated),))
        assert isinstance(found.summary.notices, tuple)
        assert found.winner is not None
        assert found.gates
        assert any(study_effects(found))


def test_a_kernel_that_a_database_names_by_a_path_is_not_read(hostile_database, study):
    assert read_one(hostile_database).kernel is None
    assert study.kernel is not None
    assert replace(study, key=structs.replace(study.key, kernel="/etc/passwd.toml")).kernel is None


def test_what_is_not_there_is_told(database, tmp_path):
    with Database.open(tmp_path / "empty.db") as empty, pytest.raises(InputError, match="run `autotile tune KERNEL`"):
        read_report(empty)
    with Database.open_readonly(database) as opened:
        with pytest.raises(InputError, match="has no trials of sgemm_2d M=7; it has sgemm_2d M=4096"):
            read_report(opened, "sgemm_2d", {"M": 7})
        with pytest.raises(InputError):
            read_report(opened, SCRIPT)

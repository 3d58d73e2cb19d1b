"""Results in notebooks: charts are Plotly figures in either theme, trials are typed data frames, HTML is escaped."""

import sys
from dataclasses import replace as replaced

import numpy as np
import plotly.graph_objects as go
import plotly.io
import pytest
from msgspec.structs import replace
from report_studies import SCRIPT

import autotile
from autotile.api.results import StudyTrial, TrialList
from autotile.core.device import device_profile
from autotile.core.model import Outcome, Problem
from autotile.errors import InputError, ToolchainError
from autotile.kernel.library import load_kernel
from autotile.report.notebook import StudyPlots, newest_study
from autotile.report.study import StudyData
from autotile.report.theme import DARK, LIGHT, Chart, figure_of

STUDY_PLOTS = sorted(name for name in vars(StudyPlots) if name.startswith("plot_"))
ARGUMENTS = {"plot_time_by_parameter": ("BM",)}
SIZES = {"M": 4096, "N": 4096, "K": 4096}


@pytest.fixture(scope="module")
def trials(database):
    return autotile.trials("sgemm_2d", SIZES, database=database)


DEVICE = replace(device_profile("h200"), source="cuda")
PROBLEM = Problem("sgemm_2d", SIZES, "float32")


class OfStudy(StudyPlots):
    def __init__(self, study: StudyData) -> None:
        self.study = study

    def study_data(self) -> StudyData:
        return self.study


@pytest.fixture(scope="module")
def result(database):
    return OfStudy(newest_study(str(database), PROBLEM, DEVICE))


class TestStudy:
    @pytest.mark.parametrize("name", [name for name in STUDY_PLOTS if name != "plot_front"])
    def test_each_chart_is_a_figure_with_its_title_and_that_of_the_trials(self, result, trials, name):
        """The roofline among them, which needs the device and the ceilings."""
        for dark in (False, True):
            made, shown = (getattr(one, name)(*ARGUMENTS.get(name, ()), dark=dark) for one in (result, trials))
            assert isinstance(made, go.Figure)
            assert made.data
            assert made.layout.title.text
            assert made.layout.paper_bgcolor == (DARK if dark else LIGHT)["paper"]
            assert made.to_json() == shown.to_json()

    def test_a_result_reads_its_study_from_the_database(self, database, result):
        assert len(result.study.trials) == 120
        with pytest.raises(InputError, match="no trials of"):
            newest_study(str(database), Problem("sgemm_2d", {**SIZES, "M": 1}, "float32"), DEVICE)
        with pytest.raises(InputError, match="password"):  # a masked one is not tried
            newest_study("postgresql://me:***@host/db", PROBLEM, DEVICE)

    def test_finals_that_are_all_that_is_left_of_a_study_are_listed_once(self, result):
        left = OfStudy(replaced(result.study, stored=result.study.final_trials))
        assert list(left.to_pandas()["trial_id"]) == [one.trial_id for one in left.study.stored]

    def test_what_cannot_be_drawn_is_one_line(self, result):
        with pytest.raises(InputError, match=r"\AThere is one objective\Z"):
            result.plot_front()
        for method, *given in (("time_by_parameter", "BX"), ("heat_map", "BM", "BX"), ("best_so_far", "BX")):
            with pytest.raises(InputError, match=r"no parameter 'BX'|axis is 'BX', expected 'trials' or 'seconds'"):
                getattr(result, f"plot_{method}")(*given)
        with pytest.raises(InputError, match=r"There is nothing\Z"):
            figure_of(Chart("x", "X", None, "There is nothing."))

    def test_the_theme_follows_plotly_and_without_a_package_its_extra_is_named(self, result, trials, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(plotly.io.templates, "default", "plotly_dark")
            assert result.plot_finals().layout.paper_bgcolor == DARK["paper"]
        monkeypatch.setitem(sys.modules, "plotly", None)
        with pytest.raises(ToolchainError, match=r"autotile\[report\]"):
            result.plot_finals()
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ToolchainError, match=r"autotile\[notebook\]"):
            trials.to_pandas()


class TestTrials:
    def test_they_become_a_data_frame_with_types_and_units(self, trials):
        frame = trials.to_pandas()
        assert len(frame) == len(trials.trials)
        assert frame["time_us"].dtype == "float64"
        assert frame["param.BM"].dtype == "Int64"
        assert frame["outcome"].dtype == "string"
        assert frame["time_us"].min() == trials.trials[0].stored.trial.time_us
        times = [entry.stored.trial.time_us for entry in trials.trials]
        assert frame["time_us"].isna().sum() == times.count(None)

    def test_they_are_drawn_without_their_runs(self, trials):
        """The trials alone, as of several databases, give the same points as those of a study."""
        alone = TrialList(trials.trials)
        timed = [entry.stored.trial for entry in alone.trials if entry.stored.phase == "search"]
        timed = [trial for trial in timed if trial.outcome.has_time]
        boxes, fastest = alone.plot_time_by_parameter("BN").data
        values = sorted({trial.config["BN"] for trial in timed})
        assert [int(name) for name in boxes.x] == values
        least = [min(trial.time_us for trial in timed if trial.config["BN"] == value) for value in values]
        assert list(fastest.y) == least == list(boxes.lowerfence)
        steps = next(trace for trace in alone.plot_best_so_far().data if trace.name == "best so far")
        reached = steps.y[np.isfinite(steps.y)].tolist()  # there is none before the first time
        assert reached[-1] == min(trial.time_us for trial in timed if trial.outcome is Outcome.OK)
        assert reached == sorted(reached, reverse=True)

    def test_a_roofline_of_some_of_the_trials_and_those_of_several_problems_are_refused(self, database):
        few = autotile.trials("sgemm_2d", SIZES, database=database, outcome="ok", limit=3)
        names = {trace.name for trace in few.plot_roofline().data}
        assert {"winner", "DRAM (datasheet) 4,814 GB/s"} <= names
        with pytest.raises(InputError, match=r"no trials that a chart could be of; `autotile\.list\(\)` shows"):
            TrialList(()).plot_finals()
        key, stored = few.trials[0]
        for changed, said in (
            ({"template_hash": "0" * 64}, "the source of the kernel; let `autotile.report` draw them all"),
            ({"dtype": "float64", "sizes": {}}, "the dtype and sizes; name the sizes and the dtype, or let"),
        ):
            with pytest.raises(InputError, match=f"these trials are of 2, which differ in {said}"):
                TrialList((*few.trials, StudyTrial(replace(key, **changed), stored))).plot_finals()  # type: ignore[arg-type]


def test_a_space_its_limits_and_the_occupancy_over_a_resource():
    made = autotile.space("sgemm_2d", SIZES, device="h200").plot_rules()
    (bars,) = made.data
    assert bars.x[0] == 93312
    assert bars.x[-1] == 14712
    found = autotile.occupancy(256, 64, 16384, device="h200")
    for resource in ("threads", "registers", "smem_bytes"):
        line, mark = found.plot_over(resource).data  # type: ignore[arg-type]
        assert mark.y == (found.occupancy.warps_per_sm,), resource
        assert min(line.y) < max(line.y) <= found.device.max_warps_per_sm, resource
    (bars,) = found.plot_limits(dark=True).data
    assert min(bars.x) == found.occupancy.blocks_per_sm
    with pytest.raises(InputError, match="no resource 'warps'"):
        found.plot_over("warps")  # type: ignore[arg-type]


class TestHtml:
    def test_a_served_kernel_and_a_space_show_their_configuration(self):
        served = autotile.get_best_kernel("sgemm_2d", **SIZES, device="h200")
        shown = served._repr_html_()
        assert "<th>BM</th>" in shown
        assert "<th>reason</th>" in shown
        assert served.plot_limits().data
        shown = load_kernel("sgemm_2d").spec._repr_html_()
        assert "<th>BM</th>" in shown
        assert "93,312 combinations" in shown

    def test_hostile_names_are_escaped_and_a_long_table_is_cut(self, hostile_database, trials):
        shown = autotile.list(database=hostile_database)._repr_html_()
        assert SCRIPT not in shown
        assert "&lt;script&gt;" in shown
        many = TrialList(trials.trials * 2)
        shown = many._repr_html_()
        assert shown.count("<tr>") == 101
        assert f"and {len(many.trials) - 100} more rows" in shown

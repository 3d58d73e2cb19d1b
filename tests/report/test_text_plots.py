"""Plots of a study as text: axes, steps, strips, hostile names, narrow widths, no colour."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_studies import Session, store_session

from autotile.database.database import Database
from autotile.errors import ToolchainError
from autotile.report.report_data import read_report
from autotile.report.text_plots import StudyPlot, _nice, _tick_text, plots_of


def plot_of(path: Path, session: Session, **options: object) -> StudyPlot:
    store_session(path, session)
    with Database.open(path) as database:
        (study,) = read_report(database).studies
        (plot,) = plots_of([study], (), "trials", 3)
        return replace(plot, **options)


class TestStudyPlot:
    def test_the_best_so_far_never_rises(self, tmp_path):
        best = plot_of(tmp_path / "a.db", Session(trials=60)).best_so_far
        known = best[np.isfinite(best)]
        assert (np.diff(known) <= 0).all()
        assert len(set(known.tolist())) > 1

    @pytest.mark.parametrize("width", [50, 80, 120])
    def test_no_line_is_wider_than_the_terminal(self, tmp_path, width):
        text = plot_of(tmp_path / "a.db", Session(trials=60)).text(width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "Best so far" in text
        assert "trials)" in text
        assert text.count("best, us") == 3

    def test_ascii_only_is_ascii(self, tmp_path):
        text = plot_of(tmp_path / "a.db", Session(trials=30)).text(80, ascii_only=True)
        assert text.isascii()
        assert "*" in text

    def test_there_is_no_escape_sequence(self, tmp_path):
        text = plot_of(tmp_path / "a.db", Session(trials=30, hostile=True)).text(80)
        assert "\x1b" not in text
        assert all(line.isprintable() for line in text.splitlines())

    def test_without_plotille_the_error_says_what_to_install(self, tmp_path, monkeypatch):
        plot = plot_of(tmp_path / "a.db", Session(trials=5, finals=False))
        monkeypatch.setitem(sys.modules, "plotille", None)
        with pytest.raises(ToolchainError, match="pip install plotille"):
            plot.text(80)

    def test_one_trial_and_none(self, tmp_path):
        assert "Best so far" in plot_of(tmp_path / "a.db", Session(trials=1, finals=False)).text(80)
        one = plot_of(tmp_path / "b.db", Session(trials=3, finals=False))
        assert "no trial has a time yet" in replace(one, study=replace(one.study, trials=())).text(80)

    def test_seconds_are_those_of_tuning(self, tmp_path):
        plot = plot_of(tmp_path / "a.db", Session(trials=30), over="seconds")
        assert (np.diff(plot.positions) >= 0).all()
        assert "(s)" in plot.text(80)

    def test_numbers_are_those_that_are_stored(self, tmp_path):
        plot = plot_of(tmp_path / "a.db", Session(trials=40))
        document = plot.to_json()
        name = plot.parameters[0]
        times = [time for entry in document["parameters"][name] for time in entry["times_us"]]
        assert sorted(times) == sorted(one.trial.time_us for one in plot.study.newest if one.trial.outcome.has_time)
        assert len(document["best_so_far"]) == len(plot.study.trials)


class TestTicks:
    @given(st.floats(1e-3, 1e9))
    def test_a_round_number_is_not_below_and_not_much_above(self, least):
        assert least * (1 - 1e-6) <= _nice(least) <= 1.35 * least

    @given(st.floats(0.1, 1e6), st.floats(1.01, 3.0))
    def test_a_tick_lies_in_its_line(self, low, ratio):
        text = _tick_text(math.log10(low), math.log10(low * ratio), log=True)
        assert not text or low * 0.999 <= float(text.replace(",", "")) <= low * ratio * 1.001

"""Results in a program or a notebook: their page, the report's charts as Plotly figures, trials as a pandas table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotile.core.argument_types import check_value
from autotile.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from autotile.core.device import DeviceProperties
    from autotile.core.model import Problem
    from autotile.report.study import StudyData


PageContent = tuple[str, str, Mapping[str, int], str | None, str | None]
"""Location of a database, and the studies of which a page is: kernel or operation, sizes, element type and name of the
GPU; empty or None selects all."""


class Reported:
    """Page with what is stored of a session, for its result, which has these fields."""

    __slots__ = ()
    problem: Problem
    device: DeviceProperties
    database: str

    def page_content(self) -> PageContent:
        """Return the database of the result, and what selects its studies."""
        of = self.problem
        return self.database, of.kernel, of.sizes, of.dtype, self.device.name

    def report(self, output: str | Path = "report.html") -> Path:
        """Write a page with charts and tables of the result, which opens offline; return its path.

        Parameters
        ----------
        output
            File to write, or folder to write ``report.html`` into.

        Raises
        ------
        InputError
            The database cannot be read, or the file cannot be written.
        ToolchainError
            Plotly is not installed (``pip install 'autotile[report]'``).
        """
        from autotile.report.sections import write_report_of  # imports the readers of the database

        return write_report_of(self.page_content(), output)


class StudyPlots:
    """Charts of a study and a table of its trials, for results that know which study they come from.

    Each ``plot_...`` method returns a Plotly figure. ``dark`` selects the theme of the charts; None takes the dark one
    if Plotly's default template is dark, as after ``plotly.io.templates.default = "plotly_dark"``. They raise a
    `ToolchainError` where Plotly is not installed, and an `InputError` where there is nothing to draw.
    """

    __slots__ = ()

    def study_data(self) -> StudyData:
        """Return the study with its runs and trials, as a report shows it.

        Raises
        ------
        InputError
            The study cannot be read, or is not one.
        """
        raise NotImplementedError

    def to_pandas(self) -> pd.DataFrame:
        """Return the trials of the study, in the order in which they were tried, as a pandas table.

        Columns are typed, and their names end with the unit: ``time_us``, ``stage.compile_s``; those of a configuration
        are ``param.BM`` and so on.

        Raises
        ------
        ToolchainError
            pandas is not installed.
        InputError
            As for `study_data`.
        """
        from autotile.exchange.column_table import trial_table

        study = self.study_data()
        return trial_table((study.key, one) for one in study.stored).to_pandas()

    def plot_best_so_far(self, axis: Literal["trials", "seconds"] = "trials", *, dark: bool | None = None) -> go.Figure:
        """Draw the best time so far, over trials or seconds, with the outcome of each trial."""
        check_value("axis", axis, Literal["trials", "seconds"])
        return self._plot("best_so_far_chart", dark=dark, axis=axis)

    def plot_finals(self, *, dark: bool | None = None) -> go.Figure:
        """Draw the finalists' times with their intervals; those that cannot be told apart are marked."""
        return self._plot("finals_chart", dark=dark)

    def plot_limits(self, *, dark: bool | None = None) -> go.Figure:
        """Draw what limits the best configurations: registers, shared memory, occupancy, spills."""
        return self._plot("limits_chart", dark=dark)

    def plot_importance(self, *, dark: bool | None = None) -> go.Figure:
        """Draw the share of each parameter in the differences of the times."""
        return self._plot("importance_chart", dark=dark)

    def plot_time_by_parameter(self, name: str, *, dark: bool | None = None) -> go.Figure:
        """Draw the distribution of the times at each value of a parameter."""
        return self._plot("time_by_parameter_chart", name, dark=dark)

    def plot_heat_map(self, x: str | None = None, y: str | None = None, *, dark: bool | None = None) -> go.Figure:
        """Draw the best time at each pair of values of two parameters, by default of those that matter most."""
        return self._plot("heat_map_chart", x, y, dark=dark)

    def plot_parallel_coordinates(self, *, dark: bool | None = None) -> go.Figure:
        """Draw each configuration as a line across the parameters; ranges of the axes can be brushed."""
        return self._plot("parallel_coordinates_chart", dark=dark)

    def plot_gates(self, *, dark: bool | None = None) -> go.Figure:
        """Draw how many configurations passed each gate, from all combinations to verified ones."""
        return self._plot("funnel_chart", dark=dark)

    def plot_failures(self, *, dark: bool | None = None) -> go.Figure:
        """Draw the reasons for which trials failed, most frequent first."""
        return self._plot("failures_chart", dark=dark)

    def plot_roofline(self, *, dark: bool | None = None) -> go.Figure:
        """Draw the trials under the ceilings that were measured on this GPU, else those of its datasheet."""
        return self._plot("roofline_chart", dark=dark)

    def plot_front(self, *, dark: bool | None = None) -> go.Figure:
        """Draw the Pareto front of a study with several objectives."""
        return self._plot("front_chart", dark=dark)

    def plot_drift(self, *, dark: bool | None = None) -> go.Figure:
        """Draw the reference kernel's time, the clock and the power over the session."""
        return self._plot("drift_chart", dark=dark)

    def _plot(self, chart: str, *parameters: str | None, dark: bool | None, **options: str) -> go.Figure:
        from autotile.report import charts  # not for results that are only printed
        from autotile.report.theme import figure_of

        study = self.study_data()
        for name in parameters:
            if name is not None and name not in study.parameters:
                raise InputError(f"there is no parameter {name!r}; there are {', '.join(study.parameters)}")
        return figure_of(getattr(charts, chart)(study, *parameters, **options), dark=dark)


def newest_study(database: str, problem: Problem, device: DeviceProperties) -> StudyData:
    """Read the study of a problem on a device, the one with the newest trial if there are several.

    The location is as a result states it. The password of a URL is masked there, so that only the user's own database
    can be opened again. It is an `InputError` if it cannot, or has no such study any more.
    """
    from autotile.database.database import database_location, location_text, open_existing
    from autotile.report.study import read_study

    location: Any = database_location(None) if database == location_text(None) else database
    if location is database and "***" in database:
        raise InputError(f"the password of {database} is not kept; use autotile.trials(..., database=...) instead")
    with open_existing(location) as opened:
        matching = [
            study
            for study in opened.studies(problem.kernel)
            if (study.key.problem, study.key.gpu_name, study.key.source) == (problem, device.name, device.source)
        ]
        if not matching:
            raise InputError(f"{database} has no trials of {problem} on {device.name} any more")
        return read_study(opened, max(matching, key=lambda study: str(study.last_at or "")))

"""Plots of studies as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotile.api.targets import merge_sizes
from autotile.core.argument_types import checked
from autotile.core.text import Displayed, plural
from autotile.database.database import open_for_reading
from autotile.errors import InputError, nearest
from autotile.kernel.library import KernelName, load_kernel
from autotile.report.report_data import read_report
from autotile.report.text_plots import DEFAULT_WIDTH, Over, StudyPlot, plots_of

MAX_PARAMETERS = 3
"""Parameters that are drawn if none is named."""


@dataclass(frozen=True, slots=True, repr=False)
class Plots(Displayed):
    """Plots of studies, oldest first.

    Attributes
    ----------
    plots
        One for each study.
    others
        Number of studies that are not drawn, as there are too many.
    """

    plots: tuple[StudyPlot, ...]
    others: int = 0

    def text(self, width: int = DEFAULT_WIDTH, *, ascii_only: bool = False) -> str:
        """Return the plots as lines of text of at most ``width`` columns."""
        return "\n\n\n".join(plot.text(width, ascii_only=ascii_only) for plot in self.plots)

    def _headline(self) -> str:
        return f"{plural(len(self.plots), 'study', 'studies')}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        return ("study", "drawn"), [(repr(plot), ", ".join(plot.parameters)) for plot in self.plots]


@checked
def plot(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    parameters: Sequence[str] = (),
    over: Over = "trials",
    dtype: str | None = None,
    database: str | Path | None = None,
    **named_sizes: int,
) -> Plots:
    """Draw the best so far, and the times by parameter, of what is stored of a kernel; ``print(result.text())``.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`.
    sizes, **named_sizes
        Problem sizes of the studies; sizes that are not given are not compared.
    parameters
        Parameters to draw; the three most important ones if empty.
    over
        Horizontal axis of the best so far: ``trials``, or ``seconds`` of tuning.
    dtype
        Element type of the studies; None for all.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        There is no such kernel, size or parameter, or nothing is stored of it.
    DatabaseError
        The database cannot be read.
    """
    given = merge_sizes(sizes, named_sizes)
    opened = open_for_reading(database)
    if opened is None:
        load_kernel(kernel)  # a misspelt name is an error of its own
        raise InputError("nothing has been tuned yet: there is no database; `autotile tune` makes one")
    with opened:
        found = read_report(opened, kernel, given, dtype=dtype)
        known = list(dict.fromkeys(name for study in found.studies for name in study.parameters))
        for name in parameters:
            if name not in known:
                raise InputError(f"{name} is not a parameter of {kernel}{nearest(name, known)}")
        return Plots(tuple(plots_of(found.studies, parameters, over, MAX_PARAMETERS)), len(found.others))

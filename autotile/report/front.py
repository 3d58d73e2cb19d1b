"""The front of a tuning with several objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, Listing
from autotile.core.model import Config, config_key, config_text
from autotile.core.objectives import ENERGY, ERROR, REGISTERS, TIME
from autotile.core.text import energy_text, plural, time_text
from autotile.tuning.result import Front

_SHOWN = 10

_TEXTS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {TIME: time_text, REGISTERS: lambda count: f"{count:.0f}", ENERGY: energy_text, ERROR: lambda share: f"{share:.2g}"}
)


def front_table(front: Front, winner: Config) -> RenderableType:
    """What can be had for what: a few configurations of the front, from the fastest to the slowest."""
    shown = sorted({round(place) for place in np.linspace(0, len(front.trials) - 1, min(_SHOWN, len(front.trials)))})
    rows = []
    for trial in (front.trials[index] for index in shown):
        values = zip(front.objectives, front.values(trial), strict=True)
        figures = (_TEXTS[name](value) for name, value in values)
        label = "winner" if config_key(winner) == config_key(trial.config) else ""
        rows.append((label, *figures, config_text(trial.config)))
    headings = ("", *(f"{RIGHT}{name}" for name in front.objectives), "configuration")
    return Group(Text(_heading(front, len(rows))), Listing(headings, rows, ("configuration",)))


def _heading(front: Front, shown: int) -> str:
    objectives = f"{', '.join(front.objectives[:-1])} and {front.objectives[-1]}"
    said = f"front of {objectives}: {plural(len(front.trials), 'configuration')}"
    return said if shown == len(front.trials) else f"{said}, {shown} shown; --json lists all"

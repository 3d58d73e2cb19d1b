"""Count a search space."""

from __future__ import annotations

from collections.abc import Mapping

from autotile.core.device import DeviceProperties
from autotile.ops.targets import open_problem
from autotile.report.space import SpaceReport
from autotile.space.search_space import feasible_space


def count_space(
    kernel: str, sizes: Mapping[str, int], device: DeviceProperties, *, dtype: str | None = None
) -> SpaceReport:
    """What each rule and limit leaves of a kernel's space; missing sizes are those of the search-space file.

    Raises
    ------
    InputError
        Unknown kernel, size or dtype, a malformed file, or a rule or limit that leaves nothing.
    """
    loaded, problem = open_problem(kernel, sizes, dtype, defaults=True)
    return SpaceReport(problem, device, feasible_space(loaded.spec, problem.sizes, device, problem.dtype))

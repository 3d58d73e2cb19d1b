"""The configuration that is served where nothing is tuned: the default, or one that is estimated to be far faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
from autotile.core.model import Config, Problem
from autotile.core.text import plural
from autotile.errors import SpecError
from autotile.kernel.library import Kernel
from autotile.space.limits import check_config, meets_heuristics

if TYPE_CHECKING:
    from autotile.space.search_space import SearchSpace
    from autotile.space.time_estimate import TimeEstimate

_MAX_ROWS = 4096
"""Maximum number of configurations that are estimated for a look-up; of a larger space, a sample."""
_MAX_COMBINATIONS = 10**9
"""Combinations of the largest space that is enumerated for a look-up, which takes some 0.1 s."""


@dataclass(frozen=True, slots=True)
class Estimated:
    """Reason to serve another configuration than the default.

    Attributes
    ----------
    time_us, default_us
        Estimated times of the configuration and of the default in microseconds, each within about a factor of two; None
        for a default that cannot run here, or that a search would not try here.
    reason
        How their launches differ, as a clause.
    """

    time_us: float
    default_us: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"time_us": self.time_us, "default_us": self.default_us, "reason": self.reason}


def untuned_config(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    *,
    is_wrong: Callable[[Config], bool],
    estimates: bool = True,
) -> tuple[Config, Estimated | None]:
    """Return the configuration to serve where nothing is tuned, and the reason if it is not the default.

    The default is served unless its estimated time is at least twice the estimated least one, and the file states
    enough for such an estimate. Where the default cannot run, or is not worth a trial, the one with the least estimate
    is served, or the first one if there are no estimates.

    Parameters
    ----------
    kernel, problem, device
        The request.
    is_wrong
        Whether a configuration was found to give wrong results for this problem.
    estimates
        Whether estimates may be used.
    """
    spec, sizes = kernel.spec, problem.sizes
    default = dict(spec.default)
    is_valid = not check_config(spec, default, sizes, device, problem.dtype)
    is_served = is_valid and meets_heuristics(spec, default, sizes, device)
    if is_served and not (estimates and _may_be_slow(kernel, problem, device)):
        return default, None
    from autotile.space.search_space import feasible_space

    try:
        space = feasible_space(spec, sizes, device, problem.dtype)
    except SpecError:
        if is_valid:  # the space is too large to enumerate
            return default, None
        raise
    found = _fastest(kernel, problem, device, space, is_wrong, beside=default if is_served else None)
    if estimates and found is not None:
        return found
    return (default if is_served else space.config(0)), None


def _may_be_slow(kernel: Kernel, problem: Problem, device: DeviceProperties) -> bool:
    """Return whether another configuration may be far faster than the default, by the device's peaks."""
    from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_configs

    if kernel.spec.work.flops is None or prod(len(each.values) for each in kernel.spec.parameters) > _MAX_COMBINATIONS:
        return False
    found = estimate_configs(kernel.spec, problem.sizes, device, [kernel.spec.default], problem.dtype)
    return found is not None and found.is_declared and found.time_us[0] >= CONFIDENT_FACTOR * found.bound_us[0]


def _fastest(
    kernel: Kernel,
    problem: Problem,
    device: DeviceProperties,
    space: SearchSpace,
    is_wrong: Callable[[Config], bool],
    *,
    beside: Config | None,
) -> tuple[Config, Estimated] | None:
    """Return the configuration of the least estimate; None without estimates, or if ``beside`` may be as fast."""
    import numpy as np

    from autotile.space.search_space import SearchSpace
    from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_times

    codes = space.codes
    if len(codes) > _MAX_ROWS:
        codes = codes[random.Random(0).sample(range(len(codes)), _MAX_ROWS)]  # numpy.random takes long to import
    if beside is not None:
        codes = np.concatenate([SearchSpace.of(kernel.spec, [beside]).codes.astype(codes.dtype), codes])
    tried = replace(space, codes=np.asfortranarray(codes))
    found = estimate_times(kernel.spec, problem.sizes, device, tried, problem.dtype)
    if found is None or (beside is not None and not found.is_declared):
        return None
    least = float(found.time_us[0]) / CONFIDENT_FACTOR if beside is not None else np.inf
    for row in np.argsort(found.time_us, kind="stable").tolist():
        if found.time_us[row] > least:
            return None
        config = tried.config(row)
        if not is_wrong(config):
            reason = _comparison(found, row, device) if beside is not None else ""
            default_us = float(found.time_us[0]) if beside is not None else None
            return config, Estimated(float(found.time_us[row]), default_us, reason)
    return None


def _comparison(found: TimeEstimate, row: int, device: DeviceProperties) -> str:
    """Compare the launch of a row with that of the first one, the default."""

    def launch(index: int) -> str:
        blocks, threads = int(found.blocks[index]), int(found.threads[index])
        busy = f"{min(blocks, device.sm_count)} of {device.sm_count} SMs"
        return f"{plural(blocks, 'block')} of {threads} threads on {busy}"

    ours, default = launch(row), launch(0)
    return f"{ours}, the default's {default}"

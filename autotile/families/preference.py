"""Comparison of configurations at a problem at which they were not measured.

A configuration that was measured at another problem is compared with the one that is served without that measurement,
the base. The ratio of their times is the ratio measured there, times the factor by which the ratio of their estimates
changes from there to here (`autotile.space.time_estimate`): what an estimate misses, such as the quality of the
compiled loop, mostly stays the same. Its doubt grows with the distance, with that change, and where a configuration
keeps fewer warps in flight than it was measured with, as latencies that were hidden there may not be hidden here.

Where the kernel's file does not say enough for an estimate, only the blocks are counted: the share of the SMs that is
idle in the last round of blocks. The doubt is then larger.

The constants were chosen on the recordings of ``sgemm_2d`` at five problems, and checked on the times of ``sgemm`` and
``gemm_mma`` at 24 problems each, which were not used to choose them; see docs/internals.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Problem, Sizes, config_key
from autotile.errors import AutotileError
from autotile.kernel.launch import launch_geometry
from autotile.kernel.problem import size_distance
from autotile.kernel.spec import KernelSpec
from autotile.space.time_estimate import estimate_configs

Column = NDArray[np.float64]

_LEAST_DOUBT = 0.03
_DOUBT_PER_DOUBLING = 0.1
_FULL_DOUBT = 0.1
"""Doubt at the measured problem itself, its growth with the distance, and its maximum. Within half a doubling, 95 % of
the errors were below 0.06; beyond, the maximum left no served configuration slower than the default."""
_CHECKED_DOUBLINGS = 14.0
"""Largest distance of the problems on which the doubts were checked; beyond, the doubt grows without a maximum."""
_DOUBT_OF_FLAG = 0.1
"""Further doubt for each flag that differs: a flag selects another code path."""
_DOUBT_OF_CHANGE = 0.3
"""Share of the change of the estimated ratio that is doubted; twice that where the file does not declare the work."""
_DOUBT_OF_WARPS = 0.12
"""Doubt for each halving of the warps in flight on an SM."""
_UNCOUNTED_DOUBT = 0.1
"""Further doubt for each doubling of the distance where only blocks are counted."""
_UNMEASURED_DOUBT = 0.25
"""Further doubt where the base was measured nowhere near, and only its estimate is known; 95 % of the errors of such a
ratio were below it."""
_USUAL_GAIN = 0.12
"""Logarithm of the default's time over that of a winner, assumed where the default's time is not known: the median of
the recordings that ship."""

MAX_STUDIES = 4
"""Number of tuned problems, the nearest ones, whose results are compared."""
WITH_FINALISTS = 2
"""Number of these whose finalists are compared, too: serving has to read them."""
FINALISTS = 12
"""Number of the fastest configurations of a tuned problem that are compared, as many as its finals have by default."""

_MARGIN = 0.05
"""Least gain for which a farther problem, or a slower finalist, is preferred."""
_MAX_LOG = 700.0
"""Logarithm of nearly the largest float64."""


class Tuned(msgspec.Struct, frozen=True):
    """A tuned problem."""

    sizes: Sizes
    device: DeviceProperties | None
    """The GPU that it was tuned on; None if that is not known."""
    configs: Mapping[str, Config]
    """Configurations that may be served from it by `config_key`, the fastest first."""
    times_us: Mapping[str, float]
    """Measured times by `config_key`, also of other configurations."""


class Expectation(msgspec.Struct, frozen=True):
    """Expected time of a configuration over that of the base, as the logarithm of the ratio.

    The doubt is half of the width of its interval; infinite where nothing is known. ``study`` is the position of the
    tuned problem of the configuration, and ``key`` its `config_key`.
    """

    log_ratio: float
    doubt: float
    study: int
    key: str

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the base by more than the doubt."""
        return self.log_upper < 0

    @property
    def log_upper(self) -> float:
        """Upper end of the interval of `log_ratio`."""
        return self.log_ratio + self.doubt

    @property
    def ratio(self) -> float:
        """Expected time over that of the base."""
        return math.exp(self.log_ratio)

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the interval of `ratio`."""
        upper = math.exp(self.log_upper) if self.log_upper < _MAX_LOG else math.inf
        return math.exp(self.log_ratio - self.doubt), upper


_identity = attrgetter("name", "compute_capability", "sm_count")
"""Returns what tells a device from others."""
_MAX_KNOWN = 256
_Launched = tuple[Column | None, Column | None, Column | None, bool]  # see `_launched`
_known: dict[tuple[object, ...], _Launched] = {}
"""Launches at tuned problems of the base, the default and what may be served from there, which look-ups of ever new
sizes compare with."""


def prefer(
    spec: KernelSpec,
    problem: Problem,
    device: DeviceProperties,
    base: Config,
    studies: Sequence[Tuned],
    *,
    may_serve: Callable[[int, str], bool] = lambda _, __: True,
) -> Expectation | None:
    """Return the configuration of near tuned problems that is the fastest if its doubt counts against it.

    The base is what is served without them; it is displaced only if the other's `Expectation.is_faster`. None is
    returned if there is nothing to compare: no configuration, or none but the base. Studies are the nearest first, and
    ``may_serve`` is asked with the position of one and a `config_key`.
    """
    base_key, default_key = config_key(base), config_key(spec.default)
    tried = [config for tuned in studies for key, config in tuned.configs.items() if key != base_key]
    if not tried:
        return None
    log_us, idle, warps, is_declared = _launched(spec, problem, device, [base, spec.default, *tried])
    found: list[Expectation] = []
    for number, tuned in enumerate(studies):
        own = [key for key in tuned.configs if key != base_key]
        if not own:
            continue
        device_there = tuned.device or device
        known = (spec.text, problem.dtype, *_identity(device_there), *tuned.sizes.items(), base_key, *tuned.configs)
        there = None if spec.computed else _known.get(known)  # the text does not say what a function computes
        if there is None:
            compared = [base, spec.default, *(tuned.configs[key] for key in own)]
            there = _launched(spec, problem.at(tuned.sizes), device_there, compared)
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[known] = there
        log_us_there, idle_there, warps_there, _ = there
        is_estimated = log_us is not None and log_us_there is not None
        now, then = (log_us, log_us_there) if is_estimated else (idle, idle_there)
        is_counted = now is not None and then is not None
        if now is None or then is None:
            now = then = np.zeros(len(tried) + 2)

        flags, doublings = size_distance(tuned.sizes, problem.sizes)
        if tuned.device is not None and _identity(tuned.device) != _identity(device):
            doublings = max(doublings, 1.0)  # another GPU counts as one doubling at least
        of_distance = min(_LEAST_DOUBT + _DOUBT_PER_DOUBLING * doublings, _FULL_DOUBT) + _DOUBT_OF_FLAG * flags
        of_distance += _DOUBT_PER_DOUBLING * max(doublings - _CHECKED_DOUBLINGS, 0.0)

        base_us, default_us = tuned.times_us.get(base_key), tuned.times_us.get(default_key)
        by_base = base_us is not None or base_key == default_key  # else by the default, the link between both
        reference, reference_us = (0, base_us) if by_base else (1, default_us)
        for row_there, key in enumerate(own, start=2):
            row, time_us = len(found) + 2, tuned.times_us.get(key)
            estimated_there = float(then[row_there] - then[reference])
            if time_us is not None and reference_us is not None:
                measured = math.log(time_us / reference_us)
            else:
                measured = min(-_USUAL_GAIN, estimated_there if is_estimated else 0.0)
            change = float(now[row] - now[reference]) - estimated_there
            log_ratio = measured + change

            doubt = of_distance + _DOUBT_OF_CHANGE * (1 if is_declared else 2) * abs(change)
            if warps is not None and warps_there is not None:
                doubt += _DOUBT_OF_WARPS * max(float(warps_there[row_there] - warps[row]), 0.0)
            if not is_estimated:
                doubt += _UNCOUNTED_DOUBT * doublings * (1 if is_counted else 2)
            if not by_base and is_estimated:
                log_ratio, doubt = log_ratio + float(now[1] - now[0]), doubt + _UNMEASURED_DOUBT
            elif not by_base:
                log_ratio, doubt = 0.0, math.inf
            found.append(Expectation(log_ratio, doubt, number, key))
    while found:
        best = found[0]
        for one in found[1:]:
            if one.is_faster > best.is_faster or best.log_upper - one.log_upper > _MARGIN:
                best = one
        if may_serve(best.study, best.key):
            return best
        found.remove(best)
    return None


def _launched(spec: KernelSpec, problem: Problem, device: DeviceProperties, configs: Sequence[Config]) -> _Launched:
    """Estimate launches of configurations; or count their blocks, where they cannot be estimated.

    The result is the logarithms of the estimated times, those of the factors by which a partial last round of blocks
    prolongs a launch, and the binary logarithms of the warps in flight on an SM, each of shape (configurations,), None
    where not known; and whether the estimate is based on declared work and registers.
    """
    found = estimate_configs(spec, problem, device, configs)
    if found is not None:
        blocks, resident, threads = found.blocks, found.blocks_per_sm, found.threads
    else:
        try:
            geometries = [launch_geometry(spec, config, problem, device) for config in configs]
        except AutotileError:
            return None, None, None, False
        blocks = np.array([math.prod(each.grid) for each in geometries], float)
        threads = np.array([each.threads for each in geometries], float)
        resident = np.maximum(device.max_threads_per_sm // threads, 1.0)
    rounds = np.ceil(blocks / device.sm_count)
    warps = np.minimum(rounds, resident) * np.ceil(threads / device.warp_size)
    idle = np.log(rounds * device.sm_count / blocks)
    log_us = np.log(found.time_us) if found is not None else None
    return log_us, idle, np.log2(warps), found is not None and found.is_declared

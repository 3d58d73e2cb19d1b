"""Choice of the kernels worth tuning for a product, and distribution of the wall-time budget among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gemm_product import Product, emulating_kernels

_SUPERSEDED_BY = {"gemm_mma": "gemm_wgmma"}
"""Kernels that lose to another one that fits, unless the product is small or narrow."""
_NARROW = 256
"""With at most this many rows or columns, the largest tile sizes yield too few tiles."""
_SMALL_FLOPS = 2.0 * 1280**3
_MAX_VECTORS = 16
"""Maximum number of rows or columns that gemm_small supports."""
_FEW_VECTORS = 4
"""Up to this many, the time is that of reading the large matrix, and no kernel reads it faster."""

_PROBE_S = 6.0
"""Wall time of the probe of one kernel, in seconds."""
_PROBE_SHARE = 0.4
"""Maximum share of the budget for the probes of all kernels."""
_MIN_TRIED = 4
"""A kernel with fewer configurations tried, because startup took most of its probe, is not ranked by the probe."""
_MIN_SEARCH_S = 1.0
"""Minimum search time for which a session is worth starting, in seconds."""
_NEAR_RATIO = 1.2
"""A kernel within this ratio of the leader's time may still win when both are tuned further: a probe tries little more
than the winners of other shapes."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a session.

    Attributes
    ----------
    time_us
        Time of the fastest configuration.
    after_search_s
        Expected time of a session of the kernel beyond its search: finals, startup and shutdown.
    tried
        Number of configurations of the kernel tried so far.
    """

    time_us: float
    after_search_s: float
    tried: int


class Session(Protocol):
    """Function that tunes one kernel, resuming from its earlier sessions."""

    def __call__(self, kernel: str, search_s: float, *, finals: bool) -> Found | None:
        """Search for ``search_s`` seconds from the start of the session; return None if no configuration runs."""


def worth_tuning(product: Product, fitting: Collection[str]) -> list[str]:
    """Return the fitting kernels that may win, judging by the shape of the product."""
    fewest = min(product.m, product.n)
    if "gemm_small" in fitting and fewest <= _FEW_VECTORS:
        return ["gemm_small"]
    small = fewest <= _NARROW or product.flops <= _SMALL_FLOPS
    return [
        name
        for name in fitting
        if (small or _SUPERSEDED_BY.get(name) not in fitting) and (name != "gemm_small" or fewest <= _MAX_VECTORS)
    ]


def share_out(
    kernels: Sequence[str], budget_s: float, tune: Session, clock: Callable[[], float] = time.monotonic
) -> None:
    """Probe each kernel briefly, and share the remaining budget among the leaders.

    A probe holds no finals: it only determines which kernels lead.

    Parameters
    ----------
    budget_s
        Total wall time.
    tune
        Function that runs a session.
    clock
        Clock in seconds, like `time.monotonic`.
    """
    if not kernels:
        return
    deadline = clock() + budget_s
    probe_s = min(_PROBE_S, _PROBE_SHARE * budget_s / len(kernels))
    probes = {name: found for name in kernels if (found := tune(name, probe_s, finals=False)) is not None}
    chosen = leaders({name: found.time_us for name, found in probes.items()})
    chosen += [name for name, found in probes.items() if name not in chosen and found.tried < _MIN_TRIED]
    for place, name in enumerate(chosen):
        share_s = (deadline - clock()) / (len(chosen) - place)
        search_s = share_s - probes[name].after_search_s
        if search_s >= _MIN_SEARCH_S:
            tune(name, search_s, finals=True)


def leaders(times_us: Mapping[str, float]) -> list[str]:
    """Return the fastest kernel, the fastest without emulation, and those close to either, fastest first.

    The best result on the CUDA cores is reported separately, so kernels that do not emulate compete among themselves.
    """
    ieee = {name: time_us for name, time_us in times_us.items() if name not in emulating_kernels()}

    def leads(name: str) -> bool:
        rivals = times_us if name in emulating_kernels() else ieee
        return times_us[name] <= _NEAR_RATIO * min(rivals.values())

    return sorted(filter(leads, times_us), key=times_us.__getitem__)

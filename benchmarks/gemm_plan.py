"""Which kernels are worth tuning for a product, and how they share a budget of wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotile.serving.matmul import EMULATED, Product

_AHEAD_WHERE_LARGE = {"gemm_mma": "gemm_wgmma"}
"""Kernels that lose to another one, where that fits, unless the product is small or narrow."""
_NARROW = 256
"""Fewer rows or columns make too few tiles of the largest sizes."""
_SMALL_FLOPS = 2.0 * 1280**3
_VECTORS = 16
"""Most rows or columns that gemm_small takes."""
_FEW_VECTORS = 4
"""As many or fewer take as long as it takes to read the large matrix, and no kernel reads it faster."""

_PROBE_S = 6.0
"""Wall time of a first look at a kernel."""
_PROBES = 0.4
"""Part of the budget that the looks at all kernels may take."""
_LOOKED = 4
"""A kernel of which fewer configurations were tried, as starting up took most of the look, is not judged by them."""
_LEAST_S = 1.0
"""A session does not begin to search any sooner."""
_NEAR = 1.2
"""A kernel that takes up to so many times the leader's time may still win when both are tuned further: a first look
tries little more than what won at other shapes."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a session found.

    Attributes
    ----------
    time_us
        Of the fastest configuration.
    after_search_s
        What a session of the kernel is expected to take beyond its search: finals, and what begins and ends it.
    tried
        Configurations of the kernel so far.
    """

    time_us: float
    after_search_s: float
    tried: int


class Session(Protocol):
    """Tunes one kernel, going on from its sessions before."""

    def __call__(self, kernel: str, search_s: float, *, finals: bool) -> Found | None:
        """Search for so long, from the session's start; None where no configuration runs."""


def worth_tuning(product: Product, fitting: Collection[str]) -> list[str]:
    """Those of the fitting kernels that may win, as far as the product's shape tells."""
    fewest = min(product.m, product.n)
    if "gemm_small" in fitting and fewest <= _FEW_VECTORS:
        return ["gemm_small"]
    small = fewest <= _NARROW or product.flops <= _SMALL_FLOPS
    return [
        name
        for name in fitting
        if (small or _AHEAD_WHERE_LARGE.get(name) not in fitting) and (name != "gemm_small" or fewest <= _VECTORS)
    ]


def share_out(
    kernels: Sequence[str], budget_s: float, tune: Session, clock: Callable[[], float] = time.monotonic
) -> None:
    """Look at each kernel briefly, and share what is left of the budget among those that lead.

    A first look holds no finals: all that it has to tell is which kernels lead.

    Parameters
    ----------
    budget_s
        Wall time of everything together.
    tune
        Holds a session.
    clock
        Seconds, as of `time.monotonic`.
    """
    if not kernels:
        return
    deadline = clock() + budget_s
    probe_s = min(_PROBE_S, _PROBES * budget_s / len(kernels))
    looks = {name: found for name in kernels if (found := tune(name, probe_s, finals=False)) is not None}
    chosen = leaders({name: found.time_us for name, found in looks.items()})
    chosen += [name for name, found in looks.items() if name not in chosen and found.tried < _LOOKED]
    for place, name in enumerate(chosen):
        share_s = (deadline - clock()) / (len(chosen) - place)
        search_s = share_s - looks[name].after_search_s
        if search_s >= _LEAST_S:
            tune(name, search_s, finals=True)


def leaders(times_us: Mapping[str, float]) -> list[str]:
    """The fastest kernel, the fastest that does not emulate, and whichever is near the one or the other, fastest first.

    What runs on the CUDA cores alone is a result of its own, so a kernel that does competes with its like.
    """
    ieee = {name: time_us for name, time_us in times_us.items() if name not in EMULATED}

    def leads(name: str) -> bool:
        rivals = times_us if name in EMULATED else ieee
        return times_us[name] <= _NEAR * min(rivals.values())

    return sorted(filter(leads, times_us), key=times_us.__getitem__)

"""Tune the kernels that can compute a product, within one budget of wall time."""

from __future__ import annotations

import time
from typing import Any

import autotile
from autotile.dispatch.matmul import fitting_kernels
from autotile.dispatch.product import Product
from autotile.ground.errors import AutotileError, InputError

_OVERHEAD_S = 6.0
"""What a session takes beside its search: start, float64 reference, finals, proof."""
_LEAST_SEARCH_S = 1.5
_FINALISTS = 6
_SAMPLE_LIMIT_S = 0.05
_FEW_ROWS = 256
"""A product with fewer rows or columns has too few tiles for the largest tiles, so that other kernels may win."""


def tune_product(product: Product, budget_s: float, database: str | None) -> None:
    """Tune what fits; afterwards the database holds a winner of each kernel.

    The kernel of the newer tensor-core instructions is tuned alone where it fits and the product has tiles enough. What
    is left of the budget goes to the kernel that leads.

    Parameters
    ----------
    budget_s
        Wall time of everything together.
    """
    deadline = time.monotonic() + budget_s
    candidates = _candidates(product, database)
    times: dict[str, float] = {}
    for place, (name, sizes) in enumerate(candidates.items()):
        share_s = (deadline - time.monotonic()) / (len(candidates) - place)
        if time_us := _tune(name, product.dtype, sizes, share_s - _OVERHEAD_S, database):
            times[name] = time_us
    left_s = deadline - time.monotonic() - _OVERHEAD_S
    if times and left_s > _LEAST_SEARCH_S:
        leader = min(times, key=times.__getitem__)
        _tune(leader, product.dtype, candidates[leader], left_s, database)


def _candidates(product: Product, database: str | None) -> dict[str, dict[str, Any]]:
    fitting = {
        name: sizes
        for name, sizes in fitting_kernels(product).items()
        if _has_configurations(name, product.dtype, sizes, database)
    }
    few = min(product.m, product.n) <= _FEW_ROWS
    return {name: sizes for name, sizes in fitting.items() if few or name != "gemm_mma" or "gemm_wgmma" not in fitting}


def _has_configurations(name: str, dtype: str, sizes: dict[str, Any], database: str | None) -> bool:
    try:
        autotile.get_best_kernel(name, dtype=dtype, database=database, **sizes)
    except InputError:
        return False
    return True


def _tune(name: str, dtype: str, sizes: dict[str, Any], search_s: float, database: str | None) -> float | None:
    """One session; the winner's time, or None where no configuration of the kernel runs."""
    options = autotile.TuneOptions(
        budget_s=max(search_s, _LEAST_SEARCH_S),
        finals=_FINALISTS,
        sample_limit_s=_SAMPLE_LIMIT_S,
        database=database,
    )
    try:
        result = autotile.tune(name, dtype=dtype, options=options, **sizes)
    except AutotileError as error:
        print(f"  {name}: {error}", flush=True)
        return None
    return result.winner.time_us if result.winner is not None else None

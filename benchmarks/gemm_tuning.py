"""Tune every kernel that can compute a product, within one budget of wall time."""

from __future__ import annotations

import time

import autotile
from autotile.dispatch.matmul import fitting_kernels
from autotile.dispatch.product import Product
from autotile.ground.errors import AutotileError
from autotile.tuning.result import TuneResult

_OVERHEAD_S = 7.0
"""What a session takes beside its search: start, float64 reference, finals, proof."""
_LEAST_SEARCH_S = 2.0
_FIRST_ROUND = 0.6
"""Share of the budget in which all kernels are tried; the rest goes to the one that leads."""


def tune_product(product: Product, budget_s: float, database: str | None) -> None:
    """Tune what fits; afterwards the database holds a winner of each kernel.

    Parameters
    ----------
    budget_s
        Wall time of everything together.
    """
    deadline = time.monotonic() + budget_s
    sizes = fitting_kernels(product)
    first_end = time.monotonic() + (budget_s if len(sizes) == 1 else _FIRST_ROUND * budget_s)
    times: dict[str, float] = {}
    for place, name in enumerate(sizes):
        share_s = (first_end - time.monotonic()) / (len(sizes) - place)
        result = _tune(name, product.dtype, sizes[name], share_s, database)
        if result is not None and result.winner is not None and result.winner.time_us is not None:
            times[name] = result.winner.time_us
    if times and len(sizes) > 1:
        leader = min(times, key=times.__getitem__)
        _tune(leader, product.dtype, sizes[leader], deadline - time.monotonic(), database)


def _tune(name: str, dtype: str, sizes: dict[str, int], seconds: float, database: str | None) -> TuneResult | None:
    """One session; None where no configuration of the kernel runs."""
    options = autotile.TuneOptions(budget_s=max(seconds - _OVERHEAD_S, _LEAST_SEARCH_S), database=database)
    try:
        return autotile.tune(name, dtype=dtype, options=options, **sizes)
    except AutotileError as error:
        print(f"  {name}: {error}")
        return None

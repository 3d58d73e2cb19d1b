"""Tuning of all kernels that can compute a product, within one wall-time budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemm_plan import Found, share_out, worth_tuning
from gemm_product import Product, fitting_kernels
from gemm_seeds import Seed, seeds_of

from autotile.errors import AutotileError, InputError
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import find_best_kernel, forget_served
from autotile.settings import read_settings
from autotile.tuning.lanes import Lane
from autotile.tuning.options import TuneOptions
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune
from autotile.workers.child import WorkerPool

_FINALISTS = 6
_SAMPLE_LIMIT_S = 0.05
_RACE_S, _ROUNDS = 3.0, 60
_CHECKS_S, _CHECKS = 15.0, 75
"""Limits of the race of the finals and of the finalist checks: seconds and number of rounds or runs."""
_COMPARING_S = 2e-3
"""Time to verify a candidate, excluding its two launches: on an H200, the checks at 4096 cubed take 0.6 s."""
_MARGIN_S = 0.5
"""Margin for the candidate in flight when the search ends, and for the longer summary of a longer session."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Cost of tuning a product: wall time, and the number of configurations tried per kernel, earlier runs included."""

    seconds: float = 0.0
    tried: Mapping[str, int] = field(default_factory=dict)


def tune_product(
    product: Product, budget_s: float, database: str | None, worker_pool: WorkerPool, seeds: Sequence[Seed] = ()
) -> Tuned:
    """Tune the kernels that may win; afterwards the database holds a result of each.

    Parameters
    ----------
    budget_s
        Total wall time.
    database
        Path or URL; None for the user's database.
    worker_pool
        Keeps workers from one session to the next.
    seeds
        Configurations to try first, in addition to the winners of other sizes.
    """
    start = time.monotonic()
    sessions = _Sessions(product, database, worker_pool, seeds)
    share_out(worth_tuning(product, sessions.served), budget_s - (time.monotonic() - start), sessions)
    forget_served()
    return Tuned(time.monotonic() - start, sessions.tried)


class _Sessions:
    """Tuning sessions of one product.

    The first session of a kernel tries the winners of the nearest sizes, and nothing else if there are any; later
    sessions resume from there. The results at one size guide the search at the next.
    """

    def __init__(self, product: Product, database: str | None, worker_pool: WorkerPool, seeds: Sequence[Seed]) -> None:
        self._product = product
        self._database = database
        self._worker_pool = worker_pool
        self._seeds = seeds
        self._sizes = fitting_kernels(product)
        self.served = {name: kernel for name in self._sizes if (kernel := self._serve(name)) is not None}
        self.tried: dict[str, int] = {}

    def __call__(self, kernel: str, search_s: float, *, finals: bool) -> Found | None:
        """Search and hold the finals, see `gemm_plan.Session`.

        The finals are a separate session, which does not wait for pending compilations of the search; the inputs have
        been prepared by then.
        """
        start = time.monotonic()
        result = self._hold(kernel, self._search_options(kernel, search_s))
        time_us = _time_us(result)
        if result is None or time_us is None:
            return None
        outside_s = time.monotonic() - start - result.phases["start"] - result.phases["search"]
        if finals:
            self._hold(kernel, self._options(budget_s=0.0, finals=_FINALISTS))
        return Found(time_us, 2 * outside_s + _finals_s(time_us) + _MARGIN_S, self.tried[kernel])

    def _search_options(self, kernel: str, search_s: float) -> TuneOptions:
        seeds = [] if kernel in self.tried else seeds_of(self.served[kernel], self._seeds, self._database)
        if any(seed != self.served[kernel].definition.spec.default for seed in seeds):  # the default alone is no seed
            return self._options(budget_s=search_s, only=tuple(seeds), sampler="brute-force")
        return self._options(budget_s=search_s)

    def _options(self, *, budget_s: float, finals: int = 0, **others: Any) -> TuneOptions:
        return TuneOptions(
            budget_s=budget_s, finals=finals, sample_limit_s=_SAMPLE_LIMIT_S, database=self._database, **others
        )

    def _hold(self, kernel: str, options: TuneOptions) -> TuneResult | None:
        """Run one session and print its result; return None if it fails."""
        start = time.monotonic()
        served = self.served[kernel]
        try:
            lane = Lane(worker_pool=self._worker_pool)
            result = tune(served.definition, served.problem, read_settings(), options, lane=lane)
        except AutotileError as error:
            print(f"  {kernel}: {error}", flush=True)
            return None
        self.tried[kernel] = sum(result.outcomes.values())
        print(f"  {_line(kernel, result, time.monotonic() - start)}", flush=True)
        return result

    def _serve(self, kernel: str) -> BoundKernel | None:
        """Return the kernel served so far; None if no configuration is valid for the product."""
        location = self._database or read_settings().database
        try:
            return find_best_kernel(kernel, self._product.dtype, None, location, self._sizes[kernel])
        except InputError:
            return None


def _finals_s(fastest_us: float) -> float:
    """Return the expected time of a race of the finalists, the default and the current winner, and of the checks."""
    launch_s = 1e-6 * fastest_us
    race_s, checks_s = _ROUNDS * (_FINALISTS + 2) * launch_s, _CHECKS * (2 * launch_s + _COMPARING_S)
    return min(race_s, _RACE_S) + min(checks_s, _CHECKS_S)


def _time_us(result: TuneResult | None) -> float | None:
    """Return the time of the fastest configuration; None if there is none."""
    return result.winner.time_us if result is not None and result.winner is not None else None


def _line(kernel: str, result: TuneResult, wall_s: float) -> str:
    trials = sum(result.outcomes.values())
    time_us = _time_us(result)
    found = f"{time_us:,.1f} us" if time_us is not None else "no configuration ran"
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases.items())
    return f"{kernel}: {found}, {trials - result.resumed} more configurations in {wall_s:.1f} s ({phases})"

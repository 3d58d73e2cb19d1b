"""Tune the kernels that can compute a product, within one budget of wall time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemm_plan import Found, share_out, worth_tuning
from gemm_seeds import Seed, seeds_of

import autotile
from autotile.dispatch.bound import BoundKernel
from autotile.dispatch.matmul import fitting_kernels
from autotile.dispatch.product import Product
from autotile.dispatch.serving import find_best_kernel
from autotile.files.settings import read_settings
from autotile.ground.errors import AutotileError, InputError
from autotile.ground.model import Trial
from autotile.tuning.result import TuneResult

_FINALISTS = 6
_SAMPLE_LIMIT_S = 0.05
_RACE_S, _ROUNDS = 3.0, 60
_PROOF_S, _PROOFS = 15.0, 75
"""Most that the finals take for their race and for the winner's proof, see `autotile.tuning.finals` and `.proof`."""
_MARGIN_S = 0.5
"""For the candidate that is under way when the search ends, and for what a longer session has more to sum up."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning a product took: wall time, and how many configurations of each kernel were tried, now or earlier."""

    seconds: float = 0.0
    tried: Mapping[str, int] = field(default_factory=dict)


def tune_product(product: Product, budget_s: float, database: str | None, seeds: Sequence[Seed] = ()) -> Tuned:
    """Tune what may win; afterwards the database holds a result of each kernel.

    Parameters
    ----------
    budget_s
        Wall time of everything together.
    seeds
        Configurations to try first, beside what won at other sizes.
    """
    start = time.monotonic()
    sessions = _Sessions(product, database, seeds)
    share_out(worth_tuning(product, sessions.served), budget_s - (time.monotonic() - start), sessions)
    return Tuned(time.monotonic() - start, sessions.tried)


class _Sessions:
    """Tuning sessions of one product.

    The first one of a kernel tries what won at the nearest sizes, and nothing else where there is any such thing; its
    later ones go on from there. What they find at one size teaches the next.
    """

    def __init__(self, product: Product, database: str | None, seeds: Sequence[Seed]) -> None:
        self._product = product
        self._database = database
        self._seeds = seeds
        self._sizes = fitting_kernels(product)
        self.served = {name: kernel for name in self._sizes if (kernel := self._serve(name)) is not None}
        self.tried: dict[str, int] = {}

    def __call__(self, kernel: str, search_s: float, *, finals: bool) -> Found | None:
        """Hold a session, see `gemm_plan.Session`."""
        start = time.monotonic()
        seeds = [] if kernel in self.tried else seeds_of(self.served[kernel], self._seeds, self._database)
        seeded = len(seeds) > 1  # the default alone is no seed
        options = autotile.TuneOptions(
            sampler="brute-force" if seeded else "auto",
            budget_s=search_s,
            only=tuple(seeds) if seeded else None,
            finals=_FINALISTS if finals else 0,
            sample_limit_s=_SAMPLE_LIMIT_S,
            database=self._database,
        )
        try:
            result = autotile.tune(kernel, dtype=self._product.dtype, options=options, **self._sizes[kernel])
        except AutotileError as error:
            print(f"  {kernel}: {error}", flush=True)
            return None
        wall_s = time.monotonic() - start
        self.tried[kernel] = sum(result.outcomes.values())
        print(f"  {_line(kernel, result, wall_s)}", flush=True)
        if result.winner is None or result.winner.time_us is None:
            return None
        overhead_s = wall_s - sum(result.phases.values())
        return Found(result.winner.time_us, overhead_s + _finals_s(result.winner) + _MARGIN_S)

    def _serve(self, kernel: str) -> BoundKernel | None:
        """What is served so far; None where no configuration is valid here."""
        location = self._database or read_settings().database
        try:
            return find_best_kernel(kernel, self._product.dtype, None, location, self._sizes[kernel])
        except InputError:
            return None


def _finals_s(fastest: Trial) -> float:
    """What a race of the finalists, the default and the winner so far is expected to take, and the winner's proof."""
    race_s = _ROUNDS * (_FINALISTS + 2) * 1e-6 * (fastest.time_us or 0.0)
    proof_s = _PROOFS * fastest.seconds.get("verify", 0.0)
    return min(race_s, _RACE_S) + min(proof_s, _PROOF_S)


def _line(kernel: str, result: TuneResult, wall_s: float) -> str:
    trials = sum(result.outcomes.values())
    time_us = result.winner.time_us if result.winner is not None else None
    found = f"{time_us:,.1f} us" if time_us is not None else "nothing ran"
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases.items())
    return f"{kernel}: {found}, {trials - result.resumed} configurations more in {wall_s:.1f} s ({phases})"

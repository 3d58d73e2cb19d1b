"""The samplers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from autotile.core.objectives import TIME
from autotile.errors import InputError, nearest
from autotile.search.kernel_tuner import PREFIX, check_strategy
from autotile.space.search_space import SearchSpace

if TYPE_CHECKING:
    from autotile.search.row_sampler import RowSampler
    from autotile.search.transfer import Source


_Make = Callable[[SearchSpace, int, ArrayLike | None], "RowSampler"]

TRANSFERRING = "feasible"
"""The sampler that learns from trials of other studies."""

_POPULATION = 20
"""Trials of one generation: ten generations in 200 trials."""


@dataclass(frozen=True, slots=True)
class SamplerKind:
    """A search method that can be asked for by name.

    Attributes
    ----------
    summary
        One line for a list of the samplers.
    make
        Makes the sampler from a space, a seed and the rows that may be proposed.
    needs
        A package that must be installed besides autotile's own, if any.
    single
        Whether it follows one objective only.
    """

    summary: str
    make: _Make
    needs: str = ""
    single: bool = False


def _feasible(space: SearchSpace, seed: int, available: ArrayLike | None, sources: Sequence[Source] = ()) -> RowSampler:
    from autotile.search.gp_sampler import FeasibleGPSampler
    from autotile.search.transfer import Expectation

    return FeasibleGPSampler(space, seed, available, expectation=Expectation(space, sources) if sources else None)


def _tpe(space: SearchSpace, seed: int, available: ArrayLike | None) -> RowSampler:
    from autotile.search.optuna_samplers import FeasibleTPESampler

    return FeasibleTPESampler(space, seed, available)


def _random(space: SearchSpace, seed: int, available: ArrayLike | None) -> RowSampler:
    from autotile.search.row_sampler import UniformSampler

    return UniformSampler(space, seed, available)


def _brute_force(space: SearchSpace, seed: int, available: ArrayLike | None) -> RowSampler:
    from autotile.search.row_sampler import InOrderSampler

    return InOrderSampler(space, seed, available)


def _nsga2(space: SearchSpace, seed: int, available: ArrayLike | None) -> RowSampler:
    from optuna.samplers import NSGAIISampler

    from autotile.search.optuna_samplers import FeasibleSampler

    inner = partial(NSGAIISampler, population_size=_POPULATION)
    return FeasibleSampler(space, inner, seed, available=available, startup=_POPULATION)


def _cmaes(space: SearchSpace, seed: int, available: ArrayLike | None) -> RowSampler:
    from optuna.samplers import CmaEsSampler

    from autotile.search.optuna_samplers import FeasibleSampler

    inner = partial(CmaEsSampler, warn_independent_sampling=False)
    return FeasibleSampler(space, inner, seed, available=available, startup=1, ordered=True)


def _gp(space: SearchSpace, seed: int, available: ArrayLike | None) -> RowSampler:
    from optuna.samplers import GPSampler

    from autotile.search.optuna_samplers import FeasibleSampler

    inner = partial(GPSampler, n_startup_trials=1, warn_independent_sampling=False)
    # A second draw would find the same maximum of the same model.
    return FeasibleSampler(space, inner, seed, available=available, draws=1, ordered=True)


def _kernel_tuner(
    strategy: str, space: SearchSpace, seed: int, available: ArrayLike | None, trials: int | None
) -> RowSampler:
    from autotile.search.kernel_tuner import KernelTunerSampler

    return KernelTunerSampler(space, strategy, seed, available, trials)


SAMPLERS: Mapping[str, SamplerKind] = MappingProxyType(
    {
        "feasible": SamplerKind("Gaussian process over the valid configurations: fewest measurements", _feasible),
        "tpe": SamplerKind("tree-structured Parzen estimator: models where the fast configurations lie", _tpe),
        "gp": SamplerKind("Optuna's Gaussian process: slow proposals", _gp, "torch"),
        "cmaes": SamplerKind("CMA-ES: an evolution strategy over the order of the values", _cmaes, "cmaes", True),
        "nsga2": SamplerKind("genetic algorithm: crosses and mutates the best configurations", _nsga2),
        "random": SamplerKind("uniform over the configurations that are left", _random),
        "brute-force": SamplerKind("every configuration, in order", _brute_force),
    }
)
"""Every sampler but ``auto``, which stands for one of them, see `resolve_sampler`, and but the strategies of Kernel
Tuner, which `autotile.search.kernel_tuner` lists."""


def resolve_sampler(
    name: str, space: SearchSpace, available: ArrayLike | None = None, trials: int | None = None
) -> str:
    """Name of the sampler that ``auto`` stands for; any other name is returned as it is.

    Where the trials that are granted cover every row that can be tried, ``auto`` is ``brute-force``, else ``feasible``.
    """
    if name != "auto":
        return name
    rows = len(space) if available is None else int(np.count_nonzero(available))
    return "brute-force" if trials is not None and trials >= rows else "feasible"


def make_sampler(
    name: str,
    space: SearchSpace,
    seed: int,
    available: ArrayLike | None = None,
    *,
    sources: Sequence[Source] = (),
    trials: int | None = None,
) -> RowSampler:
    """Make a sampler over the rows of a space.

    Parameters
    ----------
    name
        One of `SAMPLERS`, ``auto``, or ``kernel-tuner:`` with a strategy of Kernel Tuner.
    space
        The configurations.
    seed
        Makes the proposals repeatable.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.
    sources
        Trials of other studies; of use to ``feasible`` alone.
    trials
        Trials that are granted in all, by which some strategies of Kernel Tuner make their schedule; None where they
        are not counted.

    Raises
    ------
    InputError
        There is no such sampler, it needs a package that is not installed, or the seed is negative.
    """
    check_sampler(name)
    chosen = resolve_sampler(name, space, available)
    if chosen == TRANSFERRING and sources:
        return _feasible(space, seed, available, sources)
    if chosen.startswith(PREFIX):
        return _kernel_tuner(chosen.removeprefix(PREFIX), space, seed, available, trials)
    return SAMPLERS[chosen].make(space, seed, available)


def check_sampler(name: str, objectives: Sequence[str] = (TIME,)) -> None:
    """Refuse a sampler that cannot be made, before anything is made for it.

    Raises
    ------
    InputError
        There is no such sampler, it needs a package that is not installed, or it cannot follow several objectives.
    """
    if name == "auto":
        return
    if name.startswith(PREFIX):
        check_strategy(name)
        _check_objectives(name, objectives, single=True)
        return
    kind = SAMPLERS.get(name)
    if kind is None:
        known = ["auto", *SAMPLERS, f"{PREFIX}STRATEGY"]
        raise InputError(f"there is no sampler {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    _check_objectives(name, objectives, single=kind.single)
    if kind.needs and find_spec(kind.needs) is None:
        raise InputError(f"the sampler {name!r} needs {kind.needs}: pip install {kind.needs}, or choose tpe")


def _check_objectives(name: str, objectives: Sequence[str], *, single: bool) -> None:
    if single and len(objectives) > 1:
        able = ", ".join(each for each, other in SAMPLERS.items() if not other.single)
        raise InputError(f"the sampler {name!r} cannot follow several objectives ({', '.join(objectives)}); {able} can")

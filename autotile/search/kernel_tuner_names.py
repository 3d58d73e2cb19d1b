"""The strategies of the Kernel Tuner that is installed, as names of samplers."""

from __future__ import annotations

from importlib.util import find_spec

from autotile.ground.errors import InputError
from autotile.ground.syntax import nearest

PREFIX = "kernel-tuner:"
"""What the name of a sampler begins with that is a strategy of Kernel Tuner."""

_NEEDS = {
    "bayes_opt": ("sklearn", "scikit-learn"),
    "nsga2": ("pymoo", "pymoo"),
    "nsga3": ("pymoo", "pymoo"),
    "pyatf_strategies": ("pyatf", "pyatf"),
    "skopt": ("skopt", "scikit-optimize"),
}
"""The packages that Kernel Tuner itself can do without: module, and name to install it by."""


def kernel_tuner_samplers() -> list[str]:
    """Name of every strategy, those included whose packages are missing."""
    from kernel_tuner.interface import strategy_map

    return [PREFIX + strategy for strategy in strategy_map]


def check_strategy(name: str) -> None:
    """Refuse a strategy that cannot run.

    Parameters
    ----------
    name
        Of the sampler, with its prefix.

    Raises
    ------
    InputError
        Kernel Tuner has no such strategy, or it needs a package that is not installed.
    """
    known = kernel_tuner_samplers()
    if name not in known:
        strategies = ", ".join(each.removeprefix(PREFIX) for each in known)
        raise InputError(f"there is no sampler {name!r}{nearest(name, known)} (after {PREFIX!r}: {strategies})")
    module, package = _NEEDS.get(name.removeprefix(PREFIX), ("kernel_tuner", "kernel_tuner"))
    if find_spec(module) is None:
        raise InputError(f"the sampler {name!r} needs {package}: pip install {package}, or choose another strategy")

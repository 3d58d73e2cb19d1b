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
    "skopt": ("skopt", "scikit-optimize"),
}
"""The packages that Kernel Tuner itself can do without: module, and name to install it by."""


_REFUSED = {
    "pyatf_strategies": "pyATF builds the space anew from rules, of which only the outcome is known here, and "
    "takes Ctrl-C for itself",
}
"""Strategies that cannot be run over rows, and why."""


def kernel_tuner_samplers() -> list[str]:
    """Name of every strategy that can be run, those included whose packages are missing."""
    from kernel_tuner.interface import strategy_map

    return [PREFIX + strategy for strategy in strategy_map if strategy not in _REFUSED]


def package_of(strategy: str) -> str:
    """Module of the package that a strategy needs beside Kernel Tuner; ``kernel_tuner`` where it needs none."""
    return _NEEDS.get(strategy, ("kernel_tuner", ""))[0]


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
    if reason := _REFUSED.get(name.removeprefix(PREFIX)):
        raise InputError(f"the sampler {name!r} cannot be used: {reason}; choose another strategy")
    known = kernel_tuner_samplers()
    if name not in known:
        strategies = ", ".join(each.removeprefix(PREFIX) for each in known)
        raise InputError(f"there is no sampler {name!r}{nearest(name, known)} (after {PREFIX!r}: {strategies})")
    module, package = _NEEDS.get(name.removeprefix(PREFIX), ("kernel_tuner", "kernel_tuner"))
    if find_spec(module) is None:
        raise InputError(f"the sampler {name!r} needs {package}: pip install {package}, or choose another strategy")

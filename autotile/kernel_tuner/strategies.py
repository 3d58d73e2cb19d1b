"""Kernel Tuner's strategies under the names of their modules, ``strategies.minimize``, and a search by one of them.

The installed Kernel Tuner runs them over a session of autotile; so it does an object with a function ``tune``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotile.kernel_tuner.installed import installed_module
from autotile.kernel_tuner.parameter_codec import ParameterCodec

Evaluate = Callable[[Sequence[Mapping[str, Any]]], Sequence[dict[str, Any]]]
"""Function that returns a result for each of some configurations."""


class Strategy:
    """A strategy of Kernel Tuner, by the name of its module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<strategy {self.name}>"

    def tune(self, searchspace: Any, runner: Any, tuning_options: Any) -> Any:
        """Run the strategy of the installed Kernel Tuner."""
        return installed_strategy(self.name).tune(searchspace, runner, tuning_options)


def installed_strategy(name: str) -> Any:
    """Return the module of a strategy of the installed Kernel Tuner.

    Raises
    ------
    ImportError
        It, or a package that it needs, is not installed.
    """
    known = installed_module("interface", f"the strategy {name!r}").strategy_map
    return known[name] if name in known else installed_module(f"strategies.{name}", f"the strategy {name!r}")


class StrategyRunner:
    """The part of Kernel Tuner's runners that strategies use.

    Parameters
    ----------
    codec
        The parameters.
    evaluate
        Measures configurations.
    device
        Object with ``name``, ``max_threads`` and ``env``.
    """

    simulation_mode = False
    quiet = True
    units: Mapping[str, str] = {"time": "ms"}
    accumulated_strategy_time = 0.0

    def __init__(self, codec: ParameterCodec, evaluate: Evaluate, device: SimpleNamespace) -> None:
        self._codec = codec
        self._evaluate = evaluate
        self.dev = device
        self.tried: set[str] = set()

    def add_strategy_time(self, seconds: float) -> None:
        """Add up the time that the strategy takes."""
        self.accumulated_strategy_time += seconds

    def get_device_info(self) -> SimpleNamespace:
        """Return the device."""
        return self.dev

    def get_environment(self, tuning_options: Any) -> dict[str, Any]:
        """Return the environment of the device."""
        return dict(self.dev.env)

    def run(self, parameter_space: Iterable[Sequence[Any]], tuning_options: Any) -> list[dict[str, Any] | None]:
        """Return the result of each configuration; None for those that the budget does not allow."""
        configs = [dict(zip(self._codec.values, values, strict=True)) for values in parameter_space]
        allowed: dict[str, dict[str, Any]] = {}
        for config in configs:
            key = self._codec.key(config)
            if key in allowed or tuning_options.budget.is_done():
                continue
            allowed[key] = config
            if key not in self.tried:
                tuning_options.budget.add_evaluations(1)
        self.tried |= allowed.keys()
        found = dict(zip(allowed, self._evaluate(list(allowed.values())), strict=True))
        return [dict(found[key]) if (key := self._codec.key(config)) in found else None for config in configs]


def run_strategy(
    strategy: Any,
    configs: Sequence[Mapping[str, Any]],
    runner: StrategyRunner,
    codec: ParameterCodec,
    *,
    strategy_options: Mapping[str, Any],
    objective: Sequence[str],
    higher_is_better: Sequence[bool],
    seed: int | None,
    verbose: bool,
) -> None:
    """Call the ``tune`` of a strategy as Kernel Tuner does, until it ends or the budget is spent.

    Parameters
    ----------
    strategy
        Object with a function ``tune(searchspace, runner, tuning_options)``.
    configs
        All valid configurations.
    runner
        Measures configurations.
    codec
        The parameters.
    strategy_options
        Options of the strategy, with ``max_fevals`` and ``time_limit``.
    objective, higher_is_better
        Keys of the results, and their directions.
    seed
        Seed of Python's and NumPy's random states; None to leave them.
    verbose
        Passed on.

    Raises
    ------
    ImportError
        Kernel Tuner is not installed.
    """
    interface = installed_module("interface", "a strategy object")
    util = installed_module("util", "a strategy object")
    searchspaces = installed_module("searchspace", "a strategy object")
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
    values = {name: list(listed) for name, listed in codec.values.items()}
    cache = {str(number): dict(config) for number, config in enumerate(configs)}
    searchspace = searchspaces.Searchspace(None, None, None, from_cache={"tune_params": values, "cache": cache})
    max_fevals = min(strategy_options.get("max_fevals") or len(configs), len(configs))
    options = interface.Options(
        {
            "strategy": strategy.name if isinstance(strategy, Strategy) else strategy,
            "strategy_options": interface.Options(strategy_options),
            "budget": util.TuningBudget(strategy_options.get("time_limit"), max_fevals),
            "max_fevals": max_fevals,
            "seed": seed,
            "tune_params": values,
            "restrictions": [],
            "objective": list(objective),
            "objective_higher_is_better": list(higher_is_better),
            "simulation_mode": False,
            "verbose": verbose,
            "metrics": None,
            "cache": {},
            "cachefile": None,
        }
    )
    try:
        strategy.tune(searchspace, runner, options)
    except util.StopCriterionReached as reached:
        if verbose:
            print(reached)


def __getattr__(name: str) -> Strategy:
    if name.startswith("_"):
        raise AttributeError(name)
    return Strategy(name)

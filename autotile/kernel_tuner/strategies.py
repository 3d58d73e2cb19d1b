"""The search of `tune_kernel`: a sampler of autotile, or a strategy of the installed Kernel Tuner over its session.

Kernel Tuner's strategies have the names of their modules here, as ``strategies.minimize``; an object with a function
``tune`` searches in the same way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from numbers import Real
from types import ModuleType, SimpleNamespace
from typing import Any

from autotile.errors import InputError, nearest
from autotile.kernel_tuner.parameters import ParameterCodec, Params
from autotile.search.samplers import AUTO, BRUTE_FORCE, SAMPLERS, STRATEGY_PREFIX, check_sampler, strategy_names

_UNLIMITED_TRIALS = 1000
"""Configurations that are tried where neither a strategy nor a limit is given."""
_RANDOM_SHARE = 0.1
"""Share of the space that Kernel Tuner's random_sample tries without a limit."""
_LIMITS = ("max_fevals", "time_limit", "searchspace_construction_options")
_MULTI_OBJECTIVE = ("nsga2", "nsga3")
"""Strategies that follow several objectives."""


def installed_module(name: str, purpose: str) -> Any:
    """Return a module of Kernel Tuner; an `ImportError` if it, or a package that it needs, is not installed."""
    try:
        return import_module(f"kernel_tuner.{name}")
    except ImportError as error:
        raise ImportError(
            f'{purpose} needs the package kernel_tuner: pip install "autotile[kernel-tuner]" ({error})'
        ) from None


def _provide(name: str) -> None:
    """Make a module of Kernel Tuner importable from this package; its names are looked up when they are used."""
    module = ModuleType(f"autotile.kernel_tuner.{name}", f"Names of the installed ``kernel_tuner.{name}``.")

    def looked_up(attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(installed_module(name, f"{module.__name__}.{attribute}"), attribute)

    module.__getattr__ = looked_up  # type: ignore[method-assign]
    sys.modules[module.__name__] = module


for _name in ("integration", "searchspace", "strategies.common", "strategies.wrapper"):
    _provide(_name)


class Strategy:
    """A strategy of Kernel Tuner, by the name of its module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<strategy {self.name}>"

    def tune(self, searchspace: Any, runner: Any, tuning_options: Any) -> Any:
        """Run the strategy of the installed Kernel Tuner; errors as for `installed_module`."""
        purpose = f"the strategy {self.name!r}"
        known = installed_module("interface", purpose).strategy_map
        module = known[self.name] if self.name in known else installed_module(f"strategies.{self.name}", purpose)
        try:
            return module.tune(searchspace, runner, tuning_options)
        except KeyError as error:
            if error.args[0] not in tuning_options.objective:
                raise
            raise InputError(f"a result has no {error}, the objective of {purpose}; name a value that it has") from None


StrategyChoice = tuple[str | None, Any, int | float | None, float | None]
"""A sampler of autotile, or else a strategy, which is an object with a function ``tune``; the number of configurations
that it tries, or a float for a share of the valid ones, and the time in seconds, None for no limit."""


def choose_strategy(
    strategy: Any, options: Mapping[str, Any] | None, objectives: Sequence[str] = ("time",)
) -> StrategyChoice:
    """Return the search for the arguments of `tune_kernel`.

    None is autotile's own search. A strategy of Kernel Tuner with options of its own, or one that follows other
    objectives than the time, runs here, any other in a process of its own. Raise `InputError`, which as Kernel Tuner's
    error is a `ValueError`, if there is no such strategy, it needs a package that is not installed, it has no such
    option, or a limit is not positive.
    """
    given = dict(options or {})
    limit, budget_s = _limit(given, "max_fevals"), _limit(given, "time_limit")
    trials = int(limit) if limit is not None else None
    if isinstance(strategy, Strategy):
        strategy = strategy.name
    else:  # a module of Kernel Tuner has its name
        known = getattr(sys.modules.get("kernel_tuner.interface"), "strategy_map", {})  # else it is none of them
        strategy = next((name for name, module in known.items() if module is strategy), strategy)

    def check_options(*own: str) -> None:
        if unknown := [option for option in given if option not in (*_LIMITS, *own)]:
            expected = ", ".join((*own, *_LIMITS))
            raise InputError(
                f"the strategy {strategy!r} has no option {', '.join(map(repr, unknown))}; expected {expected}"
            )

    if strategy is None:
        check_options()
        return AUTO, None, _UNLIMITED_TRIALS if trials is None and budget_s is None else trials, budget_s
    if strategy == "brute_force":
        check_options()
        return BRUTE_FORCE, None, trials, budget_s
    if strategy == "random_sample":
        check_options("fraction")
        share = _limit(given, "fraction") or _RANDOM_SHARE
        if share > 1:
            raise InputError(f"strategy_options['fraction'] is {share:g}, expected a share of the space, at most 1")
        return "random", None, trials if trials or budget_s else share, budget_s
    if isinstance(strategy, str):
        follows = strategy in _MULTI_OBJECTIVE if len(objectives) > 1 else list(objectives) != ["time"]
        runs_here = follows or any(option not in _LIMITS for option in given)
        if strategy == AUTO or (strategy in SAMPLERS and not (runs_here and strategy in strategy_names())):
            check_options()
            return strategy, None, trials, budget_s
        listed = strategy_names()
        if listed and strategy not in listed:  # what it lists and autotile refuses has an error of its own
            raise InputError(
                f"there is no strategy {strategy!r}{nearest(strategy, listed)}; expected one of {', '.join(listed)}, a "
                f"sampler of autotile ({', '.join(SAMPLERS)}), or an object with a function tune"
            )
        check_sampler(STRATEGY_PREFIX + strategy)
        if runs_here:
            return None, Strategy(strategy), trials, budget_s
        return STRATEGY_PREFIX + strategy, None, trials, budget_s
    if callable(getattr(strategy, "tune", None)):
        return None, strategy, trials, budget_s
    raise InputError(f"strategy is {strategy!r:.80}, expected a name, or an object with a function tune")


def _limit(options: Mapping[str, Any], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    least, expected = (1, "number of at least 1") if name == "max_fevals" else (5e-324, "positive number")
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not least <= float(number) < math.inf:
        raise InputError(f"strategy_options[{name!r}] is {value!r}, expected a {expected}")
    return float(number)


class TuneRunner:
    """The part of Kernel Tuner's runners that strategies use.

    ``evaluate`` returns a result for each of some configurations, ``simulated_ms`` the time that one takes beside that
    which passes; ``dev`` has ``name``, ``max_threads`` and ``env``.
    """

    simulation_mode = False
    quiet = True
    units: Mapping[str, str] = {"time": "ms"}
    accumulated_strategy_time = 0.0

    def __init__(
        self,
        codec: ParameterCodec,
        evaluate: Callable[[Sequence[Params]], Sequence[Params]],
        device: SimpleNamespace,
        simulated_ms: Callable[[Params], float],
    ) -> None:
        self._codec = codec
        self._evaluate = evaluate
        self._simulated_ms = simulated_ms
        self._tried: set[str] = set()
        self.dev = device

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
            if key not in self._tried:
                tuning_options.budget.add_evaluations(1)
                tuning_options.budget.add_time(milliseconds=self._simulated_ms(config))
        self._tried |= allowed.keys()
        found = dict(zip(allowed, self._evaluate(list(allowed.values())), strict=True))
        return [dict(found[key]) if (key := self._codec.key(config)) in found else None for config in configs]


def __getattr__(name: str) -> Strategy:
    if name.startswith("_"):
        raise AttributeError(name)
    return Strategy(name)

"""The search of `tune_kernel`: ``strategy`` and ``strategy_options`` as a sampler and limits of autotile."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from autotile.errors import InputError, nearest
from autotile.kernel_tuner.strategies import Strategy
from autotile.search.samplers import AUTO, BRUTE_FORCE, SAMPLERS, STRATEGY_PREFIX, check_sampler, strategy_names

UNLIMITED_TRIALS = 1000
"""Configurations that are tried where neither a strategy nor a limit is given."""
_RANDOM_SHARE = 0.1
"""Share of the space that Kernel Tuner's random_sample tries without a limit."""
_LIMITS = ("max_fevals", "time_limit", "searchspace_construction_options")
_MULTI_OBJECTIVE = ("nsga2", "nsga3")
"""Strategies that follow several objectives."""


@dataclass(frozen=True)
class StrategyChoice:
    """A search.

    Attributes
    ----------
    sampler
        Sampler of autotile; None where ``strategy`` searches.
    strategy
        Object with a function ``tune``; None where the sampler searches.
    trials
        Number of configurations to try; None for no limit.
    budget_s
        Time of the search in seconds; None for no limit.
    options
        ``strategy_options``.
    """

    sampler: str | None
    strategy: Any
    trials: int | None
    budget_s: float | None
    options: Mapping[str, Any]


def choose_strategy(
    strategy: Any, options: Mapping[str, Any] | None, combinations: int, objectives: Sequence[str] = ("time",)
) -> StrategyChoice:
    """Return the search for the arguments of `tune_kernel`.

    Parameters
    ----------
    strategy
        None for autotile's own search; ``"brute_force"``, ``"random_sample"``, a sampler of autotile, a strategy of
        Kernel Tuner by name, or an object with a function ``tune``.
    options
        ``strategy_options``.
    combinations
        Number of combinations of the parameters' values.
    objectives
        Keys of the results that the search minimises or maximises.

    Raises
    ------
    InputError
        There is no such strategy, it needs a package that is not installed, it has no such option, or a limit is not
        positive. As Kernel Tuner's error for these, it is a `ValueError`.
    """
    options = dict(options or {})
    trials, budget_s = _limit(options, "max_fevals"), _limit(options, "time_limit")
    count = int(trials) if trials is not None else None
    strategy = _name_of(strategy)
    if strategy is None:
        if count is None and budget_s is None:
            count = UNLIMITED_TRIALS
        return StrategyChoice(AUTO, None, count, budget_s, options)
    if strategy == "brute_force":
        _check_options(strategy, options, ())
        return StrategyChoice(BRUTE_FORCE, None, count, budget_s, options)
    if strategy == "random_sample":
        _check_options(strategy, options, ("fraction",))
        share = float(options.get("fraction", _RANDOM_SHARE))
        is_limited = count is not None or budget_s is not None
        return StrategyChoice(
            "random", None, count if is_limited else max(1, int(share * combinations)), budget_s, options
        )
    if isinstance(strategy, str):
        return _named(strategy, options, count, budget_s, objectives)
    if callable(getattr(strategy, "tune", None)):
        return StrategyChoice(None, strategy, count, budget_s, options)
    raise InputError(f"strategy is {strategy!r:.80}, expected a name, or an object with a function tune")


def _name_of(strategy: Any) -> Any:
    """Return the name of a strategy that is a module of Kernel Tuner; anything else as it is."""
    if isinstance(strategy, Strategy):
        return strategy.name
    interface = sys.modules.get("kernel_tuner.interface")  # else it cannot be one of them
    known = getattr(interface, "strategy_map", {})
    return next((name for name, module in known.items() if module is strategy), strategy)


def _named(
    name: str, options: Mapping[str, Any], trials: int | None, budget_s: float | None, objectives: Sequence[str]
) -> StrategyChoice:
    """Return a strategy of Kernel Tuner, or a sampler of autotile.

    A strategy with options of its own, or one that follows several objectives, runs here, any other in a process of its
    own.
    """
    theirs = STRATEGY_PREFIX + name
    runs_here = any(option not in _LIMITS for option in options) or (len(objectives) > 1 and name in _MULTI_OBJECTIVE)
    if name == AUTO or (name in SAMPLERS and not (runs_here and name in strategy_names())):
        _check_options(name, options, ())
        return StrategyChoice(name, None, trials, budget_s, options)
    _check_name(name)
    check_sampler(theirs)
    if runs_here:
        return StrategyChoice(None, Strategy(name), trials, budget_s, options)
    return StrategyChoice(theirs, None, trials, budget_s, options)


def _check_name(name: str) -> None:
    """Raise if Kernel Tuner lists no such strategy; what it lists and autotile refuses has an error of its own."""
    listed = strategy_names()
    if listed and name not in listed:
        raise InputError(
            f"there is no strategy {name!r}{nearest(name, listed)}; expected one of {', '.join(listed)}, a sampler of "
            f"autotile ({', '.join(SAMPLERS)}), or an object with a function tune"
        )


def _check_options(name: str, options: Mapping[str, Any], own: Sequence[str]) -> None:
    unknown = [option for option in options if option not in (*_LIMITS, *own)]
    if unknown:
        known = ", ".join((*own, *_LIMITS))
        raise InputError(f"the strategy {name!r} has no option {', '.join(map(repr, unknown))}; expected {known}")


def _limit(options: Mapping[str, Any], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
        raise InputError(f"strategy_options[{name!r}] is {value!r}, expected a positive number")
    return float(number)

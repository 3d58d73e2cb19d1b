"""The search of `tune_kernel`: ``strategy`` and ``strategy_options`` as a sampler and limits of autotile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from autotile.errors import InputError
from autotile.kernel_tuner.strategies import Strategy, installed_strategy
from autotile.search.samplers import AUTO, BRUTE_FORCE, STRATEGY_PREFIX

UNLIMITED_TRIALS = 1000
"""Configurations that are tried where neither a strategy nor a limit is given."""
_RANDOM_SHARE = 0.1
"""Share of the space that Kernel Tuner's random_sample tries without a limit."""
_LIMITS = ("max_fevals", "time_limit", "searchspace_construction_options")


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


def choose_strategy(strategy: Any, options: Mapping[str, Any] | None, combinations: int) -> StrategyChoice:
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

    Raises
    ------
    InputError
        There is no such strategy, or a limit is not positive.
    """
    options = dict(options or {})
    trials, budget_s = _limit(options, "max_fevals"), _limit(options, "time_limit")
    count = int(trials) if trials is not None else None
    if isinstance(strategy, Strategy):
        strategy = strategy.name
    if strategy is None:
        if count is None and budget_s is None:
            count = UNLIMITED_TRIALS
        return StrategyChoice(AUTO, None, count, budget_s, options)
    if strategy == "brute_force":
        return StrategyChoice(BRUTE_FORCE, None, count, budget_s, options)
    if strategy == "random_sample":
        share = float(options.get("fraction", _RANDOM_SHARE))
        is_limited = count is not None or budget_s is not None
        return StrategyChoice(
            "random", None, count if is_limited else max(1, int(share * combinations)), budget_s, options
        )
    if isinstance(strategy, str):
        return _named(strategy, options, count, budget_s)
    if callable(getattr(strategy, "tune", None)):
        return StrategyChoice(None, strategy, count, budget_s, options)
    raise InputError(f"strategy is {strategy!r:.80}, expected a name, or an object with a function tune")


def _named(name: str, options: Mapping[str, Any], trials: int | None, budget_s: float | None) -> StrategyChoice:
    """Return a strategy of Kernel Tuner; with options of its own it runs here, otherwise in a process of its own."""
    from autotile.search.samplers import SAMPLERS

    if name in SAMPLERS or name == AUTO:
        return StrategyChoice(name, None, trials, budget_s, options)
    if all(option in _LIMITS for option in options):
        return StrategyChoice(STRATEGY_PREFIX + name, None, trials, budget_s, options)
    return StrategyChoice(None, installed_strategy(name), trials, budget_s, options)


def _limit(options: Mapping[str, Any], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
        raise InputError(f"strategy_options[{name!r}] is {value!r}, expected a positive number")
    return float(number)

"""One run of a strategy of Kernel Tuner over rows, and what it needs of Kernel Tuner to believe that it tunes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import scipy.stats  # noqa: F401 - not in a turn: it asks for generators as it is imported
from kernel_tuner.interface import Options, strategy_map
from kernel_tuner.searchspace import Searchspace
from kernel_tuner.util import InvalidConfig, TuningBudget

from autotile.ground.space import SearchSpace
from autotile.ground.spec import Parameter
from autotile.search.candidates import positions
from autotile.search.kernel_tuner_names import package_of
from autotile.search.kernel_tuner_turns import Randomness, TurnsEndedError

_MOST_REPEATS = 1000
"""Proposals in a row that a run made before, after which it has converged. Simulated annealing starts elsewhere after
100 of them, differential evolution after three generations."""

_REPEATABLE: Mapping[str, Mapping[str, str]] = {"bayes_opt": {"method": "multi-fast"}}
"""Options in place of defaults that go by the wall clock: ``multi-ultrafast`` does the same as this unless predictions
take longer than measurements."""


class ShownSpace:
    """Rows of a space as Kernel Tuner is shown them.

    Numbers are shown as they are and any other value as its place in the list of values: Kernel Tuner keeps values in
    sets, and the order of a set of strings is another in each process.

    Parameters
    ----------
    space
        The space.
    rows
        Those to show, in ascending order.
    """

    def __init__(self, space: SearchSpace, rows: Sequence[int]) -> None:
        self.rows = rows
        self.values = {parameter.name: _shown(parameter) for parameter in space.parameters}
        columns = zip(self.values.values(), space.codes[rows].T.tolist(), strict=True)
        configs = zip(*([values[code] for code in codes] for values, codes in columns), strict=True)
        self._configs = [dict(zip(self.values, config, strict=True)) for config in configs]

    def build(self) -> Any:
        """A new `Searchspace`, whose index of a configuration is its place in ``rows``.

        No two runs may share one: it draws from the neighbours that it found before.
        """
        cache = {"tune_params": self.values, "cache": dict(enumerate(self._configs))}
        return Searchspace(None, None, None, from_cache=cache)


class StrategyRun:
    """Calls a strategy as Kernel Tuner does; its times come from whom calls this.

    Parameters
    ----------
    strategy
        Its name in Kernel Tuner.
    space
        What it searches.
    times_ms
        Time of each row that was tried, None where it failed; it grows during the run.
    evaluations
        That are granted; some strategies make their schedule by it.
    seed
        For strategies that have a generator of their own.

    Attributes
    ----------
    asked
        Rows that the strategy wanted timed so far.
    """

    def __init__(
        self, strategy: str, space: ShownSpace, times_ms: Mapping[int, float | None], evaluations: int, seed: int
    ) -> None:
        self.asked: set[int] = set()
        self._strategy = strategy
        with Randomness(seed).in_force():  # what its packages draw as they are imported is not the run's, nor ours
            import_module(package_of(strategy))
            self._tune = strategy_map[strategy].tune
        self._space = space
        self._times_ms = times_ms
        self._evaluations = evaluations
        self._seed = seed

    def __call__(self, ask: Callable[[list[int]], None]) -> None:
        """Run the strategy to its end; ``ask`` is called with rows and returns when their times are known."""
        searchspace = self._space.build()
        runner = _Runner(searchspace, self._space.rows, self._times_ms, self.asked, ask)
        self._tune(searchspace, runner, self._options())

    def _options(self) -> Any:
        granted = {"max_fevals": self._evaluations}
        refuses_any = self._strategy == "brute_force"
        return Options(
            granted,
            strategy=self._strategy,
            strategy_options=Options({} if refuses_any else {**granted, **_REPEATABLE.get(self._strategy, {})}),
            budget=TuningBudget(),  # whoever asks for rows knows when to stop
            seed=self._seed,
            tune_params=self._space.values,
            objective=["time"],
            objective_higher_is_better=[False],
            simulation_mode=False,
            verbose=False,
        )


class _Runner:
    """As much of a runner of Kernel Tuner as its strategies use."""

    dev = SimpleNamespace(max_threads=1024)

    def __init__(
        self,
        searchspace: Any,
        rows: Sequence[int],
        times_ms: Mapping[int, float | None],
        asked: set[int],
        ask: Callable[[list[int]], None],
    ) -> None:
        self._searchspace = searchspace
        self._rows = rows
        self._times_ms = times_ms
        self._asked = asked
        self._ask = ask
        self._repeats = 0

    def add_strategy_time(self, seconds: float) -> None:
        """Take note of nothing: the session's clock runs anyway."""

    def run(self, parameter_space: Sequence[Sequence[Any]], tuning_options: Any) -> list[dict[str, Any]]:
        """Time configurations, valid or not; in Kernel Tuner's form."""
        configs = [tuple(config) for config in parameter_space]
        rows = [self._row_of(config) for config in configs]
        self._note(rows)
        unknown = [row for row in dict.fromkeys(rows) if row is not None and row not in self._times_ms]
        if unknown:
            self._ask(unknown)
        return [self._result(config, row) for config, row in zip(configs, rows, strict=True)]

    def _row_of(self, config: tuple[Any, ...]) -> int | None:
        place = self._searchspace.get_param_config_index(config)
        return None if place is None else self._rows[place]

    def _note(self, rows: Sequence[int | None]) -> None:
        """Count what this run wanted before, not what is known: in a resumed session everything is, at first."""
        for row in rows:
            if row is None or row in self._asked:
                self._repeats += 1
            else:
                self._asked.add(row)
                self._repeats = 0
        if self._repeats > _MOST_REPEATS:
            raise TurnsEndedError

    def _result(self, config: tuple[Any, ...], row: int | None) -> dict[str, Any]:
        time_ms = None if row is None else self._times_ms[row]
        measured = {"__error__": InvalidConfig()} if time_ms is None else {"time": time_ms}
        return {**dict(zip(self._searchspace.tune_params, config, strict=True)), **measured}


def _shown(parameter: Parameter) -> list[Any]:
    numbers = positions(parameter.values) is not None
    return list(parameter.values) if numbers else list(range(len(parameter.values)))

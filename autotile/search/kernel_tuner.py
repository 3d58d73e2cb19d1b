"""Kernel Tuner's strategies as samplers: each configuration that a strategy asks to time is proposed."""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_ulong, py_object, pythonapi
from importlib import import_module
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import scipy.stats  # noqa: F401 - not in a turn: it asks for generators as it is imported
from kernel_tuner.interface import Options, strategy_map
from kernel_tuner.searchspace import Searchspace
from kernel_tuner.util import InvalidConfig, TuningBudget
from numpy.typing import ArrayLike
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotile.errors import InputError, nearest
from autotile.kernel.spec import Parameter
from autotile.search.row_sampler import RowSampler, positions
from autotile.space.search_space import SearchSpace

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


T = TypeVar("T")

THREAD_NAME = "kernel-tuner-strategy"

_MOST_SECONDS = 60.0
"""Most that a turn may take: a strategy may loop for ever where it cannot draw what it wants. Over 14,712 rows the
longest turn took 0.7 s; NSGA-II took 7 s where nearly every row was tried."""

_turn = Lock()
"""Held by the turn under way: there is one random state for all."""


class TurnsEndedError(BaseException):
    """Raised where the function waits for a turn that will not come; not to be caught by ``except Exception``."""


class Turns(Generic[T]):
    """A function in a thread of its own, which runs only while its caller waits for what it gives next.

    The global random states that it draws from are its own: seeded, in force during its turns, and put back after
    each. The thread ends with the function, when nobody refers to this object any more, or with the process.

    Parameters
    ----------
    function
        Called with a function that gives a value to the caller and returns at the next turn. It must not refer to
        this object.
    seed
        Of its random states, 0 to 2**32 - 1.

    Attributes
    ----------
    failure
        What the function raised, as text; empty where it did not.
    thread
        The thread.
    """

    def __init__(self, function: Callable[[Callable[[T], None]], None], seed: int) -> None:
        self.failure = ""
        self._randomness = Randomness(seed)
        self._turns: SimpleQueue[bool] = SimpleQueue()
        self._given: SimpleQueue[tuple[T | None, str]] = SimpleQueue()
        self.thread = Thread(target=_run, args=(function, self._turns, self._given), daemon=True, name=THREAD_NAME)
        self.thread.start()
        weakref.finalize(self, self._turns.put, False)

    def next(self) -> T | None:
        """What the function gives next; None when it has ended, or was ended since its turn took too long."""
        with _turn, self._randomness.in_force(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what strategies divide by is not the user's to mend
            self._turns.put(True)
            try:
                given, self.failure = self._given.get(timeout=_MOST_SECONDS)
            except Empty:
                self._interrupt()
                return None
        return given

    def _interrupt(self) -> None:
        """End a function that loops in Python code; its thread may not draw from the random states of others."""
        self.failure = f"it proposed nothing for {_MOST_SECONDS:g} s"
        self._turns.put(False)
        pythonapi.PyThreadState_SetAsyncExc(c_ulong(self.thread.ident or 0), py_object(TurnsEndedError))
        self.thread.join(1.0)


class Randomness:
    """What one seed makes of the random states that a process has only once.

    They are those of `random` and of `numpy.random`, and the seed of NumPy's generators that are asked for without one,
    as SciPy's Latin hypercubes are.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Exchange the states for a while."""
        python, numpy, default_rng = random.getstate(), np.random.get_state(), np.random.default_rng

        def seeded(seed: Any = None) -> np.random.Generator:
            return default_rng(np.random.randint(2**31) if seed is None else seed)

        random.setstate(self._python)
        np.random.set_state(self._numpy)
        np.random.default_rng = seeded
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)
            np.random.default_rng = default_rng


def _run(
    function: Callable[[Callable[[T], None]], None],
    turns: SimpleQueue[bool],
    given: SimpleQueue[tuple[T | None, str]],
) -> None:
    def wait() -> None:
        if not turns.get():
            raise TurnsEndedError

    def give(value: T) -> None:
        given.put((value, ""))
        wait()

    failure = ""
    try:
        wait()
        function(give)
    except TurnsEndedError:
        pass
    except Exception as error:  # belongs to the caller, who may not want to go on
        failure = f"{type(error).__name__}: {error}"
    given.put((None, failure))


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


_MOST_FRUITLESS = 3
"""Runs one after another that want nothing but what earlier runs wanted, after which the strategy has had its say."""


class KernelTunerSampler(RowSampler):
    """Proposes what a strategy of Kernel Tuner wants timed, over the rows of a search space only.

    The strategy runs in a thread and waits there for each time, or for those of a generation. What is known is answered
    at once, whoever proposed it. Times are told in milliseconds, a failure as an invalid configuration.

    A run that ends before the search does, as a local search does in its optimum, is followed by one with another seed:
    so does whoever has trials left. When runs find nothing new, rows are drawn uniformly.

    Where another row is asked for while the strategy waits for all that it wants, it is the one nearest to the last of
    these. What is proposed follows from the seed and the trials that ended: in a resumed session the strategy begins
    anew, and gets by what is known to where it was.

    Parameters
    ----------
    space
        The configurations.
    strategy
        Its name in Kernel Tuner.
    seed
        Makes the proposals repeatable; not negative.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.
    trials
        Trials that are granted, by which some strategies make their schedule; None where they are not counted.

    Raises
    ------
    InputError
        The seed is negative.
    """

    def __init__(
        self,
        space: SearchSpace,
        strategy: str,
        seed: int,
        available: ArrayLike | None = None,
        trials: int | None = None,
    ) -> None:
        super().__init__(space, seed, available)
        rows: list[int] = np.flatnonzero(self.candidates.free).tolist()
        self._strategy = strategy
        self._shown = ShownSpace(space, rows)
        self._evaluations = min(trials or len(rows), len(rows))
        self._times_ms: dict[int, float | None] = {}
        """Of each row that was tried; None where it failed."""
        self._turns: Turns[list[int]] | None = None
        self._wanted: list[int] = []
        """Rows that the strategy waits for; all are known where it does not."""
        self._runs = 0
        self._fruitless = 0
        self._asked: set[int] = set()
        """Rows that the runs that ended wanted."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        while self._fruitless < _MOST_FRUITLESS and all(row in self._times_ms for row in self._wanted):
            self._go_on()
        for row in self._wanted:
            if self.candidates.free[row]:
                return row
        if self._wanted:
            return self.candidates.nearest(self.candidates.space.codes[self._wanted[-1]], rng)
        return self.candidates.uniform(rng)

    def _learn(self, trial: FrozenTrial) -> None:
        row = self.candidates.space.row_of(trial.params)
        assert row is not None
        time_us = trial.value
        worked = all(violation <= 0 for violation in trial.constraints.values())
        self._times_ms[row] = 1e-3 * time_us if worked and time_us is not None else None

    def _go_on(self) -> None:
        """Let the strategy run until it wants something that is not known, or ends."""
        if self._turns is None:
            seed = int(np.random.SeedSequence((self._seed, self._runs)).generate_state(1)[0])
            self._run = StrategyRun(self._strategy, self._shown, self._times_ms, self._evaluations, seed)
            self._turns = Turns(self._run, seed)
        self._wanted = self._turns.next() or []
        if not self._wanted:
            self._end_run(self._turns.failure)
            self._turns = None

    def _end_run(self, failure: str) -> None:
        if failure and not self._asked and not self._run.asked:
            raise InputError(
                f"Kernel Tuner's strategy {self._strategy} cannot search these {len(self._shown.rows)} configurations "
                f"({failure}); choose another sampler"
            )
        self._runs += 1
        self._fruitless = 0 if self._run.asked - self._asked else self._fruitless + 1
        self._asked |= self._run.asked

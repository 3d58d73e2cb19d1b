"""Child process that runs search strategies of Kernel Tuner and asks its parent for the time of each configuration.

Strategies draw from the random states that a process has only once, those of Python and NumPy; this process exists for
them alone. Requests and replies refer to configurations by their index:

========== ============================================== ==========================================================
``open``   ``strategy``, ``values`` of each parameter,    ``{}``
           ``codes``: base64 of a C-ordered array of
           ``dtype``, shape (configurations, parameters)
``run``    ``seed``, ``evaluations``, ``times_ms``        ``wanted``: configurations that the strategy waits for
``resume`` ``times_ms``                                   the same
========== ============================================== ==========================================================

``times_ms`` holds pairs of a configuration and its time in milliseconds, null for a failure; each request sends those
that became known since the last one. At the end of a run ``wanted`` is empty, ``new`` is the number of configurations
that no earlier run asked for, and ``failure`` is empty unless the strategy raised an error.
"""

from __future__ import annotations

import random
import sys
import warnings
from base64 import b64decode
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotile.workers.child import Channel

_MAX_REPEATS = 1000
"""Consecutive configurations that a run asked for before, after which it has converged. Simulated annealing restarts
after 100 of them, differential evolution after three generations."""
_MAX_WANTED = 1 << 16
"""Configurations per reply, which bounds its size."""
_OPTIONS: Mapping[str, Mapping[str, str]] = {"bayes_opt": {"method": "multi-fast"}}
"""Options in place of defaults that depend on the wall clock: ``multi-ultrafast`` is the same unless predictions take
longer than measurements."""
_LATE_IMPORTS = {"diff_evo": "scipy.stats", "skopt": "skopt"}
"""Packages that strategies import during a run. They draw random numbers then, so they are imported before it."""
_unseeded_rng = np.random.default_rng


class _ConvergedError(BaseException):
    """Ends a run that converged; a `BaseException`, which strategies do not catch."""


class StrategyWorker:
    """Runs a strategy on the configurations of ``open``, and has what strategies use of a runner of Kernel Tuner.

    While the strategy waits for times, the worker has replied to a request and waits for the next one.
    """

    dev = SimpleNamespace(max_threads=1024)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._strategy = ""
        self._values: dict[str, list[Any]] = {}
        self._configs: dict[int, dict[str, Any]] = {}
        self._times_ms: dict[int, float | None] = {}
        self._searchspace: Any = None
        self._asked: set[int] = set()
        """Configurations that this run asked for."""
        self._asked_before: set[int] = set()
        """Those that completed runs asked for."""
        self._repeats = 0
        """Consecutive configurations that this run asked for before."""

    def serve(self) -> None:
        """Handle requests until the parent closes the pipe."""
        while (request := self._channel.receive()) is not None:
            if request["op"] != "open":
                self._channel.reply(self._run(request))
                continue
            self._strategy, self._values = request["strategy"], request["values"]
            codes = np.frombuffer(b64decode(request["codes"]), request["dtype"]).reshape(-1, len(self._values))
            columns = zip(self._values.values(), codes.T.tolist(), strict=True)
            configs = zip(*([values[code] for code in column] for values, column in columns), strict=True)
            self._configs = {i: dict(zip(self._values, config, strict=True)) for i, config in enumerate(configs)}
            self._channel.reply({})

    def _run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._times_ms.update(dict(request["times_ms"]))
        self._asked, self._repeats = set(), 0
        failure = ""
        try:
            self._tune(request["seed"], request["evaluations"])
        except _ConvergedError:
            pass
        except Exception as error:  # whether the search goes on without the strategy is the parent's decision
            failure = f"{type(error).__name__}: {error}"
        new = len(self._asked - self._asked_before)
        self._asked_before |= self._asked
        return {"wanted": [], "new": new, "failure": failure}

    def _tune(self, seed: int, evaluations: int) -> None:
        from kernel_tuner.interface import Options, strategy_map
        from kernel_tuner.searchspace import Searchspace
        from kernel_tuner.util import TuningBudget

        _seed(seed)  # for the random numbers that modules draw as they are imported
        import_module(_LATE_IMPORTS.get(self._strategy, "kernel_tuner"))
        tune = strategy_map[self._strategy].tune
        granted = {"max_fevals": evaluations}
        accepts_options = self._strategy != "brute_force"
        options = Options(
            granted,
            strategy=self._strategy,
            strategy_options=Options({**granted, **_OPTIONS.get(self._strategy, {})} if accepts_options else {}),
            budget=TuningBudget(),  # unlimited: the parent ends the search
            seed=seed,
            tune_params=self._values,
            objective=["time"],
            objective_higher_is_better=[False],
            simulation_mode=False,
            verbose=False,
        )
        _seed(seed)
        # a space of its own for each run: a space draws from the neighbours that it found before
        cached = {"tune_params": self._values, "cache": self._configs}
        self._searchspace = Searchspace(None, None, None, from_cache=cached)
        tune(self._searchspace, self, options)

    def add_strategy_time(self, seconds: float) -> None:
        """Ignore the time that the strategy took, which the session measures."""

    def run(self, parameter_space: Sequence[Sequence[Any]], tuning_options: Any) -> list[dict[str, Any]]:
        """Return the results of configurations, valid or not, in Kernel Tuner's form."""
        from kernel_tuner.util import InvalidConfig

        configs = [tuple(config) for config in parameter_space]
        indices = [self._searchspace.get_param_config_index(config) for config in configs]
        # Repeats are those within this run: in a resumed session the times of all its first configurations are known.
        for index in indices:
            if index is None or index in self._asked:
                self._repeats += 1
            else:
                self._asked.add(index)
                self._repeats = 0
        if self._repeats > _MAX_REPEATS:
            raise _ConvergedError
        unknown = [each for each in dict.fromkeys(indices) if each is not None and each not in self._times_ms]
        for start in range(0, len(unknown), _MAX_WANTED):
            self._channel.reply({"wanted": unknown[start : start + _MAX_WANTED]})
            request = self._channel.receive()
            if request is None:
                sys.exit()
            self._times_ms.update(dict(request["times_ms"]))
        times_ms = [None if each is None else self._times_ms[each] for each in indices]
        return [
            {
                **dict(zip(self._searchspace.tune_params, config, strict=True)),
                **({"__error__": InvalidConfig()} if time_ms is None else {"time": time_ms}),
            }
            for config, time_ms in zip(configs, times_ms, strict=True)
        ]


def _seed(seed: int) -> None:
    """Seed the random states of the process, and NumPy's generators that are made without a seed.

    SciPy's Latin hypercubes, for one, use such generators.
    """
    random.seed(seed)
    np.random.seed(seed)

    def default_rng(seed: Any = None) -> np.random.Generator:
        return _unseeded_rng(np.random.randint(2**31) if seed is None else seed)

    np.random.default_rng = default_rng


if __name__ == "__main__":
    worker = StrategyWorker(Channel())
    warnings.simplefilter("ignore")  # strategies divide by zero and the like
    import kernel_tuner.interface  # noqa: F401 - while the parent prepares the first request
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1, user_api="blas")  # the matrices are small, and threads wait for each other spinning
    worker.serve()

"""The session of autotile behind `tune_kernel`, and the search in a cache that stands in for one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import ENERGY, TIME, Config, Measurement, Outcome, Problem, Trial
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import nvrtc_version
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.problem import resolve_problem
from autotile.kernel.spec import Parameter
from autotile.kernel_tuner.files import CacheFile
from autotile.kernel_tuner.kernel_definition import KernelTunerKernel
from autotile.kernel_tuner.observation import Observation
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.restrictions import check_restrictions
from autotile.kernel_tuner.strategies import StrategyRunner, run_strategy
from autotile.kernel_tuner.strategy_choice import StrategyChoice
from autotile.kernel_tuner.tune_results import Result, ResultList, environment
from autotile.settings import read_settings
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.session import Session, open_session

_MAX_LISTED = 200_000
"""Configurations of a space beyond which those in a cache are not left out of the search."""
_SEARCH_SHARE = 0.9
"""Share of the time limit for the search; the finals take the rest, so that a call ends near its limit."""
_UNVERIFIED = (
    "note: the outputs of {name} are not verified, as no answer is given; pass answer, verify, or verify='agreement', "
    "which compares configurations with each other"
)


class TuneSession:
    """One session of autotile for a kernel of Kernel Tuner.

    Parameters
    ----------
    kernel
        The kernel.
    codec
        All parameters of the call, of which the kernel may have a part.
    chosen
        The search.
    results
        Receives the results.
    observation
        Observers.
    device
        Index of the CUDA device.
    seed
        Seed of the search; None for 0.
    verbose, quiet
        As for `tune_kernel`.
    objectives, higher_is_better
        Keys of the results that a strategy object follows.
    """

    def __init__(
        self,
        kernel: KernelTunerKernel,
        codec: ParameterCodec,
        chosen: StrategyChoice,
        results: ResultList,
        observation: Observation,
        *,
        device: int,
        seed: int | None,
        verbose: bool,
        quiet: bool,
        objectives: Sequence[str],
        higher_is_better: Sequence[bool],
    ) -> None:
        self._described = kernel
        self._codec = codec
        self._chosen = chosen
        self._results = results
        self._observation = observation
        self._device_index = device
        self._seed = seed
        self._verbose = verbose
        self._quiet = quiet
        self._objectives = objectives
        self._higher_is_better = higher_is_better

    def run(self, file: CacheFile | None, iterations: int, compiler_options: Any) -> dict[str, Any]:
        """Tune, and return the environment; results in the cache are not measured again.

        Raises
        ------
        InputError
            As for `tune_kernel`.
        """
        kernel = self._described.build()
        if self._device_index >= device_count():
            raise InputError(
                f"there is no CUDA device {self._device_index} here; to search results of an earlier call, pass "
                "cache and simulation_mode=True"
            )
        device = live_device(self._device_index)
        problem = resolve_problem(kernel.spec, {}, None, defaults=True)
        if not self._quiet:
            print(f"Using: {device.name}")
        self._observation.register_device(device, self._device_index)
        extra: dict[str, Any] = {}
        left = self._left_of_cache(kernel, problem, device, file)
        if left is None or left:
            self._note_verification()
            result = self._tune(kernel, problem, left)
            extra = {"autotile": self._summary(result)}
        return environment(device, iterations, compiler_options, nvrtc_version(), **extra)

    def _tune(self, kernel: Kernel, problem: Problem, left: tuple[Config, ...] | None) -> TuneResult:
        options = self._options(left)
        settings = read_settings()
        if self._chosen.sampler is not None:
            with open_session(kernel, problem, settings, options, self._observe) as session:
                result = session.run()
                self._add(session.trials)
                return result
        with open_session(kernel, problem, settings, options) as stepped:
            stepped.begin()
            try:
                self._follow_strategy(stepped)
            except BaseException:
                stepped.abort()
                raise
            result = stepped.finish()
            self._add(stepped.trials)
            return result

    def _options(self, left: tuple[Config, ...] | None) -> TuneOptions:
        limit_s = self._chosen.budget_s
        return TuneOptions(
            sampler=self._chosen.sampler or "auto",
            trials=self._chosen.trials,
            budget_s=None if limit_s is None else _SEARCH_SHARE * limit_s,
            spend=limit_s is not None,  # as Kernel Tuner does
            objectives=(TIME, ENERGY) if self._observation.needs_energy else (TIME,),
            seed=self._seed or 0,
            l2="hot",
            only=left,
            device_index=self._device_index,
        )

    def _follow_strategy(self, session: Session) -> None:
        """Let a strategy object search; each configuration that it asks for is measured, or known."""
        space = session.space
        configs = [dict(self._codec.decode(space.config(row))) for row in range(len(space))]

        def evaluate(wanted: Sequence[Mapping[str, Any]]) -> list[Result]:
            for trial in session.evaluate([self._described.codec.encode(params) for params in wanted]):
                self._results.add(self._codec, trial)
            found = [self._results.find(self._codec, params) for params in wanted]
            return [result for result in found if result is not None]

        device = session.device
        shown = SimpleNamespace(
            name=device.name, max_threads=device.max_threads_per_block, env={"device_name": device.name}
        )
        limits = {"max_fevals": self._chosen.trials, "time_limit": self._chosen.budget_s}
        run_strategy(
            self._chosen.strategy,
            configs,
            StrategyRunner(self._codec, evaluate, shown),
            self._codec,
            strategy_options={**self._chosen.options, **{k: v for k, v in limits.items() if v is not None}},
            objective=self._objectives,
            higher_is_better=self._higher_is_better,
            seed=self._seed,
            verbose=self._verbose,
        )

    def _left_of_cache(
        self, kernel: Kernel, problem: Problem, device: DeviceProperties, file: CacheFile | None
    ) -> tuple[Config, ...] | None:
        """Take over the results in the cache; return the configurations that it lacks, None for no restriction."""
        if file is None or not file.entries:
            return None
        space = feasible_space(kernel.spec, problem.sizes, device, problem.dtype)
        if len(space) > _MAX_LISTED:
            return None
        left = []
        for row in range(len(space)):
            config = space.config(row)
            entry = file.entries.get(self._codec.key(self._codec.decode(config)))
            if entry is None:
                left.append(config)
            else:
                self._results.add_cached(self._codec, entry)
        return tuple(left) if len(left) < len(space) else None

    def _observe(self, progress: Progress) -> None:
        if progress.phase == "starting" and self._verbose:
            print(f"{progress.gates['limits']} valid configurations of {progress.gates['combinations']}")
        if progress.last is not None:
            self._results.add(self._codec, progress.last)

    def _add(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._results.add(self._codec, trial)

    def _note_verification(self) -> None:
        described = self._described
        is_verified = described.answer is not None or described.check is not None or described.is_agreement
        if not is_verified and not self._quiet:
            print(_UNVERIFIED.format(name=described.name))

    def _summary(self, result: TuneResult) -> dict[str, Any]:
        winner = result.winner
        for notice in result.notices if not self._quiet else ():
            print(f"note: {notice}")
        return {
            "winner": dict(self._codec.decode(dict(winner.config))) if winner is not None else None,
            "winner_time": winner.time_us / 1e3 if winner is not None and winner.time_us is not None else None,
            "valid": result.valid,
            "resumed": result.resumed,
            "stopped": result.stopped.to_json() if result.stopped is not None else None,
            "database": result.database,
            "seconds": result.seconds,
        }


def simulate(
    file: CacheFile,
    codec: ParameterCodec,
    restrictions: Any,
    chosen: StrategyChoice,
    results: ResultList,
    objectives: Sequence[str],
    higher_is_better: Sequence[bool],
    *,
    seed: int | None,
    verbose: bool,
) -> dict[str, Any]:
    """Search the results of a cache; nothing is compiled or run.

    Raises
    ------
    InputError
        No result of the cache meets the restrictions.
    """
    entries = [entry for entry in file.entries.values() if _is_listed(entry, codec)]
    entries = [entry for entry in entries if check_restrictions(restrictions, entry, codec.values)]
    if not entries:
        raise InputError(f"no result in {file.path} has listed values and meets the restrictions")
    if chosen.sampler is not None:
        _search_cache(entries, codec, chosen, results, seed or 0)
    else:
        _follow_in_cache(entries, codec, chosen, results, objectives, higher_is_better, file, seed, verbose=verbose)
    return {"device_name": file.device_name, "simulation": True}


def _is_listed(entry: Mapping[str, Any], codec: ParameterCodec) -> bool:
    try:
        codec.encode(entry)
    except InputError:
        return False
    return True


def _search_cache(
    entries: Sequence[Mapping[str, Any]], codec: ParameterCodec, chosen: StrategyChoice, results: ResultList, seed: int
) -> None:
    """Let a sampler of autotile search, until the limits, or all results, are reached."""
    from autotile.search.samplers import resolve_sampler
    from autotile.search.search import Search

    encoded = [codec.encode(entry) for entry in entries]
    parameters = tuple(Parameter(name, tuple(values)) for name, values in codec.declared.items())
    empty = np.empty((0, len(parameters)), np.uint16, order="F")
    space = SearchSpace(parameters, empty, len(codec), (), (), 0.0).including(encoded)
    by_row = {space.row_of(config): entry for config, entry in zip(encoded, entries, strict=True)}
    trials = min(chosen.trials or len(space), len(space))
    sampler = resolve_sampler(str(chosen.sampler), space, None, trials)
    search = Search(space, sampler, seed, trials=trials)
    started = time.perf_counter()
    try:
        for _ in range(trials):
            is_late = chosen.budget_s is not None and time.perf_counter() - started > chosen.budget_s
            proposed = None if is_late else search.propose()
            if proposed is None:
                break
            row, config = proposed
            search.tell(row, _trial(config, results.add_cached(codec, by_row[row])))
    finally:
        search.close()


def _trial(config: Config, result: Mapping[str, Any]) -> Trial:
    if "__error__" in result:
        return Trial(config, Outcome.CRASHED, source="replayed")
    time_us = 1e3 * float(result["time"])
    return Trial(config, Outcome.OK, measurement=Measurement(time_us, time_us, time_us), source="replayed")


def _follow_in_cache(
    entries: Sequence[Mapping[str, Any]],
    codec: ParameterCodec,
    chosen: StrategyChoice,
    results: ResultList,
    objectives: Sequence[str],
    higher_is_better: Sequence[bool],
    file: CacheFile,
    seed: int | None,
    *,
    verbose: bool,
) -> None:
    known = {codec.key(entry): entry for entry in entries}
    shown = SimpleNamespace(name=file.device_name, max_threads=1024, env={"device_name": file.device_name})
    runner = StrategyRunner(
        codec, lambda wanted: [results.add_cached(codec, known[codec.key(params)]) for params in wanted], shown
    )
    limits = {"max_fevals": chosen.trials, "time_limit": chosen.budget_s}
    run_strategy(
        chosen.strategy,
        [{name: entry[name] for name in codec.values} for entry in entries],
        runner,
        codec,
        strategy_options={**chosen.options, **{name: value for name, value in limits.items() if value is not None}},
        objective=objectives,
        higher_is_better=higher_is_better,
        seed=seed,
        verbose=verbose,
    )

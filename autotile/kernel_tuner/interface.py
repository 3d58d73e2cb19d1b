"""`tune_kernel` and `run_kernel` of Kernel Tuner, on autotile's engine."""

from __future__ import annotations

import itertools
import logging
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotile.core.argument_types import check_value, checked_except
from autotile.core.device import DeviceProperties
from autotile.core.documents import to_document
from autotile.core.dtypes import load_npy
from autotile.core.model import ENERGY, OUTPUT_DIGEST, TIME, Config, Outcome, Trial, config_text, non_dominated
from autotile.core.text import plural
from autotile.cuda.compiler import compile_job
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import nvrtc_version
from autotile.errors import InputError
from autotile.kernel.problem import resolve_problem
from autotile.kernel.python_kernel import function_name, names_read
from autotile.kernel.spec import Parameter, computed_values
from autotile.kernel_tuner.file_utils import CacheFile, read_header
from autotile.kernel_tuner.observers import Observation
from autotile.kernel_tuner.parameters import ParameterCodec, Params, parse_restrictions
from autotile.kernel_tuner.strategies import Strategy, TuneRunner, choose_strategy, installed_module
from autotile.kernel_tuner.translation import (
    ScriptKernel,
    block_names,
    host_array,
    is_on_gpu,
    library_name,
    restored_form,
    session_folder,
)
from autotile.kernel_tuner.util import (
    CompilationFailedConfig,
    ErrorConfig,
    InvalidConfig,
    RuntimeFailedConfig,
    get_best_config,
    get_config_string,
    get_objective_defaults,
    objective_value,
    process_metrics,
)
from autotile.search.samplers import check_sampler, resolve_sampler, sampler_entry
from autotile.settings import read_settings
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.backend import workload_of
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.session import open_session
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Gpu
from autotile.workers.jobs import Candidate, Entry, Time

_DEVICE_PARAMETERS = ("nvml_", "tegra_", "cuda_sm_percentage")
"""Parameters by which Kernel Tuner sets up the device."""
_MAX_LISTED = 200_000
"""Configurations of a space beyond which those in a cache are not left out of the search."""
_SEARCH_SHARE = 0.9
"""Share of the time limit for the search; the finals take the rest, so that a call ends near its limit."""
_UNITS = {"time": "ms"}
_COMPILE_DEADLINE_S, _RUN_DEADLINE_S = 120.0, 300.0
"""Time limits of `run_kernel`."""


class ConfigResult(dict[str, Any]):
    """The result of a configuration.

    One that failed has no key ``time``, but its time reads as infinite, so that the minimum by ``result["time"]``
    is the fastest.
    """

    def __missing__(self, name: str) -> float:
        if name == "time" and "__error__" in self:
            return math.inf
        raise KeyError(name)


@checked_except("verbose", "quiet", "simulation_mode", "block_size_names")  # the first three: of any truth
def tune_kernel(
    kernel_name: str,
    kernel_source: Any,
    problem_size: Any,
    arguments: Sequence[Any],
    tune_params: Mapping[str, Sequence[Any]],
    grid_div_x: Any = None,
    grid_div_y: Any = None,
    grid_div_z: Any = None,
    restrictions: Any = None,
    answer: Any = None,
    atol: float = 1e-6,
    verify: Callable[..., Any] | str | None = None,
    verbose: bool = False,
    lang: str | None = None,
    device: int = 0,
    platform: int = 0,
    smem_args: Mapping[str, Any] | None = None,
    cmem_args: Mapping[str, Any] | None = None,
    texmem_args: Mapping[str, Any] | None = None,
    compiler: str | None = None,
    compiler_options: Sequence[str] | Callable[..., Any] | None = None,
    defines: Mapping[str, Any] | None = None,
    log: int | None = None,
    iterations: int = 7,
    block_size_names: Sequence[str] | None = None,
    quiet: bool = False,
    strategy: Any = None,
    strategy_options: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    metrics: Mapping[str, Any] | None = None,
    simulation_mode: bool | None = None,
    parallel: Any = None,
    observers: Sequence[Any] | None = None,
    objective: str | Sequence[str] | None = None,
    objective_higher_is_better: bool | Sequence[bool] | None = None,
    objectives: Mapping[str, bool] | None = None,
    seed: int | None = None,
) -> tuple[list[ConfigResult], dict[str, Any]]:
    """Tune a kernel, given as Kernel Tuner's function of this name takes it.

    docs/from-kernel-tuner.md has a table of the arguments, and of the keys of the results.

    Returns
    -------
    tuple of list and dict
        A dictionary for each configuration that was tried, with its parameters, times in milliseconds and metrics; and
        a dictionary of the device and the totals.

    Raises
    ------
    InputError
        An argument cannot be used, or there is no GPU.
    ToolchainError, WorkerError
        As for `autotile.tune`.
    """
    started = time.perf_counter()
    _begin(kernel_name, log, texmem_args)
    codec = ParameterCodec(tune_params)
    if isinstance(verify, str) and verify != "agreement":
        raise InputError(f"verify is {verify!r}, expected a function, 'agreement' or None")
    kernel = ScriptKernel(
        kernel_name,
        kernel_source,
        problem_size,
        list(arguments),
        codec,
        block_names=block_names(block_size_names, codec.values),
        grid_div=(grid_div_x, grid_div_y, grid_div_z),
        smem_args=smem_args,
        options=compiler_options,
        defines=defines,
        restrictions=restrictions,
        constants=cmem_args,
        atol=atol,
        is_agreement=verify == "agreement",
    )
    if not simulation_mode:
        kernel.check_language(lang)
    if not objectives:
        asked: Sequence[str | None] = [objective] if isinstance(objective, str) else objective or [None]
        is_listed = isinstance(objective_higher_is_better, Sequence)
        higher: Any = objective_higher_is_better if is_listed else [objective_higher_is_better] * len(asked)
        if len(higher) != len(asked):
            counts = plural(len(asked), "name"), plural(len(higher), "value")
            raise InputError(f"objective has {counts[0]}, objective_higher_is_better {counts[1]}")
        objectives = dict(map(get_objective_defaults, asked, higher))
    names, directions = list(objectives), [bool(is_higher) for is_higher in objectives.values()]
    for name in codec.values:
        if name.startswith(_DEVICE_PARAMETERS):
            warnings.warn(
                f"the parameter {name} sets nothing: autotile leaves clocks, power limits and partitions as they are",
                stacklevel=3,
            )
    if unknown := [name for name in block_size_names or () if name not in codec.values]:
        warnings.warn(f"no parameters, so of the default extents: {unknown} of block_size_names", stacklevel=3)
    size = list(problem_size) if isinstance(problem_size, tuple | list) else problem_size
    size = "callable" if callable(problem_size) else size
    header = {"kernel_name": kernel_name, "problem_size": size, "objective": names[0]}
    file = CacheFile(cache, header, codec) if cache is not None else None
    sampler, by, trials, budget_s = choose_strategy(strategy, strategy_options, names)
    call = _TuneCall(
        codec=codec,
        file=file,
        sampler=sampler,
        strategy=by,
        strategy_options=strategy_options or {},
        trials=trials,
        budget_s=budget_s,
        observation=Observation(observers),
        metrics=metrics,
        objectives=names,
        higher_is_better=directions,
        results={},
        device=device,
        seed=seed,
        quiet=quiet,
        verbose=verbose,
    )
    if simulation_mode:
        if file is None or not file.entries:
            raise InputError("simulation_mode needs a cache with results; give cache, the name of its file")
        env = call.simulate(kernel, file)
        env["simulated_time"] = sum(map(_simulated_ms, call.results.values()))
    else:
        own_check = verify if callable(verify) else None
        env, groups = {}, list(_groups(kernel, answer))
        count = len(groups)
        for number, group in enumerate(groups):
            checked = _with_check(group, own_check, call.observation)  # holds copies of arrays on a GPU
            # The groups share the limits equally.
            part = trials
            if trials is not None and not isinstance(trials, float):
                part = max(1, trials * (number + 1) // count - trials * number // count)
            part_s = None if budget_s is None else budget_s / count
            used, extra = replace(call, codec=checked.codec, trials=part, budget_s=part_s).tune(checked)
            env = {
                "device_name": used.name,
                "cuda_version": nvrtc_version(),
                "compute_capability": used.compute_capability.replace(".", ""),
                "iterations": iterations,
                "compiler_options": None if callable(compiler_options) else list(compiler_options or []),
                "device_properties": used.to_json(),
                **extra,
            }
    if file is not None:
        file.close()
    found = list(call.results.values())
    timed = [each for each in found if all(not math.isnan(objective_value(each, name)) for name in names)]
    best: list[ConfigResult] = []
    if timed and len(names) == 1:
        best = [ConfigResult(get_best_config(timed, names[0], directions[0]))]
    elif timed:  # the Pareto front
        signs = np.array([-1.0 if higher else 1.0 for higher in directions])
        kept = non_dominated(np.array([[float(result[name]) for name in names] for result in timed]) * signs)
        best = [
            ConfigResult({**result, "optimal": True}) for result, is_kept in zip(timed, kept, strict=True) if is_kept
        ]
    if best:
        env["best_config"] = best if len(names) > 1 else best[0]
    elif any("__error__" not in result for result in found):
        warnings.warn(
            f"no result has all objectives ({', '.join(names)}), so that none is the best; expected names of numbers "
            "in the results: time, parameters, metrics and values of observers",
            stacklevel=3,
        )
    for name in _TOTALS:
        env[f"total_{name}"] = sum(result.get(name, 0) for result in found)
    # Configurations compile in parallel, so that the total may exceed the wall time.
    passed_ms = 1e3 * (time.perf_counter() - started)
    env["overhead_time"] = max(0.0, passed_ms - sum(env[f"total_{name}"] for name in _TOTALS))
    if not quiet:
        print(f"\nbest for {', '.join(names)}:" if best else "no results to report")
        for each in best:
            hidden = {"times", "timestamp", "optimal", "__error__", *_TOTALS}
            print(get_config_string(each, [name for name in each if name not in hidden], _UNITS))
    return found, env


def tune_cache(
    cache_path: str | Path, restrictions: Any = None, **options: Any
) -> tuple[list[ConfigResult], dict[str, Any]]:
    """Search the results of a cache file; further arguments are those of `tune_kernel`, and nothing runs.

    Raises
    ------
    InputError
        The file is no cache of Kernel Tuner.
    """
    header = read_header(cache_path)
    described = {
        "kernel_name": header["kernel_name"],
        "kernel_source": "",
        "problem_size": header.get("problem_size", "callable"),
        "arguments": [],
        "tune_params": header["tune_params"],
        **options,
    }
    return tune_kernel(**described, restrictions=restrictions, cache=cache_path, simulation_mode=True)


@checked_except("quiet", "block_size_names")
def run_kernel(
    kernel_name: str,
    kernel_source: Any,
    problem_size: Any,
    arguments: Sequence[Any],
    params: Mapping[str, Any],
    grid_div_x: Any = None,
    grid_div_y: Any = None,
    grid_div_z: Any = None,
    lang: str | None = None,
    device: int = 0,
    platform: int = 0,
    smem_args: Mapping[str, Any] | None = None,
    cmem_args: Mapping[str, Any] | None = None,
    texmem_args: Mapping[str, Any] | None = None,
    compiler: str | None = None,
    compiler_options: Sequence[str] | Callable[..., Any] | None = None,
    defines: Mapping[str, Any] | None = None,
    block_size_names: Sequence[str] | None = None,
    quiet: bool = False,
    log: int | None = None,
) -> list[Any]:
    """Run one configuration of a kernel once, given as Kernel Tuner's function of this name takes it.

    The kernel runs in a process of its own. Arrays of CuPy and CUDA tensors of PyTorch hold what it wrote afterwards.

    Returns
    -------
    list
        The arguments after the launch: arrays of NumPy, and numbers as they were passed.

    Raises
    ------
    InputError
        An argument cannot be used, there is no GPU, or the kernel does not compile or fails.
    """
    _begin(kernel_name, log, texmem_args)
    codec = ParameterCodec({name: [value] for name, value in params.items()} or {"block_size_x": [256]})
    described = ScriptKernel(
        kernel_name,
        kernel_source,
        problem_size,
        [_selected(argument, dict(params)) for argument in arguments],
        codec,
        block_names=block_names(block_size_names, codec.values),
        grid_div=(grid_div_x, grid_div_y, grid_div_z),
        smem_args=smem_args,
        options=compiler_options,
        defines=defines,
        constants=cmem_args,
    )
    described.check_language(lang)
    kernel = described.build()
    gpu = _device_at(device, "and run_kernel needs one; see `autotile doctor`")
    problem = resolve_problem(kernel.spec, {}, None, defaults=True)
    config = dict(kernel.spec.default)
    if reason := check_config(kernel.spec, config, problem, gpu):
        raise InputError(f"{described.name} cannot run with {config_text(config)}: {reason}")
    settings = read_settings()
    job = compile_job(kernel, config, problem, gpu.architecture)
    compiled = compile_in_worker(job, settings, _COMPILE_DEADLINE_S)
    if compiled.cubin is None:
        raise InputError(f"{described.name} does not compile: {compiled.reason}")
    names = [buffer.name for buffer in kernel.spec.buffers if buffer.is_written]
    with tempfile.TemporaryDirectory(dir=session_folder()) as folder:
        workload = replace(
            workload_of(kernel, problem, settings, TuneOptions(l2="hot", device_index=device)),
            sample_limit_s=0.0,
            captured=tuple(names),
            capture_folder=folder,
        )
        computed = computed_values(kernel.spec.computed, config)
        candidate = Candidate(config, str(compiled.cubin.path), compiled.cubin.symbols, computed)
        worker = Gpu(workload, _RUN_DEADLINE_S)
        try:
            (evaluation,) = worker.run(Time((Entry(candidate),)))
        finally:
            worker.close()
        if evaluation.outcome is not Outcome.OK or not evaluation.captured:
            raise InputError(f"{described.name} failed with {config_text(config)}: {evaluation.reason}")
        contents = {name: load_npy(Path(evaluation.captured) / f"{name}.npy") for name in names}
    returned: list[Any] = list(described.arguments)
    for index, array in described.arrays.items():
        stored = contents.get(kernel.spec.arguments[index].name)
        returned[index] = array.copy() if stored is None else restored_form(stored, array)
        target = described.arguments[index]
        if not is_on_gpu(target) or returned[index].tobytes() == array.tobytes():
            continue  # unchanged, it may be another argument, too
        if library_name(target) == "torch":
            import torch

            target.copy_(torch.from_numpy(returned[index]))
        else:
            import cupy

            with target.device:
                target[...] = cupy.asarray(returned[index])
                cupy.cuda.get_current_stream().synchronize()  # whatever stream reads it
    return returned


def _device_at(index: int, hint: str) -> DeviceProperties:
    """Return a GPU by its CUDA index; an `InputError`, which ends with the hint, if there is none."""
    if not 0 <= index < device_count():
        raise InputError(f"there is no CUDA device {index} here, {hint}")
    return live_device(index)


def _begin(kernel_name: str, log: int | None, texmem_args: Mapping[str, Any] | None) -> None:
    """Start the log; an `InputError` for textures."""
    if log:
        stamp = datetime.now().strftime("%Y%m%d-%H:%M:%S")
        logging.basicConfig(filename=f"{kernel_name.partition('<')[0]}{stamp}.log", level=log)
    if texmem_args:
        raise InputError(
            f"texmem_args ({', '.join(texmem_args)}): CUDA 12 removed texture references, so that such code "
            "does not compile; use a texture object, or read the array through a const pointer"
        )


def _is_tunable(argument: Any) -> bool:
    return callable(getattr(argument, "select_for_configuration", None))


def _selected(argument: Any, params: Params) -> Any:
    return argument.select_for_configuration(params) if _is_tunable(argument) else argument


def _groups(kernel: ScriptKernel, answer: Any) -> Iterator[ScriptKernel]:
    """Yield the kernel with its arguments and its answer, for each value of the parameters that these depend on."""
    codec = kernel.codec
    read = set().union(*(_names_of(each, codec) for each in (*kernel.arguments, answer) if _is_tunable(each)))
    names = [name for name in codec.values if name in read]
    for values in itertools.product(*(codec.values[name] for name in names)):
        fixed = {name: [value] for name, value in zip(names, values, strict=True)}
        narrowed = ParameterCodec({**codec.values, **fixed}) if names else codec
        probe = {name: listed[0] for name, listed in narrowed.values.items()}
        expected = _selected(answer, probe)
        check_value("answer", expected, Iterable[Any] | None)
        listed = [_selected(each, probe) for each in expected] if expected is not None else None
        arguments = [_selected(each, probe) for each in kernel.arguments]
        yield replace(kernel, arguments=arguments, codec=narrowed, answer=listed)


def _names_of(tunable: Any, codec: ParameterCodec) -> set[str]:
    if isinstance(tunable.param_key, str) and tunable.param_key in codec.values:
        inner = [each for each in tunable.values() if _is_tunable(each)]
        return {tunable.param_key}.union(*(_names_of(each, codec) for each in inner))
    combinations = itertools.islice(itertools.product(*codec.values.values()), 1000)
    return names_read(
        tunable.select_for_configuration, (dict(zip(codec.values, values, strict=True)) for values in combinations)
    )


def _with_check(kernel: ScriptKernel, verify: Callable[..., Any] | None, observation: Observation) -> ScriptKernel:
    """Return a kernel with the functions that look at its outputs, beside its answer."""
    answer = kernel.answer
    if answer is not None and len(answer) != len(kernel.arguments):
        raise InputError(
            f"answer has {plural(len(answer), 'element')}, expected {len(kernel.arguments)}, one an argument"
        )
    arrays = [host_array(each) for each in answer or ()]
    if verify is None and not observation.of_output:
        numbers = [array for array in arrays if array is not None and array.dtype.kind in "fc"]
        if all(np.isfinite(array).all() for array in numbers):
            return kernel
        verify = _equal_with_nan
    shown = None if answer is None else [g if a is None else a for g, a in zip(answer, arrays, strict=True)]
    observers = [
        (each.process_output, each.get_results, *getattr(each, "__dict__", {}).values())
        for each in observation.of_output
    ]
    called = [each for each in (verify, *itertools.chain(*observers)) if callable(each) or isinstance(each, str)]
    name = " ".join(function_name(each) if callable(each) else each for each in called)
    return replace(kernel, check=observation.output_check(kernel, shown, verify), check_name=name)


def _equal_with_nan(answer: Sequence[Any], outputs: Sequence[Any], atol: float) -> bool:
    """Compare an answer with NaNs or infinities, which a reference of autotile must not have."""
    pairs = [(expected, got) for expected, got in zip(answer, outputs, strict=True) if expected is not None]
    return all(np.allclose(e.reshape(-1), got.reshape(-1), atol=atol, equal_nan=True) for e, got in pairs)


@dataclass(frozen=True)
class _TuneCall:
    """State that the sessions of a call of `tune_kernel` share.

    The search is a `StrategyChoice` with its options; a strategy object follows the objectives. Results are by the keys
    of their configurations, in the order in which they became known, and are appended to the file.
    """

    codec: ParameterCodec
    file: CacheFile | None
    sampler: str | None
    strategy: Any
    strategy_options: Mapping[str, Any]
    trials: int | float | None
    budget_s: float | None
    observation: Observation
    metrics: Mapping[str, Any] | None
    objectives: Sequence[str]
    higher_is_better: Sequence[bool]
    results: dict[str, ConfigResult]
    device: int
    seed: int | None
    quiet: bool
    verbose: bool

    def tune(self, described: ScriptKernel) -> tuple[DeviceProperties, dict[str, Any]]:
        """Tune a kernel; return the device, and the summary of the session if there was any.

        Results in the cache are not measured again. Errors are those of `tune_kernel`.
        """
        codec, kernel = self.codec, described.build()
        device = _device_at(
            self.device, "and only the results of an earlier call can be searched: pass cache and simulation_mode=True"
        )
        problem = resolve_problem(kernel.spec, {}, None, defaults=True)
        if not self.quiet:
            print(f"Using: {device.name}")
        self.observation.register_device(device, self.device)
        left: tuple[Config, ...] | None = None  # configurations that the cache lacks, None for no restriction
        entries = self.file.entries if self.file is not None else {}
        space = feasible_space(kernel.spec, problem, device) if entries or isinstance(self.trials, float) else None
        if entries and space is not None and len(space) <= _MAX_LISTED:
            lacking = []
            for config in map(space.config, range(len(space))):
                params = codec.decode(config)
                if (entry := entries.get(codec.key(params))) is None:
                    lacking.append(config)
                else:
                    self._add_cached({**entry, **params, **dict.fromkeys(_STAGES, 0)})
            if not lacking:
                return device, {}
            left = tuple(lacking) if len(lacking) < len(space) else None
        is_verified = described.answer is not None or described.check is not None or described.is_agreement
        if not is_verified and not self.quiet:
            print(
                f"note: the outputs of {described.name} are not verified, as no answer is given; pass answer, verify, "
                "or verify='agreement', which compares configurations with each other"
            )
        options = TuneOptions(
            sampler=self.sampler or "auto",
            trials=_trials(self.trials, space),
            budget_s=None if self.budget_s is None else _SEARCH_SHARE * self.budget_s,
            spend=self.budget_s is not None,  # as Kernel Tuner does
            objectives=(TIME, ENERGY) if self.observation.needs_energy else (TIME,),
            seed=self.seed or 0,
            l2="hot",
            only=left,
            device_index=self.device,
        )

        def observe(progress: Progress) -> None:
            if progress.phase == "starting" and self.verbose:
                print(f"{progress.gates['limits']} valid configurations of {progress.gates['combinations']}")
            if progress.last is not None:
                self._add(progress.last)

        with open_session(kernel, problem, read_settings(), options, observe) as session:
            if self.sampler is not None:
                result = session.run()
            else:
                session.begin()
                space = session.space

                def evaluate(wanted: Sequence[Params]) -> list[ConfigResult]:
                    for trial in session.evaluate([codec.encode(params) for params in wanted]):
                        self._add(trial)
                    keys = [codec.key(params) for params in wanted]
                    return [self.results[key] for key in keys if key in self.results]

                try:
                    configs = [dict(codec.decode(space.config(row))) for row in range(len(space))]
                    self._run_strategy(configs, evaluate, device.name, device.max_threads_per_block)
                except BaseException:
                    session.abort()
                    raise
                result = session.finish()
            for trial in session.trials:
                self._add(trial)
        for notice in result.notices if not self.quiet else ():
            print(f"note: {notice}")
        winner = result.winner
        return device, {
            "autotile": {
                "winner": dict(codec.decode(dict(winner.config))) if winner is not None else None,
                "winner_time": winner.time_us / 1e3 if winner is not None and winner.time_us is not None else None,
                "valid": result.valid,
                "resumed": result.resumed,
                "stopped": to_document(result.stopped),
                "database": result.database,
                "seconds": result.seconds,
            }
        }

    def simulate(self, described: ScriptKernel, file: CacheFile) -> dict[str, Any]:
        """Search the results of a cache until the limits, or all results, are reached; nothing is compiled or run.

        As in Kernel Tuner, what the results state that they took counts towards the time limit.
        """
        codec = self.codec
        restrictions = parse_restrictions(described.restrictions, codec.values)
        known: dict[str, dict[str, Any]] = {}
        for entry in file.entries.values():
            try:
                params = codec.decode(codec.encode(entry))
            except InputError:
                continue
            if all(each.allows(params) for each in restrictions):
                known[codec.key(params)] = {**entry, **params}
        if not known:
            raise InputError(f"no result in {file.path} has listed values and meets the restrictions")
        env = {"device_name": file.device_name, "simulation": True}
        if self.sampler is None:
            configs = [{name: entry[name] for name in codec.values} for entry in known.values()]

            def evaluate(wanted: Sequence[Params]) -> list[ConfigResult]:
                return [self._add_cached(known[codec.key(params)]) for params in wanted]

            self._run_strategy(
                configs, evaluate, file.device_name, 1024, lambda params: _simulated_ms(known[codec.key(params)])
            )
            return env
        parameters = tuple(Parameter(name, tuple(values)) for name, values in codec.declared.items())
        empty = np.empty((0, len(parameters)), np.uint16, order="F")
        space = SearchSpace(parameters, empty, len(codec), (), (), 0.0).including(map(codec.encode, known.values()))
        trials = min(_trials(self.trials, space) or len(space), len(space))
        check_sampler(self.sampler)
        name = resolve_sampler(self.sampler, space, None, trials)
        sampler = sampler_entry(name).make(space, self.seed or 0, trials=trials)
        started, limit_s, simulated_ms = time.perf_counter(), self.budget_s, 0.0
        try:
            for _ in range(trials):
                if limit_s is not None and time.perf_counter() - started + simulated_ms / 1e3 > limit_s:
                    break
                row = sampler.propose()
                result = self._add_cached(known[codec.key(codec.decode(space.config(row)))])
                simulated_ms += _simulated_ms(result)
                sampler.tell(row, None if "__error__" in result else (1e3 * float(result["time"]),))
        finally:
            sampler.close()
        return env

    def _run_strategy(
        self,
        configs: Sequence[Params],
        evaluate: Callable[[Sequence[Params]], Sequence[Params]],
        device_name: str,
        max_threads: int,
        simulated_ms: Callable[[Params], float] = lambda _: 0.0,
    ) -> None:
        """Call the ``tune`` of a strategy as Kernel Tuner does, until it ends or the budget is spent.

        ``configs`` are all valid configurations, and ``evaluate`` returns a result for each of some. The seed is that
        of Python's and NumPy's random states; None leaves them.
        """
        interface, util, searchspaces = (
            installed_module(name, "a strategy object") for name in ("interface", "util", "searchspace")
        )
        if self.seed is not None:
            random.seed(self.seed)
            np.random.seed(self.seed)
        limits = {"max_fevals": self.trials, "time_limit": self.budget_s}
        given = {**self.strategy_options, **{name: value for name, value in limits.items() if value is not None}}
        values = {name: list(listed) for name, listed in self.codec.values.items()}
        cache = {str(number): dict(config) for number, config in enumerate(configs)}
        searchspace = searchspaces.Searchspace(None, None, None, from_cache={"tune_params": values, "cache": cache})
        max_fevals = min(given.get("max_fevals") or len(configs), len(configs))
        options = interface.Options(
            {
                "strategy": self.strategy.name if isinstance(self.strategy, Strategy) else self.strategy,
                "strategy_options": interface.Options(given),
                "budget": util.TuningBudget(given.get("time_limit"), max_fevals),
                "max_fevals": max_fevals,
                "seed": self.seed,
                "tune_params": values,
                "restrictions": [],
                "objective": list(self.objectives),
                "objective_higher_is_better": list(self.higher_is_better),
                "simulation_mode": False,
                "verbose": self.verbose,
                "metrics": None,
                "cache": {},
                "cachefile": None,
            }
        )
        device = SimpleNamespace(name=device_name, max_threads=max_threads, env={"device_name": device_name})
        try:
            self.strategy.tune(searchspace, TuneRunner(self.codec, evaluate, device, simulated_ms), options)
        except util.StopCriterionReached as reached:
            if self.verbose:
                print(reached)

    def _add_cached(self, entry: Mapping[str, Any]) -> ConfigResult:
        result = ConfigResult(entry)
        if "__error__" not in result:
            process_metrics(result, self.metrics)
        self.results[self.codec.key(entry)] = result
        return result

    def _add(self, trial: Trial) -> None:
        """Add, print and store the result of a trial; a second trial of a configuration is left out."""
        params = self.codec.decode(dict(trial.config))
        if (key := self.codec.key(params)) in self.results:
            return
        self.results[key] = result = ConfigResult(params)
        measured = trial.measurement if trial.outcome.has_time else None
        if measured is None:
            error: type[ErrorConfig] = RuntimeFailedConfig
            if trial.outcome in (Outcome.INFEASIBLE, Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS):
                error = InvalidConfig
            elif trial.outcome in (Outcome.COMPILE_FAILED, Outcome.NOT_COMPILED) or trial.stage in _COMPILED_STAGES:
                error = CompilationFailedConfig
            result["__error__"] = error()
        else:
            samples = measured.samples_us or (measured.time_us,)
            result |= {"time": measured.time_us / 1e3, "times": [time_us / 1e3 for time_us in samples]}
            result |= {name: _number(v) for name, v in trial.telemetry.items() if name not in _OWN_TELEMETRY}
            result |= self.observation.results(params, trial)
        for name, stages in _STAGES.items():
            result[name] = 1e3 * sum(trial.seconds.get(stage, 0.0) for stage in stages)
        result |= {"strategy_time": 0.0, "framework_time": 0.0}
        if measured is not None:
            process_metrics(result, self.metrics)
        result["timestamp"] = str(datetime.now(UTC))
        if measured is not None and not self.quiet:
            print(get_config_string(result, [*self.codec.values, "time", *(self.metrics or ())], _UNITS))
        elif self.verbose and not self.quiet:
            print(f"skipping config {'_'.join(map(str, params.values()))}, reason: {trial.outcome}: {trial.reason}")
        if self.file is not None:
            self.file.append(params, result)


_STAGES = {"compile_time": ("compile",), "verification_time": ("verify",), "benchmark_time": ("load", "measure")}
_COMPILED_STAGES = ("compile", "resources")
_TOTALS = ("framework_time", "strategy_time", "compile_time", "verification_time", "benchmark_time")
_OWN_TELEMETRY = frozenset(
    {
        *("reference_us", "event_floor_us", "max_error", "throttle_reasons", OUTPUT_DIGEST),
        *("sm_clock_mhz", "power_w", "temperature_c", "energy_mj", "energy_source"),
    }
)
"""Telemetry of autotile's own, as against what observers of the output added."""


def _simulated_ms(result: Mapping[str, Any]) -> float:
    return sum(time_ms for time_ms in map(result.get, _STAGES) if isinstance(time_ms, int | float))


def _trials(limit: int | float | None, space: SearchSpace | None) -> int | None:
    """Return the number of configurations to try; a float is a share of those of the space."""
    return math.ceil(limit * len(space or ())) if isinstance(limit, float) else limit


def _number(value: Any) -> Any:
    try:
        return float(value)
    except ValueError:
        return value

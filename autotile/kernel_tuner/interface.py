"""`tune_kernel` and `run_kernel` of Kernel Tuner, on autotile's engine."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from autotile.errors import InputError
from autotile.kernel.computed import names_read
from autotile.kernel_tuner.files import CacheFile, host_array, read_header
from autotile.kernel_tuner.kernel_definition import KernelTunerKernel
from autotile.kernel_tuner.kernel_source import KernelSource, KernelTunerLaunch, Macros, block_names
from autotile.kernel_tuner.observation import Observation, OutputCheck
from autotile.kernel_tuner.parameter_codec import ParameterCodec
from autotile.kernel_tuner.strategy_choice import choose_strategy
from autotile.kernel_tuner.tune_results import UNITS, Result, ResultList, add_totals, best_results
from autotile.kernel_tuner.tune_session import TuneSession, simulate
from autotile.kernel_tuner.util import get_config_string, get_objective_defaults

_AGREEMENT = "agreement"
_DEVICE_PARAMETERS = ("nvml_", "tegra_", "cuda_sm_percentage")
"""Parameters by which Kernel Tuner sets up the device."""


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
    compiler_options: Any = None,
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
) -> tuple[list[Result], dict[str, Any]]:
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
    _start_log(log, kernel_name)
    source = KernelSource(kernel_source, compiler_options)
    if not simulation_mode:
        source.check_language(lang)
    _refuse_textures(texmem_args)
    names, directions = _objectives(objective, objective_higher_is_better, objectives)
    observation = Observation(observers)
    codec = ParameterCodec(tune_params)
    _warn_of_device_parameters(codec)
    chosen = choose_strategy(strategy, strategy_options, len(codec), names)
    launch = KernelTunerLaunch(
        problem_size, (grid_div_x, grid_div_y, grid_div_z), block_names(block_size_names, codec.values), smem_args
    )
    header = {"kernel_name": kernel_name, "problem_size": _cached_size(problem_size), "objective": names[0]}
    file = CacheFile(cache, header, codec) if cache is not None else None
    results = ResultList(
        metrics, observation, quiet=quiet, verbose=verbose, store=file.append if file is not None else None
    )
    kernel = KernelTunerKernel(
        kernel_name,
        source,
        launch,
        Macros(launch, defines),
        list(arguments),
        codec,
        restrictions,
        cmem_args,
        None,
        atol,
        is_agreement=verify == _AGREEMENT,
    )
    if simulation_mode:
        if file is None or not file.entries:
            raise InputError("simulation_mode needs a cache with results; give cache, the name of its file")
        env = simulate(file, codec, restrictions, chosen, results, names, directions, seed=seed, verbose=verbose)
    else:
        function = verify if callable(verify) else None
        env = {}
        groups = list(_groups(kernel, answer))
        for number, (group, expected) in enumerate(groups, start=1):
            session = TuneSession(
                _with_check(group, expected, function, atol, observation),
                codec,
                _share(chosen, number, len(groups)),
                results,
                observation,
                device=device,
                seed=seed,
                verbose=verbose,
                quiet=quiet,
                objectives=names,
                higher_is_better=directions,
            )
            env = session.run(file, iterations, compiler_options)
    if file is not None:
        file.close()
    return _finish(results, env, names, directions, metrics, time.perf_counter() - started, quiet=quiet)


def tune_cache(cache_path: str | Path, restrictions: Any = None, **options: Any) -> tuple[list[Result], dict[str, Any]]:
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
    compiler_options: Any = None,
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
    from autotile.kernel_tuner.kernel_definition import run_once

    _start_log(log, kernel_name)
    source = KernelSource(kernel_source, compiler_options)
    source.check_language(lang)
    _refuse_textures(texmem_args)
    codec = ParameterCodec({name: [value] for name, value in params.items()} or {"block_size_x": [256]})
    launch = KernelTunerLaunch(
        problem_size, (grid_div_x, grid_div_y, grid_div_z), block_names(block_size_names, codec.values), smem_args
    )
    chosen = [_selected(argument, dict(params)) for argument in arguments]
    kernel = KernelTunerKernel(kernel_name, source, launch, Macros(launch, defines), chosen, codec, constants=cmem_args)
    return run_once(kernel, device)


def _start_log(log: int | None, kernel_name: str) -> None:
    if log:
        stamp = datetime.now().strftime("%Y%m%d-%H:%M:%S")
        logging.basicConfig(filename=f"{kernel_name.partition('<')[0]}{stamp}.log", level=log)


def _warn_of_device_parameters(codec: ParameterCodec) -> None:
    for name in codec.values:
        if name.startswith(_DEVICE_PARAMETERS):
            warnings.warn(
                f"the parameter {name} sets nothing: autotile leaves clocks, power limits and partitions as they are",
                stacklevel=3,
            )


def _refuse_textures(texmem_args: Mapping[str, Any] | None) -> None:
    if texmem_args:
        raise InputError(
            f"texmem_args ({', '.join(texmem_args)}): CUDA 12 removed texture references, so that such code "
            "does not compile; use a texture object, or read the array through a const pointer"
        )


def _objectives(
    objective: str | Sequence[str] | None,
    higher_is_better: bool | Sequence[bool] | None,
    objectives: Mapping[str, bool] | None,
) -> tuple[list[str], list[bool]]:
    """Return the objectives and whether greater values of each are better."""
    if objectives:
        return list(objectives), [bool(value) for value in objectives.values()]
    if objective is None or isinstance(objective, str):
        direction = None if higher_is_better is None else bool(higher_is_better)
        name, is_higher = get_objective_defaults(objective, direction)
        return [name], [is_higher]
    given = higher_is_better if isinstance(higher_is_better, Sequence) else [higher_is_better] * len(objective)
    if len(given) != len(objective):
        raise InputError(f"objective has {len(objective)} names, objective_higher_is_better {len(given)} values")
    pairs = [get_objective_defaults(name, each) for name, each in zip(objective, given, strict=True)]
    return [name for name, _ in pairs], [is_higher for _, is_higher in pairs]


def _cached_size(problem_size: Any) -> Any:
    if callable(problem_size):
        return "callable"
    return list(problem_size) if isinstance(problem_size, tuple | list) else problem_size


def _is_tunable(argument: Any) -> bool:
    return callable(getattr(argument, "select_for_configuration", None))


def _selected(argument: Any, params: Mapping[str, Any]) -> Any:
    return argument.select_for_configuration(params) if _is_tunable(argument) else argument


def _groups(kernel: KernelTunerKernel, answer: Any) -> Iterator[tuple[KernelTunerKernel, Sequence[Any] | None]]:
    """Yield the kernel with its arguments and its answer; several times where they depend on parameters.

    Each time, the parameters that they depend on have one value.
    """
    tunables = [each for each in (*kernel.arguments, answer) if _is_tunable(each)]
    names = [name for name in kernel.codec.values if any(name in _names_of(each, kernel.codec) for each in tunables)]
    for values in itertools.product(*(kernel.codec.values[name] for name in names)):
        fixed = dict(zip(names, values, strict=True))
        codec = ParameterCodec({**kernel.codec.values, **{name: [value] for name, value in fixed.items()}})
        probe = {**{name: listed[0] for name, listed in codec.values.items()}}
        chosen = [_selected(argument, probe) for argument in kernel.arguments]
        expected = _selected(answer, probe)
        listed = [_selected(each, probe) for each in expected] if expected is not None else None
        yield replace(kernel, arguments=chosen, codec=codec if names else kernel.codec), listed


def _names_of(tunable: Any, codec: ParameterCodec) -> set[str]:
    """Return the parameters that the choice of an argument depends on."""
    if isinstance(tunable.param_key, str) and tunable.param_key in codec.values:
        inner = [each for each in tunable.values() if _is_tunable(each)]
        return {tunable.param_key}.union(*(_names_of(each, codec) for each in inner))
    combinations = itertools.islice(itertools.product(*codec.values.values()), 1000)
    return names_read(
        tunable.select_for_configuration, (dict(zip(codec.values, values, strict=True)) for values in combinations)
    )


def _share(chosen: Any, number: int, groups: int) -> Any:
    """Return the search for one of several groups, which share the limits equally."""
    if groups == 1:
        return chosen
    trials, budget_s = chosen.trials, chosen.budget_s
    part = None if trials is None else max(1, (trials * number) // groups - (trials * (number - 1)) // groups)
    return replace(chosen, trials=part, budget_s=None if budget_s is None else budget_s / groups)


def _with_check(
    kernel: KernelTunerKernel,
    answer: Sequence[Any] | None,
    verify: Callable[..., Any] | None,
    atol: float,
    observation: Observation,
) -> KernelTunerKernel:
    """Return a kernel with its answer, and with the functions that look at its outputs."""
    if answer is not None and len(answer) != len(kernel.arguments):
        raise InputError(f"answer has {len(answer)} elements, expected {len(kernel.arguments)}, one for each argument")
    kernel = replace(kernel, answer=answer)
    shown = [_on_host(each) for each in answer] if answer is not None else None
    if verify is None and not observation.of_output:
        if not any(_has_nan(each) for each in shown or ()):
            return kernel
        verify = _equal_with_nan
    check = OutputCheck(kernel.arrays, len(kernel.arguments), shown, verify, atol, observation)
    return replace(kernel, check=check)


def _has_nan(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fc" and not np.isfinite(value).all()


def _equal_with_nan(answer: Sequence[Any], outputs: Sequence[Any], atol: float) -> bool:
    """Compare an answer with NaNs or infinities, which a reference of autotile must not have."""
    pairs = [(expected, got) for expected, got in zip(answer, outputs, strict=True) if expected is not None]
    return all(np.allclose(e.reshape(-1), got.reshape(-1), atol=atol, equal_nan=True) for e, got in pairs)


def _on_host(value: Any) -> Any:
    array = host_array(value)
    return value if array is None else array


def _finish(
    results: ResultList,
    env: dict[str, Any],
    objectives: Sequence[str],
    higher_is_better: Sequence[bool],
    metrics: Mapping[str, Any] | None,
    seconds: float,
    *,
    quiet: bool,
) -> tuple[list[Result], dict[str, Any]]:
    """Complete the environment, and print the best configuration."""
    found = results.all
    best = best_results(found, objectives, higher_is_better)
    if best is not None:
        env["best_config"] = best
    add_totals(env, found, seconds)
    if not quiet:
        listed = best if isinstance(best, list) else [best] if best is not None else []
        if not listed:
            print("no results to report")
        else:
            print(f"\nbest for {', '.join(objectives)}:")
        for each in listed:
            hidden = {"times", "timestamp", "optimal", "__error__"} | {f"{stage}_time" for stage in _STAGES}
            print(get_config_string(each, [name for name in each if name not in hidden], UNITS))
    return found, env


_STAGES = ("compile", "verification", "benchmark", "strategy", "framework")

"""Tuning of operations: all kernels that compute a problem, and the libraries that do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autotile.api.progress import OperationObserver, operation_observer
from autotile.api.targets import check_device_index
from autotile.core.model import Config, Problem
from autotile.core.objectives import split_objectives
from autotile.cuda.driver import device_count
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Operation
from autotile.serving.dispatcher import find_best_result, forget_served
from autotile.serving.libraries import computes, libraries_for
from autotile.settings import read_settings
from autotile.tuning import operation_session
from autotile.tuning.contest import OperationLibrary
from autotile.tuning.operation_result import OperationResult
from autotile.tuning.options import TuneOptions


def tune_operation(
    operation: Operation,
    sizes: Mapping[str, int],
    dtype: str | None,
    options: TuneOptions,
    progress: bool | Callable[[Any], None],
) -> OperationResult:
    """Tune the kernels of an operation for a problem; parameters and errors as for `autotile.tune`."""
    problem = operation.resolve(sizes, dtype)
    with operation_observer(progress, operation) as observe:
        return tune_loaded_operation(operation, problem, options, observe)


def tune_loaded_operation(
    operation: Operation, problem: Problem, options: TuneOptions, observe: OperationObserver | None = None
) -> OperationResult:
    """Tune the kernels of an operation that is already loaded; errors as for `tune`."""
    objectives, expression = split_objectives(options.objectives, ())
    options = replace(options, objectives=objectives, objective=expression)
    check_gpu(options)
    try:
        return operation_session.tune_operation(
            operation,
            problem,
            read_settings(),
            options,
            libraries=_libraries_of(operation, problem),
            served=lambda kernel, own: served_so_far(kernel, own, options),
            observe=observe or (lambda _: None),
        )
    finally:
        forget_served()  # the next get_best_kernel reads the database again


def _libraries_of(operation: Operation, problem: Problem) -> list[OperationLibrary]:
    """Return the libraries that compute a problem here."""
    return [
        OperationLibrary(library.name, library.version, library.call)
        for library in libraries_for(operation)
        if computes(library, operation, problem)
    ]


def served_so_far(kernel: Kernel, problem: Problem, options: TuneOptions) -> Config | None:
    """Return the configuration that is served for a problem before it is tuned, unless it is the default.

    It is left out in replay, and if the options exclude earlier results or name the configurations to try.
    """
    excluded = options.fresh or not options.transfer or options.only is not None
    if excluded or options.replay is not None or device_count() == 0:
        return None
    location = options.database or read_settings().database
    try:
        served = find_best_result(kernel, problem.dtype, options.device_index, location, problem.sizes)
    except InputError:  # the session reports it
        return None
    return dict(served.config) if served.tier != "default" else None


def check_gpu(options: TuneOptions) -> None:
    """Raise if the selected GPU does not exist. The first one is not checked: without a GPU, launches are replayed."""
    if options.replay is None and options.device_index > 0:
        check_device_index(options.device_index)

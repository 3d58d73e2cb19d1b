"""Tuning of operations: all kernels that compute a problem, and the libraries that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.api.progress import observing
from autotile.api.targets import check_gpu, forget_served, served_so_far, sizes_notice
from autotile.core.device import DeviceProperties
from autotile.core.dtypes import dtype_name
from autotile.core.model import Config, Problem, split_objectives
from autotile.errors import InputError
from autotile.kernel.library import Kernel
from autotile.kernel.operation import Library, Operation
from autotile.serving.operations import computes, libraries_for
from autotile.serving.selection import model_of
from autotile.settings import read_settings, user_path
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Observer
from autotile.tuning.schedule import Lane, open_lane

if TYPE_CHECKING:
    from autotile.tuning.operation_family import OperationFamilyResult
    from autotile.tuning.operation_session import OperationResult


def tune_operation(
    operation: Operation,
    sizes: Mapping[str, int],
    dtype: str | None,
    options: TuneOptions,
    progress: bool | Observer,
) -> OperationResult:
    """Tune the kernels of an operation for a problem; parameters and errors as for `autotile.tune`."""
    problem = operation.resolve(sizes, dtype, defaults=True)
    with observing(progress) as observe:
        result = tune_loaded_operation(operation, problem, options, observe)
    assumed = sizes_notice(operation, problem.sizes, sizes)
    return replace(result, notices=(assumed, *result.notices)) if assumed else result


def tune_loaded_operation(
    operation: Operation,
    problem: Problem,
    options: TuneOptions,
    observe: Observer | None = None,
    lane: Lane | None = None,
) -> OperationResult:
    """Tune the kernels of an operation that is already loaded; errors as for `tune`."""
    from autotile.tuning import operation_session

    objectives, expression = split_objectives(options.objectives, ())
    options = replace(options, objectives=objectives, objective=expression)
    check_gpu(options)
    try:
        with open_lane(options) if lane is None else nullcontext(lane) as shared:
            return operation_session.tune_operation(
                operation,
                problem,
                read_settings(),
                options,
                libraries=_libraries_of(operation, problem, is_present=not options.scheduler),
                served=lambda kernel, own: served_so_far(kernel, own, options),
                proposed=partial(_expected_by_model, operation, problem, database=options.database),
                observe=observe or (lambda _: None),
                lane=shared,
            )
    finally:
        forget_served()  # the next get_best_kernel reads the database again


def tune_operation_family(
    operation: Operation,
    words: Sequence[str],
    dtype: str | None,
    options: TuneOptions,
    progress: bool | Observer,
) -> OperationFamilyResult:
    """Measure a family of an operation, learn a model of time from it, and store it.

    Parameters
    ----------
    words
        The family, as words such as ``M=1..8192``.
    dtype, options, progress
        As for `autotile.tune_family`.

    Raises
    ------
    InputError
        The family cannot be read, or as for `autotile.tuning.operation_family.tune_operation_family`.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    """
    from autotile.tuning import operation_family

    if options.only is not None or options.tries or options.verify_sizes or options.until or options.fresh:
        raise InputError("a family of an operation takes only a budget, a number of problems, and a seed")
    check_gpu(options)
    chosen = dtype_name(dtype) if dtype is not None else operation.dtypes[0]
    if chosen not in operation.dtypes:
        raise InputError(
            f"{operation.name} does not support dtype {chosen!r}; it supports {', '.join(operation.dtypes)}"
        )
    family = operation_family.operation_family(operation, words, chosen)
    try:
        with open_lane(options) as lane, observing(progress) as observe:
            return operation_family.tune_operation_family(
                operation,
                family,
                chosen,
                read_settings(),
                options,
                libraries=libraries_for(operation),
                observe=observe,
                lane=lane,
            )
    finally:
        forget_served()


def export_models(
    operation: Operation, folder: str | Path, *, dtype: str | None = None, database: str | Path | None = None
) -> list[Path]:
    """Write the models of an operation in a database to a folder, each as a file such as those that ship.

    Parameters
    ----------
    operation
        The operation.
    folder
        Folder to write to, which is made if it does not exist.
    dtype
        Element type; None for all.
    database
        Path or URL of the tuning database; None for the user's own.

    Raises
    ------
    InputError
        The database holds no such model, or a file cannot be written.
    """
    from autotile.database.database import open_for_reading
    from autotile.database.learned import read_models
    from autotile.exchange.shipped import write_models

    opened = open_for_reading(database)
    models = []
    if opened is not None:
        with opened:
            models = read_models(opened, operation.name, dtype_name(dtype) if dtype is not None else None)
    if not models:
        name = operation.name
        raise InputError(f"the database holds no model of {name}; run `autotile tune {name} --family ...` on a GPU")
    path = user_path(folder, "the models")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}") from None
    return write_models(path, models)


_PROPOSED = 12
"""Configurations of all kernels that a model proposes."""


def _expected_by_model(
    operation: Operation,
    problem: Problem,
    kernels: Mapping[str, Kernel],
    sizes: Mapping[str, Mapping[str, int]],
    device: DeviceProperties,
    *,
    database: str | None,
) -> list[tuple[str, Config]]:
    """Return the configurations that the model of the operation expects to be the fastest; none without a model."""
    location = database or str(read_settings().database)
    model = model_of(location, operation.name, problem.dtype, device.name)
    if model is None:
        return []
    proper = {name: size for name, size in problem.sizes.items() if name not in operation.conditions}
    specs = {name: kernel.spec for name, kernel in kernels.items()}
    found = model.choose(proper, sizes, specs, device, count=_PROPOSED)
    return [(one.candidate.kernel, dict(one.candidate.config)) for one in found if not one.candidate.is_library]


def _libraries_of(operation: Operation, problem: Problem, *, is_present: bool) -> list[Library]:
    """Return the libraries that compute a problem, on this machine or, as far as an operation names them, on others."""
    return [
        library
        for library in libraries_for(operation, is_present=is_present)
        if computes(library, operation, problem) and (is_present or library.call is None)
    ]

"""Tuning of a problem and of a family of problems, and recording of a whole search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotile.api.keywords import read_keywords
from autotile.api.progress import observing
from autotile.api.targets import (
    check_device_index,
    check_gpu,
    complete_config,
    forget_served,
    named_operation,
    open_problem,
    served_so_far,
    sizes_notice,
)
from autotile.core.argument_types import checked
from autotile.core.documents import encode_json
from autotile.core.model import TIME, Problem, split_objectives
from autotile.database.engine import parse_location
from autotile.errors import InputError
from autotile.kernel.library import Kernel, KernelName, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import read_settings, user_path
from autotile.tuning import session
from autotile.tuning.options import FamilyPlan, TuneOptions
from autotile.tuning.progress_state import Observer
from autotile.tuning.result import TuneResult

if TYPE_CHECKING:
    from autotile.families.family import Family
    from autotile.tuning.family_session import FamilyResult
    from autotile.tuning.operation_family import OperationFamilyResult
    from autotile.tuning.operation_session import OperationResult
    from autotile.tuning.result import Recorded

FamilySize = int | str | Sequence[int] | range
"""Sizes of a family: a number, several numbers, a range, or text such as ``"1..8192"``."""


@checked
def tune(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    dtype: str | None = None,
    device: int | str | Sequence[int | str] | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    **named: Any,
) -> TuneResult | OperationResult:
    """Find the fastest configuration of a kernel for a problem, verify it, and store it in the database.

    The search tries valid configurations only; each one is compiled, verified against a float64 reference, measured and
    stored. The best of them are measured again, interleaved with the default. A session that was interrupted resumes.

    The kernels of an operation, such as ``"matmul"``, share one budget: those that are slow get no more of it, and the
    best of the others are raced with the libraries that compute it.

    Parameters
    ----------
    kernel
        Name of a kernel or an operation, path of a search-space or operation file, or a kernel from `autotile.kernel`.
    sizes
        Problem sizes and flags, such as ``{"M": 4096}``; missing ones are taken from the search-space file.
    **named
        Sizes and flags by name, such as ``M=4096``, and options by the names that they have on the command line or in
        `TuneOptions`, such as ``trials=50``, ``budget="5m"`` or ``verify_problem={"M": 1}``, which take the place of
        those of ``options``. A name that the kernel has a size of is that size.
    dtype
        Element type; None for the kernel's first.
    device
        CUDA index or name of a GPU of this machine; None for that of `options`, the first by default. ``"all"``, or a
        sequence of GPUs of one model, which share the session.
    database
        Path or URL of the tuning database; None for that of `options`, the user's own by default.
    options
        Options of the session; None for the defaults.
    progress
        True to show a line of progress on a terminal or in a notebook; False to show nothing; or a callable, called
        with a `Progress` as the session proceeds.
    observe
        Callable that takes the place of `progress`.

    Returns
    -------
    TuneResult or OperationResult
        Winner and default, the ratio of their times with its interval, and the numbers of rejected configurations; of
        an operation, the winner among its kernels and libraries, and what each of them reached.

    Raises
    ------
    InputError
        The kernel, a size, the dtype, the device or an option is invalid, the space is empty, or the database cannot
        be written.
    ToolchainError
        NVRTC, CuPy or the driver does not work.
    WorkerError
        The GPU worker died repeatedly.

    Examples
    --------
    >>> result = tune("sgemm_2d", M=4096, N=4096, K=4096, budget="5m")  # doctest: +SKIP
    >>> result.winner.config  # doctest: +SKIP
    {'BM': 128, 'BN': 128, ...}
    """
    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    if (operation := named_operation(kernel)) is not None:
        from autotile.api.operation_tuning import tune_operation

        return tune_operation(operation, given, dtype, chosen, observe or progress)
    loaded, problem = open_problem(kernel, given, dtype)
    with observing(observe or progress) as observer:
        result = tune_problem(loaded, problem, chosen, observer)
    assumed = sizes_notice(loaded.spec, problem.sizes, given)
    return replace(result, notices=(assumed, *result.notices)) if assumed else result


@checked
def tune_family(
    kernel: KernelName,
    sizes: Mapping[str, FamilySize] | None = None,
    /,
    *,
    dtype: str | None = None,
    plan: FamilyPlan | None = None,
    points: int | None = None,
    max_configs: int | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    **named: Any,
) -> FamilyResult | OperationFamilyResult:
    """Tune a few problems of a family, learn a rule from them that serves all others, and store it.

    Of an operation, many configurations of all its kernels are measured at many problems, and a model of time is
    learned that chooses among them and the libraries.

    Parameters
    ----------
    kernel
        Name of a kernel or an operation, path of a search-space or operation file, or a kernel from `autotile.kernel`.
    sizes
        The family: for each size a number, a list of numbers, a ``range``, or text such as ``"1..8192"``; missing ones
        are taken from the search-space file.
    **named
        Sizes and options by name, as for `tune`.
    dtype
        Element type; None for the kernel's first.
    plan
        Number of problems to tune, and of configurations that the rule chooses from; None for the defaults.
    points, max_configs
        As in ``plan``, in place of its values.
    device, database
        As for `tune`.
    options
        Options of each session; None for the defaults. ``budget_s`` is the wall time of all sessions together.
    progress, observe
        As for `tune`.

    Returns
    -------
    FamilyResult or OperationFamilyResult
        The rule, and its loss at each tuned problem; of an operation, how well the model chooses.

    Raises
    ------
    InputError
        The family cannot be read or covered, an option does not apply to families, or as for `tune`.
    ToolchainError, WorkerError
        As for `tune`.

    Examples
    --------
    >>> result = tune_family("sgemm_2d", M="1..8192", N=4096, K=[4096, 7168])  # doctest: +SKIP
    >>> result.rule.mean_held_out  # doctest: +SKIP
    0.021
    """
    from autotile.families.family import extent_text, family_of

    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    asked = {name: value for name, value in (("points", points), ("max_configs", max_configs)) if value is not None}
    if asked:
        plan = replace(plan or FamilyPlan(), **asked)
    if (operation := named_operation(kernel)) is not None:
        if plan is not None:
            raise InputError("a plan is of a kernel's family; of an operation's, trials is the number of problems")
        from autotile.api.operation_tuning import tune_operation_family

        words = [f"{name}={extent_text(name, size)}" for name, size in given.items()]
        return tune_operation_family(operation, words, dtype, chosen, observe or progress)
    loaded = load_kernel(kernel)
    family = family_of(loaded.spec, given)
    with observing(observe or progress) as observer:
        return tune_loaded_family(loaded, family, dtype, chosen, plan=plan, observe=observer)


@checked
def record(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path | None = None,
    sample: int | None = None,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    options: TuneOptions | None = None,
    progress: bool | Observer = True,
    observe: Observer | None = None,
    **named: Any,
) -> Recorded:
    """Measure a whole search space on a GPU, and write a recording that sessions replay without one.

    Parameters
    ----------
    kernel, sizes, dtype, device, database, progress, observe, **named
        As for `tune`.
    output
        File or folder to write to; None for the current folder, under a name made from the problem and the GPU.
    sample
        Number of configurations to measure, drawn at random; None for all.
    options
        Options of the session; the number of trials, the sampler and the finals are fixed here.

    Returns
    -------
    Recorded
        The recording; its ``path`` is None if the user interrupted, and the same call resumes.

    Raises
    ------
    InputError
        As for `tune`; or there is no GPU, or the file cannot be written.
    ToolchainError, WorkerError
        As for `tune`.
    """
    given, chosen = read_keywords(kernel, sizes, named, options, device=device, database=database)
    loaded, problem = open_problem(kernel, given, dtype)
    path = user_path(output, "a recording") if output is not None else None
    with observing(observe or progress) as observer:
        return record_problem(loaded, problem, chosen, sample=sample, output=path, observe=observer)


def tune_problem(
    kernel: Kernel, problem: Problem, options: TuneOptions, observe: Observer | None = None, **shared: Any
) -> TuneResult:
    """Tune a problem of a kernel that is already loaded; errors as for `tune`.

    Parameters
    ----------
    kernel, problem, options, observe
        As for `autotile.tuning.session.tune`.
    **shared
        What it shares with other sessions: ``worker_pool`` and ``stop`` of `autotile.tuning.session.tune`.
    """
    options = checked_options(kernel, problem, options)
    result = session.tune(kernel, problem, read_settings(), options, observe or _ignore, **shared)
    forget_served()  # the next get_best_kernel reads the database again
    return result


def checked_options(kernel: Kernel, problem: Problem, options: TuneOptions) -> TuneOptions:
    """Return the options of a session for a problem, checked and completed.

    Raises
    ------
    InputError
        An option does not fit the kernel, or there is no such GPU.
    """
    objectives, expression = split_objectives(options.objectives, [metric.name for metric in kernel.spec.metrics])
    if options.maximize and expression is None and options.objective is None:
        raise InputError("only an expression is maximised; give one, as in --objective '1e3 * N / time_us'")
    options = replace(
        options,
        objectives=objectives,
        objective=expression or options.objective,
        verify_sizes=_complete_sizes(kernel, problem, options.verify_sizes),
        tries=tuple(complete_config(kernel.spec, config) for config in options.tries),
    )
    check_gpu(options)
    if options.served is None:
        options = replace(options, served=served_so_far(kernel, problem, options))
    return options


def open_family(kernel: KernelName, words: Sequence[str]) -> tuple[Kernel, Family]:
    """Load a kernel, and parse a family of its problems from words such as ``M=1..8192``.

    Raises
    ------
    InputError
        The kernel is unknown, its file is malformed, or the family cannot be read.
    """
    from autotile.families.family import parse_family

    loaded = load_kernel(kernel)
    return loaded, parse_family(loaded.spec, words)


def tune_loaded_family(
    kernel: Kernel,
    family: Family,
    dtype: str | None,
    options: TuneOptions,
    *,
    plan: FamilyPlan | None = None,
    observe: Observer,
) -> FamilyResult:
    """Tune a family of a kernel that is already loaded; errors as for `tune_family`."""
    from autotile.tuning import family_session

    problem = resolve_problem(kernel.spec, family.largest, dtype)
    objectives, expression = split_objectives(options.objectives, [metric.name for metric in kernel.spec.metrics])
    options = replace(options, objectives=objectives)
    if (
        options.objectives != (TIME,)
        or expression is not None
        or kernel.spec.objective is not None
        or options.verify_sizes
        or options.only is not None
    ):
        raise InputError("a family is tuned for time, at points of its own; leave other objectives and problems out")
    check_gpu(options)
    result = family_session.tune_family(
        kernel, family, problem.dtype, read_settings(), options, plan=plan or FamilyPlan(), observe=observe
    )
    forget_served()  # the next get_best_kernel reads the database again
    return result


def record_problem(
    kernel: Kernel,
    problem: Problem,
    options: TuneOptions,
    *,
    sample: int | None = None,
    output: Path | None = None,
    observe: Observer,
) -> Recorded:
    """Record a problem of a kernel that is already loaded; errors as for `record`."""
    check_device_index(options.device_index)
    output = user_path(output, "a recording") if output is not None else None

    return session.record(kernel, problem, read_settings(), options, sample=sample, output=output, observe=observe)


def serving_call(kernel: str, problem: Problem, *, dtype: str | None, database: str | None) -> str:
    """Return the line of Python that serves a tuned problem.

    Parameters
    ----------
    kernel
        Name or path as the user gave it.
    problem
        Problem that was tuned.
    dtype, database
        As the user gave them; None is left out. The password of a database's URL is shown as ``***``.
    """
    database = str(parse_location(database)) if database is not None else None
    sizes = [f"{name}={value}" for name, value in problem.sizes.items()]
    choices = [f"{name}={encode_json(value)}" for name, value in (("dtype", dtype), ("database", database)) if value]
    return f"kernel = autotile.get_best_kernel({', '.join([encode_json(kernel), *sizes, *choices])})"


def family_serving_call(
    asked_as: str, kernel: Kernel, family: Family, *, dtype: str | None, database: str | None
) -> str:
    """Return a line of Python that a family's rule serves, at its largest problem; parameters as for `serving_call`."""
    return serving_call(asked_as, resolve_problem(kernel.spec, family.largest, dtype), dtype=dtype, database=database)


def _ignore(_: object) -> None:
    """Observe nothing."""


def _complete_sizes(
    kernel: Kernel, problem: Problem, given: Sequence[Mapping[str, int]]
) -> tuple[Mapping[str, int], ...]:
    """Check the further problems to verify; a size that one leaves out is that of the tuned problem."""
    if not all(given):
        raise InputError("a further problem to verify names no size, expected SIZE=N[,...] such as M=1,N=1")
    return tuple(resolve_problem(kernel.spec, {**problem.sizes, **sizes}, problem.dtype).sizes for sizes in given)

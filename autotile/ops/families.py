"""Tune a family of problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotile.api.targets import check_device_index
from autotile.core.objectives import TIME, normalize_objectives
from autotile.errors import InputError
from autotile.families.family import Family, family_of, parse_family
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.dispatcher import forget_served
from autotile.settings import read_settings
from autotile.tuning import family_session as tuning
from autotile.tuning.family_session import FamilyPlan, FamilyResult, FamilyStep
from autotile.tuning.options import TuneOptions

Observer = Callable[[FamilyStep], None]
Sizes = int | str | Sequence[int] | range


def tune_family(
    kernel: str,
    /,
    *,
    dtype: str | None = None,
    plan: FamilyPlan | None = None,
    options: TuneOptions | None = None,
    observe: Observer | None = None,
    **sizes: Sizes,
) -> FamilyResult:
    """Tune a few problems of a family, learn from them what to serve for all the others, and keep that.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of its search-space file.
    dtype
        One of the kernel's; None for its first.
    plan
        How many problems to tune, and how many configurations the rule may choose between; None for the defaults.
    options
        How to tune each problem; None for the defaults. ``budget_s`` is for all together.
    observe
        Called with a `FamilyStep` as the sessions go on.
    **sizes
        The family: for each size a number, a list of numbers, a ``range``, or text such as ``"1..8192"``.

    Returns
    -------
    FamilyResult
        With the rule, and what it loses at each problem.

    Raises
    ------
    InputError
        The family cannot be read or covered, an option is not for families, or as for `autotile.tune`.
    ToolchainError, WorkerError
        As for `autotile.tune`.

    Examples
    --------
    >>> result = tune_family("sgemm_2d", M="1..8192", N=4096, K=[4096, 7168])  # doctest: +SKIP
    >>> result.rule.mean_held_out  # doctest: +SKIP
    0.021
    """
    loaded = load_kernel(kernel)
    family = family_of(loaded.spec, sizes)
    return tune_opened_family(loaded, family, dtype, options or TuneOptions(), plan=plan, observe=observe)


def open_family(kernel: str, words: Sequence[str]) -> tuple[Kernel, Family]:
    """Read a kernel, and a family of its problems as it is typed.

    Raises
    ------
    InputError
        Unknown kernel, malformed file, or a family that cannot be read.
    """
    loaded = load_kernel(kernel)
    return loaded, parse_family(loaded.spec, words)


def tune_opened_family(
    kernel: Kernel,
    family: Family,
    dtype: str | None,
    options: TuneOptions,
    *,
    plan: FamilyPlan | None = None,
    observe: Observer | None = None,
) -> FamilyResult:
    """`tune_family` for a kernel and a family that are read already."""
    problem = resolve_problem(kernel.spec, family.largest, dtype)
    plan = plan or FamilyPlan()
    options = replace(options, objectives=normalize_objectives(options.objectives))
    if options.objectives != (TIME,) or options.verify_sizes or options.only is not None:
        raise InputError("a family is tuned for time, at points of its own; leave other objectives and problems out")
    if options.replay is None and options.device_index > 0:
        check_device_index(options.device_index)
    result = tuning.tune_family(
        kernel, family, problem.dtype, read_settings(), options, plan=plan, observe=observe or (lambda _: None)
    )
    forget_served()  # the next get_best_kernel sees what was learned
    return result


def family_call(kernel: str, family: Family, *, dtype: str | None, database: str | None) -> str:
    """A line of Python that is served by the rule, at the family's largest problem."""
    from autotile.ops.tuning import serving_call

    loaded = load_kernel(kernel)
    return serving_call(kernel, resolve_problem(loaded.spec, family.largest, dtype), dtype=dtype, database=database)

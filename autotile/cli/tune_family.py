"""``autotile tune-family``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from autotile.cli.arguments import (
    DtypeOption,
    JsonOption,
    KernelArgument,
    ReplayCommand,
    SearchArguments,
    with_search_options,
)
from autotile.cli.output import INTERRUPTED, error_console, examples, notice, show
from autotile.cli.tune import MAX_CONFIGS, MAX_POINTS, is_operation
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.tuning.options import TuneOptions


@with_search_options(without=("objective", "verify_problem"))
def tune_family(
    kernel: KernelArgument,
    sizes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SIZE=A..B",
            help="The family: a number, a range (M=1..8192) or a list (K=4096,7168) for each size and flag.",
            show_default=False,
        ),
    ] = None,
    *,
    dtype: DtypeOption = None,
    points: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MAX_POINTS, help="Problems of the family to tune.", show_default="24"),
    ] = None,
    max_configs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MAX_CONFIGS, help="Configurations that the rule chooses from.", show_default="8"
        ),
    ] = None,
    search: SearchArguments,
    as_json: JsonOption = False,
) -> None:
    """Tune a few problems of a family, and learn from them what to serve for all.

    --trials is for each of the problems, --budget for all of them together. The same command goes on where an
    interrupted one stopped.

    Of an operation, such as matmul, many configurations of all its kernels and its libraries are measured at many
    problems, and a model of time is learned that chooses among them; --trials is the number of problems.
    """
    run_family(kernel, sizes, dtype, search.options(), points=points, max_configs=max_configs, as_json=as_json)


def run_family(
    kernel: str | None,
    words: Sequence[str] | None,
    dtype: str | None,
    options: TuneOptions,
    *,
    points: int | None,
    max_configs: int | None,
    as_json: bool,
) -> None:
    """Tune a family, show its rule, and exit with 130 if the user interrupted."""
    from autotile.api.targets import sizes_notice
    from autotile.api.tuning import family_serving_call, open_family, tune_loaded_family
    from autotile.cli.progress import TuneProgress
    from autotile.tuning.options import FamilyPlan

    if kernel is None:
        raise InputError("no kernel is named; expected `autotile tune-family KERNEL SIZE=A..B ...`")
    if is_operation(kernel):
        from autotile.cli.tune_operation import run_operation_family

        if points is not None or max_configs is not None:
            raise InputError(f"--points and --max-configs are of a kernel's family, and {kernel} is an operation")
        run_operation_family(kernel, words or [], dtype, options, as_json=as_json)
        return
    loaded, family = open_family(kernel, words or [])
    notice(sizes_notice(loaded.spec, family.largest, [word.partition("=")[0] for word in words or []]))
    call = family_serving_call(kernel, loaded, family, dtype=dtype, database=options.database)
    given = {"points": points, "max_configs": max_configs}
    plan = FamilyPlan(**{name: value for name, value in given.items() if value is not None})
    with TuneProgress(error_console()) as progress:
        result = replace(tune_loaded_family(loaded, family, dtype, options, plan=plan, observe=progress), call=call)
    show(result, as_json=as_json)
    if result.interrupted:
        notice(f"interrupted: what was measured is saved in {result.database}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "tune-family",
        cls=ReplayCommand,
        epilog=examples(
            "autotile tune-family sgemm_2d M=1..8192 N=4096 K=4096,7168 --budget 30m",
            "autotile tune-family matmul M=1..16384 N=1..16384 K=16..131072 --dtype bfloat16 --budget 30m",
            "autotile tune-family path/to/mine.toml N=1000..2000000 --points 12 --max-configs 4",
        ),
    )(tune_family)

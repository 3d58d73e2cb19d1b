"""``autotile best``, ``list`` and ``trials``: read what was tuned."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.application import examples
from autotile.cli.arguments import (
    BundleOption,
    DatabaseOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SizesArgument,
)
from autotile.cli.completion import complete_kernel, complete_outcome
from autotile.cli.output import show_report
from autotile.core.model import Outcome
from autotile.errors import InputError


def best(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    database: DatabaseOption = None,
    bundle: BundleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what would be served for a problem, and why.

    Tiers: exact (tuned for this problem on this GPU), family (by the rule of a family that holds it), nearest (tuned
    for other sizes), transferred (on another GPU), default (not tuned).
    """
    from autotile.cli.assignments import read_sizes
    from autotile.ops.serving import best as find_best

    given = read_sizes(sizes or [])
    report = find_best(kernel, given, dtype=dtype, device=device, database=database, bundle=bundle)
    show_report(report, as_json=as_json)


def list_studies(
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL", help="Only this kernel's.", autocompletion=complete_kernel, show_default="all kernels"
        ),
    ] = None,
    *,
    recordings: Annotated[
        bool, typer.Option("--recordings", help="List the recordings that can be replayed instead.")
    ] = False,
    families: Annotated[
        bool, typer.Option("--families", help="List the families that were tuned, each with its rule, instead.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what was tuned, each problem with its best."""
    from autotile.ops import results

    if recordings and families:
        raise InputError("--recordings and --families are two lists; name one of them")
    if families:
        from autotile.ops.families import list_families

        show_report(list_families(kernel, database=database), as_json=as_json)
    elif recordings:
        show_report(results.installed_recordings(kernel), as_json=as_json)
    else:
        show_report(results.list_studies(kernel, database=database), as_json=as_json)


def misses(
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL", help="Only this kernel's.", autocompletion=complete_kernel, show_default="all kernels"
        ),
    ] = None,
    *,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what programs were served for want of an exact result.

    Says how often each was called and how much time that may have cost, where enough is tuned to tell.
    `autotile tune --from-misses` tunes them, the costliest first.
    """
    from autotile.ops.misses import list_misses

    show_report(list_misses(kernel, database=database), as_json=as_json)


def trials(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            metavar="OUTCOME",
            help="Only trials that ended like this: ok, pruned, wrong_result ...",
            autocompletion=complete_outcome,
            show_default="all",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most so many, fastest first.", show_default="all")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the stored trials of a kernel, fastest first.

    Those without a time follow, in the order they were tried.
    """
    from autotile.cli.assignments import read_sizes
    from autotile.ops.results import list_trials

    report = list_trials(
        kernel,
        read_sizes(sizes or []),
        dtype=dtype,
        outcome=_outcome(outcome) if outcome is not None else None,
        limit=limit,
        database=database,
    )
    show_report(report, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "autotile best sgemm_2d M=4096 N=4096 K=4096",
            "autotile best sgemm_2d M=1000 N=1000 K=1000 --device rtx-3090 --json",
        )
    )(best)
    app.command(
        "list",
        epilog=examples(
            "autotile list",
            "autotile list sgemm_2d --json",
            "autotile list --families",
            "autotile list --recordings",
        ),
    )(list_studies)
    app.command(epilog=examples("autotile misses", "autotile misses sgemm_2d --json"))(misses)
    app.command(
        epilog=examples(
            "autotile trials sgemm_2d --limit 20",
            "autotile trials sgemm_2d M=4096 N=4096 K=4096 --outcome wrong_result",
        )
    )(trials)


def _outcome(text: str) -> Outcome:
    try:
        return Outcome(text)
    except ValueError:
        raise InputError(f"no outcome is named {text!r}; expected one of {', '.join(Outcome)}") from None

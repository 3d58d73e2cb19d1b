"""``autotile trials``: the stored trials of a kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import (
    CsvOption,
    DatabaseOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SelectedSizesArgument,
    complete_outcome,
)
from autotile.cli.output import check_csv, check_output, examples, print_json, show, write_table_file


def trials(
    kernel: KernelArgument,
    sizes: SelectedSizesArgument = None,
    *,
    dtype: DtypeOption = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            metavar="OUTCOME",
            help="Only trials with this outcome: ok, pruned, wrong_result ...",
            autocompletion=complete_outcome,
            show_default="all",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of trials, fastest first.", show_default="all"),
    ] = None,
    csv: CsvOption = None,
    parquet: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write every column of the trials as Parquet; needs the extra autotile[parquet].",
            show_default="no",
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the stored trials of a kernel, fastest first, or write them to a file.

    Those without a time follow, in the order in which they were tried.
    """
    from autotile.api import results
    from autotile.cli.assignments import read_sizes

    check_csv(csv, as_json=as_json)
    check_output(parquet)
    given = read_sizes(sizes or [])
    found = results.trials(kernel, given, dtype=dtype, outcome=outcome, limit=limit, database=database)
    if csv is None and parquet is None:
        show(found, as_json=as_json)
        return
    columns = found.columns()
    if parquet is not None:
        write_table_file(parquet, columns, "trial", as_parquet=True)
    if csv is not None:
        write_table_file(csv, columns, "trial")
    if as_json:
        print_json(found.to_json())


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile trials sgemm_2d --limit 20",
            "autotile trials sgemm_2d M=4096 N=4096 K=4096 --outcome wrong_result",
            "autotile trials sgemm_2d --csv trials.csv",
        )
    )(trials)

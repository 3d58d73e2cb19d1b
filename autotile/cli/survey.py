"""``autotile survey``: a whole space as compiled, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from autotile.cli.arguments import (
    CsvOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    SizesArgument,
    WorkersOption,
    check_seed,
)
from autotile.cli.output import (
    INTERRUPTED,
    NOTHING_FOUND,
    STANDARD_OUTPUT,
    check_csv,
    check_output,
    error_console,
    examples,
    notice,
    print_json,
    show,
    write_table_file,
)

_SHOWN = 12
_SHOWN_FAILURES = 8


def survey(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Compile N configurations, chosen at random.", show_default="all"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the choice.", callback=check_seed)] = 0,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Configurations in the table; --json and --csv have all.")
    ] = _SHOWN,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="Write a page, too.", show_default="no"),
    ] = None,
    csv: CsvOption = None,
    workers: WorkersOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile every valid configuration, or a sample, without a GPU.

    Shows registers, spills, shared memory, occupancy and waves, and what does not compile or fit, with the compiler's
    words. Ctrl-C ends it and shows what there is; compiled code is kept, so that the same command goes on from there.
    """
    from autotile.api.surveying import survey as run_survey
    from autotile.cli.assignments import read_sizes
    from autotile.cli.progress import CountProgress

    check_csv(csv, as_json=as_json)
    check_output(output)
    given = read_sizes(sizes or [])
    with CountProgress(error_console(), "compiling", "cannot be launched") as progress:
        found = run_survey(
            kernel, given, dtype=dtype, device=device, sample=sample, seed=seed, workers=workers, observe=progress
        )
    for text in found.notices:
        notice(text)
    if output is not None:
        from autotile.api.targets import output_file
        from autotile.report.page import write_page
        from autotile.report.survey_page import survey_page

        write_page(survey_page(found), path := output_file(output))
        notice(f"wrote {path}")
    if csv is not None:
        write_table_file(csv, found.table(), "configuration")
    if as_json:
        print_json(found.to_json())
    elif csv != STANDARD_OUTPUT:
        show(replace(found, shown=limit), as_json=False)
    if found.interrupted:
        notice(f"interrupted after {len(found):,} of {found.planned:,}; the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if not found.is_usable.any():
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile survey sgemm_2d M=4096 N=4096 K=4096 --device h200 --sample 200",
            "autotile survey matmul_tiled --device rtx-3060 -o survey.html",
            "autotile survey matmul_tiled --device a100 --csv survey.csv",
        )
    )(survey)

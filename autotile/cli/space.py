"""``autotile space``: size of a search space, and the whole of it as compiled, without a GPU."""

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
from autotile.errors import InputError

_SHOWN = 12


def space(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile every valid configuration, and show registers, spills and occupancy."),
    ] = False,
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
    """Count the valid configurations of a search space, or compile them.

    Shows how many configurations each rule and each limit of the device leaves. Sizes that are not given are
    taken from the search-space file.

    With --compile or --sample: compiles them, without a GPU, and shows registers, spills, shared memory, occupancy and
    waves, and what does not compile or fit, with the compiler's words. Ctrl-C ends it and shows what there is; compiled
    code is kept, so that the same command goes on from there.
    """
    from autotile.cli.assignments import read_sizes

    given = read_sizes(sizes or [])
    if compiled or sample is not None:
        _survey(kernel, given, dtype, device, sample, seed, limit, output, csv, workers, as_json)
        return
    for name, option in (("--output", output), ("--csv", csv), ("--workers", workers)):
        if option is not None:
            raise InputError(f"{name} is of compiled configurations; add --compile")
    from autotile.api import inspection

    summary = inspection.space(kernel, given, dtype=dtype, device=device)
    for text in summary.notices:
        notice(text)
    show(summary, as_json=as_json)


def _survey(  # noqa: PLR0917 - the options of the command
    kernel: str,
    given: dict[str, int],
    dtype: str | None,
    device: str | None,
    sample: int | None,
    seed: int,
    limit: int,
    output: str | None,
    csv: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    from autotile.api.surveying import survey as run_survey
    from autotile.cli.progress import CountProgress

    check_csv(csv, as_json=as_json)
    check_output(output)
    with CountProgress(error_console(), "compiling", "cannot be launched") as progress:
        found = run_survey(
            kernel, given, dtype=dtype, device=device, sample=sample, seed=seed, workers=workers, observe=progress
        )
    for text in found.notices:
        notice(text)
    if output is not None:
        from autotile.api.targets import output_file
        from autotile.report.page import write_page

        write_page(found.page(), path := output_file(output))
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
            "autotile space sgemm_2d M=4096 N=4096 K=4096",
            "autotile space sgemm_2d M=4096 N=4096 K=4096 --device h200 --compile --sample 200",
            "autotile space matmul_tiled --device rtx-3060 --compile -o compiled.html --csv compiled.csv",
        )
    )(space)

"""``autotile verify``: measure tuned results again."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.application import INTERRUPTED, NOTHING_FOUND, examples
from autotile.cli.arguments import DatabaseOption, DtypeOption, JsonOption, KernelArgument, SizesArgument
from autotile.cli.output import notice, show_report


def verify(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    aged: Annotated[
        bool, typer.Option("--aged", help="Only what was measured with another driver or compiler than the present.")
    ] = False,
    dtype: DtypeOption = None,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Run them under compute-sanitizer, too; none with a fault is served.")
    ] = False,
    device: Annotated[int, typer.Option(metavar="INDEX", min=0, help="CUDA device to run on.")] = 0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify and time tuned results again on this GPU.

    The best three of each problem and the default are checked against the reference and timed side by side. The fastest
    that is right is served from then on; what is found wrong is served no more.
    """
    from autotile.cli.assignments import read_sizes
    from autotile.ops.verifying import verify_results
    from autotile.tuning.options import TuneOptions

    options = TuneOptions(sanitize=sanitize, device_index=device, database=database)
    given = read_sizes(sizes) if sizes else None
    report = verify_results(kernel, given, aged_only=aged, dtype=dtype, options=options, announce=notice)
    show_report(report, as_json=as_json)
    verdicts = {row.verdict for row in report.rows}
    if "interrupted" in verdicts:
        raise typer.Exit(INTERRUPTED)
    if "failed" in verdicts:
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile verify sgemm_2d M=4096 N=4096 K=4096",
            "autotile verify sgemm_2d --aged",
        )
    )(verify)

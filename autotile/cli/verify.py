"""``autotile verify``: tuned results measured again."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, DtypeOption, JsonOption, KernelArgument, SelectedSizesArgument
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, examples, notice, show


def verify(
    kernel: KernelArgument,
    sizes: SelectedSizesArgument = None,
    *,
    aged: Annotated[
        bool, typer.Option("--aged", help="Only what was measured with another driver or compiler than the current.")
    ] = False,
    served: Annotated[
        bool,
        typer.Option(
            "--served",
            help="Instead, what programs were served for problems that are not tuned; each configuration once.",
        ),
    ] = False,
    dtype: DtypeOption = None,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Run them under compute-sanitizer, too; none with a fault is served.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|INDEX",
            help="GPU to run on: the name or the index of a GPU of this machine.",
            show_default="the first",
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify and time tuned results again on this GPU.

    The best three of each problem and the default are checked against the reference and timed side by side. The fastest
    that is correct is served from then on; what fails is no longer served. With --served, configurations that were
    tuned for other sizes are checked at the sizes that programs asked for (see `autotile misses`); what fails there is
    no longer served for them.
    """
    from autotile.api import verification
    from autotile.cli.assignments import read_sizes
    from autotile.tuning.options import TuneOptions

    result = verification.verify(
        kernel,
        read_sizes(sizes or []),
        aged=aged,
        served=served,
        dtype=dtype,
        device=device,
        database=database,
        options=TuneOptions(sanitize=sanitize),
        announce=notice,
    )
    show(result, as_json=as_json)
    verdicts = {problem.verdict for problem in result.problems}
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
            "autotile verify sgemm_2d --served",
        )
    )(verify)

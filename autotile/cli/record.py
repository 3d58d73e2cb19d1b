"""``autotile record``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.arguments import (
    MEASUREMENT,
    DatabaseOption,
    DtypeOption,
    GpuOption,
    JsonOption,
    KernelArgument,
    L2Option,
    SizesArgument,
    WorkersOption,
    check_seed,
)
from autotile.cli.output import CommandInterruptedError, examples, notice, show
from autotile.cli.tune import live_progress
from autotile.core.text import plural


def record(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.npz",
            help="File or folder to write to.",
            show_default="the current folder, under a name that says what it holds",
        ),
    ] = None,
    dtype: DtypeOption = None,
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Record so many configurations at random.",
            show_default="all",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Seed of the random sample.",
            callback=check_seed,
            rich_help_panel=MEASUREMENT,
        ),
    ] = 0,
    l2: L2Option = "cold",
    workers: WorkersOption = None,
    device: GpuOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a whole search space on a GPU, for replay without one.

    The same command goes on where an interrupted one stopped.
    """
    from autotile.api.exchange import Transfer
    from autotile.api.targets import open_problem, resolve_gpu, sizes_notice
    from autotile.api.tuning import record_problem
    from autotile.cli.assignments import read_sizes
    from autotile.tuning.options import TuneOptions

    loaded, problem = open_problem(kernel, given := read_sizes(sizes or []), dtype)
    notice(sizes_notice(loaded.spec, problem.sizes, given))
    index = resolve_gpu(device)
    options = TuneOptions(seed=seed, l2=l2, workers=workers, device_index=index, database=database)
    with live_progress(problem) as progress:
        recorded = record_problem(loaded, problem, options, sample=sample, output=output, observe=progress)
    if recorded.path is None:
        measured = plural(recorded.configurations, "configuration")
        raise CommandInterruptedError(f"interrupted: {measured} measured; the same command goes on from there")
    gpu_name = recorded.header.key.gpu_name
    details = {"valid": recorded.header.valid_configs, "seconds": round(recorded.seconds, 3)}
    written = Transfer("recorded", recorded.path, "recording", problem, gpu_name, recorded.configurations, details)
    show(written, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile record matmul_tiled M=4096 N=4096 K=4096",
            "autotile record sgemm_2d M=4096 N=4096 K=4096 --sample 4000 -o sgemm_2d.npz",
        )
    )(record)

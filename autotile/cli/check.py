"""``autotile check``: a rewritten kernel, verified and timed against the winner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, DtypeOption, GpuOption, JsonOption, L2Option, SizesArgument
from autotile.cli.output import NOTHING_FOUND, SLOWER, examples, notice, show


def check(
    candidate: Annotated[
        Path, typer.Argument(metavar="CANDIDATE.cu", help="The rewritten source.", show_default=False)
    ],
    sizes: SizesArgument = None,
    *,
    like: Annotated[
        str,
        typer.Option(metavar="KERNEL", help="Name of a kernel, or path of its search-space file.", show_default=False),
    ],
    config: Annotated[
        str | None,
        typer.Option(
            metavar="PARAM=VALUE[,...]",
            help="Configuration of the candidate; parameters left out are the winner's.",
            show_default="the winner's",
        ),
    ] = None,
    verify_problem: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N[,...]",
            help="One more problem that it must be right on; sizes left out are the tuned ones. May be given again.",
            show_default="the tuned problem and a ragged one",
        ),
    ] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Run it under compute-sanitizer, too.")] = False,
    l2: L2Option = "cold",
    dtype: DtypeOption = None,
    device: GpuOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge a rewritten kernel: is it right, and how fast beside the winner.

    It is compiled, launched and verified in place of the kernel's own source, with everything that a finalist goes
    through, and timed interleaved with the winner. The exit code is 0 if it is right and not slower, 1 if it is wrong,
    2 for bad input, and 3 if it is right but slower.
    """
    from autotile.api import judging
    from autotile.cli.assignments import read_sizes, read_values
    from autotile.kernel.library import load_kernel
    from autotile.tuning.options import TuneOptions

    spec = load_kernel(like).spec
    result = judging.check(
        candidate,
        like,
        read_sizes(sizes or []),
        config=read_values(spec, config.split(",")) if config is not None else None,
        dtype=dtype,
        device=device,
        database=database,
        options=TuneOptions(
            sanitize=sanitize,
            l2=l2,
            verify_sizes=tuple(read_sizes(text.replace(",", " ").split()) for text in verify_problem or ()),
        ),
    )
    for line in result.notices:
        notice(line)
    show(result, as_json=as_json)
    if not result.is_right:
        raise typer.Exit(NOTHING_FOUND)
    if result.verdict == "slower":
        raise typer.Exit(SLOWER)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile check rewritten.cu --like mine.toml N=16777216",
            "autotile check rewritten.cu --like mine.toml --config BLOCK=512 --sanitize --json",
        )
    )(check)

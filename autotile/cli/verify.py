"""``autotile verify``: tuned results measured again, and rewritten kernels judged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotile.cli.arguments import (
    DatabaseOption,
    DtypeOption,
    GpuOption,
    JsonOption,
    L2Option,
    SelectedSizesArgument,
    complete_kernel,
)
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, SLOWER, examples, notice, show
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.tuning.options import TuneOptions


def verify(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL|NEW.cu",
            help="Name of a kernel, or path of a search-space file; with --like, a rewritten source.",
            autocompletion=complete_kernel,
            show_default=False,
        ),
    ],
    sizes: SelectedSizesArgument = None,
    *,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="KERNEL",
            help="Judge a rewritten source of this kernel: is it right, and how fast beside the winner.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="PARAM=VALUE[,...]",
            help="With --like: its configuration; parameters left out are the winner's.",
            show_default="the winner's",
        ),
    ] = None,
    verify_problem: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N[,...]",
            help="With --like: one more problem that it must be right on; sizes left out are the tuned ones. May be "
            "given again.",
            show_default="the tuned problem and a ragged one",
        ),
    ] = None,
    l2: L2Option = "cold",
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
    device: GpuOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify and time tuned results again on this GPU, or judge a rewritten kernel.

    The best three of each problem and the default are checked against the reference and timed side by side. The fastest
    that is correct is served from then on; what fails is no longer served. With --served, configurations that were
    tuned for other sizes are checked at the sizes that programs asked for (see `autotile list --misses`); what fails
    there is no longer served for them.

    With --like, NEW.cu is compiled, launched and verified in place of the kernel's own source, with everything that a
    finalist goes through, and timed interleaved with the winner. The exit code is 0 if it is right and not slower, 1 if
    it is wrong, 2 for bad input, and 3 if it is right but slower.
    """
    from autotile.cli.assignments import read_sizes
    from autotile.tuning.options import TuneOptions

    given = read_sizes(sizes or [])
    if like is not None:
        if aged or served:
            raise InputError("--aged and --served select stored results; leave them out with --like")
        problems = tuple(read_sizes(text.replace(",", " ").split()) for text in verify_problem or ())
        options = TuneOptions(sanitize=sanitize, l2=l2, verify_sizes=problems)
        _judge(Path(kernel), like, given, config, dtype, device, database, options, as_json)
        return
    if Path(kernel).suffix == ".cu":
        raise InputError(f"{kernel} is a source; name the kernel that it replaces with --like KERNEL")
    if config is not None or verify_problem or l2 != "cold":
        raise InputError("--config, --verify-problem and --l2 are of a rewritten source; add --like KERNEL")
    from autotile.api import verification

    result = verification.verify(
        kernel,
        given,
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


def _judge(  # noqa: PLR0917 - the options of the command
    candidate: Path,
    like: str,
    sizes: dict[str, int],
    config: str | None,
    dtype: str | None,
    device: str | None,
    database: str | None,
    options: TuneOptions,
    as_json: bool,
) -> None:
    from autotile.api import judging
    from autotile.cli.assignments import read_values
    from autotile.kernel.library import load_kernel

    spec = load_kernel(like).spec
    result = judging.check(
        candidate,
        like,
        sizes,
        config=read_values(spec, config.split(",")) if config is not None else None,
        dtype=dtype,
        device=device,
        database=database,
        options=options,
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
            "autotile verify sgemm_2d M=4096 N=4096 K=4096",
            "autotile verify sgemm_2d --aged",
            "autotile verify sgemm_2d --served",
            "autotile verify rewritten.cu --like mine.toml N=16777216",
            "autotile verify rewritten.cu --like mine.toml --config BLOCK=512 --sanitize --json",
        )
    )(verify)

"""``autotile verify``: tuned results measured again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from autotile.cli.arguments import DatabaseOption, DtypeOption, JsonOption, KernelArgument, SelectedSizesArgument
from autotile.cli.output import INTERRUPTED, NOTHING_FOUND, examples, notice, show
from autotile.cli.tables import RIGHT, Listing, timed_config_document
from autotile.core.model import config_text
from autotile.core.text import NOTHING, time_text

if TYPE_CHECKING:
    from autotile.api.verification import VerifiedProblem, VerifyResult


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
    show(result, verify_table, verify_document, as_json=as_json)
    verdicts = {problem.verdict for problem in result.problems}
    if "interrupted" in verdicts:
        raise typer.Exit(INTERRUPTED)
    if "failed" in verdicts:
        raise typer.Exit(NOTHING_FOUND)


def verify_table(result: VerifyResult) -> RenderableType:
    """Render one row per problem."""
    if not result.problems:
        return Text("nothing to verify: all results were verified with the present driver and compiler")
    times = (f"{RIGHT}time then", f"{RIGHT}now", f"{RIGHT}over default")
    headings = ("problem", "verdict", *times, "configuration", "reason", "aged")
    return Listing(headings, [_row(problem) for problem in result.problems], ("reason", "aged", "configuration"))


def _row(verified: VerifiedProblem) -> tuple[str, ...]:
    before, after = verified.before_measurement, verified.after_measurement
    return (
        str(verified.problem),
        verified.verdict,
        time_text(before.time_us if before is not None else None),
        time_text(after.time_us if after is not None else None),
        f"{verified.speedup.value:.3f}" if verified.speedup is not None else NOTHING,
        config_text(verified.after) if verified.after is not None else "the default",
        verified.reason,
        "; ".join(verified.aged),
    )


def verify_document(result: VerifyResult) -> list[dict[str, Any]]:
    """Return one entry per problem for JSON."""
    return [_document(problem) for problem in result.problems]


def _document(verified: VerifiedProblem) -> dict[str, Any]:
    speedup = verified.speedup
    after = timed_config_document(verified.after, verified.after_measurement) if verified.after is not None else None
    return {
        "kernel": verified.problem.kernel,
        "problem": dict(verified.problem.sizes),
        "dtype": verified.problem.dtype,
        "device": verified.device,
        "aged": list(verified.aged),
        "verdict": verified.verdict,
        "reason": verified.reason,
        "tied": verified.tied,
        "before": timed_config_document(verified.before, verified.before_measurement),
        "after": after,
        "speedup": {"ratio": speedup.value, "interval": [speedup.low, speedup.high]} if speedup is not None else None,
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile verify sgemm_2d M=4096 N=4096 K=4096",
            "autotile verify sgemm_2d --aged",
            "autotile verify sgemm_2d --served",
        )
    )(verify)

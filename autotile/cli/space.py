"""``autotile space``: size of a search space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType

from autotile.cli.arguments import DeviceOption, DtypeOption, JsonOption, KernelArgument, SizesArgument
from autotile.cli.output import examples, notice, show
from autotile.cli.tables import RIGHT, below, device_document, facts, table, title
from autotile.core.text import device_text, duration_text

if TYPE_CHECKING:
    from autotile.api.inspection import SpaceSummary
    from autotile.space.enumeration import SpaceStage


def space(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the valid configurations of a search space.

    Shows how many configurations each rule and each limit of the device leaves. Sizes that are not given are
    taken from the search-space file.
    """
    from autotile.api import inspection
    from autotile.cli.assignments import read_sizes

    summary = inspection.space(kernel, read_sizes(sizes or []), dtype=dtype, device=device)
    for text in summary.notices:
        notice(text)
    show(summary, space_table, space_document, as_json=as_json)


def space_table(summary: SpaceSummary) -> RenderableType:
    """Render the values of each parameter, then the configurations that each stage leaves."""
    values = facts((name, " ".join(map(str, values))) for name, values in summary.parameters.items())
    funnel = table("after", f"{RIGHT}configurations left")
    for stage, remaining in summary.funnel():
        funnel.add_row(stage, f"{remaining:,}")
    result = f"{summary.valid:,} valid configurations, enumerated in {duration_text(summary.seconds)}"
    return Group(title(f"{summary.problem} on {device_text(summary.device)}"), values, below(funnel), below(result))


def space_document(summary: SpaceSummary) -> dict[str, Any]:
    """Return the counts and the values of each parameter for JSON."""
    return {
        "kernel": summary.problem.kernel,
        "problem": dict(summary.problem.sizes),
        "dtype": summary.problem.dtype,
        "device": device_document(summary.device),
        "combinations": summary.combinations,
        "valid": summary.valid,
        "rules": _stages_document(summary.rules),
        "limits": _stages_document(summary.limits),
        "parameters": {name: list(values) for name, values in summary.parameters.items()},
        "seconds": round(summary.seconds, 6),
    }


def _stages_document(stages: Sequence[SpaceStage]) -> list[dict[str, Any]]:
    return [
        {"name": stage.name, "remaining": stage.remaining, **({"heuristic": True} if stage.is_heuristic else {})}
        for stage in stages
    ]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile space sgemm_2d M=4096 N=4096 K=4096", "autotile space sgemm_2d --device rtx-3060 --json"
        )
    )(space)

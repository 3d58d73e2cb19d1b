"""``autotile space``: size of a search space."""

from __future__ import annotations

import typer

from autotile.cli.arguments import DeviceOption, DtypeOption, JsonOption, KernelArgument, SizesArgument
from autotile.cli.output import examples, notice, show


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
    show(summary, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile space sgemm_2d M=4096 N=4096 K=4096", "autotile space sgemm_2d --device rtx-3060 --json"
        )
    )(space)

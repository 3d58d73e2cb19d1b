"""``autotile explain``: one configuration on one device."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, DeviceOption, DtypeOption, JsonOption, KernelArgument, LibraryOption
from autotile.cli.output import NOTHING_FOUND, examples, notice, show


def explain(
    kernel: KernelArgument,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Parameters and sizes in any order, such as BM=64 M=4096; the others have their defaults.",
            show_default=False,
        ),
    ] = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    database: DatabaseOption = None,
    library: LibraryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Explain one configuration on one device.

    Shows which rules and limits it meets, its launch geometry, registers and shared memory, and what limits its
    occupancy. It is compiled if NVRTC is installed; no GPU is needed. Exits with 1 if the configuration cannot be used.

    For an operation, such as matmul: shows which kernel or library computes a problem, and why.
    """
    from autotile.api import inspection
    from autotile.api.explanation import Explanation
    from autotile.cli.assignments import read_sizes, read_values
    from autotile.kernel.library import load_kernel
    from autotile.kernel.operation import find_operation

    is_operation = find_operation(kernel) is not None
    words = assignments or []
    values = read_sizes(words) if is_operation else read_values(load_kernel(kernel).spec, words)
    explanation = inspection.explain(kernel, values, dtype=dtype, device=device, database=database, library=library)
    for text in explanation.notices:
        notice(text)
    show(explanation, as_json=as_json)
    if isinstance(explanation, Explanation) and explanation.fault:
        raise typer.Exit(NOTHING_FOUND)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile explain matmul_tiled TILE=32 --device rtx-3060",
            "autotile explain matmul M=1000 N=1000 K=1000 --dtype float32",
            "autotile explain sgemm_2d BM=128 BN=128 M=4096 N=4096 K=4096 --json",
        )
    )(explain)

"""``autotile best``: the configuration that is served for a problem."""

from __future__ import annotations

import typer

from autotile.cli.arguments import (
    BundleOption,
    DatabaseOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KernelArgument,
    LibraryOption,
    SizesArgument,
)
from autotile.cli.output import examples, notice, show


def best(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    database: DatabaseOption = None,
    bundle: BundleOption = None,
    library: LibraryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Show what would be served for a problem, and why.

    Tiers: exact (tuned for this problem on this GPU), family (by the rule of a family that contains it), nearest (tuned
    for other sizes), transferred (tuned on another GPU), default (not tuned); for an operation also model (a model of
    times expects it to be the fastest) and library (nothing is known that is faster).
    """
    from autotile.api import results
    from autotile.cli.assignments import read_sizes

    given = read_sizes(sizes or [])
    found = results.best(kernel, given, dtype=dtype, device=device, database=database, bundle=bundle, library=library)
    for text in found.notices:
        notice(text)
    show(found, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile best sgemm_2d M=4096 N=4096 K=4096",
            "autotile best matmul M=1000 N=1000 K=1000 EMULATE=0 --dtype float32",
            "autotile best sgemm_2d M=1000 N=1000 K=1000 --device rtx-3090 --json",
        )
    )(best)

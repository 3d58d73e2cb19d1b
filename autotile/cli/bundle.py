"""``autotile bundle``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.arguments import ArchitectureOption, DatabaseOption, DtypeOption, JsonOption, complete_kernel
from autotile.cli.output import examples, notice, show
from autotile.errors import InputError


def bundle(
    kernels: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL [SIZE=N]...",
            help="Kernels by name or path, each with the sizes of one problem or with all that are tuned.",
            autocompletion=complete_kernel,
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.autotile", help="File to write.", show_default=False)
    ],
    architectures: ArchitectureOption = None,
    dtype: DtypeOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pack tuned kernels into one file that serves them anywhere.

    It holds the search-space files, what was tuned, and cubins of the winners and the defaults, each with its SHA-256.
    `get_best_kernel(..., bundle=FILE)` serves from it with neither compiler nor database.
    """
    from autotile.api import exchange
    from autotile.api.targets import sizes_notice
    from autotile.kernel.library import load_kernel

    selected = read_selections(kernels)
    for kernel, given in selected:
        if given:
            spec = load_kernel(kernel).spec
            notice(sizes_notice(spec, spec.sizes, given))
    result = exchange.bundle(selected, output=output, architectures=architectures or (), dtype=dtype, database=database)
    show(result, as_json=as_json)


def read_selections(words: Iterable[str]) -> list[tuple[str, dict[str, int] | None]]:
    """Parse ``KERNEL [SIZE=N ...] ...``, where sizes belong to the kernel before them.

    Returns
    -------
    list of tuple
        Kernels, each with its sizes, or with None if it has none.

    Raises
    ------
    InputError
        The first word is no kernel, or a size cannot be read.
    """
    from autotile.cli.assignments import read_sizes

    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"{word!r} stands before any kernel; expected KERNEL [SIZE=N ...] ...")
    return [(kernel, read_sizes(sizes) if sizes else None) for kernel, sizes in groups]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile bundle sgemm_2d matmul_tiled -o app.autotile",
            "autotile bundle sgemm_2d M=4096 N=4096 K=4096 -o app.autotile --arch sm_90 --arch sm_80",
        )
    )(bundle)

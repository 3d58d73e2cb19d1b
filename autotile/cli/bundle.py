"""``autotile bundle``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.arguments import ArchitectureOption, DatabaseOption, DtypeOption, JsonOption, complete_kernel
from autotile.cli.output import examples, notice, show
from autotile.cli.tables import RIGHT, below, facts, table
from autotile.core.text import bytes_text, shown_text
from autotile.errors import InputError

if TYPE_CHECKING:
    from autotile.api.exchange import WrittenBundle


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
    show(result, bundle_table, bundle_document, as_json=as_json)


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


def bundle_document(written: WrittenBundle) -> dict[str, Any]:
    """Return a bundle for JSON."""
    return {
        "file": str(written.file),
        "digest": written.digest,
        "bytes": written.size_bytes,
        "kernels": [{**entry._asdict(), "architectures": list(entry.architectures)} for entry in written.kernels],
        "notices": list(written.notices),
    }


def bundle_table(written: WrittenBundle) -> RenderableType:
    """Render the file, then one line for each kernel."""
    kernels = table("kernel", f"{RIGHT}problems", f"{RIGHT}cubins", "architectures")
    for entry in written.kernels:
        kernels.add_row(
            shown_text(entry.kernel), f"{entry.problems:,}", f"{entry.cubins:,}", " ".join(entry.architectures)
        )
    head = facts([("bundle", f"{written.file} ({bytes_text(written.size_bytes)})"), ("digest", written.digest)])
    return Group(head, below(kernels), *(below(Text(shown_text(notice))) for notice in written.notices))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile bundle sgemm_2d matmul_tiled -o app.autotile",
            "autotile bundle sgemm_2d M=4096 N=4096 K=4096 -o app.autotile --arch sm_90 --arch sm_80",
        )
    )(bundle)

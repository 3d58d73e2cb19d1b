"""``autotile explain``: a configuration on a device, the choice for an operation, or the occupancy of a block."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import (
    DatabaseOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LibraryOption,
    OptionalKernelArgument,
)
from autotile.cli.output import NOTHING_FOUND, examples, notice, show
from autotile.errors import InputError


def explain(
    kernel: OptionalKernelArgument = None,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Parameters and sizes in any order, such as BM=64 M=4096; the others have their defaults.",
            show_default=False,
        ),
    ] = None,
    *,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Without a kernel: threads per block.", show_default=False)
    ] = None,
    registers: Annotated[int, typer.Option(metavar="N", min=0, help="Registers per thread; 0 to ignore them.")] = 0,
    smem: Annotated[int, typer.Option(metavar="BYTES", min=0, help="Static and dynamic shared memory per block.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    database: DatabaseOption = None,
    library: LibraryOption = True,
    as_json: JsonOption = False,
) -> None:
    """Explain one configuration on one device, or the occupancy of a block.

    Shows which rules and limits it meets, its launch geometry, registers and shared memory, and what limits its
    occupancy. It is compiled if NVRTC is installed; no GPU is needed. Exits with 1 if the configuration cannot be used.

    For an operation, such as matmul: shows which kernel or library computes a problem, and why. Without a kernel:
    computes how many blocks of --threads, --registers and --smem fit on an SM, and what limits them.
    """
    from autotile.api import inspection
    from autotile.api.explanation import Explanation
    from autotile.cli.assignments import read_sizes, read_values
    from autotile.kernel.library import load_kernel
    from autotile.kernel.operation import find_operation

    if kernel is None:
        if threads is None:
            raise InputError("nothing to explain; expected KERNEL [NAME=VALUE ...], or --threads N of a block")
        result = inspection.occupancy(threads, registers, smem, device=device)
        for text in result.notices:
            notice(text)
        show(result, as_json=as_json)
        return
    if threads is not None or registers or smem:
        raise InputError("--threads, --registers and --smem are of a block without a kernel; leave the kernel out")
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
            "autotile explain --threads 1024 --registers 32 --smem 8192 --device rtx-3060",
            "autotile explain sgemm_2d BM=128 BN=128 M=4096 N=4096 K=4096 --json",
        )
    )(explain)

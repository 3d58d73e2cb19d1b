"""``autotile space``, ``explain`` and ``occupancy``: what can be said without running anything."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated

import typer

from autotile.cli.application import NOTHING_FOUND, examples
from autotile.cli.arguments import DeviceOption, DtypeOption, JsonOption, KernelArgument, SizesArgument
from autotile.cli.output import notice, show_report
from autotile.core.model import Problem
from autotile.core.text import sizes_text


def space(
    kernel: KernelArgument,
    sizes: SizesArgument = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count what the rules and the device leave of a search space.

    Sizes that are not given are those of the search-space file.
    """
    from autotile.ops.assignments import read_sizes
    from autotile.ops.spaces import count_space
    from autotile.ops.targets import target_device

    given = read_sizes(sizes or [])
    target = target_device(device)
    notice(target.notice)
    report = count_space(kernel, given, target.device, dtype=dtype)
    _say_what_was_filled_in(report.problem, given)
    show_report(report, as_json=as_json)


def explain(
    kernel: KernelArgument,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Parameters and sizes in any order, such as BM=64 M=4096; missing ones are the default's.",
            show_default=False,
        ),
    ] = None,
    *,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain one configuration on one device.

    Says which rules and limits it meets, how it is launched, which registers and how much shared memory it takes, and
    what limits its occupancy. It is compiled where NVRTC is installed; no GPU is needed. Exits with 1 where the
    configuration cannot be used.
    """
    from autotile.ops.assignments import read_assignments
    from autotile.ops.explaining import explain_config
    from autotile.ops.targets import target_device

    given = read_assignments(assignments or [])
    target = target_device(device)
    notice(target.notice)
    report = explain_config(kernel, given, target.device, dtype=dtype)
    _say_what_was_filled_in(report.problem, given)
    show_report(report, as_json=as_json)
    if report.fault:
        raise typer.Exit(NOTHING_FOUND)


def occupancy(
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Threads in a block.", show_default=False)],
    *,
    registers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Registers a thread; 0 leaves them out of account.")
    ] = 0,
    smem: Annotated[
        int, typer.Option(metavar="BYTES", min=0, help="Shared memory of a block, static and dynamic together.")
    ] = 0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Work out how many blocks fit on an SM, and why not more."""
    from autotile.ops.explaining import block_occupancy
    from autotile.ops.targets import target_device

    target = target_device(device)
    notice(target.notice)
    show_report(block_occupancy(threads, registers, smem, target.device), as_json=as_json)


def _say_what_was_filled_in(problem: Problem, given: Container[str]) -> None:
    """Name the sizes that the user left to the search-space file: the answer holds for these only."""
    filled = {name: value for name, value in problem.sizes.items() if name not in given}
    if filled:
        notice(f"not given, so as in the search-space file: {sizes_text(filled)}")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "autotile space sgemm_2d M=4096 N=4096 K=4096", "autotile space sgemm_2d --device rtx-3060 --json"
        )
    )(space)
    app.command(
        epilog=examples(
            "autotile explain matmul_tiled TILE=32 --device rtx-3060",
            "autotile explain sgemm_2d BM=128 BN=128 M=4096 N=4096 K=4096 --json",
        )
    )(explain)
    app.command(
        epilog=examples(
            "autotile occupancy --threads 1024 --registers 32 --smem 8192 --device rtx-3060",
            "autotile occupancy --threads 256 --registers 128",
        )
    )(occupancy)

"""``autotile export``: results as files of other tools, recordings, C++ headers, bundles and plans."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from autotile.cli.arguments import (
    MEASUREMENT,
    ArchitectureOption,
    DatabaseOption,
    DtypeOption,
    JsonOption,
    L2Option,
    WorkersOption,
    check_seed,
    complete_device,
    complete_kernel,
)
from autotile.cli.output import CommandInterruptedError, examples, notice, print_json, print_line, show
from autotile.cli.tune import is_operation, live_progress
from autotile.core.text import plural
from autotile.errors import InputError


def export(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KERNEL [SIZE=N]...",
            help="Kernel by name or path, with problem sizes; of a bundle, several, each with the sizes of one problem "
            "or with all that are tuned.",
            autocompletion=complete_kernel,
            show_default=False,
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="File or folder to write.", show_default=False),
    ] = None,
    file_format: Annotated[
        Literal["t4", "kernel-tuner", "optuna", "recording", "c-header", "bundle", "plan"],
        typer.Option(
            "--format",
            help="t4: the auto-tuning community's JSON; kernel-tuner: a cache file of Kernel Tuner; "
            "optuna: an SQLite file for optuna-dashboard; recording: an .npz file for --replay; "
            "c-header: a C++ header that chooses and launches, with cubins beside it; bundle: one file that serves "
            "kernels with neither compiler nor database; plan: what programs missed, for tune --plan.",
        ),
    ] = "t4",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Of a recording: measure the whole space on a GPU.", rich_help_panel=MEASUREMENT
        ),
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Measure so many configurations at random.",
            show_default="all",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Seed of the random sample.", callback=check_seed, rich_help_panel=MEASUREMENT
        ),
    ] = 0,
    l2: L2Option = "cold",
    workers: WorkersOption = None,
    captured: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Of a plan: captured calls (AUTOTILE_CAPTURE). May be given again."),
    ] = None,
    architectures: ArchitectureOption = None,
    dtype: DtypeOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|INDEX",
            help="Only results of this GPU: a profile of `autotile devices`, or the index of a GPU of this machine.",
            show_default="the newest of any GPU",
            autocompletion=complete_device,
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write results to a file: trials, a recording, a C++ header, a bundle or a plan.

    A C++ header holds all problems that are tuned of the kernel where no sizes are given. A bundle holds the
    search-space files, what was tuned, and cubins of the winners and the defaults, each with its SHA-256;
    `get_best_kernel(..., bundle=FILE)` serves from it. A recording with --measure: the same command goes on where an
    interrupted one stopped. Of an operation, such as matmul, the models of time that tuning a family has learned are
    written, to a folder.
    """
    if (measure or sample is not None) and file_format != "recording":
        raise InputError("--measure and --sample are of a recording; add --format recording")
    if captured and file_format != "plan":
        raise InputError("--captured is of a plan; add --format plan")
    if file_format == "plan":
        _write_plan(words, captured or [], output, device, database)
        return
    selected = read_selections(words or [])
    if not selected:
        raise InputError("no kernel is named; expected `autotile export KERNEL [SIZE=N ...] -o FILE`")
    if file_format == "bundle":
        _write_bundle(selected, _named(output), architectures, dtype, database, as_json=as_json)
        return
    if len(selected) > 1:
        raise InputError(f"one kernel is exported, and {selected[1][0]!r} is another; several go into a bundle")
    kernel, sizes = selected[0]
    given = sizes or {}
    if measure or sample is not None:
        _record(kernel, given, output, dtype, sample, seed, l2, workers, device, database, as_json)
        return
    if is_operation(kernel):
        if given or architectures or device is not None or file_format != "t4":
            raise InputError(f"{kernel} is an operation, of which models are exported: give no sizes, format or device")
        _export_models(kernel, _named(output), dtype, database, as_json=as_json)
        return
    from autotile.api import exchange
    from autotile.api.targets import open_problem, sizes_notice

    if file_format != "c-header" or given:
        loaded, problem = open_problem(kernel, given, dtype)
        notice(sizes_notice(loaded.spec, problem.sizes, given))
    result = exchange.export(
        kernel,
        given,
        output=_named(output),
        format=file_format,
        architectures=architectures or (),
        dtype=dtype,
        device=device,
        database=database,
    )
    show(result, as_json=as_json)


def _named(output: Path | None) -> Path:
    if output is None:
        raise InputError("no file is named to write to; add -o FILE")
    return output


def _write_plan(
    words: list[str] | None, captured: list[Path], output: Path | None, device: str | None, database: str | None
) -> None:
    """Write what programs missed, or captured calls, as a plan; to standard output without a file."""
    from autotile.api import plans
    from autotile.tuning.plan import plan_text

    if len(words or []) > 1 or any("=" in word for word in words or []):
        raise InputError("a plan is of the misses of one kernel, or of all; expected `autotile export [KERNEL] ...`")
    kernel = words[0] if words else None
    found = plans.plan(kernel, captured=captured, output=output, device=device, database=database)
    if output is None:
        print_line(plan_text(found.problems).rstrip("\n"))
    else:
        notice(f"{plural(len(found.problems), 'problem')} in {output}; tune them with `autotile tune --plan {output}`")


def _write_bundle(
    selected: list[tuple[str, dict[str, int] | None]],
    output: Path,
    architectures: list[str] | None,
    dtype: str | None,
    database: str | None,
    *,
    as_json: bool,
) -> None:
    from autotile.api import exchange
    from autotile.api.targets import sizes_notice
    from autotile.kernel.library import load_kernel

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


def _record(  # noqa: PLR0917 - the options of the command
    kernel: str,
    given: dict[str, int],
    output: Path | None,
    dtype: str | None,
    sample: int | None,
    seed: int,
    l2: Literal["cold", "hot"],
    workers: int | None,
    device: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Measure a whole search space, or a sample, for replay without a GPU."""
    from autotile.api.exchange import Transfer
    from autotile.api.targets import open_problem, resolve_gpu, sizes_notice
    from autotile.api.tuning import record_problem
    from autotile.tuning.options import TuneOptions

    loaded, problem = open_problem(kernel, given, dtype)
    notice(sizes_notice(loaded.spec, problem.sizes, given))
    index = resolve_gpu(device)
    options = TuneOptions(seed=seed, l2=l2, workers=workers, device_index=index, database=database)
    with live_progress(problem) as progress:
        recorded = record_problem(loaded, problem, options, sample=sample, output=output, observe=progress)
    if recorded.path is None:
        measured = plural(recorded.configurations, "configuration")
        raise CommandInterruptedError(f"interrupted: {measured} measured; the same command goes on from there")
    gpu_name = recorded.header.key.gpu_name
    details = {"valid": recorded.header.valid_configs, "seconds": round(recorded.seconds, 3)}
    written = Transfer("recorded", recorded.path, "recording", problem, gpu_name, recorded.configurations, details)
    show(written, as_json=as_json)


def _export_models(operation: str, folder: Path, dtype: str | None, database: str | None, *, as_json: bool) -> None:
    from autotile.api.operation_tuning import export_models
    from autotile.kernel.operation import load_operation

    files = export_models(load_operation(operation), folder, dtype=dtype, database=database)
    if as_json:
        print_json({"action": "exported", "format": "model", "files": [str(file) for file in files]})
    else:
        print_line("\n".join(f"exported {file}" for file in files))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile export sgemm_2d M=4096 N=4096 K=4096 -o results.json",
            "autotile export sgemm_2d M=4096 N=4096 K=4096 --format optuna -o study.db",
            "autotile export matmul_tiled M=4096 N=4096 K=4096 --format recording --measure",
            "autotile export sgemm_2d --format c-header -o include/sgemm_2d.hpp --arch sm_90",
            "autotile export sgemm_2d matmul_tiled --format bundle -o app.autotile",
            "autotile export --format plan -o misses.toml",
            "autotile export matmul -o tuned/models",
        ),
    )(export)

"""Exchange of results: trials in the files of other tools, headers for C++, and bundles."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from autotile.api.targets import merge_sizes, open_problem, resolve_device, sizes_notice
from autotile.core.argument_types import checked_except
from autotile.core.device import gpu_name_of
from autotile.core.dtypes import dtype_name
from autotile.core.model import L2Mode, Problem
from autotile.core.text import RIGHT, Facts, ResultTable, Written, bytes_text, plural, sizes_text
from autotile.database.database import Database, database_location, open_for_reading, standing_trials
from autotile.database.keys import version_of
from autotile.database.learned import read_models
from autotile.database.paths import check_output
from autotile.errors import InputError
from autotile.exchange.bundle import BundledKernel, prepare_bundled, write_bundle
from autotile.exchange.cpp_header import namespace_of, write_shipped_header
from autotile.exchange.kernel_tuner import (
    ImportFormat,
    import_into_database,
    import_into_recording,
    read_results,
    write_cache,
    write_t4,
)
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.exchange.shipped import write_models
from autotile.kernel.library import Kernel, KernelHolder, KernelName, load_kernel
from autotile.kernel.operation import Operation, named_operation
from autotile.settings import output_path, user_path
from autotile.version import __version__

if TYPE_CHECKING:
    from autotile.tuning.progress_state import Observer
    from autotile.tuning.result import Recorded

ExportFormat = Literal["t4", "kernel-tuner", "optuna", "recording", "c-header", "bundle", "plan"]
KernelSelection = str | Path | KernelHolder | tuple[str | Path | KernelHolder, Mapping[str, int] | None]
"""Kernel by name or path; or with the sizes of one problem, where None stands for all problems."""

_Selection = tuple[KernelName, Mapping[str, int] | None]
_OPTUNA_TABLE = "version_info"
"""Table of every Optuna storage."""
_COMPILED = ("c-header", "bundle")
"""Formats that hold compiled code, for all GPUs that were tuned on."""


def _transferred(
    action: str, file: Path, file_format: str, problem: Problem, *, device: str, count: int, **details: Any
) -> Written:
    """Return trials that were ``exported``, ``imported`` or ``recorded``; the name of a replayed device is marked."""
    counted, place = plural(count, "configuration"), f"{file} ({file_format})"
    facts: Facts = [(action, f"{counted} of {problem} on {device}"), ("file", place)]
    return Written(
        file,
        f"{problem} on {device}: {counted} {action}, {place}",
        [[*facts, *((label.replace("_", " "), str(value)) for label, value in details.items())]],
        {
            "action": action,
            "file": str(file),
            "format": file_format,
            **problem.document(),
            "device": device,
            "configurations": count,
            **details,
        },
    )


@checked_except("kernel", "device", "format")
def export(
    kernel: KernelName | Sequence[KernelSelection] | None = None,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path | None = None,
    format: ExportFormat = "t4",
    measure: bool = False,
    sample: int | None = None,
    seed: int = 0,
    l2: Literal["cold", "hot"] | None = None,
    workers: int | None = None,
    captured: Iterable[str | Path] = (),
    architectures: Sequence[str] = (),
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    progress: bool | Observer = False,
    announce: Callable[[str], None] = lambda _: None,
    **named_sizes: int,
) -> Written | Recorded:
    """Write results to a file: trials, a recording, a C++ header, a bundle or a plan.

    A C++ header holds all problems that are tuned of the kernel where no sizes are given. A bundle holds the
    search-space files, what was tuned, and cubins of the winners and the defaults, each with its SHA-256;
    `get_best_kernel(..., bundle=FILE)` serves from it. A recording with ``measure`` goes on where an interrupted one
    stopped. For an operation, such as matmul, a bundle holds all configurations that its models of time choose among;
    without a format, the models themselves, as tuning a family has learned them, are written to a folder.

    Parameters
    ----------
    kernel
        Kernel by name or path, with problem sizes; of a bundle, several, each with the sizes of one problem or with all
        that are tuned. In Python, a list of kernels, or of pairs of one and its sizes; or a kernel from
        `autotile.kernel`.
    sizes, **named_sizes
        Problem sizes and flags.
    output
        File or folder to write. A plan, and a recording with ``measure``, need none.
    format
        t4: the auto-tuning community's JSON; kernel-tuner: a cache file of Kernel Tuner; optuna: an SQLite file for
        optuna-dashboard; recording: an .npz file for replay; c-header: a C++ header that chooses and launches, with
        cubins beside it; bundle: one file that serves kernels with neither compiler nor database; plan: what programs
        missed, for `tune --plan`.
    measure
        Of a recording: measure the whole space on a GPU.
    sample
        Measure this many configurations, at random. None for all.
    seed
        Seed of the random sample.
    l2
        Whether inputs start in memory (cold) or in the L2 cache (hot). None for cold where it is measured, else for
        the newest study.
    workers
        Compile processes, at most two a core. None for one a core.
    captured
        Of a plan: captured calls (AUTOTILE_CAPTURE). May be given again.
    architectures
        Architecture to compile for, such as sm_90; of a header or a bundle. May be given again. None for those of the
        GPUs it was tuned on.
    dtype
        Element type, one of the kernel's. None for the kernel's first.
    device
        Only results of this GPU: a profile of `autotile devices`, or the index of a GPU of this machine. None for the
        newest of any GPU.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    progress
        As for `autotile.tune`, of a measurement.
    announce
        Called with each remark about the sizes.

    Returns
    -------
    Written or Recorded
        What was written; a `Recorded` without a path if the user interrupted the measurement.

    Raises
    ------
    InputError
        The problem is not tuned, an argument does not apply to the format, or a file cannot be written.
    ToolchainError
        A header or a bundle needs NVRTC, which is missing.
    """
    if format not in get_args(ExportFormat):
        raise InputError(f"there is no format {format!r}; expected one of {', '.join(get_args(ExportFormat))}")
    is_measured = measure or sample is not None
    for is_wrong, reason in (
        (is_measured and format != "recording", "--measure and --sample are of a recording; add --format recording"),
        (workers is not None and not is_measured, "--workers is of a measurement; add --measure"),
        (seed and sample is None, "--seed is of a random sample; add --sample N"),
        (l2 is not None and format in (*_COMPILED, "plan"), f"--l2 is of trials, and not for --format {format}"),
        (dtype is not None and format == "plan", "--dtype is not for --format plan, which has the dtypes of its calls"),
        (captured and format != "plan", "--captured is of a plan; add --format plan"),
        (architectures and format not in _COMPILED, f"--arch is for --format {' and '.join(_COMPILED)}, not {format}"),
        (device is not None and format in _COMPILED, f"--device is not for --format {format}: it is for all GPUs"),
    ):
        if is_wrong:
            raise InputError(reason)
    dtype = dtype and dtype_name(dtype)
    given = merge_sizes(sizes, named_sizes)
    entries: Sequence[Any] = [] if kernel is None else [(kernel, given or None)]
    if isinstance(kernel, list | tuple):
        if given:
            raise InputError("the sizes are of no kernel in the list; give each with its own, as (kernel, sizes)")
        entries = kernel
    selected = list(map(_selection, entries))
    if format == "plan":
        if len(selected) > 1 or any(sizes for _, sizes in selected):
            raise InputError(
                "a plan is of the misses of one kernel, or of all; expected `autotile export [KERNEL] ...`"
            )
        from autotile.api.plans import plan
        from autotile.tuning.plan import plan_text

        missed = [name for name, _ in selected]
        made = plan(*missed, captured=captured, output=output, device=device, database=database)
        problems, text = len(made.problems), plan_text(made.problems)
        counted, written = plural(problems, "problem"), {"plan": text} if output is None else {"file": str(output)}
        headline = f"a plan of {counted}" if output is None else f"{counted} in {output}"
        shown = text.rstrip("\n") if output is None else f"{headline}; tune them with `autotile tune --plan {output}`"
        document = {"action": "exported", "format": "plan", **written, "problems": problems}
        return Written(None if output is None else Path(output), headline, [shown], document)
    if not selected:
        raise InputError("no kernel is named; expected `autotile export KERNEL [SIZE=N ...] -o FILE`")
    if output is None and not is_measured:
        raise InputError("no file is named to write to; add -o FILE")
    if format == "bundle":
        for one, own in selected:
            if own:
                if named_operation(one) is not None:
                    raise InputError(f"{one} is an operation, which is bundled for all sizes: give none")
                spec = load_kernel(one).spec
                announce(sizes_notice(spec, spec.sizes, own))
        return bundle(entries, output=str(output), architectures=architectures, dtype=dtype, database=database)
    if len(selected) > 1:
        raise InputError(f"one kernel is exported, and {selected[1][0]!r} is another; several go into a bundle")
    ((name, own),) = selected
    given = dict(own or {})
    if not is_measured and (operation := named_operation(name)) is not None:
        if given or device is not None or format != "t4" or l2 is not None:
            raise InputError(f"{name} is an operation, of which models are exported: give no sizes, format, GPU or L2")
        models = export_models(operation, str(output), dtype=dtype, database=database)
        document = {"action": "exported", "format": "model", "files": [str(model) for model in models]}
        shown = "\n".join(f"exported {model}" for model in models)
        return Written(Path(str(output)), f"{plural(len(models), 'model')} exported", [shown], document)
    if given or format != "c-header":
        loaded, problem = open_problem(name, given, dtype)
        announce(sizes_notice(loaded.spec, problem.sizes, given))
    if format == "c-header":
        header = check_output(str(output), makes_folder=True)
        (packed,), images, notices = _prepare(selected, architectures, dtype, database)
        element_type = dtype or packed.kernel.spec.dtypes[0]
        cubins = write_shipped_header(packed, images, element_type, header)
        problems = sum(winner.key.dtype == element_type for winner in packed.winners)
        namespace = f"autotile::{namespace_of(packed.kernel.spec, element_type)}"
        held = f"{plural(problems, 'tuned problem')}, {plural(len(cubins), 'cubin')}"
        facts: Facts = [("exported", f"{held} beside the header"), ("header", str(header)), ("namespace", namespace)]
        document = {
            "action": "exported",
            "format": "c-header",
            "file": str(header),
            "namespace": namespace,
            "cubins": list(cubins),
            "problems": problems,
            "notices": list(notices),
        }
        return Written(header, f"{namespace}: {held}, {header}", [facts, *notices], document)
    if is_measured:
        from autotile.api.tuning import record
        from autotile.tuning.options import TuneOptions

        options = TuneOptions(seed=seed, l2=l2 or "cold", workers=workers)
        place: dict[str, Any] = {"device": device, "database": database, "progress": progress}
        done = record(name, given, output=output, sample=sample, dtype=dtype, options=options, **place)
        if done.path is None:
            return done
        details = {"valid": done.header.valid_configs, "seconds": round(done.seconds, 3)}
        gpu = done.header.key.gpu_name
        return _transferred(
            "recorded", done.path, "recording", problem, device=gpu, count=done.configurations, **details
        )
    return _export_trials(loaded, problem, output_path(str(output)), format, device=device, database=database, l2=l2)


def export_models(
    operation: Operation, folder: str | Path, *, dtype: str | None = None, database: str | Path | None = None
) -> list[Path]:
    """Write the models of an operation in a database to a folder, which is made, in files such as those that ship.

    It is an `InputError` if the database holds no such model, or a file cannot be written.
    """
    with open_for_reading(database) as opened:
        models = read_models(opened, operation.name, dtype) if opened is not None else []
    if not models:
        name = operation.name
        raise InputError(f"the database holds no model of {name}; tune a range of sizes on a GPU, such as SIZE=1..8192")
    path = user_path(folder, "the models")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}") from None
    return write_models(path, models)


@checked_except()
def import_(
    file: str | Path,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    output: str | Path | None = None,
    format: ImportFormat | None = None,
    kernel: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    database: str | Path | None = None,
    **named_sizes: int,
) -> Written:
    """Read results of another tool.

    They go into the database, where those of a file that was imported before are not stored again, or into a recording.
    They can be listed and compared, but are never served: the file does not say which source they are of.

    Parameters
    ----------
    file
        Cache file of Kernel Tuner, or file of T4 results.
    sizes, **named_sizes
        Problem sizes by name. None for those of the file, named x, y, z if it does not name them.
    output
        Write a recording for replay. None for the database.
    format
        What wrote the file. None for what it looks like.
    kernel
        Name of the kernel. None for that of the file, or the name of a file that states none.
    device
        Name of the GPU that they were measured on, which T4 results of Kernel Tuner do not state, or of its profile.
        None for that of the file.
    dtype
        Element type of the problem. None for that of the file, float32 if it has none.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        The file cannot be read, does not state what is not given or contradicts the sizes, or the database or the
        recording cannot be written.
    """
    if output is not None and database is not None:
        raise InputError("results go into a recording or into a database; give --output or --db")
    path = user_path(file, "a file of results")
    results = read_results(path, format, kernel=kernel, gpu_name=device and gpu_name_of(device))
    key = results.key(merge_sizes(sizes, named_sizes) or None, dtype)
    details: dict[str, object] = {"recording": str(output)}
    added = count = len(results.trials)
    if output is not None:
        import_into_recording(check_output(output, path, makes_folder=True), results, key)
    else:
        with Database.open(database_location(database)) as opened:
            study, added = import_into_database(opened, results, key)
            known = [f"{count - added:,} of the file's {count:,} were imported before"] if added < count else []
            details = {"study": study, "database": opened.location}
            details |= {"note": "; ".join(notes)} if (notes := [*known, *opened.notices]) else {}
    return _transferred("imported", path, results.format, key.problem, device=key.device_label, count=added, **details)


@checked_except("kernels")
def bundle(
    kernels: str | Path | KernelHolder | Sequence[KernelSelection],
    *,
    output: str | Path,
    architectures: Sequence[str] = (),
    dtype: str | None = None,
    database: str | Path | None = None,
) -> Written:
    """Pack tuned kernels into one file that serves them without a compiler and without a database.

    The file holds the search-space files, the results, and cubins of the winners and of the defaults.

    Parameters
    ----------
    kernels
        A kernel or several, each by name, by the path of its search-space file, or as a pair of that and the sizes of
        one tuned problem. Of an operation, all configurations that its models of time choose among are packed.
    output
        File to write.
    architectures, database
        As for `autotile.export`.
    dtype
        Element type of the results to pack; None for all.

    Raises
    ------
    InputError
        A kernel, size or architecture is unknown, a problem is not tuned, no configuration compiles, two kernels have
        the same name, or the file cannot be written.
    ToolchainError
        NVRTC is missing.

    Examples
    --------
    >>> bundle(["sgemm_2d", ("matmul_tiled", {"M": 64, "N": 64, "K": 64})], output="app.autotile")  # doctest: +SKIP
    <Written: app.autotile (1.2 MiB): sgemm_2d, matmul_tiled>
    """
    entries: Sequence[Any] = kernels if isinstance(kernels, Sequence) and not isinstance(kernels, str) else [kernels]
    selected, file = list(map(_selection, entries)), check_output(output)
    packed, images, notices = _prepare(selected, architectures, dtype and dtype_name(dtype), database)
    names = [entry.kernel.name for entry in packed]
    if len(set(names)) < len(names):
        raise InputError(f"a bundle holds a kernel once, and two of {', '.join(names)} have the same name; make two")
    digest = write_bundle(file, packed, images, __version__)
    contents = [  # a configuration that is compiled for two architectures has two cubins
        (one.kernel.name, len(one.winners), len(one.cubins), [*dict.fromkeys(cubin.target for cubin in one.cubins)])
        for one in packed
    ]
    size_bytes = file.stat().st_size
    place = f"{file} ({bytes_text(size_bytes)})"
    rows = [(name, f"{problems:,}", f"{cubins:,}", " ".join(built)) for name, problems, cubins, built in contents]
    headings = ("kernel", f"{RIGHT}problems", f"{RIGHT}cubins", "architectures")
    fields = ("kernel", "problems", "cubins", "architectures")
    return Written(
        file,
        f"{place}: {', '.join(names)}",
        [[("bundle", place), ("digest", digest)], ResultTable(headings, rows, is_wrapped=True), *notices],
        {
            "file": str(file),
            "digest": digest,
            "bytes": size_bytes,
            "kernels": [dict(zip(fields, entry, strict=True)) for entry in contents],
            "notices": list(notices),
        },
    )


def _selection(entry: Any) -> _Selection:
    kernel, sizes = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
    is_held = isinstance(kernel, Kernel | KernelHolder)
    if not (is_held or isinstance(kernel, str | Path)) or not isinstance(sizes, Mapping | None):
        shown = kernel if sizes is None else entry
        raise InputError(f"{shown!r} is no kernel; expected a name, a path, or a pair of that and sizes")
    return (kernel if is_held else str(kernel)), dict(sizes) if sizes else None


def _prepare(
    selections: Sequence[_Selection], architectures: Sequence[str], dtype: str | None, database: str | Path | None
) -> tuple[list[BundledKernel], dict[str, bytes], tuple[str, ...]]:
    if not selections:
        raise InputError("no kernel is named; expected at least one")
    with open_for_reading(database) as opened:
        return prepare_bundled(selections, architectures, opened, dtype=dtype)


def _export_trials(
    kernel: Kernel,
    problem: Problem,
    path: Path,
    file_format: ExportFormat,
    *,
    device: int | str | None,
    database: str | Path | None,
    l2: L2Mode | None,
) -> Written:
    """Write the trials of the newest study of a problem to a file, one of the present version of the kernel if any."""
    with open_for_reading(database) as opened:
        if opened is None:
            raise InputError("nothing is tuned yet, so nothing can be exported; run `autotile tune` first")
        gpu_name = resolve_device(device)[0].name if device is not None else None
        studies = opened.studies(problem.kernel)
        matching = [
            study
            for study in studies
            if study.trials
            and (dict(study.key.sizes), study.key.dtype) == (dict(problem.sizes), problem.dtype)
            and gpu_name in (None, study.key.gpu_name)
            and l2 in (None, study.key.l2_mode)
        ]
        if not matching:
            tuned = dict.fromkeys(
                f"{sizes_text(study.key.sizes)} on {study.key.gpu_name}, {study.key.l2_mode} L2" for study in studies
            )
            known = f"tuned are: {'; '.join(tuned)}" if tuned else f"nothing is tuned of {problem.kernel}"
            asked = f"{f' on {gpu_name}' if gpu_name else ''}{f' with a {l2} L2' if l2 else ''}"
            raise InputError(f"{problem} was not tuned{asked}; {known}")
        version = version_of(kernel)
        current = [study for study in matching if study.key.version == version]
        chosen = current or [study for study in matching if study.key.template_hash] or matching  # the last: imported
        study = max(chosen, key=lambda study: (study.last_at is not None, study.last_at, study.study_id))
        standing = standing_trials(opened.stored_trials(study.study_id))
    trials = [one for one in standing if one.trial.config.keys() == kernel.spec.default.keys()]
    parameters = tuple(  # with the values that were tried when the file listed them
        each._replace(values=tuple(dict.fromkeys([*each.values, *(one.trial.config[each.name] for one in trials)])))
        for each in kernel.spec.parameters
    )
    key, notes = study.key, []
    if not current and key.template_hash:
        notes.append("another version of the kernel was tuned; of the present one nothing is")
    if left := len(standing) - len(trials):
        notes.append(f"{plural(left, 'configuration')} of other parameters left out")
    details: dict[str, object] = {"study": study.study_id, **({"note": "; ".join(notes)} if notes else {})}
    if file_format == "t4":
        metadata = write_t4(path, key, trials, study.device)
        details |= {"metadata": str(metadata)} if metadata is not None else {}
    elif file_format == "kernel-tuner":
        write_cache(path, key, parameters, trials)
    elif file_format == "optuna":
        from autotile.search.optuna_samplers import write_study

        tables: set[str] = set()
        if path.is_file():
            with (
                suppress(sqlite3.Error),
                closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db,
            ):
                tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and _OPTUNA_TABLE not in tables:  # Optuna would add its own to them
            raise InputError(f"{path} is a database of something else than Optuna's studies; name another file")
        write_study(path, parameters, [stored.trial for stored in trials], f"{key.problem} on {key.gpu_name}")
    else:
        if key.source == "replayed":
            raise InputError("these results were replayed from a recording already; expected ones that a GPU measured")
        origin = {"exported_from": "the tuning database"}
        header = RecordingHeader(key, parameters, study.device, settings=origin, chosen="those that a search tried")
        write_recording(path, header, [stored.trial for stored in trials if stored.trial.outcome.is_finding])
    gpu = key.device_label
    return _transferred("exported", path, file_format, problem, device=gpu, count=len(trials), **details)

"""The commands: for each its function, the options whose names do not say enough, and examples; and their one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Signature
from pathlib import Path
from typing import Any

import typer

from autotile.cli.derivation import (
    PANELS,
    Described,
    describe,
    flags_of,
    in_options,
    parameter_of,
    read_assignments,
    read_extents,
    read_followed,
    read_selections,
    read_sizes,
    read_subject,
    read_values,
    split_assignments,
)
from autotile.cli.output import (
    INTERRUPTED,
    NOTHING_FOUND,
    SLOWER,
    STANDARD_OUTPUT,
    CommandInterruptedError,
    error_console,
    examples,
    help_without_command,
    notice,
    print_json,
    print_line,
    show,
    write_table_file,
)
from autotile.core.text import plural
from autotile.database.paths import check_output
from autotile.errors import InputError

EVERYDAY, RESULTS, CARE = "Everyday", "Results", "Machines and databases"
"""Panels of commands in the help."""

_FORMS = {
    "sizes": "SIZE=N",
    "device": "NAME|INDEX",
    "devices": "all|INDEX,...",
    "database": "--db PATH|URL",
    "output": "-o --output FILE",
    "workers": "N 1..1024",
    "sample": "N 1..",
    "seed": "N 0..",
    "trials": "N 1..",
    "finals": "N 0..",
    "limit": "N 1..",
    "l2": "cold|hot",
    "architectures": "--arch SM",
    "verify_problem": "SIZE=N[,...]",
    "bundle": "FILE",
    "captured": "FOLDER",
    "csv": "FILE|-",
    "parquet": "FILE",
    "as_json": "--json",
}
"""Option, metavar and bounds of parameters, where the name does not say them."""
_CSV = Described("csv", "str", None, False, "Write every column as CSV; - for standard output.", "no")
_PARQUET = Described(
    "parquet", "str", None, False, "Write every column as Parquet; needs the extra autotile[parquet].", "no"
)
_ASK_TELL = Described("ask_tell", "bool", False, False, "Let another program search, by JSON lines.", "")
_JSON = Described(
    "as_json", "bool", False, False, "Print one JSON document on standard output; all else goes to standard error.", ""
)


def _announced(_: Mapping[str, Any], __: ExitStack) -> Mapping[str, Any]:
    return {"announce": notice}


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as far as its function does not say it."""

    function: str
    """Module below `autotile`, and name of the function."""
    examples: Sequence[str]
    panel: str = ""
    """Panel in the help of all commands; empty for one of a group."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """As `_FORMS`, where the command differs."""
    own: Sequence[Described] = ()
    """Options beside the parameters of its function."""
    shown: frozenset[str] = frozenset()
    """Options that the help shows, where it only names the others; empty for all."""
    words: tuple[str, Callable[[Sequence[str]], Mapping[str, Any]]] | None = None
    """Metavar and reader of the words that take the place of kernel and sizes."""
    remark: str = ""
    """For the help, beside the docstring, such as on exit codes."""
    code: Callable[[Any], int] = lambda _: 0
    """Exit code of a result that was not interrupted."""
    has_notices: bool = False
    """Whether the notices of the result are printed; otherwise they were, or are part of what is shown."""
    watched: Callable[[Mapping[str, Any], ExitStack], Mapping[str, Any]] = lambda _, __: {}
    """Arguments with which the function reports its progress, made when it runs."""
    has_json: bool = True


def _tuned(result: Any) -> int:
    is_tuned = getattr(result, "is_complete", True)  # of a plan
    return 0 if is_tuned and getattr(result, "winner", result) is not None else NOTHING_FOUND


def _verified(result: Any) -> int:
    if hasattr(result, "is_right"):  # a rewritten kernel
        return NOTHING_FOUND if not result.is_right else SLOWER if result.verdict == "slower" else 0
    verdicts = {problem.verdict for problem in result.problems}
    return INTERRUPTED if "interrupted" in verdicts else NOTHING_FOUND if "failed" in verdicts else 0


def _compared(result: Any) -> int:
    """Say why a comparison of databases fails; return the code of the worst of it."""
    if getattr(result, "limit", None) is None:
        return 0
    from autotile.core.text import percent_text
    from autotile.database.keys import study_columns

    failures = []
    if result.broken:
        names = ", ".join(" ".join(study_columns(one.key)[:2]) for one in result.broken)
        failures.append((f"{plural(len(result.broken), 'problem')} with no valid result in B: {names}", NOTHING_FOUND))
    if not any(one.ratio is not None for one in result.problems):
        failures.append(("the databases have no problem in common whose times can be compared", NOTHING_FOUND))
    if slower := result.slower_by(result.limit):
        text = f"{plural(len(slower), 'problem')} slower by more than {percent_text(result.limit)}"
        failures.append((text, SLOWER))
    for text, _ in failures:
        notice(f"failed: {text}")
    return failures[0][1] if failures else 0


def _session(given: Mapping[str, Any], stack: ExitStack) -> Mapping[str, Any]:
    from autotile.cli.progress import TuneProgress

    before = "reading the plan" if "plan" in given else "enumerating the search space"
    shown = stack.enter_context(TuneProgress(error_console(), before))
    return {"progress": shown, "announce": shown.remark}


def _compilation(given: Mapping[str, Any], stack: ExitStack) -> Mapping[str, Any]:
    if not given.keys() & {"compile", "sample"}:
        return {}
    from autotile.cli.progress import count_progress

    return {"observe": stack.enter_context(count_progress(error_console()))}


_DB = "api.databases.db_"
COMMANDS: Mapping[str, Command] = {
    "new": Command(
        "api.tunable.new",
        ("autotile new saxpy", "autotile new saxpy --in kernels"),
        EVERYDAY,
        {"folder": "--in FOLDER"},
    ),
    "tune": Command(
        "api.tuning.tune",
        (
            "autotile tune sgemm_2d M=4096 N=4096 K=4096",
            "autotile tune matmul M=2047 N=4096 K=4096 --dtype bfloat16 --budget 60s",
            "autotile tune path/to/mine.toml N=1048576 --trials 1000 --until 1%",
            "autotile tune sgemm_2d M=1..8192 N=4096 K=4096,7168 --budget 30m",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --objective registers,energy",
            "autotile tune sgemm_2d M=4096 N=4096 K=4096 --replay --json",
            "autotile tune --misses --budget 5m",
        ),
        EVERYDAY,
        {
            "sizes": "SIZE=N|A..B",
            "plan": "FILE.toml",
            "tries": "--try PARAM=VALUE[,...]",
            "points": "N 1..1000",
            "max_configs": "N 1..64",
            "budget": "TIME",
            "until": "GAIN",
            "sampler": "NAME",
            "objective": "NAME[,...]|EXPR",
            "replay": "[FILE.npz]",
            "scheduler": "tls://HOST:PORT",
            "trace": "FILE.json",
        },
        own=(_ASK_TELL,),
        shown=frozenset(
            (
                *("kernel", "sizes", "dtype", "misses", "plan", "tries", "trials", "budget", "until", "sampler"),
                *("objective", "l2", "replay", "device", "devices", "database", "as_json"),
            )
        ),
        code=_tuned,
        watched=_session,
    ),
    "best": Command(
        "api.results.best",
        (
            "autotile best sgemm_2d M=4096 N=4096 K=4096",
            "autotile best matmul M=1000 N=1000 K=1000 EMULATE=0 --dtype float32",
            "autotile best sgemm_2d M=1000 N=1000 K=1000 --device rtx-3090 --json",
        ),
        EVERYDAY,
        has_notices=True,
    ),
    "explain": Command(
        "api.inspection.explain",
        (
            "autotile explain matmul_tiled TILE=32 --device rtx-3060",
            "autotile explain matmul M=1000 N=1000 K=1000 --dtype float32",
            "autotile explain --threads 1024 --registers 32 --smem 8192 --device rtx-3060",
            "autotile explain sgemm_2d BM=128 BN=128 M=4096 N=4096 K=4096 --json",
        ),
        EVERYDAY,
        {"assignments": "NAME=VALUE", "threads": "N 1..", "registers": "N 0..", "smem": "BYTES 0.."},
        remark="Exits with 1 if the configuration cannot be used.",
        code=lambda result: NOTHING_FOUND if getattr(result, "fault", "") else 0,
        has_notices=True,
    ),
    "space": Command(
        "api.inspection.space",
        (
            "autotile space sgemm_2d M=4096 N=4096 K=4096",
            "autotile space sgemm_2d M=4096 N=4096 K=4096 --device h200 --compile --sample 200",
            "autotile space matmul_tiled --device rtx-3060 --compile -o compiled.html --csv compiled.csv",
        ),
        EVERYDAY,
        {"limit": "N 0..", "output": "-o --output FILE.html"},
        own=(_CSV,),
        code=lambda result: 0 if not hasattr(result, "is_usable") or result.is_usable.any() else NOTHING_FOUND,
        has_notices=True,
        watched=_compilation,
    ),
    "list": Command(
        "api.results.list",
        (
            "autotile list",
            "autotile list sgemm_2d --json",
            "autotile list --misses",
            "autotile list --families",
            "autotile list --recordings",
        ),
        RESULTS,
    ),
    "trials": Command(
        "api.results.trials",
        (
            "autotile trials sgemm_2d --limit 20",
            "autotile trials sgemm_2d M=4096 N=4096 K=4096 --outcome wrong_result",
            "autotile trials sgemm_2d --csv trials.csv",
        ),
        RESULTS,
        own=(_CSV, _PARQUET),
    ),
    "report": Command(
        "api.results.report",
        (
            "autotile report sgemm_2d M=4096 N=4096 K=4096 -o report.html",
            "autotile report matmul",
            "autotile report before.db after.db --fail-if-slower 5%",
        ),
        RESULTS,
        {"output": "-o --output FILE.html", "device": "NAME", "fail_if_slower": "PERCENT"},
        words=("KERNEL [SIZE=N]... | A.db B.db", read_subject),
        code=_compared,
        watched=_announced,
    ),
    "watch": Command(
        "report.live.watch",
        ("autotile watch", "autotile watch gpu0.db gpu1.db --port 8000 --no-open", "autotile watch sgemm_2d"),
        RESULTS,
        {"port": "PORT 0..65535", "open_browser": "--no-open"},
        words=("DB|KERNEL", read_followed),
        watched=_announced,
        has_json=False,
    ),
    "verify": Command(
        "api.verification.verify",
        (
            "autotile verify sgemm_2d M=4096 N=4096 K=4096",
            "autotile verify sgemm_2d --aged",
            "autotile verify sgemm_2d --served",
            "autotile verify rewritten.cu --like mine.toml N=16777216",
            "autotile verify rewritten.cu --like mine.toml --config BLOCK=512 --sanitize --json",
        ),
        RESULTS,
        {"kernel": "KERNEL|NEW.cu", "like": "KERNEL", "config": "PARAM=VALUE[,...]"},
        remark="With --like, the exit code is 0 if it is right and not slower, 1 if it is wrong, 2 for bad input, and "
        "3 if it is right but slower.",
        code=_verified,
        has_notices=True,
        watched=_announced,
    ),
    "export": Command(
        "api.exchange.export",
        (
            "autotile export sgemm_2d M=4096 N=4096 K=4096 -o results.json",
            "autotile export sgemm_2d M=4096 N=4096 K=4096 --format optuna -o study.db",
            "autotile export matmul_tiled M=4096 N=4096 K=4096 --format recording --measure",
            "autotile export sgemm_2d --format c-header -o include/sgemm_2d.hpp --arch sm_90",
            "autotile export sgemm_2d matmul_tiled --format bundle -o app.autotile",
            "autotile export --format plan -o misses.toml",
            "autotile export matmul -o tuned/models",
        ),
        RESULTS,
        words=("KERNEL [SIZE=N]...", lambda words: {"kernel": read_selections(words)}),
        watched=lambda given, stack: (
            _session(given, stack) if given.keys() & {"measure", "sample"} else {"announce": notice}
        ),
    ),
    "import": Command(
        "api.exchange.import_",
        (
            "autotile import cache.json M=4096 N=4096 K=4096",
            "autotile import cache.json N=1048576 -o vector_add.npz",
            "autotile import vector_add.json N=1048576 --device h200",
        ),
        RESULTS,
        {"output": "-o --output FILE.npz", "device": "NAME"},
    ),
    "worker": Command(
        "api.devices.worker",
        (
            "autotile worker tls://head:8786",
            "autotile worker tls://head:8786 --devices 0,2 --compile 16",
            "autotile worker tcp://127.0.0.1:8786 --replay recording.npz --devices 0,1",
        ),
        CARE,
        {"compilers": "--compile N 0..1024", "replay": "FILE.npz|FOLDER", "replay_seconds": "S 0.0..60.0"},
        watched=lambda _, __: {"observe": notice},
        has_json=False,
    ),
    "devices": Command(
        "api.devices.devices",
        ("autotile devices", "autotile devices --json", "autotile devices --measure --device 1"),
        CARE,
    ),
    "doctor": Command(
        "api.doctor.doctor",
        ("autotile doctor", "autotile doctor --json"),
        CARE,
        remark="Exits with 0 if tuning works, on a GPU or by replay.",
        code=lambda result: 0 if result.works else NOTHING_FOUND,
    ),
    "db check": Command(
        f"{_DB}check",
        ("autotile db check", "autotile db check --db team.db --json"),
        remark="Exits with 1 if a fault is found.",
        code=lambda result: 0 if result.ok else NOTHING_FOUND,
    ),
    "db path": Command(f"{_DB}path", ("autotile db path", "sqlite3 $(autotile db path) .tables")),
    "db merge": Command(
        f"{_DB}merge",
        ("autotile db merge node1.db node2.db -o team.db",),
        forms={"sources": "DATABASE", "output": "-o --output PATH|URL"},
    ),
    "db diff": Command(f"{_DB}diff", ("autotile db diff mine.db team.db", "autotile db diff before.json after.json")),
    "db clean": Command(
        f"{_DB}clean",
        (
            "autotile db clean --older-than 90d --dry-run",
            "autotile db clean sgemm_2d --stale --winners",
            "autotile db clean --keep-gpu h200",
        ),
        forms={"before": "--older-than AGE", "keep_gpus": "--keep-gpu NAME"},
        has_notices=True,
    ),
}
"""Commands by their names, in the order of the help; those of a group have its name in front."""


def add_command(app: typer.Typer, name: str) -> None:
    """Add a command, or the group ``db`` with its commands, to an application."""
    if name == "db":
        group = typer.Typer(rich_markup_mode=None)

        @group.callback(invoke_without_command=True)
        def db(context: typer.Context) -> None:
            """Look after the tuning database."""
            help_without_command(context)

        for inner in COMMANDS:
            if inner.startswith("db "):
                _add(group, inner.removeprefix("db "), COMMANDS[inner])
        app.add_typer(group, name="db")
    else:
        _add(app, name, COMMANDS[name])


def _add(app: typer.Typer, name: str, command: Command) -> None:
    text, described = describe(command.function)
    forms = {**_FORMS, **command.forms}
    flags = {one.name: flags_of(one.name, forms.get(one.name, ""))[-1] for one in described}
    plain = [*described, *command.own, *([_JSON] if command.has_json else [])]
    if command.words is not None:  # they take the place of the arguments
        metavar, _ = command.words
        first = plain[0]
        plain = [
            Described("words", "Sequence[str]", None, True, first.help, first.unsaid),
            *(one for one in plain if not one.is_positional),
        ]
        forms["words"] = metavar
    parameters = []
    for one in plain:
        hidden = bool(command.shown) and one.name not in command.shown
        panel = PANELS.get(one.name) if command.shown else None
        parameters.append(parameter_of(one, forms.get(one.name, ""), flags, hidden=hidden, panel=panel))

    def run(**given: Any) -> None:
        _run(command, described, given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = "\n\n".join(filter(None, [in_options(text, flags), command.remark]))
    app.command(name, epilog=examples(*command.examples))(run)


def _run(command: Command, described: Sequence[Described], given: dict[str, Any]) -> None:
    as_json, csv, parquet = bool(given.pop("as_json", False)), given.pop("csv", None), given.pop("parquet", None)
    if csv == STANDARD_OUTPUT and as_json:
        raise InputError("--csv - and --json both write to standard output; give --csv a file, or leave one out")
    files = [file for file in (csv, parquet, given.get("output")) if file not in (None, STANDARD_OUTPUT)]
    for number, file in enumerate(files if csv or parquet else ()):
        check_output(file, *files[:number])
    is_driven = given.pop("ask_tell", False)
    if command.words is not None:
        given |= command.words[1](given.pop("words") or [])
    if "open_browser" in given:
        given["open_browser"] = not given["open_browser"]
    _read_words(given, is_extent="tries" in given)
    places = [given.pop(one.name, one.default) for one in described if one.is_positional]
    defaults = {one.name: one.default for one in described if one.default != ""}
    arguments = {name: value for name, value in given.items() if value not in (None, defaults.get(name))}
    if "watch" in command.function:
        places = places[0]
    module, _, name = command.function.rpartition(".")
    function = getattr(import_module(f"autotile.{module}"), name)
    if is_driven:
        from autotile.cli.ask_tell import drive

        drive(function, places, arguments)
        return
    with ExitStack() as stack:
        result = function(*places, **arguments, **command.watched(arguments, stack))
    if getattr(result, "path", "") is None:  # of a recording
        measured = plural(result.configurations, "configuration")
        raise CommandInterruptedError(f"interrupted: {measured} measured; the same command goes on from there")
    for text in result.notices if command.has_notices and hasattr(result, "notices") else ():
        notice(text)
    if isinstance(result, str):
        if as_json:
            print_json({"database": result})
        else:
            print_line(result)
    elif csv is not None or parquet is not None:
        _write(result, csv, parquet, as_json=as_json)
    elif result is not None:
        show(result, as_json=as_json)
    code = command.code(result)
    if getattr(result, "interrupted", False):
        code = INTERRUPTED
        if hasattr(result, "planned"):
            kept = f" after {len(result):,} of {result.planned:,}"
        else:
            counted = isinstance(getattr(result, "outcomes", None), Mapping)
            stored = plural(sum(result.outcomes.values()), "trial") if counted else "what was measured is"
            kept = f": {stored} saved in {result.database}"
        again = "begins anew" if arguments.keys() & {"fresh", "captured"} else "goes on from there"
        notice(f"interrupted{kept}; the same command {again}")
    if code:
        raise typer.Exit(code)


def _read_words(given: dict[str, Any], *, is_extent: bool) -> None:
    kernel = given.get("like") or given.get("kernel")
    if isinstance(given.get("sizes"), list):
        given["sizes"] = (read_extents if is_extent else read_sizes)(given["sizes"])
    if given.get("verify_problem"):
        problems = (text.replace(",", " ").split() for text in given["verify_problem"])
        given["verify_problem"] = tuple(map(read_sizes, problems))
    tries = list(map(split_assignments, given.get("tries") or ()))
    config = split_assignments(given["config"]) if given.get("config") is not None else None
    if not (tries or config or given.get("assignments")):
        return
    from autotile.kernel.library import load_kernel
    from autotile.kernel.operation import find_operation

    if given.get("captured") and kernel is None:
        from autotile.kernel.inputs import kernel_of_call, read_captured_call

        kernel = kernel_of_call(read_captured_call(Path(given["captured"])))
    spec = load_kernel(kernel).spec if kernel is not None and find_operation(kernel) is None else None
    if given.get("assignments"):
        words = given["assignments"]
        given["assignments"] = read_values(spec, words) if spec is not None else read_sizes(words)
    if spec is not None and config:
        given["config"] = read_values(spec, config)
    if tries:  # those of an operation are refused by their function
        given["tries"] = tuple(read_values(spec, words) if spec else read_assignments(words) for words in tries)


def _write(result: Any, csv: str | None, parquet: str | None, *, as_json: bool) -> None:
    """Write the columns of a result to files; show it, too, where the file is not all that is wanted."""
    is_survey = hasattr(result, "planned")
    if not is_survey and not hasattr(result, "trials"):
        raise InputError("--csv is of compiled configurations; add --compile")
    columns, row = (result.table(), "configuration") if is_survey else (result.columns(), "trial")
    if parquet is not None:
        write_table_file(parquet, columns, row, as_parquet=True)
    if csv is not None:
        write_table_file(csv, columns, row)
    if as_json or (is_survey and csv != STANDARD_OUTPUT):
        show(result, as_json=as_json)

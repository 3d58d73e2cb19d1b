"""Arguments and options that several commands share, and their completion at the Tab key."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from autotile.errors import AutotileError, InputError

if TYPE_CHECKING:
    from autotile.tuning.options import TuneOptions


def complete_kernel(incomplete: str) -> list[str]:
    """Return the matching names of kernels."""
    from autotile.kernel.library import kernel_names

    return _matching(incomplete, kernel_names)


def complete_device(incomplete: str) -> list[str]:
    """Return the matching names of GPU profiles."""
    from autotile.core.device import profile_names

    return _matching(incomplete, profile_names)


def complete_sampler(incomplete: str) -> list[str]:
    """Return the matching names of samplers."""
    from autotile.search.samplers import sampler_names

    return _matching(incomplete, sampler_names)


def complete_dtype(incomplete: str) -> list[str]:
    """Return the matching names of element types."""
    from autotile.core.dtypes import DTYPES

    return _matching(incomplete, lambda: list(DTYPES))


def complete_outcome(incomplete: str) -> list[str]:
    """Return the matching names of trial outcomes."""
    from autotile.core.model import Outcome

    return _matching(incomplete, lambda: [str(outcome) for outcome in Outcome])


def _matching(incomplete: str, names: Callable[[], list[str]]) -> list[str]:
    """Return the names with a given prefix; none if they cannot be listed."""
    try:
        return [name for name in names() if name.startswith(incomplete)]
    except (AutotileError, OSError):
        return []


_MAX_SEED = 2**63 - 1
"""Largest integer that the database stores."""


def _refuse_empty(database: str | None) -> str | None:
    """Raise if ``--db`` is empty: a shell variable that is not set must not select the user's own database."""
    if database == "":
        raise InputError("--db is empty; expected the path of an SQLite file or a postgresql:// URL")
    return database


def check_seed(seed: int) -> int:
    """Raise if a seed does not fit; in the help, a maximum of 19 digits would leave no space for the texts."""
    if seed > _MAX_SEED:
        raise typer.BadParameter(f"{seed} is not in the range 0<=x<={_MAX_SEED}.")
    return seed


_KERNEL = typer.Argument(
    metavar="KERNEL",
    help="Name of a kernel, or path of a search-space file (path/to/mine.toml).",
    autocompletion=complete_kernel,
    show_default=False,
)
KernelArgument = Annotated[str, _KERNEL]
OptionalKernelArgument = Annotated[str | None, _KERNEL]
SizesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SIZE=N",
        help="Problem sizes and flags, such as M=4096 N=4096 TRANS_A=1.",
        show_default="as in the search-space file",
    ),
]
SelectedSizesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SIZE=N", help="Sizes and flags of the problems, such as M=4096.", show_default="all problems"
    ),
]
LibraryOption = Annotated[
    bool, typer.Option("--library/--no-library", help="Whether a library, such as cuBLAS, may compute an operation.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output; all else goes to standard error.")
]
CsvOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", help="Write every column as CSV; - for standard output.", show_default="no"),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH|URL",
        help="Tuning database: an SQLite file or a postgresql:// URL.",
        show_default="the user's own, see `autotile db path`",
        callback=_refuse_empty,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Element type, one of the kernel's.",
        show_default="the kernel's first",
        autocompletion=complete_dtype,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|INDEX",
        help="GPU to answer for: a profile of `autotile devices`, or the index of a GPU of this machine.",
        show_default="this machine's GPU, else an H200",
        autocompletion=complete_device,
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME|INDEX",
        help="GPU to run on: the name or the index of a GPU of this machine.",
        show_default="the first",
    ),
]
ArchitectureOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arch",
        metavar="SM",
        help="Architecture to compile for, such as sm_90. May be given again.",
        show_default="those of the GPUs it was tuned on",
    ),
]
BundleOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Look into a bundle of `autotile export`.", show_default="the database"),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        metavar="all|INDEX,...",
        help="GPUs that share the work: all of this machine, or those of the given indices.",
        show_default="one, see --device",
    ),
]
SEARCH = "Search"
MEASUREMENT = "Measurement"
"""Panels of options in a command's help."""

L2Option = Annotated[
    Literal["cold", "hot"],
    typer.Option(help="Whether inputs start in memory or in the L2 cache.", rich_help_panel=MEASUREMENT),
]
SeedOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Seed of the search; equal seeds search alike.",
        callback=check_seed,
        rich_help_panel=SEARCH,
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=1024, help="Compile processes, at most two a core.", show_default="one a core"
    ),
]

_REPLAY = "--replay"
_BUILT_IN = "auto"
_RECORDING_SUFFIX = ".npz"
_SPACE_SUFFIX = ".toml"

SchedulerOption = Annotated[
    str,
    typer.Option(
        metavar="tls://HOST:PORT",
        help="Run on the GPUs that `autotile worker` offers to this scheduler; --device names their model.",
        show_default="this machine's GPU",
        rich_help_panel=MEASUREMENT,
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Allow a scheduler of another machine without TLS.", rich_help_panel=MEASUREMENT),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchArguments:
    """Options of the commands that tune, as they are typed; `with_search_options` gives them to a command."""

    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Trials that are to be stored in the end, those of earlier sessions included.",
            show_default="200, or as many as --budget or --until allows",
            rich_help_panel=SEARCH,
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Wall time of the search, such as 90s, 5m or 1h.",
            show_default="none",
            rich_help_panel=SEARCH,
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            metavar="GAIN",
            help="Stop when the next candidates are together expected to gain less than this, such as 1%.",
            show_default="none",
            rich_help_panel=SEARCH,
        ),
    ] = None
    spend: Annotated[
        bool,
        typer.Option(
            "--spend",
            help="Go on to the end of the budget when nothing more is expected from it.",
            rich_help_panel=SEARCH,
        ),
    ] = False
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Search method: feasible, tpe, random, brute-force and others.",
            autocompletion=complete_sampler,
            rich_help_panel=SEARCH,
        ),
    ] = "auto"
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,...]|EXPR",
            help="What to minimise beside time: registers, energy or error; or an expression instead of it, such as "
            "'time_us / STEPS'. May be given again.",
            show_default="time alone",
            rich_help_panel=SEARCH,
        ),
    ] = None
    maximize: Annotated[
        bool,
        typer.Option("--maximize", help="Maximise the expression of --objective.", rich_help_panel=SEARCH),
    ] = False
    seed: SeedOption = 0
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer/--no-transfer",
            help="Learn from the kernel's trials at other sizes and on other GPUs.",
            rich_help_panel=SEARCH,
        ),
    ] = True
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what is stored already.", rich_help_panel=SEARCH)
    ] = False
    l2: L2Option = "cold"
    finals: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Best candidates re-measured interleaved at the end; 0 for none.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = 12
    verify_problem: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N[,...]",
            help="One more problem that every configuration must be right on; sizes left out are the tuned ones. "
            "May be given again.",
            show_default="the tuned problem and a ragged one",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None
    sanitize: Annotated[
        bool,
        typer.Option(
            "--sanitize",
            help="Run the finalists under compute-sanitizer; none with a fault can win.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.npz]",
            help="Replay launches from a recording; without a file, from a built-in one.",
            show_default="only where there is no GPU",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None
    workers: WorkersOption = None
    device: GpuOption = None
    devices: GpusOption = None
    scheduler: SchedulerOption = ""
    insecure: InsecureOption = False
    database: DatabaseOption = None

    def options(self) -> TuneOptions:
        """Return the options of a session.

        Raises
        ------
        InputError
            A value cannot be read, or this machine has no such GPU.
        """
        from autotile.api.keywords import session_options
        from autotile.cli.assignments import read_sizes

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        device, database = given.pop("device"), given.pop("database")
        problems = (read_sizes(text.replace(",", " ").split()) for text in given.pop("verify_problem") or ())
        return session_options(None, device, database, {**given, "verify_problem": tuple(problems)})


_SHOWN = frozenset(
    ("trials", "budget", "until", "sampler", "objective", "l2", "replay", "device", "devices", "database")
)
"""Options of `SearchArguments` in the help of a command; it names the others, and the guide describes them."""


def _hidden(parameter: Parameter) -> Parameter:
    """Return a parameter whose option is not in the help unless it is one of `_SHOWN`."""
    option = copy(parameter.annotation.__metadata__[0])
    option.hidden = parameter.name not in _SHOWN
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, option])


def with_search_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `SearchArguments` in place of its parameter ``search``."""
    shared = [_hidden(one) for one in signature(SearchArguments, eval_str=True).parameters.values()]
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        parameters += shared if parameter.name == "search" else [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        search = SearchArguments(**{parameter.name: given.pop(parameter.name) for parameter in shared})
        command(**given, search=search)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class ReplayCommand(TyperCommand):
    """Command whose ``--replay`` may stand alone: the next word is its value only if it looks like a recording."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give a bare ``--replay`` its value."""
        return super().parse_args(ctx, fill_in_replay(args))


def fill_in_replay(words: list[str]) -> list[str]:
    """Return the words of a command with ``--replay=auto`` in place of a bare ``--replay``."""
    return [
        f"{_REPLAY}={_BUILT_IN}" if word == _REPLAY and not _is_recording(following) else word
        for word, following in pairwise([*words, ""])
    ]


def _is_recording(word: str) -> bool:
    """Return whether a word is the path of a recording; a kernel or a size may follow ``--replay``, too."""
    if word.startswith("-"):
        return False
    return word.endswith(_RECORDING_SUFFIX) or ("/" in word and "=" not in word and not word.endswith(_SPACE_SUFFIX))


_DAYS = re.compile(r"(\d{1,5})d")


def read_moment(text: str) -> datetime:
    """Return the moment a number of days ago (``30d``), or the beginning of a date (``2026-01-31``) in local time.

    Raises
    ------
    InputError
        The text is neither, or the date is in the future.
    """
    days = _DAYS.fullmatch(text.strip().lower())
    if days is not None:
        return datetime.now(UTC) - timedelta(days=int(days[1]))
    try:
        moment = datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise InputError(
            f"an age of {text!r} cannot be read; expected days such as 90d, or a date such as 2026-01-31"
        ) from None
    if moment > datetime.now(UTC):
        raise InputError(f"{text} lies in the future, so everything is older; expected a date that has been")
    return moment

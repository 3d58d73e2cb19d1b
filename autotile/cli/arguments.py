"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from autotile.cli.completion import complete_device, complete_dtype, complete_kernel
from autotile.errors import InputError


def _not_empty(database: str | None) -> str | None:
    """An empty ``--db`` is a variable that the shell did not find, and does not mean the user's own database."""
    if database == "":
        raise InputError("--db is empty; expected the path of an SQLite file or a postgresql:// URL")
    return database


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
        metavar="SIZE=N", help="Problem sizes and flags, such as M=4096 N=4096 TRANS_A=1.", show_default=False
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output; all else goes to standard error.")
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH|URL",
        help="Tuning database: an SQLite file or a postgresql:// URL.",
        show_default="the user's own, see `autotile db path`",
        callback=_not_empty,
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
    typer.Option(metavar="FILE", help="Look into a file of `autotile bundle`.", show_default="the database"),
]

LARGEST_SEED = 2**63 - 1
"""What the database can hold."""

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_DAYS = re.compile(r"(\d{1,5})d")
_SHARE = re.compile(r"(\d*\.?\d+) ?(%?)", re.ASCII)
_UNITS_S = (3600.0, 60.0, 1.0)


def read_duration(text: str) -> float:
    """Seconds of ``90s``, ``5m``, ``1h30m`` or ``90``.

    Raises
    ------
    InputError
        It is none of these, or nothing.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    parts = match.groups() if match is not None else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, _UNITS_S, strict=False) if part is not None)
    if seconds <= 0:
        raise InputError(f"a budget of {text!r} cannot be read; expected a duration such as 90s, 5m or 1h30m")
    return seconds


def read_moment(text: str) -> datetime:
    """So many days ago (``30d``), or the beginning of a date (``2026-01-31``), local time.

    Raises
    ------
    InputError
        It is neither, or lies in the future.
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


def read_share(text: str) -> float:
    """A part of 1, given as ``1%`` or ``0.01``.

    Raises
    ------
    InputError
        It is neither, or not between 0 and 1.
    """
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else 0.0
    if not 0 < share < 1:
        raise InputError(f"a gain of {text!r} cannot be used; expected a percentage such as 1% or 0.01")
    return share

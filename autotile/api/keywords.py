"""Options of a tuning session as keyword arguments, named as on the command line or as in `TuneOptions`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotile.api.targets import merge_sizes, named_operation, resolve_gpu, resolve_gpus, simulated_gpus
from autotile.errors import InputError, ProblemError
from autotile.kernel.library import KernelName, load_kernel
from autotile.kernel.operation import Operation
from autotile.kernel.spec import KernelSpec
from autotile.tuning.options import TuneOptions

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SHARE = re.compile(r"(\d*\.?\d+) ?(%?)", re.ASCII)
_UNITS_S = (3600.0, 60.0, 1.0)
_MAX_NAMED = 3
"""Options that a message suggests in place of an unknown one."""
_BUILT_IN = "auto"


def read_duration(given: str | float) -> float:
    """Return the seconds of a duration: ``90s``, ``5m``, ``1h30m``, or a number of seconds.

    Raises
    ------
    InputError
        It is no duration, or is zero.
    """
    match = _DURATION.fullmatch(_text(given).strip().lower())
    parts = match.groups() if match is not None else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, _UNITS_S, strict=False) if part is not None)
    if seconds <= 0:
        raise InputError(f"a budget of {given!r} cannot be read; expected a duration such as 90s, 5m or 1h30m")
    return seconds


def read_share(given: str | float) -> float:
    """Return a share of 1 that is given as ``1%`` or ``0.01``.

    Raises
    ------
    InputError
        It is neither, or is not between 0 and 1.
    """
    match = _SHARE.fullmatch(_text(given).strip())
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else 0.0
    if not 0 < share < 1:
        raise InputError(f"a gain of {given!r} cannot be used; expected a percentage such as 1% or 0.01")
    return share


def _text(given: object) -> str:
    """Return a number as text without an exponent; text as it is; and text that is no number for anything else."""
    if isinstance(given, str):
        return given
    if isinstance(given, bool) or not isinstance(given, Real):
        return ""
    return f"{float(given):.9f}"


def _budget(given: Any) -> dict[str, Any]:
    return {"budget_s": None if given is None else read_duration(given)}


def _until(given: Any) -> dict[str, Any]:
    return {"until": None if given is None else read_share(given)}


def _objective(given: Any) -> dict[str, Any]:
    names = (given,) if isinstance(given, str) else tuple(given or ())
    return {"objectives": names} if names else {}


def _verify_problem(given: Any) -> dict[str, Any]:
    return {"verify_sizes": (given,) if isinstance(given, Mapping) else tuple(given or ())}


def _replay(given: Any) -> dict[str, Any]:
    if isinstance(given, bool):
        return {"replay": _BUILT_IN if given else None}
    return {"replay": given if given in (None, _BUILT_IN) else Path(given)}


_READERS: Mapping[str, Callable[[Any], dict[str, Any]]] = MappingProxyType(
    {
        "budget": _budget,
        "until": _until,
        "objective": _objective,
        "verify_problem": _verify_problem,
        "replay": _replay,
        "db": lambda given: {"database": given},
    }
)
"""Options that are written in another form than the fields of `TuneOptions`."""

_FIELDS = {field.name: field for field in fields(TuneOptions) if field.name != "served"}
OPTION_NAMES = (*dict.fromkeys([*_FIELDS, *_READERS]),)
"""Names of options that functions take as keyword arguments."""


def session_options(
    options: TuneOptions | None = None,
    device: int | str | Sequence[int | str] | None = None,
    database: str | Path | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> TuneOptions:
    """Return options with those that are given by name in place of theirs.

    Parameters
    ----------
    options
        Options of a session; None for the defaults.
    device
        CUDA index or name of a GPU, ``"all"``, or several; with a scheduler, the model of its GPUs. None for that of
        ``options``.
    database
        Path or URL; None for that of ``options``.
    given
        Options by name, of `OPTION_NAMES`. A budget may be a duration such as ``"5m"``, a gain a percentage.

    Raises
    ------
    InputError
        A value cannot be read, an option is given twice, or this machine has no such GPU.
    """
    options = options or TuneOptions()
    changes: dict[str, Any] = {}
    sources = {**given, **({} if database is None else {"database": database})}
    for name, value in sources.items():
        if name == "devices":
            continue
        for field, read in _READERS.get(name, lambda one, field=name: {field: one})(value).items():
            if field in changes:
                raise InputError(f"{field} is given twice, by {name} and by another name; give it once")
            changes[field] = _checked(field, read)
    options = replace(options, **changes)
    return replace(options, **_gpus(options, device, given.get("devices")))


def _checked(field: str, value: Any) -> Any:
    """Check the types that `TuneOptions` leaves unchecked."""
    if isinstance(_FIELDS[field].default, bool) and not isinstance(value, bool):
        raise InputError(f"{field} is {value!r}, expected True or False")
    if field in ("sampler", "scheduler", "gpu_model") and not isinstance(value, str):
        raise InputError(f"{field} is {value!r}, expected a text")
    return str(value) if field == "database" and value is not None else value


def _gpus(options: TuneOptions, device: int | str | Sequence[int | str] | None, devices: Any) -> dict[str, Any]:
    """Return the fields that select GPUs.

    Raises
    ------
    InputError
        This machine has no such GPU, or one GPU and several are named.
    """
    if options.scheduler and (device is not None or devices is not None):
        if devices is not None or not isinstance(device, str) or device.isdecimal():
            raise InputError("--scheduler uses all GPUs of a model; to choose a model, name it: --device H200")
        return {"gpu_model": device}
    if device is not None and devices is not None:
        raise InputError("--device names one GPU and --devices several; give one of them")
    if device == "all" or (isinstance(device, Sequence) and not isinstance(device, str)):
        device, devices = None, device
    if devices is None:
        return {} if device is None else {"device_index": resolve_gpu(device), "devices": ()}
    if options.replay is not None:
        text = devices if isinstance(devices, str) else ",".join(map(str, devices))
        return {"device_index": 0, "devices": simulated_gpus(text)}
    found = resolve_gpus(devices)
    return {"device_index": found[0], "devices": found}


def read_keywords(
    kernel: KernelName | None,
    sizes: Mapping[str, Any] | None,
    named: Mapping[str, Any],
    options: TuneOptions | None,
    **place: Any,
) -> tuple[dict[str, Any], TuneOptions]:
    """Return the sizes and the options that the arguments of a function give.

    Parameters
    ----------
    kernel
        Kernel or operation that is tuned; None for one that is not known yet, which has no sizes.
    sizes
        Sizes as a mapping, in which nothing is taken for an option.
    named
        Keyword arguments: sizes, and options by their names.
    options, **place
        As for `session_options`, with ``device`` and ``database`` by name.

    Raises
    ------
    InputError
        There is no such kernel, a name is neither a size nor an option, or a value cannot be read.
    """
    declared: KernelSpec | Operation | None = None
    if kernel is not None:
        operation = named_operation(kernel)
        declared = operation if operation is not None else load_kernel(kernel).spec
    own, given = split_keywords(declared.name if declared else "", declared.sizes if declared else (), named)
    return merge_sizes(sizes, own), session_options(options, given=given, **place)


def split_keywords(
    name: str, sizes: Collection[str], named: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the sizes from the options among keyword arguments.

    Parameters
    ----------
    name
        Name of the kernel or operation, for the message.
    sizes
        Its sizes and flags; each of them is a size even if an option has the same name.
    named
        Keyword arguments.

    Returns
    -------
    sizes, options
        Those of each kind.

    Raises
    ------
    ProblemError
        A name is of neither kind; the message states the sizes, and the options of similar names.
    """
    own = {word: value for word, value in named.items() if word in sizes}
    options = {word: value for word, value in named.items() if word in OPTION_NAMES and word not in sizes}
    for word in named:
        if word not in own and word not in options:
            raise ProblemError(_unknown(name, word, sizes))
    return own, options


def _unknown(name: str, word: str, sizes: Collection[str]) -> str:
    lowered = {other.lower(): other for other in (*OPTION_NAMES, *sizes)}
    close = [lowered[one] for one in difflib.get_close_matches(word.lower()[:100], lowered, n=_MAX_NAMED, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    options = [one for one in close if one not in sizes] or ["trials", "budget", "sampler"]
    stated = f"sizes and flags: {', '.join(sizes)}; options: {', '.join(options)} ..." if sizes else ""
    shown = stated or f"options: {', '.join(options)} ..."
    lacks = f"{name} has no size {word!r}, and no option is named so" if sizes else f"no option is named {word!r}"
    return f"{lacks}{hint} ({shown})"

"""Kernel, problem, device, configuration and options that the arguments of public functions denote; their sessions."""

from __future__ import annotations

import difflib
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotile.core.argument_types import check_value
from autotile.core.device import DeviceProperties, device_profile, is_name_of
from autotile.core.documents import encode_json
from autotile.core.model import OBJECTIVES, TIME, Config, Problem, Value, split_objectives
from autotile.core.text import sizes_text
from autotile.cuda.driver import device_count, live_device
from autotile.errors import ConfigError, InputError, ProblemError, nearest
from autotile.kernel.library import Kernel, KernelName, held_kernel, load_kernel
from autotile.kernel.operation import Operation, named_operation
from autotile.kernel.problem import resolve_problem
from autotile.kernel.spec import MEASURED, KernelSpec, Parameter
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions, option_types

if TYPE_CHECKING:
    from autotile.tuning.lanes import Lane
    from autotile.tuning.operation_session import OperationResult
    from autotile.tuning.progress_state import Observer
    from autotile.tuning.result import TuneResult

_FALLBACK_PROFILE = "h200"
_MAX_INDEX_DIGITS = 9
_MAX_SIMULATED = 1024
_MAX_VALUE = 10**7
"""Bound on the magnitude of a parameter's value, so that products of a few of them fit in 64 bits."""
_PROPOSED = 12
"""Configurations of all kernels of an operation that a model proposes."""


def open_problem(kernel: KernelName, sizes: Mapping[str, int], dtype: str | None = None) -> tuple[Kernel, Problem]:
    """Load a kernel and validate a problem for it, with missing sizes from the search-space file.

    It is an `InputError` if the kernel is unknown, its file is malformed, or it does not have a size or dtype.
    """
    loaded = load_kernel(kernel)
    return loaded, resolve_problem(loaded.spec, sizes, dtype, defaults=True)


def sizes_notice(described: KernelSpec | Operation, sizes: Mapping[str, int], given: Collection[str]) -> str:
    """Return one line about those of all sizes that come from the file, as the user did not give them; empty if none.

    Flags and other sizes that may always be left out are not stated.
    """
    assumed = {name: size for name, size in sizes.items() if name not in given and not described.is_optional(name)}
    file = "operation" if isinstance(described, Operation) else "search-space"
    return f"not given, so as in the {file} file: {sizes_text(assumed)}" if assumed else ""


def resolve_device(device: int | str | None = None) -> tuple[DeviceProperties, str]:
    """Return the properties of a device that is only inspected, and a line for the user if a profile was assumed.

    It is given by the CUDA index of a GPU of this machine, as an integer or in decimal digits; the name of a GPU
    profile, such as ``"h200"``; or the name of a GPU of this machine for which there is no profile. None selects the
    first GPU of this machine and, without a GPU, the profile of an H200.
    """
    served = resolve_served_device(device)
    if served is None and device_count() == 0:
        profile = device_profile(_FALLBACK_PROFILE)
        return profile, f"no CUDA device here: the answer is for the {profile.name}; --device names another"
    return device_profile(served) if isinstance(served, str) else live_device(served or 0), ""


def resolve_served_device(device: int | str | None) -> int | str | None:
    """Return the index of a device that is a GPU of this machine, or a name that dispatch looks up."""
    if device is None:
        return None
    if (index := _parse_index(device)) is not None:
        check_device_index(index)
        return index
    try:
        device_profile(str(device))
    except InputError:
        if str(device).isdecimal():
            raise
        index = _find_gpu(str(device))
    return index if index is not None else str(device)  # may name a GPU of stored results


def resolve_gpu(device: int | str | None) -> int:
    """Return the CUDA index of the GPU of this machine that has an index or a name; the first of several, and of None.

    It is an `InputError` if there is no such GPU.
    """
    index = 0 if device is None else _parse_index(device)
    if index is None:
        index = _find_gpu(str(device))
        if index is None:
            present = ", ".join(f"{number} is {gpu.name}" for number, gpu in enumerate(local_gpus())) or "there is none"
            raise InputError(f"no CUDA device of this machine is named {device!r}: {present}; see `autotile devices`")
    check_device_index(index)
    return index


def resolve_gpus(devices: str | Sequence[int | str]) -> tuple[int, ...]:
    """Return the CUDA indices of GPUs that share a session: ``"all"``, ``"0,2,3"``, or a sequence of indices and names.

    It is an `InputError` if this machine has no such GPU, or none at all, or one is named twice.
    """
    given = [part.strip() for part in devices.split(",")] if isinstance(devices, str) else list(devices)
    if given == ["all"]:
        if not (count := device_count()):
            raise InputError("this machine has no CUDA device; see `autotile devices`")
        return tuple(range(count))
    if not given or "" in given:
        raise InputError(f"the GPUs {devices!r} cannot be read; expected `all`, or indices such as 0,2,3")
    found = [resolve_gpu(one) for one in given]
    if len(set(found)) < len(found):
        raise InputError(f"{', '.join(map(str, given))} names a GPU twice; name each once")
    return tuple(found)


def simulated_gpus(devices: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs that a replay simulates, given as ``0,1,2``; an `InputError` if they are not."""
    parts = [part.strip() for part in devices.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MAX_INDEX_DIGITS for part in parts):
        raise InputError(
            f"the GPUs {devices!r} cannot be simulated; expected numbers such as 0,1,2, as launches are replayed"
        )
    if len(set(parts)) < len(parts) or len(parts) > _MAX_SIMULATED:
        raise InputError(f"{devices!r} names a GPU twice, or more than {_MAX_SIMULATED}; name each once")
    return tuple(map(int, parts))


def models_of(devices: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the GPUs in groups of one model, which share studies; the first of each in the given order."""
    groups: dict[DeviceProperties, list[int]] = {}
    for index in devices:
        groups.setdefault(live_device(index), []).append(index)
    return [tuple(group) for group in groups.values()]


def check_device_index(index: int) -> None:
    """Raise an `InputError` with the valid indices if this machine has no GPU of an index."""
    count = device_count()
    if not 0 <= index < count:
        valid = "there is none" if count == 0 else "there is only 0" if count == 1 else f"there are 0 to {count - 1}"
        raise InputError(f"no CUDA device {index} on this machine: {valid}; see `autotile devices`")


def local_gpus() -> tuple[DeviceProperties, ...]:
    """Return the GPUs of this machine, in the order of their CUDA indices."""
    return tuple(live_device(index) for index in range(device_count()))


def _parse_index(device: int | str) -> int | None:
    if isinstance(device, str):
        is_index = device.isascii() and device.isdecimal() and len(device) <= _MAX_INDEX_DIGITS
        return int(device) if is_index else None
    try:
        return operator.index(device)
    except TypeError:
        raise InputError(
            f"the device is {device!r}, expected a CUDA index such as 0 or a name such as 'h200'"
        ) from None


def _find_gpu(name: str) -> int | None:
    return next((index for index, gpu in enumerate(local_gpus()) if is_name_of(name, gpu)), None)


def check_gpu(options: TuneOptions) -> None:
    """Raise if a selected GPU does not exist. The first one is not checked: without a GPU, launches are replayed."""
    if options.scheduler or options.replay is not None:
        return
    for index in (options.device_index, *options.devices):
        if index > 0:
            check_device_index(index)
    if len(options.devices) > 1 and len(models := models_of(options.devices)) > 1:
        raise InputError(
            f"the GPUs are of {len(models)} models, whose times are studies of their own; name those of one, such as "
            f"{','.join(map(str, models[0]))}, or use a plan, which tunes for each"
        )


def merge_sizes(mapping: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sizes given as a mapping with sizes given as keyword arguments.

    Raise `InputError` if a size is given in both, or the mapping is none.
    """
    if not isinstance(mapping, Mapping | None):
        raise InputError(f"the sizes are {mapping!r:.60}, expected a mapping by name, as in {{'M': 4096}}")
    merged = dict(mapping or {})
    if twice := merged.keys() & named.keys():
        raise InputError(f"{min(twice)} is given twice, in the mapping and by keyword; give it once")
    return merged | dict(named)


def complete_config(spec: KernelSpec, given: Mapping[str, Any]) -> Config:
    """Return a configuration with the parameters that are given, and the others from the default.

    It is a `ConfigError` if a name is not a parameter, or a value has another type than the parameter.
    """
    for name in given:
        if name not in spec.default:
            raise ConfigError(
                f"{name!r} is not a parameter of {spec.name}{nearest(name, spec.default)} (parameters: "
                f"{', '.join(spec.default)})"
            )
    return split_assignments(spec, given)[0]


def split_assignments(spec: KernelSpec, assignments: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, int]]:
    """Separate parameters from sizes, and complete the configuration from the default one.

    It is a `ConfigError` if a name is neither of them, or a value has another type than the parameter.
    """
    parameters = {parameter.name: parameter for parameter in spec.parameters}
    config: dict[str, Value] = {name: spec.default[name] for name in parameters}
    sizes: dict[str, int] = {}
    for name, value in assignments.items():
        if name in parameters:
            config[name] = _typed_value(parameters[name], value)
        elif name in spec.sizes:
            sizes[name] = value
        else:
            known = (*parameters, *spec.sizes)
            raise ConfigError(
                f"{spec.name} has neither a parameter nor a size {name!r}{nearest(name, known)} (parameters: "
                f"{', '.join(parameters)}; sizes and flags: {', '.join(spec.sizes)})"
            )
    return config, sizes


def _typed_value(parameter: Parameter, value: Any) -> Value:
    """Return a value in the type of the parameter's own values, which all have the same type."""
    own = parameter.values[0]
    if isinstance(own, str):
        if isinstance(value, str):
            return value
    elif isinstance(own, bool):
        if not isinstance(value, str) and value in (False, True):
            return bool(value)
    elif isinstance(own, float):
        if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
            return float(value)
    elif (
        not isinstance(value, bool)
        and isinstance(value, Integral)
        and (abs(int(value)) < _MAX_VALUE or value in parameter.values)
    ):
        return int(value)
    raise ConfigError(f"{parameter.name} = {value!r} is not among its values {', '.join(map(str, parameter.values))}")


def served_so_far(kernel: Kernel, problem: Problem, options: TuneOptions) -> Config | None:
    """Return the configuration that is served for a problem before it is tuned, unless it is the default.

    It is left out in replay, with a scheduler, and if the options exclude earlier results or name the configurations to
    try.
    """
    excluded = options.fresh or not options.transfer or options.only is not None or bool(options.scheduler)
    if excluded or options.replay is not None or device_count() == 0:
        return None
    from autotile.serving.dispatcher import find_best_result  # not in replay

    location = options.database or read_settings().database
    try:
        served = find_best_result(kernel, problem.dtype, options.device_index, location, problem.sizes)
    except InputError:  # the session reports it
        return None
    return dict(served.config) if served.tier != "default" else None


@contextmanager
def forgetting_served() -> Iterator[None]:
    """Let look-ups after the block read the database again, if this process has looked a kernel up."""
    try:
        yield
    finally:
        if (dispatcher := sys.modules.get("autotile.serving.dispatcher")) is not None:
            dispatcher.forget_served()


def tune_loaded_operation(
    operation: Operation,
    problem: Problem,
    options: TuneOptions,
    observe: Observer = lambda _: None,
    lane: Lane | None = None,
) -> OperationResult:
    """Tune the kernels of an operation that is already loaded; the lane and errors as for `tune_problem`."""
    from autotile.serving.operations import computes, libraries_for
    from autotile.serving.selection import model_of
    from autotile.tuning import operation_session

    objectives, expression = split_objectives(options.objectives, ())
    options = replace(options, objectives=objectives, objective=expression)
    check_gpu(options)
    is_here = not options.scheduler
    libraries = [  # on other machines, those that the operation's file names
        library
        for library in libraries_for(operation, is_present=is_here)
        if computes(library, operation, problem) and (is_here or library.call is None)
    ]

    def proposed(
        specs: Mapping[str, KernelSpec], sizes: Mapping[str, Mapping[str, int]], device: DeviceProperties
    ) -> list[tuple[str, Config]]:
        location = options.database or str(read_settings().database)
        if (model := model_of(location, operation.name, problem.dtype, device)) is None:
            return []
        found = model.choose(operation.without_conditions(problem), sizes, specs, device, count=_PROPOSED)
        return [(one.candidate.kernel, dict(one.candidate.config)) for one in found if not one.candidate.is_library]

    return operation_session.tune_operation(
        operation,
        problem,
        read_settings(),
        options,
        libraries=libraries,
        served=lambda kernel, own: served_so_far(kernel, own, options),
        proposed=proposed,
        observe=observe,
        lane=lane,
    )


def tune_problem(
    kernel: Kernel, problem: Problem, options: TuneOptions, observe: Observer = lambda _: None, lane: Lane | None = None
) -> TuneResult:
    """Tune a problem of a kernel that is already loaded; errors as for `tune`.

    The lane is what it shares with other sessions, as for `autotile.tuning.session.tune`.
    """
    from autotile.tuning import session as sessions  # which look-ups and inspections do without

    options = checked_options(kernel, problem, options)
    return sessions.tune(kernel, problem, read_settings(), options, observe, lane=lane)


def checked_options(kernel: Kernel, problem: Problem, options: TuneOptions) -> TuneOptions:
    """Return the options of a session for a problem, checked and completed.

    It is an `InputError` if an option does not fit the kernel, or there is no such GPU.
    """
    expressions = [*kernel.spec.metrics, *(name for name in MEASURED if name not in OBJECTIVES)]
    objectives, expression = split_objectives(options.objectives, expressions)
    if kernel.spec.objective is None and options.objective == OBJECTIVES[TIME]:
        options = replace(options, objective=None)
    if options.maximize and expression is None and options.objective in (None, OBJECTIVES[TIME]):
        raise InputError("only an expression is maximised; give one, as in --objective '1e3 * N / time_us'")
    if not all(options.verify_sizes):
        raise InputError("a further problem to verify names no size, expected SIZE=N[,...] such as M=1,N=1")
    options = replace(
        options,
        objectives=objectives,
        objective=expression or options.objective,
        verify_sizes=tuple(
            resolve_problem(kernel.spec, {**problem.sizes, **sizes}, problem.dtype).sizes
            for sizes in options.verify_sizes
        ),
        tries=tuple(complete_config(kernel.spec, config) for config in options.tries),
    )
    check_gpu(options)
    if options.served is None:
        options = replace(options, served=served_so_far(kernel, problem, options))
    return options


def serving_call(kernel: KernelName, problem: Problem, *, dtype: str | None, database: str | None) -> str:
    """Return the line of Python that serves a tuned problem; empty for a kernel that is no file.

    Kernel, dtype and database are as the user gave them; None is left out, and the password of a URL is ``***``.
    """
    if held_kernel(kernel):
        return ""
    if database is not None:
        from autotile.database.engine import parse_location  # which inspections do without

        database = str(parse_location(database))
    sizes = [f"{name}={value}" for name, value in problem.sizes.items()]
    choices = [f"{name}={encode_json(value)}" for name, value in (("dtype", dtype), ("database", database)) if value]
    return f"kernel = autotile.get_best_kernel({', '.join([encode_json(str(kernel)), *sizes, *choices])})"


_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SHARE = re.compile(r"(\d*\.?\d+) ?(%?)", re.ASCII)
_UNITS_S = (3600.0, 60.0, 1.0)
_MAX_NAMED = 3
"""Options that a message suggests in place of an unknown one."""
_BUILT_IN = "auto"


def read_duration(given: str | float) -> float:
    """Return the seconds of a duration: ``90s``, ``5m``, ``1h30m``, or a number of seconds.

    It is an `InputError` if it is no duration, or zero.
    """
    match = _DURATION.fullmatch(_number_text(given).strip().lower())
    parts = match.groups() if match is not None else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, _UNITS_S, strict=False) if part is not None)
    if not 0 < seconds < math.inf:
        raise InputError(f"a budget of {given!r:.80} cannot be read; expected a duration such as 90s, 5m or 1h30m")
    return seconds


def read_share(given: str | float, what: str = "gain") -> float:
    """Return a share of 1 that is given as ``1%`` or ``0.01``; ``what`` it is of, for the message.

    It is an `InputError` if it is neither, or not between 0 and 1.
    """
    match = _SHARE.fullmatch(_number_text(given).strip())
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else 0.0
    if not 0 < share < 1:
        raise InputError(f"a {what} of {given!r:.80} cannot be used; expected a percentage such as 1% or 0.01")
    return share


def _number_text(given: object) -> str:
    """Return a number as text without an exponent; text as it is; and text that is no number for anything else."""
    if isinstance(given, str):
        return given
    if not isinstance(given, bool) and isinstance(given, Real):
        with suppress(OverflowError):
            return f"{float(given):.9f}"
    return ""


def _replay(given: Any) -> Any:
    if isinstance(given, bool):
        return _BUILT_IN if given else None
    return given if given in (None, _BUILT_IN) or not isinstance(given, str) else Path(given)


def _one_or_several(given: Any, one: type) -> tuple[Any, ...]:
    return (given,) if isinstance(given, one) else tuple(given) if isinstance(given, Iterable) else given or ()


_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "budget": ("budget_s", lambda given: None if given is None else read_duration(given)),
        "until": ("until", lambda given: None if given is None else read_share(given)),
        "precision": ("precision", lambda given: read_share(given, "precision")),
        "objective": ("objectives", lambda given: _one_or_several(given, str)),
        "verify_problem": ("verify_sizes", lambda given: _one_or_several(given, Mapping)),
        "replay": ("replay", _replay),
        "db": ("database", lambda given: str(given) if isinstance(given, Path) else given),
    }
)
"""Options that are written in another form than the fields of `TuneOptions`: the field, and the reader of a value."""

OPTION_NAMES = (*dict.fromkeys([*(field.name for field in fields(TuneOptions) if field.name != "served"), *_READERS]),)
"""Names of options that functions take as keyword arguments."""


def session_options(
    options: TuneOptions | None = None,
    device: int | str | Sequence[int | str] | None = None,
    database: str | Path | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> TuneOptions:
    """Return options with those that are given by name, of `OPTION_NAMES`, in place of theirs.

    A budget may be a duration such as ``"5m"``, a gain a percentage. The device is the CUDA index or the name of a GPU,
    ``"all"``, or several; with a scheduler, the model of its GPUs. The database is a path or URL. None leaves them as
    they are. It is an `InputError` if a value cannot be read, an option is given twice, or there is no such GPU.
    """
    options = options or TuneOptions()
    changes: dict[str, Any] = {}
    for name, written in {**given, **({} if database is None else {"database": database})}.items():
        field, read = _READERS.get(name, (name, lambda value: value))
        value = read(written)
        if name == "devices" or (name == "objective" and not value):
            continue
        if name == "scheduler" and value == "":  # which stands for none
            raise InputError("--scheduler is empty; expected an address such as tls://node1:8786")
        if field in changes:
            raise InputError(f"{field} is given twice, by {name} and by another name; give it once")
        if field != name:  # else `TuneOptions` names it as it was written
            check_value(name, value, option_types()[field])
        changes[field] = value
    options, devices = replace(options, **changes), given.get("devices")
    if "objectives" in changes and TIME in ",".join(options.objectives).replace(" ", "").split(","):
        options = replace(options, objective=OBJECTIVES[TIME])  # in place of that of the search-space file
    if options.insecure and not options.scheduler:
        raise InputError("--insecure is of the connection to a scheduler; add --scheduler ADDRESS")
    if not options.finals and (options.sanitize or "precision" in given):
        raise InputError("--precision and --sanitize are of the finals, of which --finals 0 holds none; leave one out")
    if options.spend and options.until is not None:
        raise InputError("--spend goes on when little is expected, and --until stops then; give one of them")
    if options.scheduler and (device is not None or devices is not None):
        if devices is not None or not isinstance(device, str) or device.isdecimal():
            raise InputError("--scheduler uses all GPUs of a model; to choose a model, name it: --device H200")
        return replace(options, gpu_model=device)
    if device is not None and devices is not None:
        raise InputError("--device names one GPU and --devices several; give one of them")
    if device == "all" or (isinstance(device, Sequence) and not isinstance(device, str)):
        device, devices = None, device
    if device is not None and options.replay is not None:
        raise InputError("--device names a GPU to run on, and launches are replayed; leave --device or --replay out")
    if devices is None:
        return options if device is None else replace(options, device_index=resolve_gpu(device), devices=())
    if options.replay is not None:
        text = devices if isinstance(devices, str) else ",".join(map(str, devices))
        return replace(options, device_index=0, devices=simulated_gpus(text))
    found = resolve_gpus(devices)
    return replace(options, device_index=found[0], devices=found)


def read_keywords(
    kernel: KernelName | None,
    sizes: Mapping[str, Any] | None,
    named: Mapping[str, Any],
    options: TuneOptions | None,
    **place: Any,
) -> tuple[dict[str, Any], TuneOptions]:
    """Return the sizes and the options that the arguments of a function give.

    A kernel or operation that is None, not known yet, has no sizes. Nothing in the mapping of sizes is taken for an
    option; of the ``named`` arguments, a size that has the name of an option is the size. Options and ``place``, of
    ``device`` and ``database``, are those of `session_options`, as are errors; and it is an `InputError` if there is no
    such kernel, or a name is neither a size nor an option.
    """
    name, known = "", dict[str, int]()
    if kernel is not None:
        described = named_operation(kernel) or load_kernel(kernel).spec
        name, known = described.name, dict(described.sizes)
    for word in named:
        if word not in known and word not in OPTION_NAMES:
            lowered = {other.lower(): other for other in (*OPTION_NAMES, *known)}
            alike = difflib.get_close_matches(word.lower()[:100], lowered, n=_MAX_NAMED, cutoff=0.5)
            close = [lowered[one] for one in alike]
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            others = [one for one in close if one not in known] or ["trials", "budget", "sampler"]
            stated = f"sizes and flags: {', '.join(known)}; " if known else ""
            lacks = (
                f"{name} has no size {word!r}, and no option is named so" if known else f"no option is named {word!r}"
            )
            raise ProblemError(f"{lacks}{hint} ({stated}options: {', '.join(others)} ...)")
    own = {word: value for word, value in named.items() if word in known}
    given = {word: value for word, value in named.items() if word not in known}
    return merge_sizes(sizes, own), session_options(options, given=given, **place)

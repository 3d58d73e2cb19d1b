"""Gather what a kernel needs away from here: its winners, and cubins of them for chosen architectures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotile.core.device import device_profile
from autotile.core.model import Config, config_key, config_text
from autotile.core.text import sizes_text
from autotile.cuda.compiler import CachedCubin, CompileJob, compile_job, known_architectures
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.family_store import FamilyStore
from autotile.database.keys import TuningKey, space_hash
from autotile.database.opening import open_for_reading
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.exchange.shipped import shipped_rules, shipped_winners
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.problem import ARCHITECTURE, capability_of, resolve_problem, unsupported_reason
from autotile.settings import available_cores, read_settings
from autotile.workers.compile_pool import CompilePool

_DEADLINE_S = 120.0
_ANY_PROFILE = "h200"
"""Stands in for a device of which only the architecture is known."""


class Wanted(NamedTuple):
    """A kernel to ship, and the problem of it that is meant; None for all that are tuned."""

    kernel: str
    sizes: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class ShippedCubin:
    """A configuration of a winner, or the default, compiled."""

    target: str
    dtype: str
    flags: Mapping[str, int]
    config: Config
    cubin: CachedCubin


@dataclass(frozen=True, slots=True)
class Shipment:
    """A kernel with what it is shipped with.

    Attributes
    ----------
    notices
        What was left out and why, a line each.
    """

    kernel: Kernel
    nvrtc_version: str
    winners: tuple[Winner, ...]
    rules: tuple[StoredRule, ...]
    cubins: tuple[ShippedCubin, ...]
    notices: tuple[str, ...]


class _Tuned(NamedTuple):
    """What is tuned of a kernel."""

    winners: list[Winner]
    rules: list[StoredRule]


class _Task(NamedTuple):
    target: str
    dtype: str
    flags: tuple[tuple[str, int], ...]
    config: Config


def gather(
    wanted: Sequence[Wanted],
    architectures: Sequence[str],
    *,
    dtype: str | None = None,
    database: str | None = None,
) -> list[Shipment]:
    """Winners and cubins of kernels, one shipment a kernel.

    Parameters
    ----------
    wanted
        What to ship; a kernel may come with several problems.
    architectures
        Such as ``sm_90``; none for those of the GPUs that the kernel is tuned on.
    dtype
        Only winners of this element type; None for all.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        A kernel, size or architecture is unknown, a problem is not tuned, or nothing can be compiled for what is asked.
    ToolchainError
        NVRTC is missing.
    """
    _check_architectures(architectures)
    settings = read_settings()
    kernels = {name: load_kernel(name) for name in dict.fromkeys(one.kernel for one in wanted)}
    pool = CompilePool(settings.cache, settings.cache_limit_bytes, available_cores(), _DEADLINE_S)
    try:
        shipments = []
        for name, kernel in kernels.items():
            problems = [one.sizes for one in wanted if one.kernel == name]
            tuned = _asked_for(kernel, problems, _current(kernel, database, dtype))
            shipments.append(_gather(kernel, tuned, architectures, dtype, pool))
        return shipments
    finally:
        pool.close()


def _check_architectures(architectures: Sequence[str]) -> None:
    """Refuse what NVRTC compiles nothing for."""
    for architecture in architectures:
        if re.fullmatch(ARCHITECTURE, architecture) is None:
            raise InputError(f"{architecture!r} is no architecture; expected one such as sm_90")
        if architecture.removesuffix("a") not in (known := known_architectures()):
            raise InputError(
                f"NVRTC {nvrtc_version()} does not know the architecture {architecture!r}; it compiles for "
                f"{', '.join(known)}"
            )


def _gather(
    kernel: Kernel,
    tuned: _Tuned,
    architectures: Sequence[str],
    dtype: str | None,
    pool: CompilePool,
) -> Shipment:
    if not tuned.winners and not architectures:
        raise InputError(
            f"nothing is tuned of {kernel.name}, so there is no GPU to make cubins for; run `autotile tune`, or name "
            "the architectures with --arch to ship the default configuration"
        )
    targets, notices = _targets(kernel, tuned.winners, architectures)
    tasks = _tasks(kernel, tuned, targets, dtype)
    started = [(task, pool.submit(lambda task=task: _job(kernel, task))) for task in tasks]  # type: ignore[misc]
    cubins: list[ShippedCubin] = []
    for task, future in started:
        compiled = future.result()
        if compiled.cubin is None:
            notices.append(f"{kernel.name} {config_text(task.config)} is left out for {task.target}: {compiled.reason}")
        else:
            cubins.append(ShippedCubin(task.target, task.dtype, dict(task.flags), task.config, compiled.cubin))
    if not cubins:
        raise InputError(f"nothing of {kernel.name} can be shipped: {'; '.join(notices)}")
    return Shipment(kernel, nvrtc_version(), tuple(tuned.winners), tuple(tuned.rules), tuple(cubins), tuple(notices))


def _current(kernel: Kernel, database: str | None, dtype: str | None) -> _Tuned:
    """What is tuned of this very version of the kernel: the user's own results, then those that came with autotile."""
    if dtype is not None and dtype not in kernel.spec.dtypes:
        raise InputError(f"{kernel.name} is not written for dtype {dtype!r}; it takes {', '.join(kernel.spec.dtypes)}")
    opened = open_for_reading(database)
    own: list[Winner] = []
    rules: list[StoredRule] = []
    if opened is not None:
        with opened:
            own = [best.winner for best in opened.best(kernel.name, dtype=dtype)]
            rules = FamilyStore(opened).rules(kernel.name, dtype)
    dtypes = [dtype] if dtype is not None else kernel.spec.dtypes
    came_along = [winner for name in dtypes for winner in shipped_winners(kernel.name, name)]
    rules += [rule for name in dtypes for rule in shipped_rules(kernel.name, name)]
    digests = {winner.key.digest for winner in own}
    every = own + [winner for winner in came_along if winner.key.digest not in digests]
    version = (kernel.source_hash, space_hash(kernel.spec), tuple(kernel.spec.options))

    def is_current(key: TuningKey) -> bool:
        return (key.template_hash, key.space_hash, key.options) == version

    return _Tuned([w for w in every if is_current(w.key)], [rule for rule in rules if is_current(rule.key)])


def _asked_for(kernel: Kernel, problems: Sequence[Mapping[str, int] | None], tuned: _Tuned) -> _Tuned:
    """All of it, or what is tuned for the given problems alone."""
    if None in problems:
        return tuned
    winners = tuned.winners
    sizes = [resolve_problem(kernel.spec, given or {}).sizes for given in problems]
    for one in sizes:
        if not any(dict(winner.key.sizes) == dict(one) for winner in winners):
            tuned_for = "; ".join(dict.fromkeys(sizes_text(winner.key.sizes) for winner in winners))
            known = f"tuned is {tuned_for}" if tuned_for else f"nothing is tuned of {kernel.name}"
            raise InputError(f"{kernel.name} {sizes_text(one)} is not tuned; {known}. Run `autotile tune`")
    return _Tuned([winner for winner in winners if dict(winner.key.sizes) in [dict(one) for one in sizes]], [])


def _targets(kernel: Kernel, winners: Iterable[Winner], architectures: Sequence[str]) -> tuple[list[str], list[str]]:
    """What to compile for, and what is left out."""
    tuned_on = (winner.device.architecture for winner in winners if winner.device is not None)
    targets, notices = [], []
    for architecture in dict.fromkeys(architectures or tuned_on):
        stand_in = replace(
            device_profile(_ANY_PROFILE), name=architecture, compute_capability=capability_of(architecture)
        )
        fault = unsupported_reason(kernel.spec, stand_in)
        if fault:
            notices.append(f"{architecture} is left out: {fault}")
        else:
            targets.append(kernel.spec.architecture or architecture)
    return list(dict.fromkeys(targets)), notices


def _tasks(kernel: Kernel, tuned: _Tuned, targets: Sequence[str], dtype: str | None) -> Iterator[_Task]:
    """Each configuration with the dtype and flags that it was tuned for, and the default with each of these."""
    spec = kernel.spec
    seen: set[tuple[str, str, tuple[tuple[str, int], ...], str]] = set()

    def flags_of(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((name, sizes[name]) for name in spec.flags)

    own = [(w.key.dtype, flags_of(w.key.sizes), w.config) for w in tuned.winners]
    for stored in tuned.rules:
        seen_flags = dict.fromkeys(flags_of(point.sizes) for point in stored.rule.points)
        own += [(stored.key.dtype, flags, one.config) for flags in seen_flags for one in stored.rule.configs]
    usual = (dtype or spec.dtypes[0], flags_of(spec.sizes))
    defaults = [(*variant, spec.default) for variant in dict.fromkeys([*(entry[:2] for entry in own), usual])]
    for target in targets:
        for element_type, flags, config in [*own, *defaults]:
            identity = (target, element_type, flags, config_key(config))
            if identity not in seen:
                seen.add(identity)
                yield _Task(target, element_type, flags, config)


def _job(kernel: Kernel, task: _Task) -> CompileJob:
    return compile_job(kernel, task.config, task.dtype, task.target, {**kernel.spec.sizes, **dict(task.flags)})

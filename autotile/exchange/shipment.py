"""Shipments: kernels with their winners and rules, compiled for chosen architectures, for use without a compiler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from autotile.core.device import device_profile
from autotile.core.model import Config, config_key, config_text
from autotile.core.text import sizes_text
from autotile.cuda.compiler import CachedCubin, CompileJob, compile_job, known_architectures
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import TuningKey, space_hash
from autotile.database.paths import atomic_write
from autotile.database.winners import StoredRule, Winner
from autotile.errors import InputError
from autotile.exchange.bundle import BundledCubin, BundledKernel, cubin_member
from autotile.exchange.cpp_header import HeaderCubin, write_header
from autotile.exchange.shipped import shipped_rules, shipped_winners
from autotile.kernel.library import Kernel, KernelName, load_kernel
from autotile.kernel.problem import ARCHITECTURE, capability_of, resolve_problem, unsupported_reason
from autotile.settings import read_settings
from autotile.version import __version__
from autotile.workers.compile_pool import CompilePool

_COMPILE_DEADLINE_S = 120.0
_STAND_IN_PROFILE = "h200"
"""Device of which only name and compute capability are replaced, for checks that need nothing else of a device."""


class Selection(NamedTuple):
    """A kernel to ship.

    Attributes
    ----------
    kernel
        Name, path of a search-space file, or an object that holds the kernel.
    sizes
        Problem to ship; None for all that are tuned.
    """

    kernel: KernelName
    sizes: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class ShippedCubin:
    """Compiled configuration: a winner's, a rule's or the default.

    Attributes
    ----------
    target
        Architecture that it was compiled for, such as ``sm_90`` or ``sm_90a``.
    dtype, flags, config
        Element type, flags (and sizes, where they are compiled in) and parameters that it was compiled with.
    cubin
        File in the cubin cache.
    """

    target: str
    dtype: str
    flags: Mapping[str, int]
    config: Config
    cubin: CachedCubin


@dataclass(frozen=True, slots=True)
class Shipment:
    """A kernel with its results and cubins.

    Attributes
    ----------
    kernel
        Kernel in its current version.
    nvrtc_version
        Version of the compiler.
    winners, rules
        Results for this version of the kernel.
    cubins
        Compiled configurations.
    notices
        Architectures and configurations that were left out and why, one line each.
    """

    kernel: Kernel
    nvrtc_version: str
    winners: tuple[Winner, ...]
    rules: tuple[StoredRule, ...]
    cubins: tuple[ShippedCubin, ...]
    notices: tuple[str, ...]


class _Results(NamedTuple):
    """Winners and rules of a kernel."""

    winners: list[Winner]
    rules: list[StoredRule]


class _Task(NamedTuple):
    """A configuration to compile."""

    target: str
    dtype: str
    flags: tuple[tuple[str, int], ...]
    config: Config


def prepare_shipments(
    selections: Sequence[Selection],
    architectures: Sequence[str],
    database: Database | None,
    *,
    dtype: str | None = None,
) -> list[Shipment]:
    """Collect the results of kernels and compile their configurations, one shipment for each kernel.

    Parameters
    ----------
    selections
        Kernels and problems to ship; a kernel may be selected with several problems.
    architectures
        Architectures such as ``sm_90``; empty for those of the GPUs that the kernel is tuned on.
    database
        Open database; None if the user has none, so that only the results that come with autotile are shipped.
    dtype
        Element type of the results to ship; None for all.

    Raises
    ------
    InputError
        A kernel, size or architecture is unknown, a selected problem is not tuned, or no configuration compiles.
    ToolchainError
        NVRTC is missing.
    """
    _check_architectures(architectures)
    kernels = {name: load_kernel(name) for name in dict.fromkeys(selection.kernel for selection in selections)}
    pool = CompilePool(read_settings(), deadline_s=_COMPILE_DEADLINE_S)
    try:
        shipments = []
        for name, kernel in kernels.items():
            problems = [selection.sizes for selection in selections if selection.kernel == name]
            results = _select(kernel, problems, _current_results(kernel, database, dtype))
            shipments.append(_prepare(kernel, results, architectures, dtype, pool))
        return shipments
    finally:
        pool.close()


def pack_shipment(shipment: Shipment, images: dict[str, bytes]) -> BundledKernel:
    """Return a shipment as a bundle holds it, and add its cubins to ``images`` under the names of their members."""
    cubins = []
    for shipped in shipment.cubins:
        image = shipped.cubin.path.read_bytes()
        member = cubin_member(image)
        images[member] = image
        resources = shipped.cubin.resources
        symbols = shipped.cubin.symbols
        cubins.append(
            BundledCubin(shipped.target, shipped.dtype, shipped.flags, shipped.config, resources, member, symbols)
        )
    return BundledKernel(shipment.kernel, shipment.nvrtc_version, shipment.winners, cubins, shipment.rules)


def write_shipped_header(shipment: Shipment, dtype: str, output: Path) -> tuple[str, ...]:
    """Write a C++ header for one element type, and its cubins beside it; return the names of the cubins' files.

    Raises
    ------
    InputError
        A file cannot be written, or the kernel depends on a property of the device that a header cannot know.
    """
    shipped = [cubin for cubin in shipment.cubins if cubin.dtype == dtype]
    winners = sorted((winner for winner in shipment.winners if winner.key.dtype == dtype), key=_precedence)
    rules = [stored for stored in shipment.rules if stored.key.dtype == dtype]
    cubins = [_header_cubin(one, output.stem) for one in shipped]
    images = {cubin.file: one.cubin.path.read_bytes() for cubin, one in zip(cubins, shipped, strict=True)}
    text = write_header(
        shipment.kernel.spec, dtype, winners, cubins, rules=rules, stem=output.stem, version=__version__
    )
    _write(output, text.encode())
    for name, image in images.items():
        _write(output.with_name(name), image, follow_link=False)
    return tuple(sorted(images))


def _header_cubin(shipped: ShippedCubin, stem: str) -> HeaderCubin:
    file = f"{stem}.{shipped.target}.{shipped.cubin.cubin_hash[:12]}.cubin"
    cubin = shipped.cubin
    return HeaderCubin(shipped.target, shipped.flags, shipped.config, cubin.resources, file, cubin.symbols)


def _precedence(winner: Winner) -> tuple[bool, bool, bool, float]:
    """Sort key of winners at the same distance: measured ones, cold L2, the user's own and the newest come first.

    The user's own are in order already, newest first.
    """
    key = winner.key
    age = -winner.tuned_at.timestamp() if winner.shipped else 0.0
    return (key.source != "cuda", key.l2_mode != "cold", winner.shipped, age)


def _write(path: Path, data: bytes, *, follow_link: bool = True) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow_link=follow_link) as stream:
            stream.write(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name another file") from None


def _check_architectures(architectures: Sequence[str]) -> None:
    """Raise if NVRTC does not compile for an architecture."""
    for architecture in architectures:
        if re.fullmatch(ARCHITECTURE, architecture) is None:
            raise InputError(f"{architecture!r} is no architecture; expected one such as sm_90")
        if architecture.removesuffix("a") not in (known := known_architectures()):
            raise InputError(
                f"NVRTC {nvrtc_version()} does not know the architecture {architecture!r}; it compiles for "
                f"{', '.join(known)}"
            )


def _prepare(
    kernel: Kernel,
    results: _Results,
    architectures: Sequence[str],
    dtype: str | None,
    pool: CompilePool,
) -> Shipment:
    if not results.winners and not architectures:
        raise InputError(
            f"nothing is tuned of {kernel.name}, so there is no GPU to make cubins for; run `autotile tune`, or name "
            "the architectures with --arch to ship the default configuration"
        )
    targets, notices = _targets(kernel, results.winners, architectures)
    tasks = _tasks(kernel, results, targets, dtype)
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
    winners, rules = tuple(results.winners), tuple(results.rules)
    return Shipment(kernel, nvrtc_version(), winners, rules, tuple(cubins), tuple(notices))


def _current_results(kernel: Kernel, database: Database | None, dtype: str | None) -> _Results:
    """Return the results for the kernel's current version: those in the database, then those shipped with autotile."""
    if dtype is not None and dtype not in kernel.spec.dtypes:
        raise InputError(f"{kernel.name} is not written for dtype {dtype!r}; it takes {', '.join(kernel.spec.dtypes)}")
    own: list[Winner] = []
    rules: list[StoredRule] = []
    if database is not None:
        own = [best.winner for best in database.best(kernel.name, dtype=dtype)]
        rules = database.rules(kernel.name, dtype)
    dtypes = [dtype] if dtype is not None else kernel.spec.dtypes
    shipped = [winner for name in dtypes for winner in shipped_winners(kernel.name, name)]
    rules += [rule for name in dtypes for rule in shipped_rules(kernel.name, name)]
    digests = {winner.key.digest for winner in own}
    winners = own + [winner for winner in shipped if winner.key.digest not in digests]
    version = (kernel.source_hash, space_hash(kernel.spec), tuple(kernel.spec.options))

    def is_current(key: TuningKey) -> bool:
        return (key.template_hash, key.space_hash, key.options) == version

    return _Results([w for w in winners if is_current(w.key)], [rule for rule in rules if is_current(rule.key)])


def _select(kernel: Kernel, problems: Sequence[Mapping[str, int] | None], results: _Results) -> _Results:
    """Return all results, or only those of the given problems."""
    if None in problems:
        return results
    winners = results.winners
    sizes = [resolve_problem(kernel.spec, given or {}, defaults=True).sizes for given in problems]
    for one in sizes:
        if not any(dict(winner.key.sizes) == dict(one) for winner in winners):
            tuned_for = "; ".join(dict.fromkeys(sizes_text(winner.key.sizes) for winner in winners))
            known = f"tuned is {tuned_for}" if tuned_for else f"nothing is tuned of {kernel.name}"
            raise InputError(f"{kernel.name} {sizes_text(one)} is not tuned; {known}. Run `autotile tune`")
    return _Results([winner for winner in winners if dict(winner.key.sizes) in [dict(one) for one in sizes]], [])


def _targets(kernel: Kernel, winners: Iterable[Winner], architectures: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the architectures to compile for, and notices about those that are left out."""
    tuned_on = (winner.device.architecture for winner in winners if winner.device is not None)
    targets, notices = [], []
    for architecture in dict.fromkeys(architectures or tuned_on):
        stand_in = replace(
            device_profile(_STAND_IN_PROFILE), name=architecture, compute_capability=capability_of(architecture)
        )
        fault = unsupported_reason(kernel.spec, stand_in)
        if fault:
            notices.append(f"{architecture} is left out: {fault}")
        else:
            targets.append(kernel.spec.architecture or architecture)
    return list(dict.fromkeys(targets)), notices


def _tasks(kernel: Kernel, results: _Results, targets: Sequence[str], dtype: str | None) -> Iterator[_Task]:
    """Yield each configuration with the dtype and flags that it was tuned for, and the default with each of these."""
    spec = kernel.spec
    seen: set[tuple[str, str, tuple[tuple[str, int], ...], str]] = set()

    def flags_of(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((name, sizes[name]) for name in spec.compiled_names)

    tuned = [(w.key.dtype, flags_of(w.key.sizes), w.config) for w in results.winners]
    for stored in results.rules:
        rule_flags = dict.fromkeys(flags_of(point.sizes) for point in stored.rule.points)
        tuned += [(stored.key.dtype, flags, one.config) for flags in rule_flags for one in stored.rule.configs]
    usual = (dtype or spec.dtypes[0], flags_of(spec.sizes))
    defaults = [(*variant, spec.default) for variant in dict.fromkeys([*(entry[:2] for entry in tuned), usual])]
    for target in targets:
        for element_type, flags, config in [*tuned, *defaults]:
            identity = (target, element_type, flags, config_key(config))
            if identity not in seen:
                seen.add(identity)
                yield _Task(target, element_type, flags, config)


def _job(kernel: Kernel, task: _Task) -> CompileJob:
    return compile_job(kernel, task.config, task.dtype, task.target, {**kernel.spec.sizes, **dict(task.flags)})

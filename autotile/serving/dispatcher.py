"""Dispatch: from the name and sizes of a kernel to the best known configuration, kept once it is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotile.core.argument_types import check_value
from autotile.core.device import DeviceProperties
from autotile.core.dtypes import dtype_name
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import load_cupy
from autotile.database.paths import absolute_location
from autotile.database.winners import Winner
from autotile.errors import NotTunedError
from autotile.kernel.library import KernelName, held_kernel, is_path, load_kernel
from autotile.kernel.operation import Operation, find_operation, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel
from autotile.serving.candidates import Candidates, absent_device, nvrtc_of, refusal
from autotile.serving.choice import Choice
from autotile.serving.miss_counter import MissCounter
from autotile.serving.numerics import Requested, check_numerics, exchanged
from autotile.serving.pinning import Pins
from autotile.serving.recent_cache import MAX_SERVED, RecentCache
from autotile.serving.refresh import Refresher
from autotile.serving.requests import (
    DEFAULTS,
    Asked,
    Request,
    bundle_path,
    choose_again,
    device_index,
    kept,
    whole_size,
)
from autotile.settings import Numerics, absolute_path, served_database

if TYPE_CHECKING:
    from autotile.exchange.bundle import Bundle
    from autotile.serving.operations import OperationTable


Options = tuple[str | Path | None, str | Path | None, bool, Numerics | None, bool]
"""Options of a call: database, bundle, library, numerics and race."""


class Dispatcher:
    """Serves kernels, and keeps what it served.

    Most programs use the functions `get_best_kernel` and `autotile.matmul`, which share one dispatcher. A dispatcher
    may be used from many threads.

    Parameters
    ----------
    database
        Path or URL of the database to use unless a call names another; None for the user's own.
    bundle
        File of ``autotile bundle`` to serve from unless a call names another.

    Attributes
    ----------
    misses
        Counter of the calls of fallbacks.
    refresher
        Replaces what was served when there are new results.
    pins
        Choices that are pinned, and do not change.
    served, matmul_kernels
        Kernels that `get_best_kernel` has returned, by its arguments, and those that `matmul` has chosen, by keys of
        `autotile.serving.matmul`.
    only_device
        The CUDA device if there is exactly one, once they have been counted.

    Examples
    --------
    >>> dispatcher = Dispatcher(database="team.db")  # doctest: +SKIP
    >>> kernel = dispatcher.get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    """

    def __init__(self, *, database: str | Path | None = None, bundle: str | Path | None = None) -> None:
        self._database = absolute_location(str(database)) if database is not None else None
        self._bundle = bundle_path(bundle)
        self.served: RecentCache[tuple[object, ...], BoundKernel] = RecentCache(MAX_SERVED)
        self.find_served = self.served.get
        self._bundles: dict[str, Bundle] = {}
        self._operations: dict[str, Operation] = {}
        self._denotes_operation: dict[str, bool] = {}
        self._tables: dict[tuple[object, ...], OperationTable] = {}
        self._device_count = 0
        """Number of CUDA devices; 0 if there are none, or if they have not been counted."""
        self.only_device: int | None = None
        self.matmul_kernels: RecentCache[tuple[object, ...], BoundKernel] = RecentCache(MAX_SERVED)
        self.misses = MissCounter()
        self.refresher = Refresher(self.misses, (self.served, self.matmul_kernels))
        self.pins = Pins(self.refresher)

    @kept
    def get_best_kernel(
        self,
        /,
        name: KernelName,
        *,
        dtype: str | None = None,
        device: int | str | None = None,
        database: str | Path | None = None,
        bundle: str | Path | None = None,
        strict: bool = False,
        library: bool = True,
        numerics: Numerics | None = None,
        race: bool = False,
        **sizes: int,
    ) -> BoundKernel:
        """Return the best known configuration of a kernel for a problem, ready to launch.

        For an operation, it is the best of its kernels, or a library. It never tunes, and never fails because a
        database is missing; the ``tier`` of the returned kernel tells how its configuration was found. A second call
        with the same arguments returns the same object. Calls of kernels that a CUDA device could not be served in the
        ``exact`` tier are counted as misses, so that they can be tuned.

        Parameters
        ----------
        name
            Name of a kernel, path of its search-space file, or a kernel from `autotile.kernel`; or name of an operation
            such as ``"matmul"``, or path of its file.
        dtype
            dtype of the kernel; None for its first one.
        device
            CUDA device index; None for CuPy's current device. Or the name of a GPU, such as ``"h200"``, for which the
            kernel can be inspected but not launched.
        database
            Path or URL; None for the dispatcher's own.
        bundle
            File of ``autotile bundle`` to serve from, without a compiler or a database; ``name`` is then the name of a
            kernel in the bundle.
        strict
            Raise instead of serving in any tier but ``exact``.
        library
            Whether a library may compute an operation; the result is then a `BoundLibrary`.
        numerics
            ``"same"``: what is served is only exchanged for configurations that are known to compute the same bits,
            when there are new results, or in place of a pinned one. ``"any"``: for any. None for the setting.
        race
            Whether the first call for a problem of an operation that was not measured races the best few ways, for up
            to 20 ms of GPU time; see `autotile.matmul`. The setting ``race`` does so for all.
        **sizes
            Sizes of the problem, such as ``M=4096``; for an operation also its conditions, such as ``EMULATE=0``.

        Raises
        ------
        InputError
            The kernel, a size or the dtype is unknown, the search-space file is malformed, or its space is empty at
            these sizes.
        BundleError
            The bundle is damaged, was made by a newer autotile, or has no configuration for this device and problem.
        NotTunedError
            With ``strict``: nothing is tuned for exactly this problem and device. Its ``differences`` are the fields of
            the key in which the nearest result differs.

        Examples
        --------
        >>> kernel = get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
        >>> C = kernel(A, B)  # doctest: +SKIP
        """
        served = self._serve(name, sizes, dtype, device, (database, bundle, library, numerics, race))
        if strict and served.tier != "exact":
            raise self._refuse(served, self.location(database), bundle)
        return served

    def _serve(
        self, given: KernelName, sizes: Mapping[str, Any], dtype: object, device: int | str | None, options: Options
    ) -> BoundKernel:
        """Return the kernel for a call in the one form in which it is kept, which no working directory changes.

        In this form, plain names, absolute paths and whole sizes are as in most calls, which therefore take one entry.
        """
        database, bundle, library, numerics, race = options
        bundle = bundle_path(bundle)
        name = given if held_kernel(given) else str(given)
        if isinstance(name, str) and is_path(name) and not (bundle or self._bundle):
            name = str(absolute_path(name, "a search-space file"))
        dtype = None if dtype is None else dtype_name(dtype)
        database = None if database is None else absolute_location(str(database))
        sizes = {size: whole_size(value) for size, value in sizes.items()}
        if not isinstance(device, str | None):
            device = device_index(device)
        place = self.current_device() if device is None else device
        chosen = {"dtype": dtype, "database": database, "bundle": bundle, "library": library, "numerics": numerics}
        chosen |= {"race": race}
        named = {option: value for option, value in chosen.items() if value != DEFAULTS[option]} | sizes
        key = (place, name, *named, *named.values())
        try:
            served = self.served.recall(key)
        except TypeError:
            served = None  # the size that is no number is refused below
        if served is not None:
            return served
        check_numerics(numerics)
        check_value("library", library, bool)
        check_value("race", race, bool)
        location = self.location(database)
        of_operation = isinstance(name, str) and self._is_operation(name)
        kernel = self.find_best_kernel(
            name, dtype, place, location, sizes, bundle=bundle, library=library, numerics=numerics, race=race
        )
        gpu = device if isinstance(device, str) else None
        places = database or self._database, bundle or self._bundle
        if isinstance(name, str):  # another process cannot find a kernel that an object of this one holds
            given_sizes = sizes if of_operation else kernel.problem.sizes
            kernel.request = Request(name, given_sizes, dtype, gpu, *places, library, numerics)
        asked = Asked(str(name) if of_operation else None, dtype, place, location, library, numerics)
        return self._keep(key, kernel, sizes, asked, is_bundled=bool(bundle or self._bundle))

    def _keep(
        self,
        key: tuple[object, ...],
        kernel: BoundKernel,
        sizes: Mapping[str, int],
        asked: Asked,
        *,
        is_bundled: bool = False,
    ) -> BoundKernel:
        """Keep what was found, and whatever follows from that: its pin, the count of its calls, later results."""
        if not is_bundled:
            self.pins.check(kernel)
        served = self.served.keep(key, kernel)  # concurrent callers get the same object
        if served is kernel:
            self.refresher.count_misses(asked.location, kernel)
            if not is_bundled:
                self.pins.record(kernel)
                self.refresher.add(asked.location, kernel, partial(choose_again, self, sizes, asked))
        return served

    def serve_operation(
        self,
        operation: str,
        sizes: Mapping[str, int],
        dtype: str,
        *,
        device: int | str | None = None,
        database: str | Path | None = None,
        library: bool = True,
        numerics: Numerics | None = None,
        race: bool = False,
    ) -> BoundKernel:
        """Return what `get_best_kernel` serves for an operation, whatever kernels there are of its name.

        Parameters
        ----------
        operation
            Name of the operation.
        sizes, dtype, device, database, library, numerics, race
            As for `get_best_kernel`.
        """
        place = self.current_device() if device is None else device
        key = ("operation", operation, dtype, place, database, library, numerics, race, *sizes, *sizes.values())
        served = self.served.get(key) or self.served.recall(key)
        if served is None:
            check_numerics(numerics)
            location = self.location(database)
            kernel = self.find_for_operation(
                operation, dtype, place, location, sizes, library=library, numerics=numerics, race=race
            )
            asked = Asked(operation, dtype, place, location, library, numerics)
            served = self._keep(key, kernel, sizes, asked, is_bundled=bool(self._bundle))
        return served

    def find_best_kernel(
        self,
        name: KernelName,
        dtype: str | None,
        device: int | str | None,
        location: str,
        sizes: Mapping[str, int],
        *,
        bundle: str | Path | None = None,
        library: bool = True,
        numerics: Numerics | None = None,
        race: bool = False,
        like: Choice | None = None,
        defaults: bool = False,
    ) -> BoundKernel:
        """Return what `get_best_kernel` would serve, without keeping it and without counting a miss.

        Parameters
        ----------
        location
            Path or URL of the database.
        name, dtype, device, sizes, bundle, library, numerics, race
            As for `get_best_kernel`.
        like
            Choice whose bits must be kept; None if any may be computed.
        defaults
            Whether to take missing sizes from the file, as for a user who asks; a program must give them.

        Raises
        ------
        InputError
            As for `get_best_kernel`.
        """
        if isinstance(name, str | os.PathLike) and self._is_operation(str(name)):
            options: dict[str, Any] = {"bundle": bundle, "library": library, "numerics": numerics, "race": race}
            options["defaults"] = defaults
            return self.find_for_operation(str(name), dtype, device, location, sizes, **options)
        path = bundle_path(bundle) or self._bundle
        if path is not None:
            held = held_kernel(name)
            return self._find_bundled(path, held.name if held else str(name), dtype, device, sizes, defaults=defaults)
        kernel = load_kernel(name)
        problem = resolve_problem(kernel.spec, sizes, dtype, defaults=defaults)
        candidates = Candidates(location, problem)
        index, properties = self._device(device, candidates.winners)
        version = nvrtc_of(candidates.winners)
        request = Requested(kernel, problem, properties, version, location)
        choice = self.pins.choice_for(request, numerics)
        if choice is None:
            choice = candidates.choose(kernel, problem, properties, version)
            if like is not None and choice.config != like.config:
                choice = exchanged(like, request)
        if candidates.fault:
            choice = replace(choice, unread=candidates.fault)
        return BoundKernel(kernel, problem, properties, index, choice)

    def _is_operation(self, name: str) -> bool:
        """Return whether a name or path denotes an operation rather than a kernel."""
        if name not in self._denotes_operation:
            self._denotes_operation[name] = find_operation(name) is not None
        return self._denotes_operation[name]

    def find_for_operation(
        self,
        name: str,
        dtype: str | None,
        device: int | str | None,
        location: str,
        sizes: Mapping[str, int],
        *,
        bundle: str | Path | None = None,
        library: bool = True,
        numerics: Numerics | None = None,
        race: bool = False,
        anew: bool = False,
        defaults: bool = False,
    ) -> BoundKernel:
        """Return what `serve_operation` would serve, without keeping it and without counting a miss.

        Parameters
        ----------
        name
            Name of the operation, or path of its file.
        dtype, device, location, sizes, bundle, library, numerics
            As for `find_best_kernel`.
        race, anew
            As for `get_best_kernel`, and whether the database has changed.
        defaults
            As for `find_best_kernel`.
        """
        from autotile.serving.operations import OperationTable, serve_bundled

        operation = self._operations.get(name)
        if operation is None:
            operation = self._operations[name] = load_operation(name)
        problem = operation.resolve(sizes, dtype, defaults=defaults)
        if bundle or self._bundle:
            return serve_bundled(
                operation,
                problem,
                lambda kernel, own: self.find_best_kernel(kernel, problem.dtype, device, location, own, bundle=bundle),
            )
        key = operation.source, problem.dtype, device, location
        table = self._tables.get(key)
        if table is None or table.is_outdated(anew=anew):
            table = self._tables[key] = OperationTable(
                operation, problem.dtype, location, lambda stored: self._device(device, lambda: stored), nvrtc_of
            )
        served = self.pins.serve_operation(table, problem, library=library, numerics=numerics)
        if served is None:
            may_race = numerics != "same" and not anew and self.pins.in_force() is None
            served = table.serve(problem, library=library, race=race, may_race=may_race)
        served.operation, served.library_allowed = problem, library
        return served

    def matmul(
        self,
        a: Any,
        b: Any,
        out: Any = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        deterministic: bool = True,
        emulate: bool = True,
        library: bool = True,
        numerics: Numerics | None = None,
        race: bool = False,
        database: str | Path | None = None,
        stream: Any = None,
    ) -> Any:
        """Compute ``alpha a @ b + beta out``; parameters, result and errors are those of `autotile.matmul`."""
        from autotile.serving.matmul import multiply

        return multiply(
            self,
            a,
            b,
            out,
            alpha=alpha,
            beta=beta,
            deterministic=deterministic,
            emulate=emulate,
            library=library,
            numerics=numerics,
            race=race,
            database=database,
            stream=stream,
        )

    def clear(self) -> None:
        """Forget the served kernels and the bundles, so that new results are seen; misses stay counted."""
        self.served.clear()
        self.matmul_kernels.clear()
        self._bundles.clear()
        self._operations.clear()
        self._denotes_operation.clear()
        self._tables.clear()

    def current_device(self) -> int | None:
        """Return CuPy's current device; None if there is no device."""
        if self.only_device is not None:
            return self.only_device
        if self._device_count == 0:
            self._device_count = device_count()
            if self._device_count == 1:  # asking CUDA in every call would cost a quarter of it
                self.only_device = 0
        return int(load_cupy().cuda.runtime.getDevice()) if self._device_count > 0 else None

    def is_current(self, device: int) -> bool:
        """Return whether a CUDA device, which must exist, is the current one."""
        return self.only_device is not None or self.current_device() == device

    def location(self, database: str | Path | None) -> str:
        """Return the path or URL of the database that a call uses."""
        if database:
            return absolute_location(str(database))
        return self._database or served_database()

    def _find_bundled(
        self,
        path: str,
        name: str,
        dtype: str | None,
        device: int | str | None,
        sizes: Mapping[str, int],
        *,
        defaults: bool,
    ) -> BoundKernel:
        from autotile.exchange.bundle import Bundle
        from autotile.serving.candidates import choose_bundled

        bundle = self._bundles.get(path) or self._bundles.setdefault(path, Bundle(Path(path)))
        bundled = bundle.kernel(name)
        problem = resolve_problem(bundled.kernel.spec, sizes, dtype, defaults=defaults)
        index, properties = self._device(device, lambda: list(bundled.winners))
        choice, cubin = choose_bundled(bundle, bundled, problem, properties)
        return BoundKernel(bundled.kernel, problem, properties, index, choice, packed=cubin)

    def _refuse(self, served: BoundKernel, location: str, bundle: str | Path | None) -> NotTunedError:
        path = bundle_path(bundle) or self._bundle
        if path is not None:
            bundled = self._bundles[path].kernel(served.kernel)
            return refusal(served, bundled.winners, bundled.nvrtc_version)
        stored = Candidates(location, served.problem).winners()
        return refusal(served, stored, nvrtc_of(lambda: stored))

    def _device(
        self, device: int | str | None, read_stored: Callable[[], list[Winner]]
    ) -> tuple[int | None, DeviceProperties]:
        """Return the CUDA device to launch on, None if the kernel can only be inspected, and its properties."""
        if isinstance(device, str):
            return None, absent_device(device, read_stored())
        index = self.current_device() if device is None else device
        return index, live_device(index) if index is not None else absent_device(None, read_stored())


default_dispatcher = Dispatcher()
"""The dispatcher of `get_best_kernel` and `autotile.matmul`."""

get_best_kernel = default_dispatcher.get_best_kernel
"""`Dispatcher.get_best_kernel` of the default dispatcher; a function around it would double the time of a call."""

find_best_kernel = default_dispatcher.find_best_kernel


def find_best_result(*request: Any, **options: Any) -> BoundKernel:
    """Return what `find_best_kernel` does where nothing is pinned: results are judged by what they are."""
    with default_dispatcher.pins.set_aside():
        return find_best_kernel(*request, **options)


def forget_served() -> None:
    """Clear the default dispatcher, so that new tuning results and new bundles are seen."""
    default_dispatcher.clear()

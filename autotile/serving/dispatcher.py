"""Dispatch: from the name and sizes of a kernel to the best known configuration, kept once it is chosen."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import dtype_name
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import load_cupy
from autotile.database.paths import absolute_location
from autotile.database.winners import Winner
from autotile.errors import DeviceError, NotTunedError
from autotile.kernel.library import KernelName, held_kernel, is_path, load_kernel
from autotile.kernel.operation import Operation, find_operation, load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel, Request
from autotile.serving.candidates import Candidates, absent_device, nvrtc_of, refusal
from autotile.serving.choice import choose
from autotile.serving.miss_counter import MissCounter
from autotile.serving.recent_cache import MAX_SERVED, RecentCache
from autotile.serving.refresh import Refresher
from autotile.settings import absolute_path, read_settings

if TYPE_CHECKING:
    from autotile.exchange.bundle import Bundle
    from autotile.serving.operations import OperationTable


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
    matmul_kernels
        Kernels that `matmul` has chosen, by keys of `autotile.serving.matmul`.

    Examples
    --------
    >>> dispatcher = Dispatcher(database="team.db")  # doctest: +SKIP
    >>> kernel = dispatcher.get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    """

    def __init__(self, *, database: str | Path | None = None, bundle: str | Path | None = None) -> None:
        self._database = absolute_location(str(database)) if database is not None else None
        self._bundle = _bundle_path(bundle)
        self._served: RecentCache[tuple[object, ...], BoundKernel] = RecentCache(MAX_SERVED)
        self._find_served = self._served.get
        self._bundles: dict[str, Bundle] = {}
        self._operations: dict[str, Operation] = {}
        self._denotes_operation: dict[str, bool] = {}
        self._tables: dict[tuple[object, ...], OperationTable] = {}
        self._device_count = 0
        """Number of CUDA devices; 0 if there are none, or if they have not been counted."""
        self._only_device: int | None = None
        """The CUDA device if there is exactly one."""
        self.misses = MissCounter()
        self.refresher = Refresher(self.misses)
        self.matmul_kernels: RecentCache[tuple[object, ...], BoundKernel] = RecentCache(MAX_SERVED)

    def get_best_kernel(
        self,
        /,  # Python compares every size with each parameter that can be named
        name: KernelName,
        *,
        dtype: str | None = None,
        device: int | str | None = None,
        database: str | Path | None = None,
        bundle: str | Path | None = None,
        strict: bool = False,
        library: bool = True,
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
        place = self._only_device if device is None else device
        if place is None:
            place = self.current_device()
        try:
            served = self._find_served((name, dtype, place, database, bundle, library, *sizes, *sizes.values()))
        except TypeError:  # not hashable, such as a list for a size
            served = None
        if served is None:
            served = self._serve(
                name, sizes, dtype=dtype, place=place, database=database, bundle=bundle, library=library
            )
        if strict and served.tier != "exact":
            raise self._refuse(served, self.location(database), bundle)
        return served

    def _serve(
        self,
        given: KernelName,
        sizes: Mapping[str, Any],
        *,
        dtype: object,
        place: int | str | None,
        database: str | Path | None,
        bundle: str | Path | None,
        library: bool,
    ) -> BoundKernel:
        """Return the kernel for a call in the one form in which it is kept, which no working directory changes.

        In this form, plain names, absolute paths and whole sizes are as in the call, which therefore finds the kernel
        at once the next time. A call with a relative path comes here each time.
        """
        bundle = _bundle_path(bundle)
        name = given if held_kernel(given) else str(given)
        if isinstance(name, str) and is_path(name) and not (bundle or self._bundle):
            name = str(absolute_path(name, "a search-space file"))
        dtype = None if dtype is None else dtype_name(dtype)
        database = None if database is None else absolute_location(str(database))
        sizes = {size: _whole(value) for size, value in sizes.items()}
        if not isinstance(place, str | None):
            place = _device_index(place)
        try:
            key = (name, dtype, place, database, bundle, library, *sizes, *sizes.values())
            served = self._served.recall(key)
        except TypeError:
            served = None  # the size that is no number is refused below
        if served is not None:
            return served
        location = self.location(database)
        of_operation = isinstance(name, str) and self._is_operation(name)
        kernel = self.find_best_kernel(name, dtype, place, location, sizes, bundle=bundle, library=library)
        device = place if isinstance(place, str) else None
        named = database or self._database, bundle or self._bundle
        if isinstance(name, str):  # another process cannot find a kernel that an object of this one holds
            given_sizes = sizes if of_operation else kernel.problem.sizes
            kernel.request = Request(name, given_sizes, dtype, device, *named, library)
        served = self._keep(key, kernel, location)
        if served is not kernel or bundle or self._bundle:
            return served
        if not of_operation:
            self.refresher.add(location, kernel, self._choose_again(kernel, dtype, place, location))
        else:
            again = partial(
                self.find_for_operation, str(name), dtype, place, location, sizes, library=library, anew=True
            )
            self.refresher.add_operation(location, self._served, key, lambda _: again())
        return served

    def _keep(self, key: tuple[object, ...], kernel: BoundKernel, location: str) -> BoundKernel:
        served = self._served.keep(key, kernel)  # concurrent callers get the same object
        if served is kernel and kernel.tier != "exact" and kernel.can_launch and not kernel.is_library:
            self.misses.watch(location, kernel)
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
    ) -> BoundKernel:
        """Return what `get_best_kernel` serves for an operation, whatever kernels there are of its name.

        Parameters
        ----------
        operation
            Name of the operation.
        sizes, dtype, device, database, library
            As for `get_best_kernel`.
        """
        place = self.current_device() if device is None else device
        key = ("operation", operation, dtype, place, database, library, *sizes, *sizes.values())
        served = self._served.get(key) or self._served.recall(key)
        if served is None:
            location = self.location(database)
            kernel = self.find_for_operation(operation, dtype, place, location, sizes, library=library)
            served = self._keep(key, kernel, location)
        return served

    def _choose_again(
        self, kernel: BoundKernel, dtype: str | None, place: int | str | None, location: str
    ) -> Callable[[BoundKernel], BoundKernel]:
        """Return a function that chooses a configuration of the same definition again."""
        definition, sizes = kernel.definition, kernel.problem.sizes
        return lambda _: self.find_best_kernel(definition, dtype, place, location, sizes)

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
    ) -> BoundKernel:
        """Return what `get_best_kernel` would serve, without keeping it and without counting a miss.

        Parameters
        ----------
        location
            Path or URL of the database.
        name, dtype, device, sizes, bundle, library
            As for `get_best_kernel`.

        Raises
        ------
        InputError
            As for `get_best_kernel`.
        """
        if isinstance(name, str | os.PathLike) and self._is_operation(str(name)):
            return self.find_for_operation(str(name), dtype, device, location, sizes, bundle=bundle, library=library)
        path = _bundle_path(bundle) or self._bundle
        if path is not None:
            held = held_kernel(name)
            return self._find_bundled(path, held.name if held else str(name), dtype, device, sizes)
        kernel = load_kernel(name)
        problem = resolve_problem(kernel.spec, sizes, dtype)
        candidates = Candidates(location, problem)
        stored = candidates.winners()
        index, properties = self._device(device, stored)
        choice = choose(
            kernel,
            problem,
            properties,
            nvrtc_of(stored),
            stored,
            rules=candidates.rules(),
            checks=candidates.checks,
        )
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
        anew: bool = False,
    ) -> BoundKernel:
        """Return what `serve_operation` would serve, without keeping it and without counting a miss.

        Parameters
        ----------
        name
            Name of the operation, or path of its file.
        dtype, device, location, sizes, bundle, library
            As for `find_best_kernel`.
        anew
            Whether the database has changed.
        """
        from autotile.serving.operations import OperationTable, serve_bundled

        operation = self._operations.get(name)
        if operation is None:
            operation = self._operations[name] = load_operation(name)
        problem = operation.resolve(sizes, dtype)
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
                operation, problem.dtype, location, lambda stored: self._device(device, stored), nvrtc_of
            )
        return table.serve(problem, library=library)

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
            database=database,
            stream=stream,
        )

    def clear(self) -> None:
        """Forget the served kernels and the bundles, so that new results are seen; misses stay counted."""
        self._served.clear()
        self.matmul_kernels.clear()
        self._bundles.clear()
        self._operations.clear()
        self._denotes_operation.clear()
        self._tables.clear()

    def current_device(self) -> int | None:
        """Return CuPy's current device; None if there is no device."""
        if self._device_count == 0:
            self._device_count = device_count()
            if self._device_count == 1:  # asking CUDA in every call would cost a quarter of it
                self._only_device = 0
        return int(load_cupy().cuda.runtime.getDevice()) if self._device_count > 0 else None

    def is_current(self, device: int) -> bool:
        """Return whether a CUDA device, which must exist, is the current one."""
        return self._only_device is not None or self.current_device() == device

    def location(self, database: str | Path | None) -> str:
        """Return the path or URL of the database that a call uses."""
        if database:
            return absolute_location(str(database))
        return self._database or read_settings().database

    def _find_bundled(
        self, path: str, name: str, dtype: str | None, device: int | str | None, sizes: Mapping[str, int]
    ) -> BoundKernel:
        from autotile.exchange.bundle import Bundle
        from autotile.serving.candidates import choose_bundled

        bundle = self._bundles.get(path) or self._bundles.setdefault(path, Bundle(Path(path)))
        bundled = bundle.kernel(name)
        problem = resolve_problem(bundled.kernel.spec, sizes, dtype)
        index, properties = self._device(device, list(bundled.winners))
        choice, cubin = choose_bundled(bundle, bundled, problem, properties)
        return BoundKernel(bundled.kernel, problem, properties, index, choice, packed=cubin)

    def _refuse(self, served: BoundKernel, location: str, bundle: str | Path | None) -> NotTunedError:
        path = _bundle_path(bundle) or self._bundle
        if path is not None:
            bundled = self._bundles[path].kernel(served.kernel)
            return refusal(served, bundled.winners, bundled.nvrtc_version)
        stored = Candidates(location, served.problem).winners()
        return refusal(served, stored, nvrtc_of(stored))

    def _device(self, device: int | str | None, stored: list[Winner]) -> tuple[int | None, DeviceProperties]:
        """Return the CUDA device to launch on, None if the kernel can only be inspected, and its properties."""
        if isinstance(device, str):
            return None, absent_device(device, stored)
        index = self.current_device() if device is None else device
        return index, live_device(index) if index is not None else absent_device(None, stored)


def _bundle_path(bundle: str | Path | None) -> str | None:
    return str(absolute_path(bundle, "a bundle")) if bundle else None


def _device_index(device: object) -> int:
    try:
        return operator.index(device)  # type: ignore[arg-type]
    except TypeError:
        raise DeviceError(
            f"the device is {device!r}, expected a CUDA index such as 0, or a name such as 'h200'"
        ) from None


def _whole(size: Any) -> Any:
    """Return a number that equals a whole number as that, since both are one key of a dictionary: 2048.0 as 2048."""
    if type(size) is not int and isinstance(size, Number | np.bool_):
        try:
            whole = int(size.real)  # type: ignore[union-attr]
        except (OverflowError, ValueError):
            return size
        return whole if whole == size else size
    return size


default_dispatcher = Dispatcher()
"""The dispatcher of `get_best_kernel` and `autotile.matmul`."""

get_best_kernel = default_dispatcher.get_best_kernel
"""`Dispatcher.get_best_kernel` of the default dispatcher; a function around it would double the time of a call."""

find_best_kernel = default_dispatcher.find_best_kernel


def forget_served() -> None:
    """Clear the default dispatcher, so that new tuning results and new bundles are seen."""
    default_dispatcher.clear()

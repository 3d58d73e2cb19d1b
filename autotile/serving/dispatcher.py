"""Dispatch: from the name and sizes of a kernel to a served one, kept once it is chosen."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec
from weakref import WeakSet

import numpy as np
from msgspec.structs import replace

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.dtypes import dtype_name
from autotile.core.forks import cached_property
from autotile.core.model import Config, L2Mode, Sizes
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.toolchain import load_cupy, nvrtc_version
from autotile.database.keys import key_differences, key_of
from autotile.database.paths import absolute_location
from autotile.database.winners import Winner
from autotile.errors import DeviceError, InputError, NotTunedError, ToolchainError
from autotile.kernel.library import KernelName, held_kernel, is_path, load_kernel
from autotile.kernel.operation import Operation, load_operation, named_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving.bound import BoundKernel, Lookup
from autotile.serving.choice import Choice, KernelCode, RecentCache
from autotile.serving.refresh import MissCounter, Refresher
from autotile.serving.selection import (
    MAX_SERVED,
    DatabaseShelf,
    KernelRequest,
    Shelf,
    choose,
    choose_bundled,
    same_bits,
)
from autotile.settings import Numerics, absolute_path, read_settings, served_database

if TYPE_CHECKING:
    from autotile.exchange.bundle import Bundle, BundledKernel
    from autotile.serving.operations import MatmulOptions, OperationShelf, Products
    from autotile.serving.pinning import Pin, Pins

    Stored = Shelf | DatabaseShelf | BundledKernel

_DEFAULTS = dict(dict.fromkeys(("dtype", "database", "bundle", "numerics")), library=True, race=False, wait=False)
"""Options of `get_best_kernel` that mean the same as none."""

Arguments = ParamSpec("Arguments")
Find = Callable[Concatenate["Dispatcher", Arguments], BoundKernel]


def _kept(serve: Find[Arguments]) -> Find[Arguments]:
    """Return a method that returns what it returned to an equal call, and otherwise calls the given one.

    It takes the arguments as they come: for a method with named parameters, Python compares the name of each size with
    every one of them, which takes longer than all else.
    """

    @wraps(serve)
    def find(self: Dispatcher, /, *names: Arguments.args, **given: Arguments.kwargs) -> BoundKernel:
        place = self.only_device
        if place is None and given.get("device") is None:
            place = self.current_device()
        key = (place, *names, *given, *given.values())
        try:
            served = self.find_served(key)
            if served is not None:
                return served
        except TypeError:  # not hashable, such as a list for a size
            return serve(self, *names, **given)
        served = serve(self, *names, **given)
        # An equal call means the same later, in another working directory, too, unless it has a relative path.
        name, database = (names or (given.get("name"),))[0], given.get("database")
        is_relative = isinstance(name, str | os.PathLike) and is_path(str(name)) and not Path(name).is_absolute()
        is_relative |= database is not None and database != absolute_location(str(database))
        if is_relative or given.get("strict") or given.get("bundle") is not None:
            return served
        return self.served.keep(key, served)

    return find


def _stand_in(request: KernelRequest, chosen: Config, device_index: int | None) -> BoundKernel | None:
    """Return a kernel in the best other configuration that is valid for a problem and needs no compiler, or None."""
    stored = map(request.choice_of, request.ranked)
    for choice in (*stored, Choice("default", request.kernel.spec.default)):
        is_other = dict(choice.config) != dict(chosen) and request.allows(choice)
        if is_other and not (code := request.code(choice)).needs_compiler():
            return BoundKernel(code, choice, request.device, device_index)
    return None


class Dispatcher:
    """Serves kernels, and keeps what it served.

    Most programs use the functions `get_best_kernel` and `autotile.matmul`, which share one dispatcher. A dispatcher
    may be used from many threads.

    Parameters
    ----------
    database
        Path or URL of the database to use unless a call names another; None for the user's own.
    bundle
        Bundle of ``autotile export`` to serve from unless a call names another.
    l2
        State of the L2 cache for which kernels are served: ``"cold"`` where a call finds its inputs in memory,
        ``"hot"`` where the one before leaves them in the cache. None for the setting.
    deployment
        ``"eager"``: the program launches kernels one by one, so that the host's part counts; ``"graph"``: it does not,
        as in CUDA graphs. None for the setting.

    Examples
    --------
    >>> dispatcher = Dispatcher(database="team.db")  # doctest: +SKIP
    >>> kernel = dispatcher.get_best_kernel("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        database: str | Path | None = None,
        bundle: str | Path | None = None,
        l2: Literal["cold", "hot"] | None = None,
        deployment: Literal["graph", "eager"] | None = None,
    ) -> None:
        self._l2 = state_of(l2, deployment)
        self._database = absolute_location(database) if database is not None else None
        self._bundle = _bundle_path(bundle)
        self.served: RecentCache[tuple[object, ...], BoundKernel] = RecentCache(MAX_SERVED)
        """Kernels that `get_best_kernel` has returned, by its arguments."""
        self.find_served = self.served.get
        self._open_bundle = cache(_bundle_at)
        self._named_operation = cache(partial(named_operation, checks=False))
        self._shelves: dict[tuple[object, ...], OperationShelf] = {}
        self._device_count = 0
        """Number of CUDA devices; 0 if there are none, or if they have not been counted."""
        self.only_device: int | None = None
        """The CUDA device if there is exactly one, once they have been counted."""
        self._products: Products | None = None
        self.misses = MissCounter()
        """Counter of the calls of fallbacks."""
        self.refresher = Refresher(self.misses, self._find_again)
        self.asked: dict[BoundKernel, None] | None = None
        """Kernels that were asked for since `note_requests`; None where nobody wants to know."""
        self.may_race = True
        """Whether first calls may race, by their arguments or the setting."""
        dispatchers.add(self)

    @property
    def l2(self) -> L2Mode:
        """State of the L2 cache for which kernels are served, or ``eager`` if the host launches them one by one.

        What was chosen before stays until it is chosen again.
        """
        settings = read_settings()
        return self._l2 or ("eager" if settings.deployment == "eager" else settings.l2)

    @l2.setter
    def l2(self, mode: L2Mode) -> None:
        self._l2 = mode

    @property
    def products(self) -> Products:
        """Products that `matmul` has computed."""
        if self._products is None:
            from autotile.serving.operations import Products

            self._products = Products(MAX_SERVED, self.serve_product, self.is_current, self.may_defer)
        return self._products

    def may_defer(self, options: MatmulOptions) -> bool:
        """Return True if something else than the choice may compute a product until the choice is made and loaded."""
        if self._waits(options) or options.race or read_settings().race or not options.library:
            return False
        return self._pin_in_force is None and self._bundle is None

    @cached_property
    def pins(self) -> Pins:
        """Choices that are pinned, and do not change."""
        from autotile.serving.pinning import Pins

        return Pins(self.refresher)

    @property
    def _pin_in_force(self) -> Pin | None:
        """The pinned choices that are in force; nothing is loaded for them unless something was pinned."""
        if "pins" not in vars(self) and (settings := read_settings()).pin is None and not settings.pin_strict:
            return None
        return self.pins.in_force()

    @_kept
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
        wait: bool = False,
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
            Bundle of ``autotile export`` to serve from, without a compiler or a database; it may hold a kernel whose
            file is not here, by its name.
        strict
            Raise instead of serving in any tier but ``exact``.
        library
            Whether a library may compute an operation.
        numerics
            ``"same"``: what is served is only exchanged for configurations that are known to compute the same bits,
            when there are new results, or in place of a pinned one. ``"any"``: for any. None for the setting.
        race
            Whether the first call for a problem of an operation that was not measured races the best few ways, for up
            to 20 ms of GPU time; see `autotile.matmul`. The setting ``race`` does so for all.
        wait
            Whether the first call waits where a compiler is needed. Otherwise it launches the best that needs none, as
            do further calls, until the kernel is compiled aside and takes over; it waits in any case where nothing else
            can be launched, where choices are pinned, and with ``numerics="same"``. The setting ``wait`` does so for
            all.
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
        location = None if database is None else absolute_location(database)
        source = _bundle_path(bundle)
        # The one form in which a call is kept, which no working directory changes: plain names, absolute paths and
        # whole sizes are as in most calls, which therefore take one entry.
        kept = name if held_kernel(name) else str(name)
        if isinstance(kept, str) and is_path(kept):
            kept = str(absolute_path(kept, "a search-space file"))
        dtype = None if dtype is None else dtype_name(dtype)
        whole = {size: _whole_size(value) for size, value in sizes.items()}
        if not isinstance(device, str | None):
            try:
                index = operator.index(device)
            except TypeError:
                index = 2**31
            if abs(index) >= 2**31:  # what a CUDA index fits in
                raise DeviceError(
                    f"the device is {device!r:.80}, expected a CUDA index such as 0, or a name such as 'h200'"
                )
            device = index
        _check_numerics(numerics)
        _check_types(bool, strict=strict, library=library, race=race, wait=wait)
        place = self.current_device() if device is None else device
        asked = {"dtype": dtype, "database": location, "bundle": source, "library": library, "numerics": numerics}
        chosen = {**asked, "race": race, "wait": wait}
        named = {option: value for option, value in chosen.items() if value != _DEFAULTS[option]} | whole
        key = (place, kept, *named, *named.values())
        try:
            served = self.served.recall(key)
        except TypeError:
            served = None  # the size that is no number is refused below
        if served is None:
            is_operation = isinstance(kept, str) and self._operation(kept) is not None
            origin, where = source or self._bundle, self.location(location)
            lookup = Lookup(kept, whole, dtype, place, where, origin, library, numerics, race, wait, is_operation)
            kernel = self.find(lookup)
            if isinstance(kept, str):  # another process cannot find a kernel that an object of this one holds
                given = whole if is_operation else kernel.problem.sizes
                gpu, own = device if isinstance(device, str) else None, location or self._database
                kernel.request = {"name": kept, **asked, "device": gpu, "database": own, "bundle": origin, **given}
            served = self._keep(key, kernel, lookup)
        self._note(served)
        if strict and served.tier != "exact":
            raise self._refusal(served, self.location(location), source or self._bundle)
        return served

    def _keep(self, key: tuple[object, ...], kernel: BoundKernel, lookup: Lookup) -> BoundKernel:
        """Keep what was found, and whatever follows from that: its pin, the count of its calls, later results."""
        pin = self._pin_in_force if lookup.bundle is None else None
        if pin is not None:
            pin.check(kernel)
        kernel.lookup = lookup
        served = self.served.keep(key, kernel)  # concurrent callers get the same object
        if served is kernel:
            self.refresher.count_misses(kernel)
            if pin is not None:
                pin.record(kernel)
            if lookup.bundle is None:
                self.refresher.add(kernel)
        return served

    def note_requests(self) -> list[BoundKernel]:
        """Note in `asked` what is asked for from now on, also what was served before; return what was noted so far.

        Quick paths know nothing of it: what they keep is set aside, and found again by the first request of each.
        """
        noted, self.asked = self.asked, {}
        self.served.set_aside()
        if self._products is not None:
            self._products.clear()
        return list(noted or ())

    def _note(self, served: BoundKernel) -> None:
        asked = self.asked
        if asked is not None:
            asked[served] = None

    def _find_again(self, served: BoundKernel) -> BoundKernel:
        """Return the kernel that would be served now; the one that is served if that must not change."""
        lookup = served.lookup
        assert lookup is not None
        pin = self._pin_in_force
        must_match = pin is None and (lookup.numerics or read_settings().numerics) == "same"
        if lookup.is_operation and not must_match:
            fresh = self.find(lookup, anew=True)
        elif served.is_library:
            return served
        else:
            problem, like = served.problem, served.choice if must_match else None
            own = replace(lookup, name=served.definition, sizes=problem.sizes, dtype=problem.dtype, is_operation=False)
            fresh = self.find(own, like=like)
        is_same = fresh.kernel == served.kernel and fresh.config == served.config
        must_stay = pin is not None and (not fresh.choice.pinned or (pin.is_recording and is_same))
        return served if must_stay else fresh

    def _operation(self, name: str) -> Operation | None:
        """Return the operation that a name, or a file as it is now, denotes; None if that is a kernel."""
        return named_operation(name, checks=False) if is_path(name) else self._named_operation(name)

    def serve_product(
        self, sizes: Mapping[str, int], dtype: str, options: MatmulOptions, device: int | str | None = None
    ) -> BoundKernel:
        """Return the kernel or library for the operation ``matmul``, also if a kernel has its name.

        The sizes are with its flags and conditions; those that the options state count in them only.
        """
        place = self.current_device() if device is None else device
        _, _, library, numerics, race, wait, database = options
        key = ("a product", dtype, place, database, library, numerics, race, wait, *sizes, *sizes.values())
        served = self.served.get(key) or self.served.recall(key)
        if served is None:
            _check_numerics(numerics)
            location = self.location(database)
            lookup = Lookup("matmul", sizes, dtype, place, location, self._bundle, library, numerics, race, wait, True)
            served = self._keep(key, self.find(lookup), lookup)
        self._note(served)
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
        defaults: bool = False,
    ) -> BoundKernel:
        """Return the kernel that `get_best_kernel` would serve, without keeping it and without counting a miss.

        With ``defaults``, missing sizes are taken from the file, as for a user who asks; a program must give them.
        """
        path = _bundle_path(bundle) or self._bundle
        if is_path(str(name)):
            self._shelves.clear()  # its kernels may have changed
        is_operation = isinstance(name, str | os.PathLike) and self._operation(str(name)) is not None
        lookup = Lookup(name, sizes, dtype, device, location, path, library, is_operation=is_operation)
        return self.find(lookup, defaults=defaults)

    def find(
        self, lookup: Lookup, *, like: Choice | None = None, anew: bool = False, defaults: bool = False
    ) -> BoundKernel:
        """Return the kernel that is served for a look-up, without keeping it and without counting a miss.

        The bits of ``like`` are kept, if it is given. ``anew`` says that the database has changed; ``defaults`` is as
        for `find_best_kernel`.
        """
        name, sizes, dtype = lookup.name, lookup.sizes, lookup.dtype
        if lookup.is_operation:
            return self._find_for_operation(lookup, anew=anew, defaults=defaults)
        if lookup.bundle is not None:
            held, bundle = held_kernel(name), self._open_bundle(lookup.bundle)
            if held is None and is_path(str(name)) and Path(str(name)).is_file():
                held = load_kernel(name)
            bundled = bundle.kernel(held.name if held is not None else str(name))
            problem = resolve_problem(bundled.kernel.spec, sizes, dtype, defaults=defaults)
            index, device = self._device(lookup.place, bundled)
            choice, cubin = choose_bundled(bundle, bundled, problem, device, self.l2)
            code = KernelCode(bundled.kernel, problem, device, choice.config, packed=cubin)
            return BoundKernel(code, choice, device, index)
        kernel = load_kernel(name)
        problem = resolve_problem(kernel.spec, sizes, dtype, defaults=defaults)
        shelf = DatabaseShelf(lookup.location, problem.kernel, problem.dtype)
        index, device = self._device(lookup.place, shelf)
        request = KernelRequest(kernel, problem, device, _nvrtc_of(shelf), shelf, l2=self.l2)
        pin, found = self._pin_in_force, None
        if pin is not None and (pinned := pin.find(problem, device)) is not None:
            found = pin.choice_of(pinned, request, lookup.numerics)
        if found is None:
            found = choose(request)
            if like is not None and found.config != like.config:
                found = same_bits(like, request)
        if shelf.fault:
            found = replace(found, unread=shelf.fault)
        served = BoundKernel(request.code(found), found, device, index)
        if pin is None and like is None and not self._waits(lookup):
            served.find_stand_in = partial(_stand_in, request, found.config, index)
        return served

    @staticmethod
    def _waits(asked: Lookup | MatmulOptions) -> bool:
        """Return True if the first call waits for the compiler, so that nothing but the choice is ever launched."""
        settings = read_settings()
        return asked.wait or settings.wait or (asked.numerics or settings.numerics) == "same"

    def _find_for_operation(self, lookup: Lookup, *, anew: bool, defaults: bool) -> BoundKernel:
        name, library = str(lookup.name), lookup.library
        operation = self._operation(name) or load_operation(name, checks=False)
        problem = operation.resolve(lookup.sizes, lookup.dtype, defaults=defaults)
        bundle = self._open_bundle(lookup.bundle) if lookup.bundle is not None else None
        shelf = self._shelf_for(operation, problem.dtype, lookup, anew=anew)
        pin = self._pin_in_force if bundle is None else None
        if bundle is not None:
            of_kernel = replace(lookup, dtype=problem.dtype, is_operation=False)

            def find(kernel: str, sizes: Sizes) -> BoundKernel:
                return self.find(replace(of_kernel, name=kernel, sizes=sizes))

            served = shelf.serve_packed(problem, bundle, find, library=library)
        elif pin is not None and (way := pin.way_for(shelf, problem, library=library, numerics=lookup.numerics)):
            served = shelf.bind(way)
        else:
            may_race = self.may_race and lookup.numerics != "same" and not anew and pin is None
            race = may_race and (lookup.race or shelf.races)
            served = shelf.serve(problem, library=library, race=race)
            if pin is None and not self._waits(lookup):
                served.find_stand_in = partial(shelf.stand_in, problem, library=library)
        served.operation, served.library_allowed = problem, library
        return served

    def _shelf_for(self, operation: Operation, dtype: str, lookup: Lookup, *, anew: bool = False) -> OperationShelf:
        """Return the results of an operation that a look-up reads, those of before unless they are outdated."""
        from autotile.serving.operations import OperationShelf

        path, l2 = lookup.bundle, self.l2
        key = operation.source, dtype, lookup.place, path or lookup.location, l2
        shelf = self._shelves.get(key)
        if shelf is None or shelf.operation is not operation or shelf.is_outdated(anew=anew):
            shelf = self._shelves[key] = OperationShelf(
                *(operation, dtype, lookup.location if path is None else _NO_DATABASE),
                partial(self._device, lookup.place),
                _nvrtc_of if path is None else lambda _: "",
                l2=l2,
            )
        return shelf

    def contenders(self, lookup: Lookup) -> list[BoundKernel]:
        """Return the best few ways to compute what is looked up, that which results say is served first."""
        with self.pins.instead(None):
            served = self.find(lookup, anew=True)
        if served.operation is None:
            return [served]
        shelf = self._shelf_for(load_operation(str(lookup.name), checks=False), served.operation.dtype, lookup)
        return shelf.contenders(served.operation, library=lookup.library)

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
        wait: bool = False,
        database: str | Path | None = None,
        stream: Any = None,
    ) -> Any:
        """Compute ``alpha a @ b + beta out`` on the GPU with the kernel, or the library, that is the fastest.

        Parameters
        ----------
        a, b
            Arrays on the GPU (CuPy, PyTorch, JAX, Numba) of one dtype: float32, float16 or bfloat16; shapes ``(m, k)``
            and ``(k, n)``, or stacks ``(batch, m, k)`` and ``(batch, k, n)``. A transposed view, such as ``weights.T``,
            is used without a copy.
        out
            Array for the result, shape ``(m, n)`` or ``(batch, m, n)``, C-contiguous, of the dtype of ``a`` or float32.
            None: a new array of the dtype of ``a``, a PyTorch tensor if ``a`` is one, else a CuPy array.
        alpha, beta
            Factors of the product and of the former content of ``out``.
        deterministic
            Whether what is served must give bitwise equal results for equal inputs; False allows sums in varying order.
            Another choice, such as after the first product of a size, may give others: see ``numerics`` and ``wait``.
        emulate
            Whether float32 products may be computed from bfloat16 parts on tensor cores, at the same accuracy. False:
            all products and sums are computed on the CUDA cores in IEEE fp32.
        library
            Whether cuBLAS may compute the product: where it was measured or is expected to be faster than the kernels,
            and where nothing is known of these. float32 products are then IEEE fp32, too.
        numerics
            ``"same"``: while the program runs, or with `autotile.pin`, only configurations that compute the same bits
            are exchanged; ``"any"``: all are. None for the setting.
        race
            Whether the first call of a product that was not measured races the best few kernels and cuBLAS for up to 20
            ms of GPU time, on scratch outputs; the times are stored. Nothing is raced while the stream is captured, or
            if ``out`` overlaps a factor.
        wait
            As for `get_best_kernel`.
        database
            Path or URL; None for the user's own.
        stream
            A stream of CuPy or PyTorch, or any object with ``__cuda_stream__``. None: PyTorch's current stream for
            PyTorch tensors, else CuPy's.

        Returns
        -------
        array
            ``out``, or the new array.

        Raises
        ------
        ArgumentError
            Shapes or dtypes do not match.
        InputError
            No kernel computes such a product.
        """
        products = self._products
        if products is not None and out is stream is database is None and alpha == 1.0 and beta == 0.0:
            known = products.find(a, b, (deterministic, emulate, library, numerics, race, wait))
            if known is not None and (made := known.launch(a, b)) is not None:
                return made
        from autotile.serving.operations import MatmulOptions

        if database is not None:
            database = self.location(database)  # a relative path means another file in another working directory
        options = MatmulOptions(deterministic, emulate, library, numerics, race, wait, database)
        scalars = {} if alpha == 1.0 and beta == 0.0 else {"alpha": alpha, "beta": beta}
        return self.products.multiply((a, b, out), scalars, stream, options)

    def clear(self) -> None:
        """Forget the served kernels and the bundles, so that new results are seen; misses stay counted."""
        self.served.clear()
        if self._products is not None:
            self._products.clear()
        self._open_bundle.cache_clear()
        self._named_operation.cache_clear()
        self._shelves.clear()

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
        """Return True if a CUDA device, which must exist, is the current one."""
        return self.only_device is not None or self.current_device() == device

    def location(self, database: str | Path | None) -> str:
        """Return the path or URL of the database that a call uses."""
        if database:
            return absolute_location(database)
        return self._database or served_database()

    def _device(self, device: int | str | None, stored: Stored) -> tuple[int | None, DeviceProperties]:
        """Return the CUDA device to launch on, None if the kernel can only be inspected, and its properties.

        A device to inspect is the named one, else that of the user's newest result: measured ones come before replayed
        ones, and imported ones last.
        """
        if not isinstance(device, str):
            index = self.current_device() if device is None else device
            if index is not None:
                return index, live_device(index)
        own_first = sorted(
            stored.winners, key=lambda best: (best.shipped, not best.key.template_hash, best.key.source != "cuda")
        )
        tuned = [best.device for best in own_first if best.device is not None]
        if not isinstance(device, str):
            return None, tuned[0] if tuned else device_profile(_FALLBACK_PROFILE)
        by_name = {one.name.lower(): one for one in reversed(tuned)}
        if device.lower() in by_name:
            return None, by_name[device.lower()]
        profile = device_profile(device)
        return None, by_name.get(profile.name.lower(), profile)

    def _refusal(self, served: BoundKernel, location: str, bundle: str | None) -> NotTunedError:
        """Return the error that strict serving raises instead of serving a fallback."""
        stored: Sequence[Winner]
        if bundle is not None and not served.is_library:
            bundled = self._open_bundle(bundle).kernel(served.kernel)
            stored, version = bundled.winners, bundled.nvrtc_version
        else:  # those of other versions of the kernel, too
            shelf = DatabaseShelf(location, served.problem.kernel, served.problem.dtype)
            stored, version = shelf.winners, _nvrtc_of(shelf)
        differences = served.choice.differences
        requested = key_of(served.definition, served.problem, served.device, nvrtc_version=version, l2_mode=self.l2)
        if not differences and stored:
            differences = min((key_differences(winner.key, requested) for winner in stored), key=len)
        if not stored:
            why, differences = f": nothing is tuned for {served.problem.kernel}", ()
        elif not differences:
            why = f" ({served.tier}): what was tuned for it breaks a rule or a limit here"
        else:
            listed = "; ".join(f"{name}: tuned {tuned}, requested {wanted}" for name, tuned, wanted in differences)
            why = f" ({served.tier}): the nearest result differs in {listed}"
        return NotTunedError(
            f"{served.problem} on {served.device.name} is not tuned, and strict=True allows no fallback{why}; run "
            "`autotile tune`, or call without strict",
            differences,
        )


def state_of(l2: str | None, deployment: str | None) -> L2Mode | None:
    """Return the state for which kernels are served, from arguments that a program gives; None if it gives none."""
    if l2 not in (None, "cold", "hot"):
        raise InputError(f"l2 is {l2!r:.80}, expected 'cold' or 'hot'")
    if deployment not in (None, "graph", "eager"):
        raise InputError(f"deployment is {deployment!r:.80}, expected 'graph' or 'eager'")
    if deployment == "eager":
        if l2 == "cold":
            raise InputError("deployment='eager' leaves the L2 cache as the calls before do; leave l2='cold' out")
        return "eager"
    return "hot" if l2 == "hot" else "cold" if l2 or deployment else None


def _check_types(hint: Any, **values: object) -> None:
    if not all(type(value) is hint for value in values.values()):
        from autotile.core.argument_types import check_value

        for name, value in values.items():
            check_value(name, value, hint)


def _check_numerics(numerics: object) -> None:
    if numerics not in (None, "any", "same"):
        raise InputError(f"numerics is {numerics!r:.80}, expected 'any' or 'same'")


def _bundle_path(bundle: str | Path | None) -> str | None:
    return str(absolute_path(bundle, "a bundle")) if bundle is not None else None


def _bundle_at(path: str) -> Bundle:
    from autotile.exchange.bundle import Bundle

    return Bundle(Path(path))


def _whole_size(size: Any) -> Any:
    """Return a number that equals a whole number as that, since both are one key of a dictionary: 2048.0 as 2048."""
    try:  # also an array or tensor of one number, which is no key
        whole = int(size.real) if isinstance(size, Number | np.bool_) else operator.index(size)  # type: ignore[union-attr]
    except (OverflowError, TypeError, ValueError):
        return size
    return whole if whole == size else size


_NO_DATABASE = "/dev/null/none"
"""Path at which there cannot be a database, for what is served from a bundle."""
_FALLBACK_PROFILE = "h200"
"""Device to serve for if there is no GPU and nothing is tuned: the one that the recordings are of."""


def _nvrtc_of(stored: Stored) -> str:
    """Return the version of NVRTC on this machine; without NVRTC, the one that the newest result was compiled with."""
    try:
        return nvrtc_version()
    except ToolchainError:
        return stored.winners[0].key.nvrtc_version if stored.winners else ""


dispatchers: WeakSet[Dispatcher] = WeakSet()
"""The dispatchers of this process."""


def _begin_anew() -> None:
    for dispatcher in list(dispatchers):
        dispatcher.refresher.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)

default_dispatcher = Dispatcher()
"""The dispatcher of `get_best_kernel` and `autotile.matmul`."""

get_best_kernel = default_dispatcher.get_best_kernel
"""`Dispatcher.get_best_kernel` of the default dispatcher; a function around it would double the time of a call."""

matmul = default_dispatcher.matmul

find_best_kernel = default_dispatcher.find_best_kernel

forget_served = default_dispatcher.clear
"""`Dispatcher.clear` of the default dispatcher, so that new tuning results and new bundles are seen."""


def find_best_result(*request: Any, **options: Any) -> BoundKernel:
    """Return the kernel of `find_best_kernel` where nothing is pinned: results are judged by what they are."""
    with default_dispatcher.pins.instead(None):
        return find_best_kernel(*request, **options)


def add_library(operation: str, name: str, callable: Callable[..., object], *, version: str = "") -> None:
    """Add a library that computes an operation, to be compared with its kernels and called where it is faster.

    Parameters
    ----------
    operation
        Name of the operation, or path of its file.
    name
        Name of the library. One that was added before is replaced.
    callable
        Function over the arrays of the operation's kernels, in the order of their arguments, as a caller passes them:
        of CuPy or PyTorch, or any that the kernels take. It writes the outputs, on the current stream of the arrays'
        library; scalars that a caller gives, such as ``alpha``, are passed by name.
    version
        Version of the library. Times that were measured with another version are not compared.

    Raises
    ------
    InputError
        There is no such operation, or the name is one of a built-in library.

    Examples
    --------
    >>> autotile.add_library("sum.toml", "cupy", lambda x, y: x.sum(out=y))  # doctest: +SKIP
    """
    from autotile.kernel.operation import Library
    from autotile.serving.operations import keep_library

    _check_types(str, operation=operation, name=name, version=version)
    _check_types(Callable[..., object], callable=callable)

    keep_library(load_operation(operation), Library(name, version, callable))
    forget_served()


def pin(path: str | Path, *, strict: bool = False) -> None:
    """Freeze what is served to a file, or serve what the file says.

    If the file does not exist, it is written: with what was served so far, and whatever is served from now on. If
    it exists, its choices are served, also by kernels that the program has already, and it is not changed. New
    results change nothing any more, except with ``numerics="same"``.

    Parameters
    ----------
    path
        The file, JSON.
    strict
        Refuse to serve a problem that is not in an existing file, rather than serve it as usual with a
        `PinWarning`.

    Raises
    ------
    PinError
        The file cannot be read or written, is malformed, or holds a choice that cannot be served in place of what
        is served now: of another version of the kernel, or for arrays of other shapes. Nothing is changed then.
    InputError
        The path is empty.
    CompileError, ToolchainError
        A pinned kernel cannot be loaded in place of one that is. Nothing is changed then.

    Examples
    --------
    >>> pin("choices.json")  # doctest: +SKIP
    """
    _check_types(str | Path, path=path)
    _check_types(bool, strict=strict)
    default_dispatcher.pins.pin(path, strict=strict)


def unpin() -> None:
    """Serve what the results say again, whatever was pinned by `pin` or by the setting."""
    default_dispatcher.pins.unpin()

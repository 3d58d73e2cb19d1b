"""Requests of a program: their arguments in one form, so that they can be repeated here or in another process."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

import numpy as np

from autotile.database.paths import absolute_location
from autotile.errors import DeviceError
from autotile.kernel.library import is_path
from autotile.settings import Numerics, absolute_path, read_settings

if TYPE_CHECKING:
    from autotile.serving.bound import BoundKernel
    from autotile.serving.dispatcher import Dispatcher


class Request(NamedTuple):
    """Arguments of a call of `get_best_kernel`, which mean the same in another process; None for those not given."""

    name: str
    """Name of the kernel, or absolute path of its search-space file."""
    sizes: Mapping[str, int]
    dtype: str | None
    device: str | None
    """Name of a GPU; None for the current CUDA device."""
    database: str | None
    bundle: str | None
    library: bool = True
    """Whether libraries may compute an operation."""
    numerics: Numerics | None = None
    """Whether only configurations that compute the same bits are exchanged."""


DEFAULTS = {"dtype": None, "database": None, "bundle": None, "library": True, "numerics": None, "race": False}
"""Options of `get_best_kernel` that mean the same as none."""

Arguments = ParamSpec("Arguments")
Find = Callable[Concatenate["Dispatcher", Arguments], "BoundKernel"]


def kept(serve: Find[Arguments]) -> Find[Arguments]:
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
        return self.served.keep(key, served) if _is_lasting(*names, **given) else served

    return find


def _is_lasting(name: object, strict: Any = False, database: Any = None, bundle: Any = None, **_: object) -> bool:
    """Return whether an equal call means the same later, in another working directory, too."""
    if strict or bundle is not None or not (database is None or database == absolute_location(str(database))):
        return False
    return not (isinstance(name, str | os.PathLike) and is_path(str(name)) and not Path(name).is_absolute())


class Asked(NamedTuple):
    """What a kernel was asked for with, beside its sizes."""

    operation: str | None
    """Name or path of the operation; None if a kernel was asked for."""
    dtype: str | None
    place: int | str | None
    location: str
    library: bool
    numerics: Numerics | None


def choose_again(dispatcher: Dispatcher, sizes: Mapping[str, int], asked: Asked, served: BoundKernel) -> BoundKernel:
    """Return what a dispatcher would serve now; what is served if that must not change."""
    operation, dtype, place, location, library, numerics = asked
    pin = dispatcher.pins.in_force()
    must_match = pin is None and (numerics or read_settings().numerics) == "same"
    if operation is not None and not must_match:
        fresh = dispatcher.find_for_operation(
            operation, dtype, place, location, sizes, library=library, numerics=numerics, anew=True
        )
    elif served.is_library:
        return served
    else:
        problem, like = served.problem, served.choice if must_match else None
        fresh = dispatcher.find_best_kernel(
            served.definition, problem.dtype, place, location, problem.sizes, numerics=numerics, like=like
        )
    is_same = fresh.kernel == served.kernel and fresh.config == served.config
    must_stay = pin is not None and (not fresh.choice.pinned or (pin.is_recording and is_same))
    return served if must_stay else fresh


def bundle_path(bundle: str | Path | None) -> str | None:
    """Return the absolute path of a bundle; None if none is given."""
    return str(absolute_path(bundle, "a bundle")) if bundle else None


def device_index(device: object) -> int:
    """Return a CUDA device index as a number of Python's.

    Raises
    ------
    DeviceError
        It is no whole number, or too large.
    """
    index: int | None
    try:
        index = operator.index(device)  # type: ignore[arg-type]
    except TypeError:
        index = None
    if index is None or abs(index) >= 2**31:  # what a CUDA index fits in
        raise DeviceError(f"the device is {device!r:.80}, expected a CUDA index such as 0, or a name such as 'h200'")
    return index


def whole_size(size: Any) -> Any:
    """Return a number that equals a whole number as that, since both are one key of a dictionary: 2048.0 as 2048."""
    if type(size) is not int and isinstance(size, Number | np.bool_):
        try:
            whole = int(size.real)  # type: ignore[union-attr]
        except (OverflowError, ValueError):
            return size
        return whole if whole == size else size
    return size

"""Block, grid, shared memory and macros of a configuration, as Kernel Tuner's arguments state them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from autotile.errors import InputError
from autotile.kernel.table import is_c_identifier
from autotile.kernel_tuner.python_strings import evaluate, replace_names
from autotile.kernel_tuner.util import default_block_size_names

_DEFAULT_BLOCK = (256, 1, 1)
"""Threads of a block along each axis where no parameter states them."""
_GRID_NAMES = ("grid_size_x", "grid_size_y", "grid_size_z")

Params = Mapping[str, Any]


def block_names(given: Sequence[str] | None, parameters: Iterable[str]) -> tuple[str, str, str]:
    """Return the names of the parameters that are the block's extents.

    Parameters
    ----------
    given
        The argument ``block_size_names``; None for the default names, in upper or lower case.
    parameters
        Names of the parameters.

    Raises
    ------
    InputError
        The argument is not a list of at most three names.
    """
    if given is not None:
        if not isinstance(given, list | tuple) or len(given) > 3 or not all(isinstance(name, str) for name in given):
            raise InputError(f"block_size_names is {given!r}, expected a list of at most three names")
        names: list[str] = list(given)
        x, y, z = names + default_block_size_names[len(names) :]
        return x, y, z
    names = list(parameters)
    spelled = {name.lower(): name for name in names if name.lower() not in names}
    x, y, z = (spelled.get(name, name) for name in default_block_size_names)
    return x, y, z


@dataclass(frozen=True)
class KernelTunerLaunch:
    """Launch of a kernel, stated by Kernel Tuner's arguments.

    Attributes
    ----------
    problem_size
        A number, text, function of the parameters, or up to three numbers and texts.
    grid_div
        ``grid_div_x``, ``grid_div_y`` and ``grid_div_z``.
    names
        Names of the block's extents, see `block_names`.
    smem_args
        ``smem_args``: its ``size`` is the dynamic shared memory in bytes.
    """

    problem_size: Any
    grid_div: tuple[Any, Any, Any]
    names: tuple[str, str, str]
    smem_args: Mapping[str, Any] | None = None

    def block(self, params: Params) -> tuple[int, int, int]:
        """Return the threads of a block along each axis."""
        x, y, z = (int(params.get(name, default)) for name, default in zip(self.names, _DEFAULT_BLOCK, strict=True))
        return x, y, z

    def problem(self, params: Params) -> tuple[int, int, int]:
        """Return the problem size along each axis.

        Raises
        ------
        InputError
            An extent is neither a whole number nor text.
        """
        size = self.problem_size(params) if callable(self.problem_size) else self.problem_size
        if isinstance(size, str | Integral):
            size = (size,)
        if not isinstance(size, Iterable):
            raise InputError(f"problem_size is {size!r}, expected a number, text, or up to three of them")
        extents = [_extent(each, params) for each in size]
        if not 1 <= len(extents) <= 3:
            raise InputError(f"problem_size has {len(extents)} extents, expected 1 to 3")
        x, y, z = (*extents, 1, 1)[:3]
        return x, y, z

    def grid(self, params: Params) -> tuple[int, int, int]:
        """Return the blocks of the grid along each axis: the problem size over the divisors, rounded up."""
        divisors = [_divisor(given, name, params) for given, name in zip(self.grid_div, self.names, strict=True)]
        x, y, z = (math.ceil(float(e) / float(d)) for e, d in zip(self.problem(params), divisors, strict=True))
        return x, y, z

    def dynamic_smem_bytes(self, params: Params) -> int:
        """Return the dynamic shared memory of a block."""
        size = (self.smem_args or {}).get("size", 0)
        if callable(size):
            size = size(params)
        return int(evaluate(size, params) if isinstance(size, str) else size)


def _extent(given: Any, params: Params) -> int:
    if isinstance(given, str):
        return int(evaluate(given, params))
    if isinstance(given, Integral):
        return int(given)
    raise InputError(f"problem_size contains {given!r}, expected whole numbers and texts")


def _divisor(given: Any, name: str, params: Params) -> float:
    """Return what a dimension of the problem is divided by: the block's extent if nothing is given."""
    if given is None:
        return float(params.get(name, 1))
    if callable(given):
        return float(given(params))
    if isinstance(given, str):
        return float(int(evaluate(given, params)))
    if isinstance(given, Integral):
        return float(given)
    if isinstance(given, Iterable):
        return math.prod(_divisor(each, "", params) if each is not None else 1.0 for each in given)
    raise InputError(f"a grid divisor is {given!r}, expected a number, text, a function, or a list of these")


@dataclass(frozen=True)
class Macros:
    """The macros of a configuration.

    Attributes
    ----------
    launch
        The launch, whose extents are macros unless ``defines`` is given.
    defines
        The argument of that name: values, texts or functions by name; None for all parameters.
    """

    launch: KernelTunerLaunch
    defines: Mapping[str, Any] | None = None

    def of(self, params: Params) -> dict[str, str]:
        """Return the text of each macro.

        Raises
        ------
        InputError
            A name is not a C identifier.
        """
        if self.defines is not None:
            return {_checked(name): _text(_defined(value, params)) for name, value in self.defines.items()}
        grid = zip(_GRID_NAMES, self.launch.grid(params), strict=True)
        block = zip(self.launch.names, self.launch.block(params), strict=True)
        return {name: _text(value) for name, value in (*grid, *block, *params.items(), ("kernel_tuner", 1))}

    def prepended(self, source: str, params: Params) -> str:
        """Return a source with its macros; lines are still counted from the source's first one."""
        macros = self.of(params)
        if not macros:
            return source
        return "".join(f"#define {name} {text}\n" for name, text in macros.items()) + "#line 1\n" + source

    def for_entry(self, params: Params) -> str:
        """Return lines for the end of the source, so that the kernel's name may name parameters that are no macros."""
        if self.defines is None:
            return ""
        missing = params.keys() - self.of(params).keys()
        return "".join(f"\n#define {name} {_text(params[name])}" for name in params if name in missing) + "\n"


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not is_c_identifier(name):
        raise InputError(f"defines contains {name!r}, expected C identifiers")
    return name


def _defined(value: Any, params: Params) -> Any:
    if callable(value):
        return value(params)
    return replace_names(value, params) if isinstance(value, str) else value


def _text(value: Any) -> str:
    plain = int(value) if isinstance(value, bool) else value
    return str(plain).replace("\n", "\\\n")


CompilerOptions = Sequence[str] | Callable[[Params], Sequence[str]] | None

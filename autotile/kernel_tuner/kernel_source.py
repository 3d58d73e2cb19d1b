"""The source and the launch of a kernel, as Kernel Tuner's scripts pass them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from autotile.errors import InputError
from autotile.kernel.table import is_c_identifier
from autotile.kernel_tuner.restrictions import evaluate, replace_names
from autotile.kernel_tuner.util import default_block_size_names

Params = Mapping[str, Any]

_GPU_LANGUAGES = ("CUDA", "CUPY", "NVCUDA", "PYCUDA")
"""Kernel Tuner's names of CUDA; autotile compiles all with NVRTC and launches with the driver."""
_REFUSALS = {
    "C": "a function that runs on the host cannot be tuned: autotile launches kernels itself, and times them alone; "
    "pass the __global__ function that the host function launches, with lang='CUDA'",
    "OPENCL": "autotile runs CUDA C++ only",
    "HIP": "autotile runs CUDA C++ only; HIP code that NVRTC compiles can be passed with lang='CUDA'",
    "JULIA": "autotile runs CUDA C++ only",
    "FORTRAN": "autotile runs CUDA C++ only",
    "HYPERTUNER": "autotile has no strategies of Kernel Tuner to tune",
}
_FILE_NAME_CHARACTERS = 250
_CODE_MARKS = ("(", ")", "{", "}", ";", "\n", "__global__ ", "void ", "float ")
_FILE_MARKS = (".c", ".h")


@dataclass(frozen=True)
class KernelSource:
    """Source of a kernel.

    Attributes
    ----------
    given
        Code, a file, a function that returns the code of a configuration, or a list of files of which the first has
        the kernel and includes the others.
    options
        ``compiler_options``: a list, or a function of the configuration.
    """

    given: Any
    options: Sequence[str] | Callable[[Params], Sequence[str]] | None = None

    @property
    def first(self) -> Any:
        """The source that has the kernel."""
        return self.given[0] if isinstance(self.given, list | tuple) and self.given else self.given

    @property
    def is_generated(self) -> bool:
        """Whether a function makes the source."""
        return callable(self.first)

    @property
    def path(self) -> Path | None:
        """Path of the file of the kernel; None if it is code."""
        first = self.first
        if isinstance(first, Path):
            return first.absolute()
        return Path(first).absolute() if isinstance(first, str) and _looks_like_a_file(first) else None

    def text(self, params: Params) -> str:
        """Return the code for a configuration.

        Raises
        ------
        InputError
            The source has another type, or its file cannot be read.
        """
        first = self.first
        text = first(dict(params)) if callable(first) else first
        path = self.path
        if path is not None:
            try:
                return path.read_text(errors="replace")
            except OSError as error:
                raise InputError(f"cannot read the source {path}: {error.strerror}") from None
        if not isinstance(text, str):
            raise InputError(f"kernel_source is {type(text).__name__}, expected code, a file, a function, or a list")
        return text

    def variant(self, macros: Macros, params: Params) -> str:
        """Return the code for a configuration, with its macros."""
        return macros.prepended(self.text(params), params) + macros.for_entry(params)

    def compiler_options(self, params: Params) -> tuple[str, ...]:
        """Return the options for NVRTC; see `nvrtc_options`."""
        given = self.options(params) if callable(self.options) else self.options
        return nvrtc_options(given or ())

    def check_language(self, lang: str | None) -> None:
        """Raise if the source is not CUDA C++.

        Raises
        ------
        InputError
            ``lang``, or the code where it is None, is another language.
        """
        language = lang.upper() if lang else self._detected()
        if language in _GPU_LANGUAGES:
            return
        if language not in _REFUSALS:
            raise InputError(f"there is no language {lang!r}; expected one of CUDA, CuPy, NVCUDA, or None")
        found = f"lang={lang!r}" if lang else f"the code looks like {language}, as it has no __global__ function"
        raise InputError(f"{found}: {_REFUSALS[language]}")

    def _detected(self) -> str:
        if self.is_generated:
            return "CUDA"
        code = self.text({}).lower()
        if "__global__" in code:
            return "CUDA"
        return "OPENCL" if "__kernel" in code else "C"


_DROPPED = ("-O0", "-O1", "-O2", "-O3", "-O4", "-c", "-shared", "--shared", "-cubin", "-ptx")
_DROPPED_PREFIXES = (
    *("-W", "-arch", "--gpu-architecture", "-gencode", "--generate-code", "-code", "--gpu-code"),
    *("-Xcompiler", "--compiler-options", "-ccbin", "--compiler-bindir", "-Xlinker", "-L", "-l", "--library"),
)
_WITH_VALUE = ("-Xcompiler", "--compiler-options", "-ccbin", "-gencode", "-arch", "-code", "-Xlinker")


def nvrtc_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options of a compiler that NVRTC has, too; the target and those for the host compiler are left out.

    Raises
    ------
    InputError
        The options are not a list of texts.
    """
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise InputError(f"compiler_options is {options!r:.80}, expected a list of texts")
    kept: list[str] = []
    words = iter(options)
    for option in words:
        if option in _WITH_VALUE:
            next(words, None)
        elif option in ("-I", "--include-path"):
            kept.append(f"-I{Path(next(words, '.')).absolute()}")
        elif option.startswith("-I"):
            kept.append(f"-I{Path(option[2:]).absolute()}")
        elif option in ("-Xptxas", "--ptxas-options"):
            kept.append(f"--ptxas-options={next(words, '')}")
        elif option not in _DROPPED and not (
            option.startswith(_DROPPED_PREFIXES) and not option.startswith("-lineinfo")
        ):
            kept.append(option)
    return tuple(kept)


def _looks_like_a_file(text: str) -> bool:
    is_short = len(text) <= _FILE_NAME_CHARACTERS and not any(mark in text for mark in _CODE_MARKS)
    return is_short and any(mark in text for mark in _FILE_MARKS)


_DEFAULT_BLOCK = (256, 1, 1)
"""Threads of a block along each axis where no parameter states them."""
_GRID_NAMES = ("grid_size_x", "grid_size_y", "grid_size_z")


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
    """Return the divisor of a dimension of the problem: the block's extent if nothing is given."""
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

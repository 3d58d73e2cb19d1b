"""The source of a kernel, as Kernel Tuner's scripts pass it, and the options that it is compiled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotile.errors import InputError
from autotile.kernel_tuner.launch_translation import Macros

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

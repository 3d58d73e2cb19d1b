"""A compiler's messages: the first error, and its remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.cuda.headers import include_folders
from autotile.errors import CompileError
from autotile.kernel.global_functions import global_functions
from autotile.kernel.includes import is_permitted, permitted_folders

if TYPE_CHECKING:
    from autotile.cuda.compiler import CompileJob

_PLACE = re.compile(r"(/[^\n]*?)\(\d+\)")
"""Absolute path and line at the start of an error."""
_NAME_MAP = re.compile(r"__nv_name_map\(\d+\): error: ([^\n]*)")
"""Error in the part that NVRTC appends to a source for the names of its entries."""

_MISSING_HEADER = re.compile(r'(?:cannot|could not) open source file "([^"]+)"|fatal error: (\S+): No such file')
_UNDEFINED = re.compile(r'identifier "(\w+)" is undefined')
_DECLARED = re.compile(r"\b(?:int|unsigned|short|long|size_t|bool|float|double|auto|\w+_t)\s+(?:const\s+)?(\w+)\s*[={]")
_HOST = re.compile(r"not allowed in JIT mode|namespace \"std\" has no member|calling a __host__ function")
_PACKAGES = {
    r"crt/": "nvidia-cuda-crt",
    r"curand": "nvidia-curand",
    r"(?:cub|cuda|thrust|nv)/": "nvidia-cuda-cccl",
    r"cublas": "nvidia-cublas",
    r"(?:cuda|vector_|cooperative_groups|mma\.h)": "nvidia-cuda-runtime",
}
"""Wheels of CUDA 13 that hold headers, by the beginnings of their names."""
HOST_CURE = (
    "NVRTC compiles device code only: keep code for the host out with #ifndef __CUDACC_RTC__ ... #endif, or compile "
    'with nvcc: [kernel] compiler = "nvcc"'
)


def compile_error(log: str, job: CompileJob) -> CompileError:
    """Return the error for a compiler's log, with the remedy where it is known."""
    error = first_error(log, Path(job.template_path), job.include_folders)
    if match := _NAME_MAP.match(error):
        return CompileError(_entry_error(job, match[1]), log)
    cure = _cure(error, {option[2:].partition("=")[0] for option in job.options if option.startswith("-D")})
    return CompileError(f"{error}\n{cure}" if cure else error, log)


def first_error(log: str, template: Path, own: Sequence[str] = ()) -> str:
    """Return the compiler's first error, with the lines that show the source.

    Of a file that the template must not include, which a macro may have named, nothing is shown.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    for index, line in enumerate(lines):
        if "error" in line.lower():
            place = _PLACE.match(line)
            if place is not None and _is_foreign(Path(place[1]), template, own):
                return f"{place[0]}: error in a file that the template must not include, as it is outside of its folder"
            context = [following for following in lines[index + 1 : index + 3] if following.strip()]
            return "\n".join([line, *context])
    return log.strip()


def _entry_error(job: CompileJob, error: str) -> str:
    """Return why an entry does not name one function, with those that there are."""
    found = global_functions(job.source)
    names = ", ".join(dict.fromkeys(function.display for function in found)) or "none in the template itself"
    entries = " and ".join(repr(job.expression(entry)) for entry in job.entries)
    if "which instance of function template" in error:
        cure = 'it is a template, so give its arguments, as in entry = "name<BLOCK, float>"'
    elif "which instance of overloaded" in error:
        cure = 'it is overloaded, so give its type, as in entry = "(void (*)(float*, int))name"'
    else:
        cure = (
            'give the C++ name of a __global__ function, with its namespace, as in entry = "name" or "space::name<4>"'
        )
    return f"entry {entries}: {error}; {cure} (__global__ functions found: {names})"


def _cure(error: str, macros: Collection[str]) -> str:
    """Return the remedy of an error; "" if none is known.

    Parameters
    ----------
    error
        The error, with the lines that show the source.
    macros
        Names of the macros that the compiler gets.
    """
    if match := _MISSING_HEADER.search(error):
        return header_cure(match[1] or match[2])
    if match := _UNDEFINED.search(error):
        name = match[1]
        if name.startswith("cuda") and name[4:5].isupper():
            return HOST_CURE
        if name.isupper():
            return f'if {name} is a macro, define it: [kernel] defines = {{ {name} = "..." }}'
    if "expected an identifier" in error and (declared := _DECLARED.search(error)) and declared[1] in macros:
        return f"{declared[1]} is a parameter here, and so a macro: remove its declaration from the source"
    if "texture is not a template" in error:
        return _TEXTURE_CURE
    return HOST_CURE if _HOST.search(error) else ""


_TEXTURE_CURE = (
    "texture references were removed in CUDA 12: take a parameter cudaTextureObject_t instead, and declare it as in "
    'tex = { texture = "image" }'
)


def header_cure(name: str) -> str:
    """Return how to provide a header that is missing."""
    package = next((package for pattern, package in _PACKAGES.items() if re.match(pattern, name)), None)
    if package is not None:
        return f"{name} comes with the wheel {package} (pip install {package}) or a CUDA toolkit (set CUDA_HOME)"
    return (
        f'if {name} is in a folder of yours, name the folder: [kernel] include = ["path/to/folder"], or set '
        "AUTOTILE_INCLUDE"
    )


def _is_foreign(path: Path, template: Path, own: Sequence[str]) -> bool:
    folders = permitted_folders(template, [Path(folder) for folder in (*own, *include_folders())])
    return not is_permitted(path, folders)

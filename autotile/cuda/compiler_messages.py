"""A compiler's messages: the first error, and its remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.cuda.toolchain import include_folders
from autotile.errors import CompileError
from autotile.kernel.global_functions import global_functions
from autotile.kernel.includes import is_permitted, permitted_folders

if TYPE_CHECKING:
    from autotile.cuda.compiler import CompileJob

_PLACE = re.compile(r"(/[^\n]*?)\(\d+\)")
"""Absolute path and line at the start of an error."""
_NAME_MAP = re.compile(r"__nv_name_map\(\d+\): error: ([^\n]*)")
"""Error in the part that NVRTC appends to a source for the names of its entries."""


def compile_error(log: str, job: CompileJob) -> CompileError:
    """Return the error for a compiler's log, with the remedy where it is known."""
    error = first_error(log, Path(job.template_path))
    if match := _NAME_MAP.match(error):
        return CompileError(_entry_error(job, match[1]), log)
    return CompileError(error, log)


def first_error(log: str, template: Path) -> str:
    """Return the compiler's first error, with the lines that show the source.

    Of a file that the template must not include, which a macro may have named, nothing is shown.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    for index, line in enumerate(lines):
        if "error" in line.lower():
            place = _PLACE.match(line)
            if place is not None and _is_foreign(Path(place[1]), template):
                return f"{place[0]}: error in a file that the template must not include, as it is outside of its folder"
            context = [following for following in lines[index + 1 : index + 3] if following.strip()]
            return "\n".join([line, *context])
    return log.strip()


def _entry_error(job: CompileJob, error: str) -> str:
    """Return why an entry does not name one function, with those that there are."""
    found = global_functions(job.source)
    names = ", ".join(dict.fromkeys(function.display for function in found)) or "none in the template itself"
    entries = " and ".join(repr(entry) for entry in job.entries)
    if "which instance of function template" in error:
        cure = 'it is a template, so give its arguments, as in entry = "name<BLOCK, float>"'
    elif "which instance of overloaded" in error:
        cure = 'it is overloaded, so give its type, as in entry = "(void (*)(float*, int))name"'
    else:
        cure = (
            'give the C++ name of a __global__ function, with its namespace, as in entry = "name" or "space::name<4>"'
        )
    return f"entry {entries}: {error}; {cure} (__global__ functions found: {names})"


def _is_foreign(path: Path, template: Path) -> bool:
    folders = permitted_folders(template, [Path(folder) for folder in include_folders()])
    return not is_permitted(path, folders)

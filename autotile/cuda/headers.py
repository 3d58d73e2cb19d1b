"""Headers: the folders of the toolkit and of the author, what NVRTC lacks, and the remedy where one is missing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.core.device import version_of
from autotile.cuda.toolchain import nvrtc_version
from autotile.errors import CompileError, InputError
from autotile.kernel.sources import (
    global_functions,
    included_names,
    is_file,
    is_permitted,
    permitted_folders,
    read_text,
    strip_comments,
    without_host_functions,
)
from autotile.settings import toolkit_folders

if TYPE_CHECKING:
    from autotile.cuda.compiler import CompileJob


_OWN = Path(__file__).resolve().parent
_DEVICE_HEADERS = _OWN / "device_headers"  # headers in place of the toolkit's, which NVRTC refuses
_STANDARD_HEADERS = _OWN / "standard_headers"  # standard headers that NVRTC lacks
PRELUDE = "autotile_prelude.h"
"""Header of what nvcc declares without any ``#include``."""
_VERSION = re.compile(rb"#define\s+CUDA_VERSION\s+(\d+)")
_LIBRARIES = ("cudart", "cccl", "curand")
"""Libraries of `cuda.pathfinder` whose headers kernels include, the runtime first."""
_OF_WHEELS = ("cuda_cccl", "cuda_runtime", "cuda_nvcc", "curand")
"""Folders below ``nvidia`` of the wheels for CUDA 12 that hold headers; those for CUDA 13 share ``nvidia/cu13``."""
_UNNUMBERED_MAJOR = 12
_OF_A_WHEEL = re.compile(rf"/nvidia/(?:cu(\d+)|{'|'.join(_OF_WHEELS)})/include(?:/cccl)?$")
_CCCL_VERSIONS = (
    ("cuda/std/__cccl/version.h", re.compile(rb"#\s*define\s+CCCL_VERSION\s+(\d+)"), 1000),
    ("thrust/version.h", re.compile(rb"#\s*define\s+THRUST_VERSION\s+(\d+)"), 100),
)
"""Files that state CCCL's version, with its pattern, and the factor between a patch and a minor version."""
_MINOR_VERSIONS = 1000

HOST_HEADERS = (
    *("cerrno", "condition_variable", "deque", "errno.h", "exception", "filesystem", "forward_list", "fstream"),
    *("future", "getopt.h", "iomanip", "ios", "iostream", "istream", "list", "locale", "map", "memory", "mutex"),
    *("ostream", "queue", "random", "regex", "set", "signal.h", "sstream", "stack", "stdexcept", "streambuf", "string"),
    *("string_view", "sys/time.h", "sys/types.h", "thread", "typeinfo", "unistd.h", "unordered_map", "unordered_set"),
    *("vector", "ctype.h", "cctype", "valarray", "inttypes.h", "cinttypes", "malloc.h"),
)
"""Standard headers of which device code can use nothing; for a source with host functions, they are empty."""


@lru_cache
def toolkit_headers() -> tuple[str, ...]:
    """Return the folders of the toolkit's headers: NVRTC's own version first, and the newest CCCL before all others.

    Of equal versions, the wheels' come before an installed toolkit's.
    """
    installed = [
        folder.resolve()
        for toolkit in toolkit_folders()
        for folder in (toolkit / "include", toolkit / "include" / "cccl")
        if os.path.isdir(folder)  # noqa: PTH112 - never raises
    ]
    found = {os.path.realpath(folder): folder for folder in reversed([*_wheel_folders(), *installed])}
    return tuple(map(str, _ranked(reversed(found.values()))))


def include_folders() -> tuple[str, ...]:
    """Return the folders that the compiler searches after the kernel's own: of the toolkit, and of standard headers."""
    return str(_DEVICE_HEADERS), *_without_older(toolkit_headers()), str(_STANDARD_HEADERS)


@lru_cache
def _without_older(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the folders of CCCL alone but the first: CUTLASS asks for a header that only older versions have."""
    alone = [one for one in folders if cccl_version(Path(one)) and not is_file(Path(one, "cuda.h"))]
    return tuple(one for one in folders if one not in alone[1:])


def find_header(name: str) -> Path | None:
    """Return the path of a header, such as ``mma.h``; None if there is none."""
    paths = (Path(folder) / name for folder in include_folders())
    return next((path for path in paths if path.is_file()), None)


def _wheel_folders() -> list[Path]:
    """Return the folders of all wheels, of which other packages, such as PyTorch, may bring older ones.

    A runtime that is no wheel is found by `cuda.pathfinder`, and the other libraries beside it. Where it is a wheel,
    they are not asked for: it would start an interpreter in each compile worker to look for one that is not installed.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # it is installed with the bindings of NVRTC
        return []
    found: list[Path] = []
    for library in _LIBRARIES:
        try:
            folder = find_nvidia_header_directory(library)
        except Exception:
            continue
        if folder and _OF_A_WHEEL.search(folder):
            break
        found += [Path(folder)] if folder else []
    major = version_of(nvrtc_version())[0]
    names = [f"cu{major}/include", f"cu{major}/include/cccl", *(f"{name}/include" for name in _OF_WHEELS)]
    places = (Path(place, "nvidia", name) for place in sys.path if place for name in names)
    return [*found, *(folder for folder in places if os.path.isdir(folder))]  # noqa: PTH112 - never raises


def _ranked(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of NVRTC's major version in the order of the search.

    Those of its very version are first, then the newest. A folder of CCCL alone is before all that hold an older one,
    since the headers of two versions cannot be mixed.
    """
    wanted = version_of(nvrtc_version())
    versions = {folder: _version(folder) or wanted for folder in folders}
    cccl = {folder: cccl_version(folder) for folder in versions}
    alone = [folder for folder in versions if cccl[folder] and not is_file(folder / "cuda.h")]
    fitting = [folder for folder in versions if versions[folder][0] == wanted[0]]
    if any(cccl[folder] for folder in fitting):  # else that of another version is better than none
        alone = [folder for folder in alone if folder in fitting]
    found = sorted(
        (folder for folder in fitting if folder not in alone),
        key=lambda folder: (versions[folder] != wanted, -versions[folder][1]),
    )
    toolkits = tuple(found)
    for folder in sorted(alone, key=cccl.__getitem__):
        newer = [found.index(toolkit) for toolkit in toolkits if cccl[toolkit] > cccl[folder]]
        found.insert(max(newer, default=-1) + 1, folder)
    return found


def _version(folder: Path) -> tuple[int, int] | None:
    """Return the toolkit's version that a folder's ``cuda.h``, or else its path, states; None if neither does."""
    for place in (folder, folder.parent):
        try:
            match = _VERSION.search((place / "cuda.h").read_bytes())
        except OSError:
            continue
        if match:
            return int(match[1]) // 1000, int(match[1]) % 1000 // 10
    wheel = _OF_A_WHEEL.search(folder.as_posix())
    return (int(wheel[1] or _UNNUMBERED_MAJOR), 0) if wheel else None


def cccl_version(folder: Path) -> tuple[int, ...]:
    """Return the version of the CCCL in a folder, such as ``(3, 0, 1)``; empty if there is none."""
    for name, pattern, patches in _CCCL_VERSIONS:
        try:
            match = pattern.search((folder / name).read_bytes())
        except OSError:
            continue
        if match:
            minor, patch = divmod(int(match[1]), patches)
            return (*divmod(minor, _MINOR_VERSIONS), patch)
    return ()


def cccl_folders() -> list[tuple[str, str]]:
    """Return version and folder of each CCCL that was found; the first is the one that is used."""
    found = ((cccl_version(Path(folder)), folder) for folder in toolkit_headers())
    return [(".".join(map(str, version)), folder) for version, folder in found if version]


_MAX_HEADERS = 1000


def own_headers(
    source: str, template: Path, include_folders: Sequence[str], convert: Callable[[str], str] = without_host_functions
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the author's headers that a source includes, directly or indirectly, converted: without host functions.

    They are texts by the name in the ``#include``, for NVRTC, which does not search the folder of a header that is a
    text; therefore the folders are returned, too.
    """
    own = [template.parent, *map(Path, include_folders)]
    permitted = permitted_folders(template, own[1:])
    texts: dict[str, str] = {}
    folders: dict[str, None] = {}
    waiting = [(template.parent, source)]
    while waiting and len(texts) < _MAX_HEADERS:
        folder, text = waiting.pop()
        for name in included_names(strip_comments(text)):
            places = [place / name for place in (folder, *own)] if name else []
            path = next((place for place in places if is_file(place) and is_permitted(place, permitted)), None)
            if name is None or path is None or name in texts:
                continue
            try:
                texts[name] = convert(read_text(path, "included file"))
            except InputError:  # the compiler reports it
                continue
            folders[str(path.parent)] = None
            waiting.append((path.parent, texts[name]))
    return texts, tuple(folders)


_PLACE = re.compile(r"(/[^\n]*?)\(\d+\)")  # absolute path and line at the start of an error
_NAME_MAP = re.compile(r"__nv_name_map\(\d+\): error: ([^\n]*)")
"""Error in the part that NVRTC appends to a source for the names of its entries."""

_REDEFINED = re.compile(r'(?m)^(.+): warning(?: #47-D: incompatible re.* macro|:) "(\w+)"(?: redefined| \(declared)')
_MISSING_HEADER = re.compile(r'(?:cannot|could not) open source file "([^"]+)"|fatal error: (\S+): No such file')
_UNDEFINED = re.compile(r'identifier "(\w+)" is undefined')
_MARKED = re.compile(r"\n([^\n]*)\n( *)\^$")  # line of the source, and the place in it where the error is
_HOST = re.compile(r"not allowed in JIT mode|namespace \"std\" has no member|calling a __host__ function")
_CCCL_PACKAGE = "nvidia-cuda-cccl"
_PACKAGES = {
    r"crt/": "nvidia-cuda-crt",
    r"curand": "nvidia-curand",
    r"(?:cub|cuda|thrust|nv)/": _CCCL_PACKAGE,
    r"cublas": "nvidia-cublas",
    r"(?:cuda|vector_|cooperative_groups|mma\.h)": "nvidia-cuda-runtime",
}
"""Wheels of CUDA 13 that hold headers, by the beginnings of their names."""
HOST_CURE = (
    "NVRTC compiles device code only: keep code for the host out with #ifndef __CUDACC_RTC__ ... #endif, or compile "
    'with nvcc: [kernel] compiler = "nvcc"'
)


_ASSEMBLER_ERROR = r"^ptxas[^\n]*?error\s*:\s*"
_USES_TOO_MUCH = re.compile(
    rf"{_ASSEMBLER_ERROR}(?:Entry function '(?P<entry>[^']+)'|File) uses too much (?P<what>[^(\n]+?) "
    r"\((?:bank \d+, )?(?P<used>0x[0-9a-f]+) bytes(?: \+ (?P<system>0x[0-9a-f]+) bytes system)?, "
    r"(?P<allowed>0x[0-9a-f]+) max\)",
    re.MULTILINE,
)
_OVERFLOWED = re.compile(
    r"Error: (?P<what>Formal parameter space) overflowed "
    r"\((?P<used>\d+) bytes required, max (?P<allowed>\d+) bytes allowed\)(?: in function (?P<entry>\S+))?"
)
_OTHER_LIMIT = re.compile(
    rf"{_ASSEMBLER_ERROR}([^\n]*(?:Out Of Resources to support|Insufficient registers|requires? more registers"
    r"|Constant register limit exceeded|uses too much|overflows maximum register limit|exceeds specified max reg)"
    r"[^\n]*)",
    re.MULTILINE,
)
"""Messages of the assembler about limits without bytes, or in words that other versions may have."""
_RESOURCES = {
    "shared data": "static shared memory",
    "constant data": "constant memory",
    "global constant data": "constant memory",
    "local data": "local memory",
    "Formal parameter space": "kernel parameters",
    "parameter space": "kernel parameters",
}


def compile_error(log: str, job: CompileJob) -> CompileError:
    """Return the error for a compiler's log, with the remedy where it is known."""
    if match := _USES_TOO_MUCH.search(log) or _OVERFLOWED.search(log):
        groups = match.groupdict()
        used, allowed = int(groups["used"], 0) + int(groups.get("system") or "0", 0), int(groups["allowed"], 0)
        what = _RESOURCES.get(groups["what"], groups["what"])
        cure = "; an array that is extern __shared__ may be larger, see dynamic_smem_bytes" if "shared" in what else ""
        entry = groups["entry"] or ""
        for name in job.entries:
            own = re.split(r"[<(]", name)[0].rpartition("::")[2].strip()
            if entry.startswith("_Z") and own and f"{len(own)}{own}" in entry:  # the mangled name is that of an entry
                entry = name
                break
        limit = f"{entry or 'the source'} uses {used} bytes of {what}, over the limit of {allowed} bytes{cure}"
        return CompileError(limit, log, exceeds_limit=True)
    if match := _OTHER_LIMIT.search(log):
        return CompileError(match[1], log, exceeds_limit=True)
    error = _first_error(log, Path(job.template_path), job.include_folders)
    if match := _NAME_MAP.match(error):  # an entry does not name one function
        found = global_functions(job.source)
        names = ", ".join(dict.fromkeys(function.display for function in found)) or "none in the template itself"
        entries = " and ".join(repr(job.expression(entry)) for entry in job.entries)
        if "which instance of function template" in match[1]:
            cure = 'it is a template, so give its arguments, as in entry = "name<BLOCK, float>"'
        elif "which instance of overloaded" in match[1]:
            cure = 'it is overloaded, so give its type, as in entry = "(void (*)(float*, int))name"'
        else:
            cure = (
                'give the C++ name of a __global__ function, with its namespace, as in entry = "name" or '
                '"space::name<4>"'
            )
        return CompileError(f"entry {entries}: {match[1]}; {cure} (__global__ functions found: {names})", log)
    cure = _cure(error, _macros(job))
    return CompileError(f"{error}\n{cure}" if cure else error, log)


def _macros(job: CompileJob) -> dict[str, str]:
    return dict(option[2:].partition("=")[::2] for option in job.options if option.startswith("-D"))


def check_macros(log: str, job: CompileJob) -> None:
    """Raise `CompileError` if the compiler warns that the source, or a header, gives a macro of a job another value."""
    for place, name in _REDEFINED.findall(log):
        if name in _macros(job) and not job.may_redefine:
            cure = f"remove it, put it between #ifndef {name} and #endif, or rename {name} in the search-space file"
            raise CompileError(f"{place}: #define {name} overrides the values of {name}; {cure}", log)


def _first_error(log: str, template: Path, own: Sequence[str]) -> str:
    """Return the compiler's first error, with the lines that show the source.

    Of a file that the template must not include, which a macro may have named, nothing is shown.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    for index, line in enumerate(lines):
        if "error" in line.lower():
            place = _PLACE.match(line)
            if place is not None:
                permitted = permitted_folders(template, [Path(folder) for folder in (*own, *include_folders())])
                if not is_permitted(Path(place[1]), permitted):
                    outside = "error in a file that the template must not include, as it is outside of its folder"
                    return f"{place[0]}: {outside}"
            context = [following for following in lines[index + 1 : index + 3] if following.strip()]
            return "\n".join([line, *(following for following in context if not following.startswith("ptxas info"))])
    return log.strip()


def _cure(error: str, macros: Mapping[str, str]) -> str:
    if match := _MISSING_HEADER.search(error):
        return header_cure(match[1] or match[2])
    if match := _UNDEFINED.search(error):
        name = match[1]
        if name.startswith("cuda") and name[4:5].isupper():
            return HOST_CURE
        if name.isupper():
            undefined = "if it is a parameter of the file, a C++ template has one of that name: rename that"
            return f'if {name} is a macro, define it: [kernel] defines = {{ {name} = "..." }}; {undefined}'
    marked = _MARKED.search(error)
    if marked and (word := re.match(r"\w+", marked[1][len(marked[2]) :])) and (name := word[0]) in macros:
        return (
            f"{name} is a parameter here, or another macro of the search-space file: the compiler reads "
            f"{macros[name]!r} for it; rename it, or remove its declaration from the source"
        )
    if "texture is not a template" in error:
        return (
            "texture references were removed in CUDA 12: take a parameter cudaTextureObject_t instead, and declare it "
            'as in tex = { texture = "image" }'
        )
    return HOST_CURE if _HOST.search(error) else ""


def header_cure(name: str) -> str:
    """Return how to provide a header that is missing."""
    package = next((package for pattern, package in _PACKAGES.items() if re.match(pattern, name)), None)
    older = cccl_folders() if package == _CCCL_PACKAGE else []
    if older:
        version, folder = older[0]
        return f"CCCL {version} in {folder} has no {name}; a newer one may: pip install --upgrade {package}"
    if package is not None:
        return f"{name} comes with the wheel {package} (pip install {package}) or a CUDA toolkit (set CUDA_HOME)"
    return (
        f'if {name} is in a folder of yours, name the folder: [kernel] include = ["path/to/folder"], or set '
        "AUTOTILE_INCLUDE"
    )

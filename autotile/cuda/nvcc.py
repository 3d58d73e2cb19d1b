"""Compile with nvcc, where a kernel asks for it and a toolkit is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.errors import CompileError, ToolchainError
from autotile.settings import toolkit_folders, worker_environment

if TYPE_CHECKING:
    from autotile.cuda.compiler import Compilation, CompileJob

_VERSION = re.compile(r"release (\d+\.\d+), V([\d.]+)")
_VERSION_TIMEOUT_S = 30.0
_STANDARD = "-std=c++17"
_INSTALL = (
    'install the CUDA toolkit and set CUDA_HOME to its folder, or add nvcc to PATH; or leave out compiler = "nvcc", so '
    "that the kernel is compiled with NVRTC"
)
_BASE_OPTIONS = ("-cubin", "--resource-usage", "-Xptxas=-v")


@lru_cache
def find_nvcc() -> Path:
    """Return the path of nvcc: that of ``CUDA_HOME``, of ``CUDA_PATH``, on ``PATH``, or of the default folder.

    Raises
    ------
    ToolchainError
        There is none.
    """
    *named, default = (str(folder / "bin") for folder in toolkit_folders())
    for folder in (*named, None, default):
        if found := shutil.which("nvcc", path=folder):
            return Path(found).resolve()
    raise ToolchainError(f"there is no nvcc on this machine; {_INSTALL}")


@lru_cache
def nvcc_version() -> str:
    """Return the version of nvcc, such as ``"13.0.88"``, which is part of the key of what it compiles.

    Raises
    ------
    ToolchainError
        There is no nvcc, or it does not run.
    """
    nvcc = find_nvcc()
    try:
        shown = subprocess.run(
            [str(nvcc), "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=True,
            env=worker_environment(),
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{nvcc} --version fails: {error}; {_INSTALL}") from None
    match = _VERSION.search(shown)
    if match is None:
        raise ToolchainError(f"{nvcc} --version says {shown.strip()[-200:]!r}, expected a release; {_INSTALL}")
    return match[2]


def installed_nvcc() -> str:
    """Return the version of nvcc; "" if there is none."""
    try:
        return nvcc_version()
    except ToolchainError:
        return ""


def compile_with_nvcc(job: CompileJob) -> Compilation:
    """Compile a source to a cubin; errors as for `autotile.cuda.compiler.compile_cubin`.

    nvcc has no name expressions. An entry with template arguments is instantiated by a reference to it that follows the
    source, and found among the functions that the assembler reports on.
    """
    from autotile.cuda.compiler import Compilation, compiled_functions, reported_symbols

    template = Path(job.template_path)
    with tempfile.TemporaryDirectory(prefix="autotile-nvcc-") as folder:
        source, cubin = Path(folder, template.name), Path(folder, "kernel.cubin")
        source.write_text(
            job.source + _references([job.expression(entry) for entry in job.entries]),
            encoding="utf-8",
            errors="surrogateescape",
        )
        has_standard = any(option.lstrip("-").startswith("std=") for option in job.options)
        arguments = [
            str(find_nvcc()),
            *_BASE_OPTIONS,
            f"-arch={job.architecture}",
            *(() if has_standard else (_STANDARD,)),
            *job.compiler_options,
            *(f"-I{path}" for path in (template.parent, *job.include_folders)),
            "-o",
            str(cubin),
            str(source),
        ]
        try:
            done = subprocess.run(
                arguments,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                env=worker_environment(),
            )
        except OSError as error:
            raise ToolchainError(f"{arguments[0]} cannot be run: {error}") from None
        log = (done.stdout + done.stderr).replace(f"{folder}/", "").replace("\0", "")
        if done.returncode < 0:
            raise ToolchainError(f"nvcc was killed by signal {-done.returncode}")
        if done.returncode != 0 or not cubin.is_file():
            from autotile.cuda.headers import compile_error

            raise compile_error(log or f"nvcc ended with code {done.returncode}", job)
        image = cubin.read_bytes()
    found = reported_symbols(log)
    symbols = {entry: _symbol(entry, found, job) for entry in job.entries}
    return Compilation(image, compiled_functions(image, log, symbols))


def _references(entries: Sequence[str]) -> str:
    """Return code that refers to each entry that is more than a name, so that templates are instantiated."""
    named = [entry for entry in entries if not entry.isidentifier()]
    lines = [
        f"static auto const autotile_entry_{number} __attribute__((used)) = &{_address(entry)};"
        for number, entry in enumerate(named)
    ]
    return "\n".join(["", *lines, ""]) if lines else ""


def _address(entry: str) -> str:
    return entry.replace("&", "", 1) if entry.startswith("(") else entry


def _symbol(entry: str, found: list[str], job: CompileJob) -> str:
    """Return the symbol of an entry among those of a cubin."""
    if entry in found:
        return entry
    name = entry.partition("<")[0].rpartition(")")[2].strip().removeprefix("::")
    parts = [part.strip() for part in name.split("::")]
    encoded = "".join(f"{len(part)}{part}" for part in parts[-1:])
    matching = [symbol for symbol in found if symbol.startswith("_Z") and _has_name(symbol, encoded)]
    if "<" in entry:
        matching = [symbol for symbol in matching if f"{encoded}I" in symbol]
    else:
        matching = [symbol for symbol in matching if f"{encoded}I" not in symbol]
    if len(parts) > 1:
        path = "".join(f"{len(part)}{part}" for part in parts)
        matching = [symbol for symbol in matching if path in symbol]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise CompileError(f"there is no __global__ function {entry!r}; found: {', '.join(found) or 'none'}")
    raise CompileError(
        f"{entry!r} may be any of {', '.join(matching)}: with nvcc, compile one instance of a template only, and give "
        f"overloaded functions names of their own (in {Path(job.template_path).name})"
    )


def _has_name(symbol: str, encoded: str) -> bool:
    position = symbol.find(encoded)
    return position > 0 and not symbol[position - 1].isdigit()

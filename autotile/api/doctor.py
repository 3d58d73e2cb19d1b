"""Diagnosis of an installation: everything that tuning needs, with a remedy for what is missing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autotile.core.argument_types import checked
from autotile.core.text import Part, Result, ResultTable, bytes_text, device_text, plural
from autotile.cuda.compiler import CompileJob, CubinCache
from autotile.cuda.driver import device_count, driver_version, has_driver, live_device
from autotile.cuda.headers import cccl_folders, find_header, header_cure, toolkit_headers
from autotile.cuda.toolchain import INSTALL_WHEELS, find_nvcc, installed_nvcc, load_cupy, nvrtc_version
from autotile.database.database import Database
from autotile.database.engine import parse_location
from autotile.database.paths import check_writable
from autotile.errors import AutotileError, InputError, ToolchainError
from autotile.exchange.recording import list_recordings
from autotile.kernel.library import kernel_names, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import Settings, read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.options import TuneOptions
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Gpu

Status = Literal["ok", "warn", "fail"]

_TINY_KERNEL = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = 1.0f; }\n'
_HEADERS = (
    "cuda_runtime.h",
    "cuda_fp16.h",
    "cuda_bf16.h",
    "cuda_fp8.h",
    "cooperative_groups.h",
    "crt/mma.h",
    "cuda/std/limits",
    "cuda/pipeline",
    "cub/block/block_reduce.cuh",
    "curand_kernel.h",
)
"""Headers that kernels include, by the files that they need."""
_INCLUDED_AS = {"crt/mma.h": "mma.h", "cub/block/block_reduce.cuh": "cub/cub.cuh"}
_DEFAULT_ARCHITECTURE = "sm_80"
"""Compilation target without a GPU."""
_TIMEOUT_S = 60.0
"""Timeout of the compilation and of the start of a GPU worker."""
_SAMPLE_LIMIT_S = 0.01
_NO_NVCC = 'none: kernels with compiler = "nvcc" do not compile; all others need none'


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Result of one check."""

    name: str
    status: Status
    """``warn`` if tuning works without the component, ``fail`` if it does not."""
    detail: str
    remedy: str = ""
    """Action that solves the problem; empty if there is none to take."""


_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True, repr=False)
class HealthReport(Result):
    """Results of all checks."""

    checks: tuple[HealthCheck, ...]
    verdict: str
    """One line that says whether tuning works."""

    @property
    def works(self) -> bool:
        """Whether tuning works, on a GPU or by replay."""
        return all(check.status != "fail" for check in self.checks)

    def _headline(self) -> str:
        return self.verdict

    def _parts(self) -> Iterator[Part]:
        rows = [
            (check.status, check.name, "\n".join(filter(None, (check.detail, check.remedy)))) for check in self.checks
        ]
        styles = [_STYLES[check.status] for check in self.checks]
        yield ResultTable(("", "looked at", "found"), rows, is_wrapped=True, styles=styles)
        yield self.verdict

    def to_json(self) -> dict[str, Any]:
        """Return the checks and the verdict."""
        checks = [
            {"name": check.name, "status": check.status, "detail": check.detail, "cure": check.remedy}
            for check in self.checks
        ]
        return {"ok": self.works, "verdict": self.verdict, "checks": checks}


@checked
def doctor(database: str | Path | None = None) -> HealthReport:
    """Check everything that tuning needs.

    Suggests a remedy for what is missing: of the driver, the GPUs, the compiler, the caches, the database, the kernels
    and the recordings. Problems are reported and not raised.

    Parameters
    ----------
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    """
    try:
        settings = read_settings()
    except AutotileError as error:
        check = HealthCheck("settings", "fail", str(error))
        return HealthReport((check,), "nothing works until the settings can be read")
    gpus, recordings = device_count(), list_recordings(settings.recording_folders)
    damaged = [problem for _, problem in recordings if isinstance(problem, str)]
    readable = len(recordings) - len(damaged)
    missing: Status = "warn" if readable else "fail"  # replay needs no GPU
    nvcc, names, faults = installed_nvcc(), kernel_names(settings.kernel_folders), []
    for name in names:
        try:
            load_kernel(name, settings.kernel_folders)
        except AutotileError as error:
            faults.append(str(error))
    kernels = "\n".join(faults) or ", ".join(names) or "none found"
    remedy = "set AUTOTILE_DB to another path, or look at it with `autotile db check`"
    location = str(settings.database if database is None else database)
    folders = *settings.kernel_folders, *settings.operation_folders, *settings.include_folders
    named = [*folders, settings.bundle, settings.pin if settings.pin_strict else None]
    absent = [str(path) for path in named if path is not None and not path.exists()]
    where = "correct AUTOTILE_KERNELS, _OPERATIONS, _INCLUDE, _BUNDLE or _PIN, or the key of config.toml"
    architecture = _DEFAULT_ARCHITECTURE
    with suppress(ToolchainError):
        architecture = live_device().architecture if gpus else architecture
    driver = HealthCheck("driver", missing, "no NVIDIA driver", "install the driver of your GPU; replay needs none")
    if has_driver():
        driver = HealthCheck("driver", "ok", f"supports CUDA {driver_version()}")
    checks = [
        _check("CuPy", lambda: f"version {load_cupy().__version__}", missing),
        driver,
        *(_check(f"GPU {index}", partial(_gpu_text, index)) for index in range(gpus)),
        _check("NVRTC", lambda: f"version {nvrtc_version()}"),
        *_check_headers(),
        HealthCheck("nvcc", "ok", f"version {nvcc} in {find_nvcc()}" if nvcc else _NO_NVCC),
        _check("compiler", lambda: _compiler_text(architecture, settings)),
        _check("cubin cache", lambda: _cache_text(settings), remedy="set AUTOTILE_CACHE"),
        _check("database", lambda: _database_text(location), remedy=remedy),
        HealthCheck("kernels", "ok" if names and not faults else "warn", kernels),
        *(HealthCheck("recording", "warn", problem, "record it again, or delete it") for problem in damaged),
        *(HealthCheck("settings", "warn", f"{path} does not exist", where) for path in absent),
    ]
    if not gpus:
        cure = "tune by replay here, or run on a machine with an NVIDIA GPU"
        checks.insert(2, HealthCheck("GPU", missing, "no CUDA device", cure))
    if readable:
        checks.append(HealthCheck("recordings", "ok", f"{plural(readable, 'problem')} can be tuned by replay"))
    else:
        cure = "`autotile export --format recording --measure` makes one on a machine with a GPU"
        checks.append(
            HealthCheck("recordings", "warn" if gpus else "fail", "none: nothing can be tuned by replay", cure)
        )
    if gpus and all(check.status != "fail" for check in checks):
        checks.append(_check("GPU worker", lambda: _worker_text(settings)))
    failed = [check.name for check in checks if check.status == "fail"]
    verdict = "tuning works here"
    if failed:
        verdict = f"tuning does not work here: see {', '.join(failed)}"
    elif not gpus:
        verdict += f" by replay, of {plural(readable, 'recorded problem')}; measuring needs a CUDA device"
    return HealthReport(tuple(checks), verdict)


def _check(name: str, describe: Callable[[], str], missing: Status = "fail", remedy: str = "") -> HealthCheck:
    """Return a check that passes with the returned description, or else has the error that was raised."""
    try:
        return HealthCheck(name, "ok", describe())
    except AutotileError as error:
        return HealthCheck(name, missing, str(error), remedy)


def _gpu_text(index: int) -> str:
    gpu = live_device(index)
    return f"{gpu.name}, compute capability {gpu.compute_capability}, {bytes_text(gpu.memory_bytes)}"


def _check_headers() -> Iterator[HealthCheck]:
    """Yield a check of the folders of headers, of CCCL among them, and of each header that kernels often include."""
    folders = toolkit_headers()
    if not folders:
        detail = "no CUDA headers: kernels that include cuda_fp16.h do not compile"
        yield HealthCheck("headers", "warn", detail, INSTALL_WHEELS)
        return
    missing = {name: header_cure(name) for name in _HEADERS if find_header(name) is None}
    found = [name for name in _HEADERS if name not in missing]
    yield HealthCheck("headers", "ok", f"{', '.join(found)} in {', '.join(folders)}")
    if cccl := cccl_folders():
        (version, folder), *others = cccl
        rest = "; what it lacks, from " + ", ".join(map(" in ".join, others)) if others else ""
        yield HealthCheck("CCCL", "ok", f"{version} in {folder}{rest}")
    for name, cure in missing.items():
        yield HealthCheck(
            "headers", "warn", f"no <{_INCLUDED_AS.get(name, name)}>: kernels that include it do not compile", cure
        )


def _compiler_text(architecture: str, settings: Settings) -> str:
    """Compile a tiny kernel in a worker process, with a temporary cache."""
    job = CompileJob(_TINY_KERNEL, "tiny", "tiny.cu", "tiny", architecture, ())
    with tempfile.TemporaryDirectory(prefix="autotile-doctor-") as folder:
        compiled = compile_in_worker(job, replace(settings, cache=Path(folder)), _TIMEOUT_S)
    if compiled.cubin is None:
        raise ToolchainError(compiled.reason)
    return f"a tiny kernel compiles for {architecture} in {compiled.seconds:.2f} s"


def _cache_text(settings: Settings) -> str:
    try:
        cache = CubinCache(settings.cache, settings.cache_limit_bytes)
        with tempfile.TemporaryFile(dir=settings.cache):
            return f"{settings.cache}: {bytes_text(cache.size_bytes())} of {bytes_text(settings.cache_limit_bytes)}"
    except OSError as error:
        raise InputError(f"cannot write {settings.cache}: {error.strerror}") from None


def _database_text(location: str) -> str:
    place = parse_location(location)
    if isinstance(place, Path):
        check_writable(place)
    opened = Database.open_readonly(location)
    if opened is None:
        return f"{place}: not there yet, the first `autotile tune` makes it"
    with opened:
        return f"{opened.location}: {plural(len(opened.studies()), 'study', 'studies')}"


def _worker_text(settings: Settings) -> str:
    """Start a GPU worker on a small problem, as a tuning session does, and describe it."""
    kernel = load_kernel("matmul_naive", settings.kernel_folders[-1:])  # the one that ships runs on any GPU
    problem = resolve_problem(kernel.spec, kernel.spec.ragged)
    workload = workload_of(kernel, problem, settings, TuneOptions(sample_limit_s=_SAMPLE_LIMIT_S))
    with closing(Gpu(workload, _TIMEOUT_S)) as gpu:
        gpu.wait()
        return f"starts, and sets up a small problem on {device_text(gpu.device)}"

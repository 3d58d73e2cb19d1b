"""Look at everything that tuning needs, and say what to do about what is missing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from autotile.core.text import bytes_text, device_text, plural
from autotile.cuda.compiler import CompileJob, CubinCache
from autotile.cuda.driver import device_count, driver_version, live_device
from autotile.cuda.toolchain import INSTALL_WHEELS, include_folders, load_cupy, nvrtc_version
from autotile.database.database import Database
from autotile.database.engine import parse_location
from autotile.database.paths import check_writable
from autotile.errors import AutotileError, ToolchainError
from autotile.exchange.recording import list_recordings
from autotile.kernel.library import kernel_names, load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.report.health import DoctorReport, Finding, Status
from autotile.settings import Settings, read_settings
from autotile.workers.compile_pool import CompilePool
from autotile.workers.gpu import Gpu
from autotile.workers.protocol import Workload

_TINY_KERNEL = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = 1.0f; }\n'
_ANY_ARCHITECTURE = "sm_80"
_DEADLINE_S = 60.0
_SAMPLE_LIMIT_S = 0.01


def examine(database: str | None = None) -> DoctorReport:
    """Look at the driver, the compiler, the GPU, the caches, the database and the recordings.

    Nothing raises: whatever is wrong becomes a finding with its cure.
    """
    try:
        settings = read_settings()
    except AutotileError as error:
        return DoctorReport([Finding("settings", "fail", str(error))], "nothing works before the settings are readable")
    gpus, recordings = device_count(), list_recordings(settings.recording_folders)
    readable = sum(1 for recording in recordings if not recording.problem)
    findings = [
        _cupy(replay=readable > 0),
        _driver(replay=readable > 0),
        *_gpus(gpus, replay=readable > 0),
        _attempt("NVRTC", lambda: f"version {nvrtc_version()}"),
        _headers(),
        _compiler(_architecture(gpus)),
        _cache(settings),
        _database(database or settings.database),
        _kernels(settings),
        *(Finding("recording", "warn", r.problem, "record it again, or delete it") for r in recordings if r.problem),
        _recordings(readable, gpus),
    ]
    if gpus and all(finding.status != "fail" for finding in findings):
        findings.append(_worker(settings))
    return DoctorReport(findings, _verdict(findings, gpus, readable))


def _verdict(findings: list[Finding], gpus: int, recordings: int) -> str:
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if failed:
        return f"tuning does not work here: see {', '.join(failed)}"
    if gpus:
        return "tuning works here"
    return f"tuning works here by replay, of {plural(recordings, 'recorded problem')}; measuring needs a CUDA device"


def _attempt(name: str, look: Callable[[], str], cure: str = "") -> Finding:
    try:
        return Finding(name, "ok", look())
    except AutotileError as error:
        return Finding(name, "fail", str(error), cure)


def _cupy(*, replay: bool) -> Finding:
    try:
        return Finding("CuPy", "ok", f"version {load_cupy().__version__}")
    except ToolchainError as error:
        return Finding("CuPy", "warn" if replay else "fail", str(error))


def _driver(*, replay: bool) -> Finding:
    missing: Status = "warn" if replay else "fail"
    try:
        version = driver_version()
    except Exception as error:  # CuPy raises errors of its own where there is no driver library
        return Finding("driver", missing, f"not found: {error}".splitlines()[0])
    if version == "0.0":
        return Finding("driver", missing, "no NVIDIA driver", "install the driver of your GPU; replay needs none")
    return Finding("driver", "ok", f"supports CUDA {version}")


def _gpus(count: int, *, replay: bool) -> Iterator[Finding]:
    if count == 0:
        cure = "tune by replay here, or run on a machine with an NVIDIA GPU"
        yield Finding("GPU", "warn" if replay else "fail", "no CUDA device", cure)
    for index in range(count):
        yield _attempt(f"GPU {index}", lambda index=index: _gpu_text(index))  # type: ignore[misc]


def _gpu_text(index: int) -> str:
    device = live_device(index)
    return f"{device.name}, compute capability {device.compute_capability}, {bytes_text(device.memory_bytes)}"


def _headers() -> Finding:
    folders = include_folders()
    if folders:
        return Finding("headers", "ok", ", ".join(folders))
    missing = "no CUDA headers: kernels that include cuda_fp16.h do not compile"
    return Finding("headers", "warn", missing, INSTALL_WHEELS)


def _architecture(gpus: int) -> str:
    try:
        return live_device().architecture if gpus else _ANY_ARCHITECTURE
    except ToolchainError:
        return _ANY_ARCHITECTURE


def _compiler(architecture: str) -> Finding:
    """Compile a tiny kernel in a worker process, into a cache of its own."""
    job = CompileJob(_TINY_KERNEL, "tiny", "tiny.cu", "tiny", architecture, ())
    with tempfile.TemporaryDirectory(prefix="autotile-doctor-") as folder:
        pool = CompilePool(Path(folder), 2**20, 1, _DEADLINE_S)
        try:
            compiled = pool.submit(lambda: job).result()
        except AutotileError as error:
            return Finding("compiler", "fail", str(error))
        finally:
            pool.close()
    if compiled.cubin is None:
        return Finding("compiler", "fail", compiled.reason)
    return Finding("compiler", "ok", f"a tiny kernel compiles for {architecture} in {compiled.seconds:.2f} s")


def _cache(settings: Settings) -> Finding:
    def look() -> str:
        cache = CubinCache(settings.cache, settings.cache_limit_bytes)
        with tempfile.TemporaryFile(dir=settings.cache):
            return f"{settings.cache}: {bytes_text(cache.size_bytes())} of {bytes_text(settings.cache_limit_bytes)}"

    try:
        return _attempt("cubin cache", look)
    except OSError as error:
        return Finding("cubin cache", "fail", f"cannot write {settings.cache}: {error.strerror}", "set AUTOTILE_CACHE")


def _database(location: str) -> Finding:
    def look() -> str:
        place = parse_location(location)
        if isinstance(place, Path):
            check_writable(place)
        opened = Database.open_readonly(location)
        if opened is None:
            return f"{place}: not there yet, the first `autotile tune` makes it"
        with opened:
            return f"{opened.location}: {plural(len(opened.studies()), 'study', 'studies')}"

    return _attempt("database", look, "set AUTOTILE_DB to another path, or look at it with `autotile db check`")


def _kernels(settings: Settings) -> Finding:
    names = kernel_names(settings.kernel_folders)
    broken = []
    for name in names:
        try:
            load_kernel(name, settings.kernel_folders)
        except AutotileError as error:
            broken.append(str(error))
    if broken:
        return Finding("kernels", "warn", "\n".join(broken))
    return Finding("kernels", "ok" if names else "warn", ", ".join(names) or "none found")


def _recordings(readable: int, gpus: int) -> Finding:
    if readable:
        return Finding("recordings", "ok", f"{plural(readable, 'problem')} can be tuned by replay")
    cure = "`autotile record` makes one on a machine with a GPU"
    return Finding("recordings", "warn" if gpus else "fail", "none: nothing can be tuned by replay", cure)


def _worker(settings: Settings) -> Finding:
    """Start a GPU worker on a small problem, as a session does."""

    def look() -> str:
        kernel = load_kernel(kernel_names(settings.kernel_folders)[0], settings.kernel_folders)
        problem = resolve_problem(kernel.spec, kernel.spec.ragged)
        workload = Workload(
            spec_text=kernel.spec.text,
            spec_source=kernel.spec.source,
            sizes=problem.sizes,
            dtype=problem.dtype,
            l2="cold",
            cache=str(settings.cache),
            cache_limit_bytes=settings.cache_limit_bytes,
            sample_limit_s=_SAMPLE_LIMIT_S,
        )
        with closing(Gpu(workload, _DEADLINE_S)) as gpu:
            return f"starts, and lays out a small problem on {device_text(gpu.wait())}"

    return _attempt("GPU worker", look)

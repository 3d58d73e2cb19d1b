"""The GPU of a session: one of this machine, several of them, those of a cluster, or a recording of one."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotile.core.device import device_profile
from autotile.core.documents import attributes
from autotile.core.model import ENERGY, Problem
from autotile.cuda.compiler import check_signatures, compile_job
from autotile.cuda.driver import device_count, device_uuid, has_driver, live_device
from autotile.errors import InputError, ToolchainError, WorkerError
from autotile.kernel.inputs import missing_input, with_captured_call
from autotile.kernel.library import Kernel, reference_source
from autotile.kernel.problem import check_memory
from autotile.settings import Settings
from autotile.space.search_space import feasible_space
from autotile.tuning.gpu_group import GpuGroup
from autotile.tuning.lanes import Lane
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend, open_recording
from autotile.tuning.start import measures_energy, session_objective
from autotile.workers.compile_pool import compile_in_worker
from autotile.workers.gpu import Backend, Gpu
from autotile.workers.jobs import SECOND_SEED, Workload

if TYPE_CHECKING:
    from autotile.workers.python_reference import ExpectedFolder

_PROFILE = "h200"
"""Device profile for the checks without a GPU; the built-in recordings are of this GPU."""
_SANITIZER_S = 120.0
"""Timeout of one check under compute-sanitizer. A check of a few thousand elements a side takes seconds."""


def choose_backend(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, lane: Lane | None = None
) -> Backend:
    """Return the GPU if there is one and no replay was requested, and a recording otherwise.

    ``lane`` has the worker processes, and the GPUs of a cluster to use, None for those that the options name. An
    `InputError` is raised if there is neither a GPU nor a recording, or without them the problem does not fit in a
    large GPU's memory, no configuration is valid for it, or the default one does not compile; as for `open_recording`;
    or if a sanitizer was requested in replay. A `ToolchainError` is raised if the requested sanitizer is not installed.
    """
    lane = lane or Lane()
    if options.scheduler:
        from autotile.tuning.cluster.gpus import ClusterGpus, ClusterLane  # imports Dask
        from autotile.tuning.cluster.worker import GpuRequest

        needs_python = kernel.reference_function is not None or kernel.inspection is not None
        for what, is_used in (
            ("a reference or a check in Python", needs_python or kernel.spec.reference.is_agreement),
            ("a captured call", options.captured is not None),
            ("compute-sanitizer", options.sanitize),
            ("a choice of this machine's GPUs", bool(options.devices or options.device_index)),
        ):
            if is_used:
                raise InputError(
                    f"a session with a scheduler cannot use {what}, which other machines lack; leave one out"
                )
        recorded = None
        if options.replay is not None:
            recording = open_recording(kernel, problem, options, settings.recording_folders)
            recorded = ReplayBackend(recording, options)
        work = GpuRequest(kernel.name, workload_of(kernel, problem, settings, options), options.run_deadline_s)
        if lane.cluster is not None:
            return ClusterGpus(lane, work, recorded)
        own = ClusterLane(options)
        try:
            return ClusterGpus(own, work, recorded, ending=own.close)
        except BaseException:
            own.close()
            raise
    if options.replay is None and has_driver():
        with ExitStack() as opened:
            gpus: list[Gpu] = []
            for index in options.devices if len(options.devices) > 1 else (options.device_index,):
                # its worker starts before the device is looked at: its imports take as long as all of this
                expected = expected_folder(kernel, problem, options)
                if expected is not None:
                    opened.callback(expected.close)
                workload = workload_of(kernel, problem, settings, replace(options, device_index=index), expected)
                sanitizer = None
                if options.sanitize:
                    from autotile.workers.sanitizer import Sanitizer, find_sanitizer

                    sanitizer = Sanitizer(workload, find_sanitizer(settings.sanitizer), _SANITIZER_S)
                gpu = Gpu(
                    workload,
                    options.run_deadline_s,
                    worker_pool=lane.worker_pool,
                    sanitizer=sanitizer,
                    expected=expected,
                )
                opened.callback(gpu.close)
                if not device_count():
                    break
                gpu.device, gpu.uuid = live_device(index), device_uuid(index)
                gpus.append(gpu)
            else:
                opened.pop_all()
                return gpus[0] if len(gpus) == 1 else GpuGroup(gpus, options.run_deadline_s)
    if options.sanitize:
        raise InputError("--sanitize runs the finalists on a GPU, and launches are replayed here; leave it out")
    try:
        recording = open_recording(kernel, problem, options, settings.recording_folders)
    except InputError:  # raised after what may be wrong with the kernel or the problem: it would hide that
        device = device_profile(_PROFILE)
        check_memory(kernel.spec, problem, device)
        if missing := missing_input(kernel.spec, kernel.spec.shaped(problem, kernel.spec.default)):
            raise InputError(missing) from None
        feasible_space(kernel.spec, problem, device)
        job = compile_job(kernel, kernel.spec.default, problem, device.architecture)
        with suppress(ToolchainError, WorkerError):
            compiled = compile_in_worker(job, settings, options.compile_deadline_s)
            if compiled.cubin is None:
                source, reason = kernel.spec.source, compiled.reason
                raise InputError(f"{source}: the default configuration does not compile: {reason}") from None
            check_signatures(kernel, problem.dtype, compiled.cubin)
        raise
    simulated = [ReplayBackend(recording, options, uuid=f"simulated-{index}") for index in options.devices]
    return GpuGroup(simulated, options.run_deadline_s) if len(simulated) > 1 else ReplayBackend(recording, options)


def workload_of(
    kernel: Kernel, problem: Problem, settings: Settings, options: TuneOptions, expected: ExpectedFolder | None = None
) -> Workload:
    """Return the problem as the GPU worker sets it up; ``expected`` is that of `expected_folder`."""
    if kernel.spec.reference.comparison is not None and kernel.inspection is None:
        raise InputError(
            f"{kernel.spec.source}: [reference] comparison {kernel.spec.reference.comparison!r} is a Python function; "
            "tune the kernel from Python, with autotile.kernel(..., verify=...)"
        )
    found, sent = reference_source(kernel), None
    if found is not None:
        names = tuple(sorted(found.template_names))
        sent = found.source, found.template_path, found.source_hash, found.include_folders, names
    return Workload(
        spec_text=kernel.spec.text,
        spec_source=kernel.spec.source,
        spec_folder=kernel.spec.folder,
        captured_call=options.captured or "",
        sizes=problem.sizes,
        dtype=problem.dtype,
        cache=str(settings.cache),
        cache_limit_bytes=settings.cache_limit_bytes,
        **attributes(options, "l2", "sample_limit_s", "device_index", "verify_sizes"),
        energy=ENERGY in options.objectives or measures_energy(kernel.spec, session_objective(kernel.spec, options)),
        reference_source=sent,
        reference_folder=str(expected.path) if expected is not None else "",
        captured=kernel.inspection.buffers if kernel.inspection is not None else (),
        capture_folder=kernel.inspection.folder if kernel.inspection is not None else "",
    )


def expected_folder(kernel: Kernel, problem: Problem, options: TuneOptions) -> ExpectedFolder | None:
    """Make a folder with the results of a reference in Python for every set of inputs that verification may use.

    They are computed aside; those for the second set of inputs, which finals need, come last.
    Without a reference, the folder takes the outputs on which configurations agree.
    """
    if kernel.reference_function is None and not kernel.spec.reference.is_agreement:
        return None
    from autotile.workers.python_reference import ExpectedFolder, shaped_problems

    spec = with_captured_call(kernel.spec, Path(options.captured)) if options.captured else kernel.spec
    if kernel.reference_function is None:
        return ExpectedFolder(spec, problem.dtype)
    inputs = [
        (sizes, seed, check)
        for given, seed, check in (
            (spec.ragged_sizes(problem.sizes), 0, True),
            (problem.sizes, 0, False),
            *((sizes, 0, True) for sizes in options.verify_sizes),
            (problem.sizes, SECOND_SEED, False),
        )
        if not missing_input(spec, problem.at(given))
        for sizes in shaped_problems(spec, problem.at(given))
    ]
    return ExpectedFolder(spec, problem.dtype, kernel.reference_function, inputs)

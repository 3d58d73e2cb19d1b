"""Where a family is tuned: on which device, and at which of its problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotile.device.properties import device_count, has_driver, live_device
from autotile.files.library import Kernel
from autotile.files.settings import Settings
from autotile.ground.config_check import check_config
from autotile.ground.errors import InputError
from autotile.ground.family import Family
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem
from autotile.ground.problem import check_memory, resolve_problem
from autotile.ground.representatives import choose_among, choose_representatives
from autotile.ground.space import feasible_space
from autotile.ground.spec import KernelSpec
from autotile.store.keys import space_hash
from autotile.store.recording_files import list_recordings
from autotile.store.recording_header import RecordingHeader
from autotile.tuning.options import TuneOptions


def family_points(
    kernel: Kernel, family: Family, dtype: str, settings: Settings, options: TuneOptions, *, count: int
) -> tuple[DeviceProperties, list[dict[str, int]]]:
    """The device, and the sizes of the problems to tune; in replay, those of the family that were recorded.

    Raises
    ------
    InputError
        The family has no problem that can be tuned, or none that was recorded.
    """
    if options.replay not in (None, "auto"):
        raise InputError("a family is replayed from the installed recordings, one a problem; leave the file's name out")
    if options.replay is None and has_driver() and device_count() > 0:
        device = live_device(options.device_index)
        return device, choose_representatives(
            family, count, lambda sizes: _is_possible(kernel.spec, sizes, dtype, device)
        )
    headers = [entry.header for entry in list_recordings(settings.recording_folders) if entry.header is not None]
    recorded = [header for header in headers if _is_of(header, kernel, dtype, options)]
    members = [header for header in recorded if header.key.sizes in family]
    if not members:
        known = "; ".join(str(header.problem) for header in recorded) or "none"
        raise InputError(
            f"launches are replayed, and no problem of the family {family} is recorded of {kernel.name} as it is now; "
            f"recorded are: {known}"
        )
    device = next(header.device for header in members if header.device is not None)
    here = [header.key.sizes for header in members if header.device == device]
    return replace(device, source="replayed"), choose_among(family, here, count)


def _is_of(header: RecordingHeader, kernel: Kernel, dtype: str, options: TuneOptions) -> bool:
    key = header.key
    version = (kernel.source_hash, space_hash(kernel.spec))
    same = (key.kernel, key.dtype, key.l2_mode) == (kernel.name, dtype, options.l2)
    return same and (key.template_hash, key.space_hash) == version and header.device is not None


def _is_possible(spec: KernelSpec, sizes: Mapping[str, int], dtype: str, device: DeviceProperties) -> bool:
    """Whether a problem fits in the device's memory and leaves any configuration."""
    try:
        problem: Problem = resolve_problem(spec, sizes, dtype)
        check_memory(spec, problem, device)
        return not check_config(spec, spec.default, sizes, device, dtype) or bool(
            len(feasible_space(spec, sizes, device, dtype))
        )
    except InputError:
        return False

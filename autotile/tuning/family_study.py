"""The points of a family, and the times of configurations at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Problem, Trial, config_key
from autotile.cuda.driver import device_count, has_driver, live_device
from autotile.database.keys import TuningKey, space_hash
from autotile.errors import InputError
from autotile.exchange.recording import RecordingHeader, list_recordings
from autotile.families.family import Family, select_points, select_points_from
from autotile.families.learning import UNSERVED_LOSS
from autotile.families.preference import FINALISTS, MAX_STUDIES, WITH_FINALISTS, Tuned, prefer
from autotile.families.rule import RuleConfig
from autotile.kernel.library import Kernel
from autotile.kernel.problem import check_memory, resolve_problem, size_distance
from autotile.kernel.spec import KernelSpec
from autotile.settings import Settings
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space
from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_configs
from autotile.tuning.options import TuneOptions

if TYPE_CHECKING:
    from autotile.database.database import Database


def family_points(
    kernel: Kernel,
    family: Family,
    dtype: str,
    settings: Settings,
    options: TuneOptions,
    *,
    count: int,
    device: DeviceProperties | None = None,
) -> tuple[DeviceProperties, list[dict[str, int]]]:
    """Return the device, and the sizes of the problems to tune.

    In replay, the points are selected from the problems of the family that were recorded.

    Parameters
    ----------
    kernel, family, dtype, settings, options
        As for `autotile.tuning.family_session.tune_family`.
    count
        Number of points.
    device
        Device of another machine; None for that of this one, or a replay.

    Raises
    ------
    InputError
        The family has no problem that can be tuned, or none that was recorded.
    """
    if options.replay not in (None, "auto"):
        raise InputError("a family is replayed from the installed recordings, one a problem; leave the file's name out")
    if device is None and options.replay is None and has_driver() and device_count() > 0:
        device = live_device(options.device_index)
    if (gpu := device) is not None:
        return gpu, select_points(family, count, lambda sizes: is_possible(kernel.spec, sizes, dtype, gpu))
    headers = [entry.header for entry in list_recordings(settings.recording_folders) if entry.header is not None]
    recorded = [header for header in headers if _belongs_to(header, kernel, dtype, options)]
    members = [header for header in recorded if header.key.sizes in family]
    if not members:
        known = "; ".join(str(header.problem) for header in recorded) or "none"
        raise InputError(
            f"launches are replayed, and no problem of the family {family} is recorded of {kernel.name} as it is now; "
            f"recorded are: {known}"
        )
    device = next(header.device for header in members if header.device is not None)
    here = [header.key.sizes for header in members if header.device == device]
    return replace(device, source="replayed"), select_points_from(family, here, count)


def _belongs_to(header: RecordingHeader, kernel: Kernel, dtype: str, options: TuneOptions) -> bool:
    key = header.key
    version = (kernel.source_hash, space_hash(kernel.spec))
    same = (key.kernel, key.dtype, key.l2_mode) == (kernel.name, dtype, options.l2)
    return same and (key.template_hash, key.space_hash) == version and header.device is not None


def is_possible(spec: KernelSpec, sizes: Mapping[str, int], dtype: str, device: DeviceProperties) -> bool:
    """Return whether a problem fits in the device's memory and any configuration is valid for it."""
    try:
        problem: Problem = resolve_problem(spec, sizes, dtype)
        check_memory(spec, problem, device)
        return not check_config(spec, spec.default, sizes, device, dtype) or bool(
            len(feasible_space(spec, sizes, device, dtype))
        )
    except InputError:
        return False


_BEST_OF_EACH = 3
"""Number of configurations that a point proposes: the second best at one point is often the best at its neighbours."""
_FAULTS = (Outcome.WRONG_RESULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED, Outcome.TIMED_OUT)
"""Outcomes that, at any point, exclude a configuration from the rule."""


@dataclass(frozen=True)
class FamilyMatrix:
    """Measured times of configurations at the points of a family.

    Attributes
    ----------
    points
        Sizes of the problems at which any configuration ran.
    configs
        The configurations, each with its compiled resources.
    measurements
        Time and its interval in microseconds, shape (points, configurations, 3); NaN where a configuration did not run.
    proposed_by
        Whether a point proposed the configuration, shape (points, configurations).
    """

    points: tuple[Mapping[str, int], ...]
    configs: tuple[RuleConfig, ...]
    measurements: NDArray[np.float64]
    proposed_by: NDArray[np.bool_]

    @property
    def times_us(self) -> NDArray[np.float64]:
        """Times in microseconds, shape (points, configurations)."""
        return np.asarray(self.measurements[:, :, 0])


def proposals(database: Database, keys: Sequence[TuningKey]) -> list[list[Config]]:
    """Return the best few configurations of each point's study, its winner first."""
    return [_best_of(database, key) for key in keys]


def union(proposed: Sequence[Sequence[Config]], default: Config) -> list[Config]:
    """Return every proposed configuration once, and the default."""
    found = {config_key(config): config for configs in proposed for config in configs}
    return list({**found, config_key(default): default}.values())


def read_matrix(
    database: Database, keys: Sequence[TuningKey], proposed: Sequence[Sequence[Config]], configs: Sequence[Config]
) -> FamilyMatrix:
    """Read the times of configurations at all points; faulty configurations and points where none ran are left out."""
    studies = [_newest(database, key) for key in keys]
    wanted = [config_key(config) for config in configs]
    usable = [key for key in wanted if not any(_is_faulty(study.get(key)) for study in studies)]
    kept = [key for key in usable if any(_has_time(study.get(key)) for study in studies)]
    ran = [number for number, study in enumerate(studies) if any(_has_time(study.get(key)) for key in kept)]
    by_point = [{config_key(config) for config in proposed[number]} for number in ran]
    return FamilyMatrix(
        points=tuple(keys[number].sizes for number in ran),
        configs=tuple(_compiled(key, studies) for key in kept),
        measurements=np.array([[_times(studies[number].get(key)) for key in kept] for number in ran]),
        proposed_by=np.array([[key in found for key in kept] for found in by_point], np.bool_),
    )


def _best_of(database: Database, key: TuningKey) -> list[Config]:
    study_id = database.find_study(key)
    if study_id is None:
        return []
    winner = [best.trial.config for best in database.best(study_id=study_id)]
    ran = [trial for trial in _newest(database, key).values() if trial.outcome is Outcome.OK]
    ordered = [trial.config for trial in sorted(ran, key=lambda trial: trial.time_us or np.inf)]
    found = {config_key(config): config for config in [*winner, *ordered]}
    return list(found.values())[:_BEST_OF_EACH]


def _newest(database: Database, key: TuningKey) -> dict[str, Trial]:
    """Return the newest trial of each configuration in a study; a refusal by the finals replaces the search's trial."""
    study_id = database.find_study(key)
    if study_id is None:
        return {}
    searched = {config_key(trial.config): trial for trial in database.trials(study_id, phase="search")}
    finals = database.trials(study_id, phase="final")
    return {**searched, **{config_key(trial.config): trial for trial in finals if not trial.outcome.has_time}}


def _is_faulty(trial: Trial | None) -> bool:
    return trial is not None and trial.outcome in _FAULTS


def _has_time(trial: Trial | None) -> bool:
    return trial is not None and trial.outcome.has_time and trial.measurement is not None


def _times(trial: Trial | None) -> tuple[float, float, float]:
    if trial is None or trial.measurement is None or not trial.outcome.has_time:
        return np.nan, np.nan, np.nan
    return trial.measurement.time_us, trial.measurement.low_us, trial.measurement.high_us


def _compiled(key: str, studies: Sequence[Mapping[str, Trial]]) -> RuleConfig:
    """Return a configuration with its compiled resources at the first point where it ran."""
    trial = next(study[key] for study in studies if _has_time(study.get(key)))
    return RuleConfig(trial.config, trial.resources, trial.occupancy.blocks_per_sm if trial.occupancy else 0)


def losses_without(spec: KernelSpec, device: DeviceProperties, dtype: str, matrix: FamilyMatrix) -> list[float]:
    """Return the loss at each point of what would be served there without a rule, had the point not been tuned.

    This is what serving chooses from the other points: the default, or the one that is estimated to be far faster,
    unless a result of a near point is expected to be faster still by more than the doubt.
    """
    return [_loss_without(spec, device, dtype, matrix, point) for point in range(len(matrix.points))]


def _loss_without(spec: KernelSpec, device: DeviceProperties, dtype: str, matrix: FamilyMatrix, point: int) -> float:
    times_us, sizes = matrix.times_us, matrix.points[point]
    runs = np.isfinite(times_us)
    configs = [one.config for one in matrix.configs]
    others = [row for row in range(len(matrix.points)) if row != point]
    others.sort(key=lambda row: size_distance(matrix.points[row], sizes))
    known = [
        column
        for column in np.flatnonzero(runs[point]).tolist()
        if matrix.proposed_by[others, column].any() or not matrix.proposed_by[:, column].any()
    ]
    base = _untuned(spec, device, dtype, sizes, {column: configs[column] for column in known})
    studies = []
    for place, row in enumerate(others[:MAX_STUDIES]):
        fastest = sorted((column for column in known if runs[row, column]), key=lambda column: times_us[row, column])
        measured = {config_key(configs[column]): float(times_us[row, column]) for column in fastest}
        served = fastest[: FINALISTS if place < WITH_FINALISTS else 1]
        tried = {config_key(configs[column]): configs[column] for column in served}
        studies.append(Tuned(matrix.points[row], device, tried, measured))
    if base is None:
        served_config = next((config for tuned in studies for config in tuned.configs.values()), None)
    else:
        found = prefer(spec, sizes, device, base, studies, dtype=dtype)
        is_displaced = found is not None and found.expectation.is_faster
        served_config = studies[found.study].configs[found.key] if found is not None and is_displaced else base
    if served_config is None:
        return UNSERVED_LOSS
    column = configs.index(served_config)
    return float(times_us[point, column] / np.nanmin(times_us[point]) - 1.0)


def _untuned(
    spec: KernelSpec, device: DeviceProperties, dtype: str, sizes: Mapping[str, int], configs: Mapping[int, Config]
) -> Config | None:
    """Return what is served where nothing is tuned, among configurations that were measured; None if that is not known.

    Serving estimates the whole space; of the others, the time at the point is not known.
    """
    default = next((column for column, config in configs.items() if config == spec.default), None)
    if default is None:
        return None
    columns = [default, *(column for column in configs if column != default)]
    found = estimate_configs(spec, sizes, device, [configs[column] for column in columns], dtype)
    if found is None or not found.is_declared or found.time_us[0] < CONFIDENT_FACTOR * found.time_us.min():
        return configs[default]
    return configs[columns[int(np.argmin(found.time_us))]]

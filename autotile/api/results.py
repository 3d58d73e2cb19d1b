"""Stored results: the configuration that is served for a problem, and what a database holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from autotile.api.listings import (
    FamilyList,
    ListedMiss,
    MissList,
    RecordingList,
    StudyList,
    StudyTrial,
    TrialList,
    TunedFamily,
)
from autotile.api.targets import merge_sizes, named_operation, resolve_served_device, sizes_notice
from autotile.core.argument_types import checked
from autotile.core.device import DeviceProperties
from autotile.core.model import (
    Config,
    LaunchGeometry,
    Measurement,
    Occupancy,
    Outcome,
    Problem,
    Resources,
    config_key,
    config_text,
)
from autotile.core.text import Facts, Part, Result, interval_text, occupancy_text, source_text, time_text
from autotile.database.database import StudySummary, database_location, location_text, open_for_reading, rows_of_kernel
from autotile.database.keys import space_hash
from autotile.database.winners import StoredRule
from autotile.errors import InputError, ProblemError
from autotile.exchange.recording import list_recordings
from autotile.kernel.library import KernelName, load_kernel, load_named_kernel
from autotile.kernel.problem import Workrate
from autotile.report.study import study_without_trials
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import Compared, Contender, resources_document
from autotile.serving.dispatcher import find_best_kernel
from autotile.settings import read_settings
from autotile.tuning.plan import AssessedMiss, assess_misses


@dataclass(frozen=True, slots=True, repr=False)
class BestResult(Result):
    """The configuration that is served for a problem, and the reason.

    Attributes
    ----------
    problem, device
        Problem and device that it is served for.
    tier
        ``exact``: tuned for this problem on this GPU. ``family``: chosen by the rule of a family that contains the
        problem. ``nearest``: tuned for other sizes on this GPU. ``transferred``: tuned on another GPU. ``default``:
        not tuned.
    config
        Configuration.
    measurement
        Time where it was tuned; None for the default configuration.
    source
        ``cuda`` for a time measured on the GPU, ``replayed`` for one from a recording, empty for the default.
    tuned_on
        Name of the GPU that it was tuned on; empty for the default.
    tuned_at
        Time of the tuning (UTC); None for the default.
    differences
        Fields of the key in which the tuned problem differs from this one: name, tuned value, value here.
    aged
        Drivers and compilers that have changed since it was measured, one phrase each.
    shipped
        Whether the result came with autotile.
    bundle
        Bundle that it is served from, and the architecture of its cubin; empty without a bundle.
    contenders
        For an operation: the best ways to compute the problem, that which is served first.
    kernel
        Name of the kernel, or of the library.
    geometry
        Grid, block and dynamic shared memory of the launch; None for a library.
    resources, occupancy
        Compiled resources and occupancy; None if NVRTC is missing and they are not stored.
    workrate
        Amount of work of the problem, for a rate in FLOP/s or bytes per second.
    explanation
        Paragraph that states the reason for the choice.
    notices
        Assumptions about the sizes, one line each.
    compared
        Comparison with a result of another problem or GPU, by which it is served in place of what an empty database
        would serve, or the other way round; None if there was nothing to compare.
    unapplied
        Reason why the rule of a family with the problem is not applied; empty if there is none, or it is.
    """

    problem: Problem
    device: DeviceProperties
    tier: str
    config: Config
    measurement: Measurement | None
    source: str
    tuned_on: str
    tuned_at: datetime | None
    differences: tuple[tuple[str, str, str], ...]
    aged: tuple[str, ...]
    shipped: bool
    bundle: str
    contenders: tuple[Contender, ...]
    kernel: str
    geometry: LaunchGeometry | None
    resources: Resources | None
    occupancy: Occupancy | None
    workrate: Workrate
    explanation: str
    notices: tuple[str, ...] = ()
    compared: Compared | None = None
    unapplied: str = ""

    @property
    def time_us(self) -> float | None:
        """Time in microseconds where it was tuned; None for the default configuration."""
        return self.measurement.time_us if self.measurement is not None else None

    @property
    def device_label(self) -> str:
        """Name of the device, with ``(replayed)`` if its own time was replayed from a recording."""
        return self.device.name if self.tier == "transferred" else source_text(self.device.name, self.source)

    def _headline(self) -> str:
        by = self.kernel if not self.config else config_text(self.config)
        served = f"{self.problem} on {self.device_label}: {self.tier}, {by}"
        if self.tier == "transferred":
            return f"{served}, {time_text(self.time_us)} on {source_text(self.tuned_on, self.source)}"
        return f"{served}, {time_text(self.time_us)}" if self.measurement is not None else served

    def _heading(self) -> str:
        return f"{self.problem} on {self.device_label}"

    def _parts(self) -> Iterator[Part]:
        """Yield the configuration with its figures, the reason, and the contenders of an operation."""
        yield self._facts()
        yield self.explanation
        if self.contenders:
            from autotile.api.explanation import contenders_table

            yield contenders_table(self.contenders)

    def _facts(self) -> Facts:
        facts: Facts = [("tier", self.tier)]
        if self.contenders:
            facts.append(("computed by", self.kernel))
        if self.config:
            facts.append(("configuration", config_text(self.config)))
        measured, resources = self.measurement, self.resources
        if measured is not None:
            interval = f"95 % interval {interval_text(measured.low_us, measured.high_us)}"
            if self.tier == "exact":
                facts.append(("time", f"{time_text(measured.time_us)} ({interval})"))
                facts.append(("rate", self.workrate.text(measured.time_us, self.device)))
            else:
                where = source_text(self.tuned_on, self.source)
                facts.append(("time there", f"{time_text(measured.time_us)} on {where} ({interval})"))
        if (compared := self.compared) is not None and compared.serves:
            low, high = compared.interval
            ratio = f"{compared.ratio:.2f} times as long as the {compared.base_tier} ({low:.2f} to {high:.2f})"
            facts.append(("expected", ratio))
        if resources is not None and self.geometry is not None:
            smem_bytes = resources.static_smem_bytes + self.geometry.dynamic_smem_bytes
            facts.append(("registers", f"{resources.registers} a thread, {resources.spill_bytes} B spilled"))
            facts.append(("shared memory", f"{smem_bytes:,} B a block"))
        if self.occupancy is not None:
            facts.append(("occupancy", occupancy_text(self.device, self.occupancy)))
        return facts

    def to_json(self) -> dict[str, Any]:
        """Return everything that is known of the configuration."""
        measured = self.measurement
        return {
            "kernel": self.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "tier": self.tier,
            "config": dict(self.config),
            "time_us": self.time_us,
            "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
            "device": self.device.identity,
            "source": self.source,
            "tuned_on": self.tuned_on,
            "tuned_at": self.tuned_at.isoformat() if self.tuned_at is not None else None,
            "contenders": [contender.to_json() for contender in self.contenders],
            "differences": [[*difference] for difference in self.differences],
            "aged": [*self.aged],
            "shipped": self.shipped,
            "bundle": self.bundle or None,
            "resources": resources_document(self.resources, self.geometry, self.occupancy),
            "compared": self.compared.to_json() if self.compared is not None else None,
            "unapplied": self.unapplied or None,
            "explain": self.explanation,
        }


@checked
def best(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    dtype: str | None = None,
    device: int | str | None = None,
    database: str | Path | None = None,
    bundle: str | Path | None = None,
    library: bool = True,
    **named_sizes: int,
) -> BestResult:
    """Return the best known configuration of a kernel for a problem, as `autotile.get_best_kernel` serves it.

    Nothing is launched, and no miss is counted. Unlike `autotile.get_best_kernel`, it raises if the database cannot be
    read.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; or name of an operation, or
        path of its file.
    sizes, **named_sizes
        Problem sizes and flags; for an operation also its conditions. Missing ones are taken from the file.
    dtype
        Element type; None for the kernel's first.
    device
        CUDA index of a GPU of this machine, or name of a GPU. None for the current GPU; without a GPU, for that of the
        newest stored result, else an H200.
    database
        Path or URL; None for the user's own.
    bundle
        Bundle to look into instead of the database.
    library
        Whether a library may compute an operation.

    Raises
    ------
    InputError
        The kernel, a size, the dtype or the device is unknown, the search-space file is malformed, or the database or
        the bundle cannot be read.

    Examples
    --------
    >>> best("sgemm", M=4096, N=4096, K=4096, device="h200").tier
    'exact'
    """
    served_for, given = resolve_served_device(device), merge_sizes(sizes, named_sizes)
    operation = named_operation(kernel)
    if bundle is None:
        name = operation.name if operation is not None else load_kernel(kernel).name
        _check_readable(database, name)
    location = str(database_location(database))
    found = find_best_kernel(kernel, dtype, served_for, location, given, bundle=bundle, library=library, defaults=True)
    described = operation if operation is not None else found.definition.spec
    asked = found.operation if operation is not None and found.operation is not None else found.problem
    return replace(_best_result(found), notices=tuple(filter(None, [sizes_notice(described, asked.sizes, given)])))


@checked
def list(kernel: KernelName | None = None, *, database: str | Path | None = None) -> StudyList:
    """Return the studies of a kernel, or of all kernels, each with its best configuration.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; None for all kernels.
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    opened = open_for_reading(database)
    if opened is None:
        return StudyList((), location_text(database))
    with opened:
        return StudyList(tuple(rows_of_kernel(opened.studies, kernel)), opened.location)


@checked
def families(kernel: KernelName | None = None, *, database: str | Path | None = None) -> FamilyList:
    """Return the tuned families of a kernel, or of all kernels, each with its rule.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; None for all kernels.
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    opened = open_for_reading(database)
    if opened is None:
        return FamilyList((), location_text(database))
    with opened:
        rules = rows_of_kernel(opened.rules, kernel)
        return FamilyList(tuple(TunedFamily(rule, _is_in_force(rule)) for rule in rules), opened.location)


@checked
def recordings(kernel: KernelName | None = None) -> RecordingList:
    """Return the installed recordings of a kernel, or of all kernels, which a replay finds without a path.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; None for all kernels.

    Raises
    ------
    InputError
        There is no such kernel.
    """
    found = list_recordings(read_settings().recording_folders)
    if kernel is None:
        return RecordingList(tuple(found))
    name = load_kernel(kernel).name
    return RecordingList(tuple(one for one in found if one.header is not None and one.header.key.kernel == name))


@checked
def trials(
    kernel: KernelName,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    dtype: str | None = None,
    outcome: Outcome | str | None = None,
    limit: int | None = None,
    database: str | Path | None = None,
    **named_sizes: int,
) -> TrialList:
    """Return the stored trials of a kernel, the fastest first: one of each configuration of a study.

    Its time is that of the newest finals that it took part in, else that of the search.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`.
    sizes, **named_sizes
        Problem sizes of the studies to include; sizes that are not given are not compared.
    dtype
        Element type of the studies to include; None for all.
    outcome
        Outcome of the trials to include; None for all.
    limit
        Maximum number of trials; None for all.
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        The database cannot be read, there is no such kernel or outcome, the kernel has no such size, or ``limit``
        is less than 1.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}, expected at least 1")
    wanted = _outcome(outcome) if outcome is not None else None
    given = merge_sizes(sizes, named_sizes)
    opened = open_for_reading(database)
    if opened is None:
        load_kernel(kernel)  # a misspelt name is an error, not an empty list
        return TrialList(())
    with opened:
        studies = [study for study in rows_of_kernel(opened.studies, kernel) if dtype in (None, study.key.dtype)]
        _check_sizes(given, studies)
        studies = [study for study in studies if given.items() <= study.key.sizes.items()]
        found = [
            StudyTrial(study.key, stored)
            for study in studies
            for stored in opened.standing_trials(study.study_id)
            if wanted in (None, stored.trial.outcome)
        ]
        digests = {entry.key.digest for entry in found}
        alone = next((study for study in studies if {study.key.digest} == digests), None)
        study = study_without_trials(opened, alone) if alone is not None else None
        if study is not None and alone is not None:
            kept = {config_key(entry.stored.trial.config) for entry in found}
            stored = [one for one in opened.stored_trials(alone.study_id) if config_key(one.trial.config) in kept]
            searched = tuple(one for one in stored if one.phase == "search")
            finals = tuple(one for one in stored if one.phase == "final")
            study = replace(study, trials=searched or finals, final_trials=finals)
    return TrialList(tuple(sorted(found, key=_by_time)[:limit]), study)


@checked
def misses(kernel: KernelName | None = None, *, database: str | Path | None = None) -> MissList:
    """Return the problems that programs were served by a fallback, the costliest first.

    Parameters
    ----------
    kernel
        Name of a kernel, path of a search-space file, or a kernel from `autotile.kernel`; None for all kernels.
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    opened = open_for_reading(database)
    if opened is None:
        return MissList(())
    with opened:
        found = [_miss(one) for one in assess_misses(opened, kernel)]
    return MissList(tuple(sorted(found, key=lambda miss: (-(miss.lost_s or 0.0), -miss.count))))


def _best_result(bound: BoundKernel) -> BestResult:
    return BestResult(
        problem=bound.problem,
        device=bound.device,
        tier=bound.tier,
        config=bound.config,
        measurement=bound.measurement,
        source=bound.source,
        tuned_on=bound.tuned_on,
        tuned_at=bound.tuned_at,
        differences=bound.choice.differences,
        aged=bound.choice.aged,
        shipped=bound.choice.shipped,
        bundle=bound.choice.packed,
        contenders=bound.contenders,
        kernel=bound.kernel,
        geometry=None if bound.is_library else bound.geometry,
        resources=bound.resources,
        occupancy=bound.occupancy,
        workrate=Workrate.of(bound.definition.spec, bound.problem, bound.config),
        explanation=bound.explain(),
        compared=bound.choice.compared,
        unapplied=bound.choice.unapplied,
    )


def _check_readable(database: str | Path | None, kernel: str) -> None:
    """Raise if the database cannot be read, in which case a program is served without it."""
    opened = open_for_reading(database)
    if opened is not None:
        with opened:
            opened.best(kernel)


def _is_in_force(stored: StoredRule) -> bool | None:
    try:
        loaded = load_named_kernel(stored.key.kernel)
    except InputError:
        return None
    is_current = (stored.key.template_hash, stored.key.space_hash) == (loaded.source_hash, space_hash(loaded.spec))
    return is_current and stored.rule.in_force


def _check_sizes(sizes: Iterable[str], studies: Sequence[StudySummary]) -> None:
    for name in sizes:
        if studies and not any(name in study.key.sizes for study in studies):
            known = ", ".join(dict.fromkeys(size for study in studies for size in study.key.sizes))
            raise ProblemError(f"{studies[0].key.kernel} has no size {name!r}; its sizes are {known}")


def _outcome(text: str) -> Outcome:
    try:
        return Outcome(text)
    except ValueError:
        raise InputError(f"no outcome is named {text!r}; expected one of {', '.join(Outcome)}") from None


def _by_time(entry: StudyTrial) -> tuple[bool, float, int]:
    time_us = entry.stored.trial.time_us
    return time_us is None, time_us or 0.0, entry.stored.trial_id


def _miss(assessed: AssessedMiss) -> ListedMiss:
    miss, cost = assessed.miss, assessed.cost
    return ListedMiss(
        problem=miss.problem,
        gpu_name=miss.gpu_name,
        tier=miss.tier,
        count=miss.count,
        last_at=miss.last_at,
        call_us=cost.call_us if cost is not None else None,
        lost_s=assessed.lost_s,
        measured=cost is not None and cost.measured,
        tuned=assessed.tuned,
    )

"""Stored results: what is served for a problem, what a database holds, and pages of it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autotile.api.targets import merge_sizes, resolve_served_device, sizes_notice
from autotile.core.argument_types import checked, checked_except
from autotile.core.device import DeviceProperties, gpu_name_of
from autotile.core.documents import attributes, to_document
from autotile.core.dtypes import known_dtype
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
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Facts,
    Part,
    Result,
    ResultTable,
    Written,
    bytes_text,
    duration_text,
    interval_text,
    moment_text,
    occupancy_text,
    percent_text,
    plural,
    sizes_text,
    source_text,
    time_text,
)
from autotile.database.database import (
    StoredTrial,
    StudySummary,
    database_location,
    location_text,
    open_for_reading,
    rows_of_kernel,
    standing_trials,
)
from autotile.database.keys import (
    L2_TEXTS,
    STUDY_HEADINGS,
    TuningKey,
    key_differences,
    study_columns,
    study_document,
    version_of,
)
from autotile.database.paths import check_output
from autotile.database.winners import StoredRule
from autotile.errors import InputError
from autotile.exchange.recording import RecordingFile, list_recordings, read_recording
from autotile.kernel.library import KernelName, is_path, load_kernel, load_named_kernel
from autotile.kernel.operation import named_operation
from autotile.kernel.problem import Workrate
from autotile.report.notebook import StudyPlots
from autotile.report.study import study_with
from autotile.serving.choice import Compared, Contender
from autotile.serving.dispatcher import default_dispatcher, find_best_kernel
from autotile.settings import read_settings, user_path
from autotile.tuning.plan import AssessedMiss, assess_misses

if TYPE_CHECKING:
    import pandas as pd

    from autotile.exchange.column_table import ColumnTable
    from autotile.report.comparison import DatabaseComparison
    from autotile.report.study import StudyData


def counted_text(keys: Iterable[TuningKey], singular: str, several: str) -> str:
    """Format the number of results under some keys, with the number of replayed ones: ``3 trials, 2 (replayed)``."""
    sources = [key.source for key in keys]
    replayed = sources.count("replayed")
    text = plural(len(sources), singular, several)
    if replayed == 0:
        return text
    return f"{text} (replayed)" if replayed == len(sources) else f"{text}, {replayed:,} (replayed)"


def _columns_by_study(keys: Mapping[int, TuningKey]) -> dict[int, tuple[str, str, str]]:
    """Return `study_columns` by the number of a study, which is shown where two read alike, as of two versions."""
    columns = {number: study_columns(key) for number, key in keys.items()}
    count = Counter(columns.values())
    return {
        number: (kernel, f"{problem} (study {number})" if count[kernel, problem, device] > 1 else problem, device)
        for number, (kernel, problem, device) in columns.items()
    }


@dataclass(frozen=True, slots=True, repr=False)
class StudyList(Result):
    """Studies of a database (its path or URL), by kernel and then oldest first; ``of_kernel`` names that asked for."""

    studies: tuple[StudySummary, ...]
    location: str
    of_kernel: str = ""

    def _headline(self) -> str:
        return f"{counted_text((study.key for study in self.studies), 'study', 'studies')} in {self.location}"

    def _parts(self) -> Iterator[Part]:
        if not self.studies:
            yield f"nothing is tuned yet{self.of_kernel} in {self.location}; run `autotile tune`"
            return
        columns = _columns_by_study({study.study_id: study.key for study in self.studies})
        headings = (*STUDY_HEADINGS, f"{RIGHT}tried", f"{RIGHT}ok", f"{RIGHT}best", "configuration", "last trial")
        rows = [
            (
                *columns[study.study_id],
                f"{study.trials:,}",
                f"{study.ok:,}",
                time_text(study.best_time_us),
                config_text(study.best_config) if study.best_config is not None else NOTHING,
                moment_text(study.last_at),
            )
            for study in self.studies
        ]
        yield ResultTable(headings, rows, ("configuration", "last trial", "device"))

    def to_json(self) -> Any:
        """Return one entry for each study."""
        return to_document(
            [
                {
                    "study": study.study_id,
                    **study_document(study.key),
                    "nvrtc_version": study.key.nvrtc_version,
                    **attributes(study, "runs", "trials", "ok"),
                    "best": {"config": study.best_config, "time_us": study.best_time_us}
                    if study.best_config is not None
                    else None,
                    **attributes(study, "created_at", "last_at"),
                }
                for study in self.studies
            ]
        )


@dataclass(frozen=True, slots=True, repr=False)
class FamilyList(Result):
    """Tuned families of a database, the newest first; ``location`` is its path or URL."""

    families: tuple[tuple[StoredRule, bool | None], ...]
    """Rules, each with whether it is served: it is for the current version of the kernel, and was not found to be no
    better than serving without it (`FamilyRule.judgement`). None if no kernel of its name is found."""
    location: str

    def _headline(self) -> str:
        keys = (stored.key for stored, _ in self.families)
        return f"{counted_text(keys, 'family', 'families')} in {self.location}"

    def _parts(self) -> Iterator[Part]:
        if not self.families:
            yield f"no family is tuned yet in {self.location}; `autotile tune KERNEL SIZE=A..B` tunes one"
        for stored, in_force in self.families:
            rule, key = stored.rule, stored.key
            facts: Facts = [
                ("family", f"{key.kernel} {rule.family} {key.dtype}{L2_TEXTS[key.l2_mode]}"),
                ("device", key.device_label),
                ("loss", rule.loss_text()),
                ("learned", f"{moment_text(stored.learned_at)}, from {plural(len(rule.points), 'point')}"),
                ("in force", _IN_FORCE[in_force] if rule.in_force else f"no: {rule.verdict}"),
            ]
            yield facts
            yield rule.facts()

    def to_json(self) -> Any:
        """Return one entry for each family."""
        documents = []
        for stored, in_force in self.families:
            key, rule = stored.key, stored.rule
            documents.append(
                {
                    "kernel": key.kernel,
                    "family": str(rule.family),
                    "dtype": key.dtype,
                    "device": {"name": key.gpu_name, "source": key.source},
                    "nvrtc_version": key.nvrtc_version,
                    "l2": key.l2_mode,
                    "learned_at": stored.learned_at,
                    "in_force": in_force,
                    "judgement": rule.judgement,
                    "loss": {"mean": rule.mean_loss, "worst": rule.worst.loss},
                    "held_out_loss": rule.mean_held_out,
                    "rule": rule,
                }
            )
        return to_document(documents)


_IN_FORCE = {True: "yes", False: "no: the kernel has changed since", None: "not known: no kernel of that name is found"}


@dataclass(frozen=True, slots=True, repr=False)
class RecordingList(Result):
    """Installed recordings, by folder and name, each with its header; a damaged one with its problem instead."""

    recordings: tuple[RecordingFile, ...]

    def _headline(self) -> str:
        return plural(len(self.recordings), "recording")

    def _parts(self) -> Iterator[Part]:
        if not self.recordings:
            yield "no recording is installed; `autotile export --format recording --measure` makes one on a GPU"
            return
        headings = (*STUDY_HEADINGS, f"{RIGHT}valid", "recorded", "made", "file")
        rows = [
            (
                *study_columns(header.key),
                f"{header.valid_configs:,}",
                header.chosen,
                moment_text(header.created_at),
                str(path),
            )
            if not isinstance(header, str)
            else ("damaged", *[NOTHING] * 5, header)
            for path, header in self.recordings
        ]
        yield ResultTable(headings, rows, ("file", "made", "device"))

    def to_json(self) -> Any:
        """Return one entry for each recording."""
        return to_document(
            [
                {
                    **study_document(header.key),
                    "valid": header.valid_configs,
                    "recorded": header.chosen,
                    "created_at": header.created_at,
                    "file": path,
                }
                if not isinstance(header, str)
                else {"file": path, "problem": header}
                for path, header in self.recordings
            ]
        )


class StudyTrial(NamedTuple):
    """A stored trial with the key of its study."""

    key: TuningKey
    stored: StoredTrial


@dataclass(frozen=True, slots=True, repr=False)
class TrialList(Result, StudyPlots):
    """Trials of a kernel: the fastest first, then those without a time in the order in which they were tried.

    Its methods ``plot_...`` return charts of the trials of one problem; see `autotile.report.notebook.StudyPlots`.
    """

    trials: tuple[StudyTrial, ...]
    study: StudyData | None = field(default=None, compare=False)
    """The study that all trials are of, with all that is stored of their configurations; None if they are of
    several."""

    def study_data(self) -> StudyData:
        """Return the trials as a study.

        Raises
        ------
        InputError
            There are no trials, or trials of several problems, devices or versions of the kernel.
        """
        from autotile.report.study import StudyData

        if not self.trials:
            raise InputError("there are no trials that a chart could be of; `autotile.list()` shows what is tuned")
        if self.study is not None:
            return self.study
        keys = {entry.key.digest: entry.key for entry in self.trials}
        key, *others = keys.values()
        if differ := dict.fromkeys(name for other in others for name, *_ in key_differences(key, other)):
            from autotile.report.comparison import KEY_LABELS

            names = " and ".join(KEY_LABELS.get(name, name) for name in differ)
            chosen = [name for name in ("sizes", "dtype") if name in differ]
            cure = f"name the {' and the '.join(chosen)}, or " if chosen else ""
            raise InputError(
                f"charts are of one study, and these trials are of {len(keys)}, which differ in the {names}; {cure}"
                "let `autotile.report` draw them all on a page"
            )
        stored = sorted((entry.stored for entry in self.trials), key=lambda one: one.trial_id)
        return StudyData(key, None, "", (), tuple(stored))

    def to_pandas(self) -> pd.DataFrame:
        """Return the trials of all problems, in this order, as a pandas table; columns as for `columns`."""
        return self.columns().to_pandas()

    def columns(self) -> ColumnTable:
        """Return the trials as typed columns, which can be written as CSV and Parquet."""
        from autotile.exchange.column_table import trial_table

        return trial_table(self.trials)

    def _headline(self) -> str:
        counted = counted_text((entry.key for entry in self.trials), "trial", "trials")
        if not self.trials:
            return counted
        first = self.trials[0]
        fastest = first.stored.trial.time_us
        return f"{counted} of {first.key.kernel}" + (f", fastest {time_text(fastest)}" if fastest is not None else "")

    def _parts(self) -> Iterator[Part]:
        if not self.trials:
            yield "no such trial is stored; `autotile list` shows what is tuned"
            return
        columns = _columns_by_study({entry.stored.study_id: entry.key for entry in self.trials})
        several = len(columns) > 1
        scores = dict.fromkeys(name for entry in self.trials for name in entry.stored.trial.scores)
        rows = []
        for _, stored in self.trials:
            trial = stored.trial
            own, resources, occupancy = trial.scores, trial.resources, trial.occupancy
            remarks = [f"finals, place {stored.rank}"] if stored.phase == "final" else []
            remarks += ["replayed"] if trial.source == "replayed" else []
            remarks += [trial.reason.splitlines()[0]] if trial.reason else []
            rows.append(
                (
                    str(trial.outcome),
                    time_text(trial.time_us),
                    interval_text(trial.measurement),
                    str(resources.registers) if resources is not None else NOTHING,
                    percent_text(occupancy.occupancy) if occupancy is not None else NOTHING,
                    *(f"{own[name]:.6g}" if name in own else NOTHING for name in scores),
                    config_text(trial.config),
                    ", ".join(remarks),
                    *([", ".join(columns[stored.study_id][1:])] if several else []),
                )
            )
        figures = ("time", "95 % interval, us", "registers", "occupancy", *scores)
        aligned = [name if name.startswith("95") else f"{RIGHT}{name}" for name in figures]
        headings = ("outcome", *aligned, "configuration", "remark", *(["problem"] if several else []))
        yield ResultTable(headings, rows, ("configuration", "remark", "problem"))

    def to_json(self) -> Any:
        """Return one entry for each trial."""
        documents, used = [], ("registers", "spill_bytes", "static_smem_bytes")
        for key, stored in self.trials:
            trial = stored.trial
            measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
            documents.append(
                {
                    "trial": stored.trial_id,
                    "study": stored.study_id,
                    "run": stored.run_id,
                    **study_document(key),
                    **attributes(stored, "phase", "rank"),
                    **attributes(trial, "config", "outcome", "stage", "reason", "time_us"),
                    "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
                    "samples": len(measured.samples_us) if measured is not None else 0,
                    **(attributes(resources, *used) if resources is not None else dict.fromkeys(used)),
                    "occupancy": occupancy and occupancy.occupancy,
                    "limited_by": occupancy.limited_by if occupancy is not None else [],
                    **attributes(trial, "seconds", "telemetry"),
                    "created_at": stored.created_at,
                }
            )
        return to_document(documents)


@dataclass(frozen=True, slots=True, repr=False)
class MissList(Result):
    """Misses, the costliest first, then the most frequent."""

    misses: tuple[AssessedMiss, ...]

    def _headline(self) -> str:
        calls = plural(sum(miss.count for miss in self.misses), "call")
        lost = [miss.lost_s for miss in self.misses if miss.lost_s is not None]
        cost = f", which may have cost {duration_text(sum(lost))}" if lost else ""
        return f"{plural(len(self.misses), 'miss', 'misses')} with {calls}{cost}"

    def _parts(self) -> Iterator[Part]:
        if not self.misses:
            yield "no misses are stored"
            return
        figures = (f"{RIGHT}calls", f"{RIGHT}a call", f"{RIGHT}may have cost")
        rows = []
        for miss in self.misses:
            about = "" if miss.measured or miss.call_us is None else "about "
            rows.append(
                (
                    miss.problem.kernel,
                    f"{sizes_text(miss.problem.sizes)} {miss.problem.dtype}",
                    miss.gpu_name,
                    miss.tier,
                    f"{miss.count:,}",
                    about + time_text(miss.call_us),
                    NOTHING if miss.lost_s is None else about + duration_text(miss.lost_s),
                    "tuned" if miss.tuned else NOTHING,
                    moment_text(miss.last_at),
                )
            )
        headings = ("kernel", "problem", "device", "served", *figures, "since", "last")
        yield ResultTable(headings, rows, ("last", "device"))

    def to_json(self) -> Any:
        """Return one entry for each problem, GPU and tier."""
        return to_document(
            [
                {
                    **miss.problem.document(),
                    "device": miss.gpu_name,
                    **attributes(miss, "tier", "count", "last_at", "call_us", "lost_s", "measured", "tuned"),
                }
                for miss in self.misses
            ]
        )


@dataclass(frozen=True, slots=True, repr=False)
class BestResult(Result):
    """The configuration that is served for a problem, and the reason."""

    problem: Problem
    device: DeviceProperties
    tier: str
    """``exact``: tuned for this problem on this GPU. ``family``: chosen by the rule of a family that contains the
    problem. ``nearest``: tuned for other sizes on this GPU. ``transferred``: tuned on another GPU. ``default``: not
    tuned."""
    config: Config
    measurement: Measurement | None
    """Time where it was tuned; None for the default configuration."""
    source: str
    """``cuda`` for a time measured on the GPU, ``replayed`` for one from a recording, empty for the default."""
    tuned_on: str
    """Name of the GPU that it was tuned on; empty for the default."""
    tuned_at: datetime | None
    """Time of the tuning (UTC); None for the default."""
    differences: tuple[tuple[str, str, str], ...]
    """Fields of the key in which the tuned problem differs from this one: name, tuned value, value here."""
    aged: tuple[str, ...]
    """Drivers and compilers that have changed since it was measured, one phrase each."""
    shipped: bool
    """Whether the result came with autotile."""
    bundle: str
    """Bundle that it is served from, and the architecture of its cubin; empty without a bundle."""
    contenders: tuple[Contender, ...]
    """For an operation: the best ways to compute the problem, that which is served first."""
    kernel: str
    """Name of the kernel, or of the library."""
    geometry: LaunchGeometry | None
    """Grid, block and dynamic shared memory of the launch; None for a library."""
    resources: Resources | None
    occupancy: Occupancy | None
    """Compiled resources and occupancy; None if NVRTC is missing and they are not stored."""
    workrate: Workrate
    """Amount of work of the problem, for a rate in FLOP/s or bytes per second."""
    explanation: str
    """Paragraph that states the reason for the choice."""
    notices: tuple[str, ...]
    """Assumptions about the sizes, one line each."""
    compared: Compared | None
    """Comparison with a result of another problem or GPU, by which it is served in place of what an empty database
    would serve, or the other way round; None if there was nothing to compare."""
    unapplied: str
    """Reason why the rule of a family with the problem is not applied; empty if there is none, or it is."""
    document: Mapping[str, Any]
    """Everything that is known of the configuration, as JSON values."""

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
        served = f"{self._heading()}: {self.tier}, {by}"
        if self.tier == "transferred":
            return f"{served}, {time_text(self.time_us)} on {source_text(self.tuned_on, self.source)}"
        return f"{served}, {time_text(self.time_us)}" if self.measurement is not None else served

    def _heading(self) -> str:
        return f"{self.problem} on {self.device_label}"

    def _parts(self) -> Iterator[Part]:
        facts: Facts = [("tier", self.tier)]
        if self.contenders:
            facts.append(("computed by", self.kernel))
        if self.config:
            facts.append(("configuration", config_text(self.config)))
        measured, resources = self.measurement, self.resources
        if measured is not None:
            interval = f"95 % interval {interval_text(measured)}"
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
        yield facts
        yield self.explanation
        if self.contenders:
            from autotile.api.inspection import contenders_table

            yield contenders_table(self.contenders)

    def to_json(self) -> Any:
        """Return everything that is known of the configuration."""
        return dict(self.document)


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
    """Show what would be served for a problem, and why.

    Tiers: exact (tuned for this problem on this GPU), family (by the rule of a family that contains it), nearest (tuned
    for other sizes), transferred (tuned on another GPU), default (not tuned); for an operation also model (a model of
    times expects it to be the fastest) and library (nothing is known that is faster).

    Nothing is launched, and no miss is counted. Unlike `get_best_kernel`, it fails if the database cannot be read.

    Parameters
    ----------
    kernel
        Name of a kernel or an operation, or path of its file. Or a kernel from `autotile.kernel`.
    sizes, **named_sizes
        Problem sizes and flags, such as M=4096 N=4096 TRANS_A=1; for an operation also its conditions. None for those
        in the search-space file.
    dtype
        Element type, one of the kernel's. None for the kernel's first.
    device
        GPU to answer for: a profile of `autotile devices`, or the index of a GPU of this machine. None for the current
        GPU, else that of the newest result, else an H200.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    bundle
        Look into a bundle of `autotile export`. None for the database.
    library
        Whether a library, such as cuBLAS, may compute an operation.

    Raises
    ------
    InputError
        The kernel, a size, the dtype or the device is unknown, the search-space file is malformed, or the database or
        the bundle cannot be read. Or only pinned choices are allowed, and this is not one of them (`PinError`).

    Examples
    --------
    >>> best("sgemm", M=4096, N=4096, K=4096, device="h200").tier
    'exact'
    """
    if bundle is not None and database is not None:
        raise InputError("a bundle holds its own results; give --bundle or --db")
    served_for, given = resolve_served_device(device), merge_sizes(sizes, named_sizes)
    operation = named_operation(kernel)
    if bundle is None:
        name = operation.name if operation is not None else load_kernel(kernel).name
        with open_for_reading(database) as opened:
            if opened is not None:
                opened.best(name)  # raises if it cannot be read, where a program would be served without it
    location = str(database_location(database))
    found = find_best_kernel(kernel, dtype, served_for, location, given, bundle=bundle, library=library, defaults=True)
    if bundle is None and (pin := default_dispatcher.pins.in_force()) is not None:
        pin.check(found)
    described = operation if operation is not None else found.definition.spec
    asked = found.operation if operation is not None and found.operation is not None else found.problem
    choice, of_choice = found.choice, ("differences", "aged", "shipped", "compared", "unapplied")
    names = ("problem", "device", "tier", "config", "measurement", "source", "tuned_on", "tuned_at", "contenders")
    document = found.to_json()
    return BestResult(
        **attributes(found, *names, "kernel", "resources", "occupancy"),
        **attributes(choice, *of_choice),
        bundle=choice.packed,
        geometry=None if found.is_library else found.geometry,
        workrate=Workrate.of(found.definition.spec, found.problem, found.config),
        explanation=document["explain"],
        notices=tuple(filter(None, [sizes_notice(described, asked.sizes, given)])),
        document={**document, "compared": to_document(choice.compared), "unapplied": choice.unapplied or None},
    )


@checked
def list(
    kernel: KernelName | None = None,
    *,
    misses: bool = False,
    families: bool = False,
    recordings: bool = False,
    database: str | Path | None = None,
) -> StudyList | MissList | FamilyList | RecordingList:
    """List tuned problems, each with its best configuration.

    Lists those of one kernel if it is named, else of all. Of misses: the number of calls and, if enough is tuned to
    estimate it, the time that they may have cost; `autotile tune --misses` tunes them, the costliest first.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of a search-space file (path/to/mine.toml). Or a kernel from `autotile.kernel`.
    misses
        List instead what programs asked for and could not be served exactly, the costliest first.
    families
        List instead the families that were tuned, each with its rule.
    recordings
        List instead the recordings that a replay finds without a path.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        The database cannot be read, or there is no such kernel.
    """
    named = "" if kernel is None else f" of {kernel}"
    if misses + families + recordings > 1:
        raise InputError("--misses, --families and --recordings are lists of their own; give one of them")
    if recordings:
        if database is not None:
            raise InputError("--recordings are files, which are in no database; leave --db out")
        found = list_recordings(read_settings().recording_folders)
        name = None if kernel is None else load_kernel(kernel).name
        own = (one for one in found if not isinstance(one[1], str) and one[1].key.kernel == name)
        return RecordingList(tuple(found if name is None else own))
    with open_for_reading(database) as opened:
        if opened is None:
            rows_of_kernel(lambda _: (), kernel)  # a misspelt name is an error, not an empty list
            place = location_text(database)
            return MissList(()) if misses else FamilyList((), place) if families else StudyList((), place, named)
        if misses:
            assessed = assess_misses(opened, kernel)
            return MissList(tuple(sorted(assessed, key=lambda miss: (-(miss.lost_s or 0.0), -miss.count))))
        if families:
            tuned = []
            for stored in rows_of_kernel(opened.rules, kernel):
                in_force = None
                with suppress(InputError):  # there may be no kernel of its name any more
                    current = load_named_kernel(stored.key.kernel)
                    in_force = stored.key.version == version_of(current) and stored.rule.in_force
                tuned.append((stored, in_force))
            return FamilyList(tuple(tuned), opened.location)
        return StudyList(tuple(rows_of_kernel(opened.studies, kernel)), opened.location, named)


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
    """Show the stored trials of a kernel, fastest first, or write them to a file.

    Those without a time follow, in the order in which they were tried. Of each configuration of a study there is one,
    with the time of the newest finals that it took part in, else that of the search.

    Parameters
    ----------
    kernel
        Name of a kernel, or path of a search-space file (path/to/mine.toml). Or a kernel from `autotile.kernel`.
    sizes, **named_sizes
        Sizes and flags of the problems, such as M=4096. None for all problems.
    dtype
        Element type, one of the kernel's. None for all.
    outcome
        Only trials with this outcome: ok, pruned, wrong_result and others. None for all.
    limit
        Maximum number of trials, fastest first. None for all.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.

    Raises
    ------
    InputError
        The database cannot be read, there is no such kernel or outcome, the kernel has no such size, or ``limit``
        is less than 1.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}, expected at least 1")
    if outcome is not None and outcome not in [*Outcome]:
        raise InputError(f"no outcome is named {outcome!r}; expected one of {', '.join(Outcome)}")
    given, dtype = merge_sizes(sizes, named_sizes), None if dtype is None else known_dtype(dtype)
    from autotile.report.report_data import check_sizes

    with open_for_reading(database) as opened:
        if opened is None:
            load_kernel(kernel)  # a misspelt name is an error, not an empty list
            return TrialList(())
        studies = [study for study in rows_of_kernel(opened.studies, kernel) if dtype in (None, study.key.dtype)]
        check_sizes(given, studies)
        studies = [study for study in studies if given.items() <= study.key.sizes.items()]
        found = [
            StudyTrial(study.key, stored)
            for study in studies
            for stored in standing_trials(opened.stored_trials(study.study_id))
            if outcome in (None, stored.trial.outcome)
        ]
        digests = {entry.key.digest for entry in found}
        alone = next((study for study in studies if {study.key.digest} == digests), None)
        study = None
        if alone is not None:
            kept = {config_key(entry.stored.trial.config) for entry in found}
            stored = [one for one in opened.stored_trials(alone.study_id) if config_key(one.trial.config) in kept]
            study = study_with(opened, alone, stored)
    found.sort(key=lambda one: (one.stored.trial.time_us is None, one.stored.trial.time_us or 0.0, one.stored.trial_id))
    return TrialList(tuple(found[:limit]), study)


@checked_except()  # its device is a name
def report(
    kernel: KernelName | None = None,
    sizes: Mapping[str, int] | None = None,
    /,
    *,
    other: str | Path | None = None,
    output: str | Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    fail_if_slower: str | float | None = None,
    database: str | Path | None = None,
    announce: Callable[[str], None] = lambda _: None,
    **named_sizes: int,
) -> Written | DatabaseComparison:
    """Write a page with charts and tables of what is stored.

    It is one file, which opens offline in a browser. Plotly draws its charts (`pip install 'autotile[report]'`).

    For two databases, it shows what got slower in the second, by how much and how certainly; a page is then written
    with ``output`` only.

    Parameters
    ----------
    kernel
        Kernel or operation, with sizes that select its problems; or a recording (FILE.npz); or two databases to
        compare. None for everything that is stored.
    sizes, **named_sizes
        Problem sizes of the studies to show; a size that is left out may have any value.
    other
        Second database, to be compared with that in place of the kernel.
    output
        Page to write, or a folder to write it into. None for report.html.
    dtype
        Only problems of this element type. None for all.
    device
        Only problems tuned on the GPU of this name. None for all.
    fail_if_slower
        With two databases: exit with 3 if a problem is slower in the second by more than this, such as 5%, with 95 %
        confidence; and with 1 if one fails there, or nothing can be compared. In Python, the result has it as its
        ``limit``.
    database
        Tuning database: an SQLite file or a postgresql:// URL. None for the user's own, see `autotile db path`.
    announce
        Called with the place of the page of a comparison.

    Raises
    ------
    InputError
        There is no such kernel, size or recording, nothing is stored of it, the database cannot be read, or the file
        cannot be written.
    ToolchainError
        Plotly is not installed.

    Examples
    --------
    >>> report("sgemm_2d", M=4096, N=4096, K=4096)  # doctest: +SKIP
    <Written: report.html: 1 tuned problem, 200 trials, 5.14 MiB>
    """
    from autotile.report.page import write_page

    given, dtype = merge_sizes(sizes, named_sizes), None if dtype is None else known_dtype(dtype)
    path = user_path("report.html" if output is None else output, "a report")
    path = path / "report.html" if path.is_dir() else path
    recording = None
    if other is None and isinstance(kernel, str | Path) and str(kernel).endswith(".npz"):
        recording = user_path(str(kernel), "a recording")
        if not recording.is_file():
            raise InputError(f"there is no recording {recording}; see `autotile list --recordings`")
    elif other is None and str(kernel).endswith(".db"):
        raise InputError(f"{kernel} is a database; give it as --db {kernel}, or a second one to compare it with")
    if other is None or output is not None:
        check_output(path, *([recording] if recording is not None else []))
    if other is not None or recording is not None:
        for name, value in (("SIZE=N", given or None), ("--dtype", dtype), ("--device", device), ("--db", database)):
            if value is not None:
                purpose = "to compare two" if recording is None else "to show a recording"
                raise InputError(f"{name} selects problems of one database; leave it out {purpose}")
    if other is not None:
        limit = read_percentage(fail_if_slower) if fail_if_slower is not None else None
        from autotile.report.comparison import compare

        compared = replace(compare(str(kernel), other), limit=limit)
        if output is not None:
            write_page(compared.page(), path)
            announce(f"page: {path}")
        return compared
    if fail_if_slower is not None:
        raise InputError("--fail-if-slower compares two databases; give them as A.db B.db")
    from autotile.report.report_data import read_report, report_of_study
    from autotile.report.sections import report_page
    from autotile.report.study import study_of_recording

    if recording is not None:
        data = report_of_study(study_of_recording(read_recording(recording), str(recording)))
    else:
        operation = named_operation(kernel)
        with open_for_reading(database) as opened:
            if opened is None:
                if kernel is not None and operation is None:
                    load_kernel(kernel)  # a misspelt name is an error of its own
                asked = f"autotile tune {kernel or 'KERNEL'}"
                raise InputError(f"there is no database {location_text(database)} yet; run `{asked}` first")
            gpu_name = gpu_name_of(device) if device is not None else None
            data = read_report(opened, operation or kernel, given, dtype=dtype, gpu_name=gpu_name)
        if isinstance(kernel, str | Path) and is_path(str(kernel)):
            data = replace(data, path=str(kernel))
    write_page(report_page(data), path)
    shown = sum(len(study.newest) for study in data.studies)
    studies, size_bytes = len(data.studies), path.stat().st_size
    content = f"{plural(studies, 'tuned problem')}, {plural(shown, 'trial')}, {bytes_text(size_bytes)}"
    facts: Facts = [("page", str(path)), ("title", data.title), ("shows", content)]
    document = {"path": path, "title": data.title, "studies": studies, "trials": shown, "size_bytes": size_bytes}
    return Written(path, f"{path}: {content}", [facts], to_document(document))


_PERCENTAGE = re.compile(r"\A([0-9]{1,4}(?:\.[0-9]{1,6})?) ?%\Z")


def read_percentage(given: str | float) -> float:
    """Return the fraction that a percentage such as ``5%`` states, or a number as it is; an `InputError` if neither."""
    found = _PERCENTAGE.match(given.strip()) if isinstance(given, str) else None
    share = float(found[1]) / 100.0 if found is not None else -1.0 if isinstance(given, str) else float(given)
    if not 0.0 <= share < math.inf:
        raise InputError(f"--fail-if-slower {given!r} is no percentage; expected one such as 5% or 2.5%")
    return share

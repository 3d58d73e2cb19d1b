"""Lists of what a database holds, as the public functions return them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from autotile.core.documents import to_document
from autotile.core.model import Problem, config_text
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Facts,
    Part,
    Result,
    ResultTable,
    duration_text,
    interval_text,
    moment_text,
    percent_text,
    plural,
    sizes_text,
    source_text,
    time_text,
)
from autotile.database.database import StoredTrial, StudySummary
from autotile.database.keys import STUDY_HEADINGS, TuningKey, key_text, study_columns, study_document
from autotile.database.winners import StoredRule
from autotile.errors import InputError
from autotile.exchange.recording import RecordingFile
from autotile.report.notebook import StudyPlots

if TYPE_CHECKING:
    import pandas as pd

    from autotile.exchange.column_table import ColumnTable
    from autotile.report.study import StudyData


def counted_text(keys: Iterable[TuningKey], singular: str, several: str) -> str:
    """Format the number of results under some keys, with the number of replayed ones: ``3 trials, 2 (replayed)``."""
    sources = [key.source for key in keys]
    replayed = sources.count("replayed")
    text = plural(len(sources), singular, several)
    if replayed == 0:
        return text
    return f"{text} (replayed)" if replayed == len(sources) else f"{text}, {replayed:,} (replayed)"


@dataclass(frozen=True, slots=True, repr=False)
class StudyList(Result):
    """Studies of a database, by kernel and then oldest first; ``location`` is its path or URL."""

    studies: tuple[StudySummary, ...]
    location: str

    def _headline(self) -> str:
        return f"{counted_text((study.key for study in self.studies), 'study', 'studies')} in {self.location}"

    def _parts(self) -> Iterator[Part]:
        if not self.studies:
            yield f"nothing is tuned yet in {self.location}; `autotile tune` does it"
            return
        headings = (*STUDY_HEADINGS, f"{RIGHT}tried", f"{RIGHT}ok", f"{RIGHT}best", "configuration", "last trial")
        rows = [
            (
                *study_columns(study.key),
                f"{study.trials:,}",
                f"{study.ok:,}",
                time_text(study.best_time_us),
                config_text(study.best_config) if study.best_config is not None else NOTHING,
                moment_text(study.last_at),
            )
            for study in self.studies
        ]
        yield ResultTable(headings, rows, ("configuration", "last trial", "device"))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one entry for each study."""
        return [
            {
                "study": study.study_id,
                **study_document(study.key),
                "nvrtc_version": study.key.nvrtc_version,
                "runs": study.runs,
                "trials": study.trials,
                "ok": study.ok,
                "best": {"config": dict(study.best_config), "time_us": study.best_time_us}
                if study.best_config is not None
                else None,
                "created_at": study.created_at.isoformat(),
                "last_at": study.last_at.isoformat() if study.last_at is not None else None,
            }
            for study in self.studies
        ]


@dataclass(frozen=True, slots=True)
class TunedFamily:
    """A family of problems that has been tuned.

    Attributes
    ----------
    stored
        Rule of the family, with its key and the time of learning.
    in_force
        Whether the rule is served: it is for the current version of the kernel, and was not found to be no better than
        serving without it (`FamilyRule.judgement`). None if no kernel of its name is found.
    """

    stored: StoredRule
    in_force: bool | None


@dataclass(frozen=True, slots=True, repr=False)
class FamilyList(Result):
    """Tuned families of a database, the newest first; ``location`` is its path or URL."""

    families: tuple[TunedFamily, ...]
    location: str

    def _headline(self) -> str:
        keys = (family.stored.key for family in self.families)
        return f"{counted_text(keys, 'family', 'families')} in {self.location}"

    def _parts(self) -> Iterator[Part]:
        if not self.families:
            yield f"no family is tuned yet in {self.location}; `autotile tune` tunes one"
        for family in self.families:
            stored, key = family.stored, family.stored.key
            hot = " hot L2" if key.l2_mode == "hot" else ""
            learned = f"{moment_text(stored.learned_at)}, from {plural(len(stored.rule.points), 'point')}"
            in_force = _IN_FORCE[family.in_force] if stored.rule.in_force else f"no: {stored.rule.verdict}"
            facts: Facts = [
                ("family", f"{key.kernel} {stored.rule.family} {key.dtype}{hot}"),
                ("device", source_text(key.gpu_name, key.source)),
                ("loss", stored.rule.loss_text()),
                ("learned", learned),
                ("in force", in_force),
            ]
            yield facts
            yield stored.rule.facts()

    def to_json(self) -> list[dict[str, Any]]:
        """Return one entry for each family."""
        return [_family_document(family) for family in self.families]


_IN_FORCE = {True: "yes", False: "no: the kernel has changed since", None: "not known: no kernel of that name is found"}


def _family_document(family: TunedFamily) -> dict[str, Any]:
    stored, key = family.stored, family.stored.key
    return {
        "kernel": key.kernel,
        "family": str(stored.rule.family),
        "dtype": key.dtype,
        "device": {"name": key.gpu_name, "source": key.source},
        "nvrtc_version": key.nvrtc_version,
        "l2": key.l2_mode,
        "learned_at": stored.learned_at.isoformat(),
        "in_force": family.in_force,
        "judgement": to_document(stored.rule.judgement),
        "loss": {"mean": stored.rule.mean_loss, "worst": stored.rule.worst.loss},
        "held_out_loss": stored.rule.mean_held_out,
        "rule": stored.rule.to_json(),
    }


@dataclass(frozen=True, slots=True, repr=False)
class RecordingList(Result):
    """Installed recordings, by folder and name; a damaged one has no header."""

    recordings: tuple[RecordingFile, ...]

    def _headline(self) -> str:
        return plural(len(self.recordings), "recording")

    def _parts(self) -> Iterator[Part]:
        """Yield one row for each recording; a damaged one shows its fault."""
        if not self.recordings:
            yield "no recording is installed; `autotile export --format recording --measure` makes one on a GPU"
            return
        headings = (*STUDY_HEADINGS, f"{RIGHT}valid", "recorded", "made", "file")
        rows = [
            (
                found.header.key.kernel,
                f"{sizes_text(found.header.key.sizes)} {found.header.key.dtype}",
                found.header.key.gpu_name,
                f"{found.header.valid_configs:,}",
                found.header.chosen,
                moment_text(found.header.created_at),
                str(found.path),
            )
            if found.header is not None
            else ("damaged", *[NOTHING] * 5, found.problem)
            for found in self.recordings
        ]
        yield ResultTable(headings, rows, ("file", "made", "device"))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one entry for each recording."""
        return [
            {
                **study_document(found.header.key),
                "valid": found.header.valid_configs,
                "recorded": found.header.chosen,
                "created_at": found.header.created_at.isoformat(),
                "file": str(found.path),
            }
            if found.header is not None
            else {"file": str(found.path), "problem": found.problem}
            for found in self.recordings
        ]


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """A stored trial with the key of its study."""

    key: TuningKey
    stored: StoredTrial


@dataclass(frozen=True, slots=True, repr=False)
class TrialList(Result, StudyPlots):
    """Trials of a kernel: the fastest first, then those without a time in the order in which they were tried.

    Its methods ``plot_...`` return charts of the trials of one problem; see `autotile.report.notebook.StudyPlots`.

    Attributes
    ----------
    trials
        Trials with the keys of their studies.
    study
        The study that all trials are of, with all that is stored of their configurations; None if they are of several.
    """

    trials: tuple[StudyTrial, ...]
    study: StudyData | None = field(default=None, compare=False)

    def study_data(self) -> StudyData:
        """Return the trials as a study.

        Raises
        ------
        InputError
            There are no trials, or trials of several problems or devices.
        """
        from autotile.report.study import StudyData

        keys = {entry.key.digest: entry.key for entry in self.trials}
        if len(keys) != 1:
            raise InputError(f"charts are of the trials of one problem, these are of {len(keys)}; name the sizes")
        (key,) = keys.values()
        stored = sorted((entry.stored for entry in self.trials), key=lambda one: one.trial_id)
        searched = tuple(one for one in stored if one.phase == "search")
        final = tuple(one for one in stored if one.phase == "final")
        if self.study is None:
            return StudyData(key, None, "", (), searched, final)
        return self.study

    def to_pandas(self) -> pd.DataFrame:
        """Return the trials of all problems, in this order, as a pandas table; columns as for `columns`."""
        return self.columns().to_pandas()

    def columns(self) -> ColumnTable:
        """Return the trials as typed columns, which can be written as CSV and Parquet."""
        from autotile.exchange.column_table import trial_table

        return trial_table((entry.key, entry.stored) for entry in self.trials)

    def _headline(self) -> str:
        counted = counted_text((entry.key for entry in self.trials), "trial", "trials")
        if not self.trials:
            return counted
        first = self.trials[0]
        fastest = first.stored.trial.time_us
        return f"{counted} of {first.key.kernel}" + (f", fastest {time_text(fastest)}" if fastest is not None else "")

    def _parts(self) -> Iterator[Part]:
        """Yield one row for each trial, with its problem if there are several."""
        if not self.trials:
            yield "no such trial is stored"
            return
        several = len({entry.stored.study_id for entry in self.trials}) > 1
        scores = list(dict.fromkeys(name for entry in self.trials for name in entry.stored.trial.scores))
        figures = (f"{RIGHT}time", "95 % interval, us", f"{RIGHT}registers", f"{RIGHT}occupancy")
        own = [f"{RIGHT}{name}" for name in scores]
        headings = ("outcome", *figures, *own, "configuration", "remark", *(["problem"] if several else []))
        rows = [
            (
                *_trial_row(entry.stored, scores),
                *([f"{key_text(entry.key)}, {source_text(entry.key.gpu_name, entry.key.source)}"] if several else []),
            )
            for entry in self.trials
        ]
        yield ResultTable(headings, rows, ("configuration", "remark", "problem"))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one entry for each trial."""
        return [_trial_document(entry) for entry in self.trials]


def _trial_row(stored: StoredTrial, scores: Sequence[str]) -> tuple[str, ...]:
    trial = stored.trial
    own = trial.scores
    measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    remarks = [f"finals, place {stored.rank}"] if stored.phase == "final" else []
    if trial.source == "replayed":
        remarks.append("replayed")
    if trial.reason:
        remarks.append(trial.reason.splitlines()[0])
    return (
        str(trial.outcome),
        time_text(trial.time_us),
        interval_text(measured.low_us, measured.high_us) if measured is not None else NOTHING,
        str(resources.registers) if resources is not None else NOTHING,
        percent_text(occupancy.occupancy) if occupancy is not None else NOTHING,
        *(f"{own[name]:.6g}" if name in own else NOTHING for name in scores),
        config_text(trial.config),
        ", ".join(remarks),
    )


def _trial_document(entry: StudyTrial) -> dict[str, Any]:
    stored, trial = entry.stored, entry.stored.trial
    measured, resources, occupancy = trial.measurement, trial.resources, trial.occupancy
    return {
        "trial": stored.trial_id,
        "study": stored.study_id,
        "run": stored.run_id,
        **study_document(entry.key),
        "phase": stored.phase,
        "rank": stored.rank,
        "config": dict(trial.config),
        "outcome": str(trial.outcome),
        "stage": trial.stage,
        "reason": trial.reason,
        "time_us": trial.time_us,
        "interval_us": [measured.low_us, measured.high_us] if measured is not None else None,
        "samples": len(measured.samples_us) if measured is not None else 0,
        "registers": resources.registers if resources is not None else None,
        "spill_bytes": resources.spill_bytes if resources is not None else None,
        "static_smem_bytes": resources.static_smem_bytes if resources is not None else None,
        "occupancy": occupancy.occupancy if occupancy is not None else None,
        "limited_by": list(occupancy.limited_by) if occupancy is not None else [],
        "seconds": dict(trial.seconds),
        "telemetry": dict(trial.telemetry),
        "created_at": stored.created_at.isoformat(),
    }


@dataclass(frozen=True, slots=True)
class ListedMiss:
    """Calls of one problem on one GPU that were served by a fallback.

    Attributes
    ----------
    problem, gpu_name
        Problem and name of the GPU.
    tier
        Tier that was served.
    count
        Number of calls.
    last_at
        Time of the last update of the count (UTC).
    call_us
        Time of one call, in microseconds; None if unknown.
    lost_s
        Time that all calls together may have lost against the best configuration, in seconds; None if unknown.
    measured
        Whether these times were measured at this problem rather than estimated from others.
    tuned
        Whether the problem has been tuned since.
    """

    problem: Problem
    gpu_name: str
    tier: str
    count: int
    last_at: datetime
    call_us: float | None
    lost_s: float | None
    measured: bool
    tuned: bool


@dataclass(frozen=True, slots=True, repr=False)
class MissList(Result):
    """Misses, the costliest first, then the most frequent."""

    misses: tuple[ListedMiss, ...]

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

    def to_json(self) -> list[dict[str, Any]]:
        """Return one entry for each problem, GPU and tier."""
        return [
            {
                "kernel": miss.problem.kernel,
                "problem": dict(miss.problem.sizes),
                "dtype": miss.problem.dtype,
                "device": miss.gpu_name,
                "tier": miss.tier,
                "count": miss.count,
                "last_at": miss.last_at.isoformat(),
                "call_us": miss.call_us,
                "lost_s": miss.lost_s,
                "measured": miss.measured,
                "tuned": miss.tuned,
            }
            for miss in self.misses
        ]

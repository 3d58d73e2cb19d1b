"""Lists of what a database holds, as the public functions return them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from autotile.core.model import Problem, Trial, config_text
from autotile.core.text import (
    NOTHING,
    Displayed,
    duration_text,
    percent_text,
    plural,
    sizes_text,
    source_text,
    time_text,
)
from autotile.database.keys import TuningKey, key_text
from autotile.database.rows import StoredTrial
from autotile.database.studies import StudySummary
from autotile.database.winners import StoredRule
from autotile.errors import InputError
from autotile.exchange.recording import RecordingFile
from autotile.report.notebook import StudyPlots

if TYPE_CHECKING:
    import pandas as pd

    from autotile.exchange.column_table import ColumnTable
    from autotile.report.study_data import StudyData


def counted_text(keys: Iterable[TuningKey], singular: str, several: str) -> str:
    """Format the number of results under some keys, with the number of replayed ones: ``3 trials, 2 (replayed)``."""
    sources = [key.source for key in keys]
    replayed = sources.count("replayed")
    text = plural(len(sources), singular, several)
    if replayed == 0:
        return text
    return f"{text} (replayed)" if replayed == len(sources) else f"{text}, {replayed:,} (replayed)"


def key_columns(key: TuningKey) -> tuple[str, str, str]:
    """Format what identifies a study for a person: kernel, problem and device."""
    return key.kernel, key_text(key), source_text(key.gpu_name, key.source)


@dataclass(frozen=True, slots=True, repr=False)
class StudyList(Displayed):
    """Studies of a database, by kernel and then oldest first; ``location`` is its path or URL."""

    studies: tuple[StudySummary, ...]
    location: str

    def _headline(self) -> str:
        return f"{counted_text((study.key for study in self.studies), 'study', 'studies')} in {self.location}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (
                *key_columns(study.key),
                time_text(study.best_time_us),
                config_text(study.best_config) if study.best_config is not None else NOTHING,
            )
            for study in self.studies
        ]
        return ("kernel", "problem", "device", "best", "configuration"), rows


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
class FamilyList(Displayed):
    """Tuned families of a database, the newest first; ``location`` is its path or URL."""

    families: tuple[TunedFamily, ...]
    location: str

    def _headline(self) -> str:
        keys = (family.stored.key for family in self.families)
        return f"{counted_text(keys, 'family', 'families')} in {self.location}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (
                family.stored.key.kernel,
                f"{family.stored.rule.family} {family.stored.key.dtype}",
                source_text(family.stored.key.gpu_name, family.stored.key.source),
                percent_text(family.stored.rule.mean_loss),
            )
            for family in self.families
        ]
        return ("kernel", "family", "device", "mean loss"), rows


@dataclass(frozen=True, slots=True, repr=False)
class RecordingList(Displayed):
    """Installed recordings, by folder and name; a damaged one has no header."""

    recordings: tuple[RecordingFile, ...]

    def _headline(self) -> str:
        return plural(len(self.recordings), "recording")

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (*(key_columns(found.header.key) if found.header else ("damaged", NOTHING, NOTHING)), str(found.path))
            for found in self.recordings
        ]
        return ("kernel", "problem", "device", "file"), rows


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """A stored trial with the key of its study."""

    key: TuningKey
    stored: StoredTrial


@dataclass(frozen=True, slots=True, repr=False)
class TrialList(Displayed, StudyPlots):
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
        from autotile.report.study_data import StudyData

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

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        trials = [(key_text(entry.key), entry.stored.trial) for entry in self.trials]
        rows = [(p, str(t.outcome), _trial_time(t), config_text(t.config), t.reason) for p, t in trials]
        return ("problem", "outcome", "time", "configuration", "reason"), rows


def _trial_time(trial: Trial) -> str:
    """Return the time of a trial, marked if it was replayed."""
    return NOTHING if trial.time_us is None else source_text(time_text(trial.time_us), trial.source)


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
class MissList(Displayed):
    """Misses, the costliest first, then the most frequent."""

    misses: tuple[ListedMiss, ...]

    def _headline(self) -> str:
        calls = plural(sum(miss.count for miss in self.misses), "call")
        lost = [miss.lost_s for miss in self.misses if miss.lost_s is not None]
        cost = f", which may have cost {duration_text(sum(lost))}" if lost else ""
        return f"{plural(len(self.misses), 'miss', 'misses')} with {calls}{cost}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (
                f"{miss.problem.kernel} {sizes_text(miss.problem.sizes)} {miss.problem.dtype}",
                miss.gpu_name,
                miss.tier,
                f"{miss.count:,}",
                NOTHING if miss.lost_s is None else duration_text(miss.lost_s),
            )
            for miss in self.misses
        ]
        return ("problem", "device", "served", "calls", "may have cost"), rows

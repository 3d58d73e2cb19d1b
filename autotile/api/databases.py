"""Databases as a whole: check, comparison, merging, and deletion of trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotile.api.listings import counted_text, key_columns
from autotile.core.argument_types import checked
from autotile.core.model import config_key, config_text
from autotile.core.statistics import Interval, is_tie
from autotile.core.text import Displayed, plural, time_text
from autotile.database.checking import DatabaseCheck, check_database
from autotile.database.database import (
    Database,
    database_location,
    location_text,
    open_existing,
    open_for_reading,
)
from autotile.database.engine import DamagedDatabaseError, parse_location
from autotile.database.keys import key_differences
from autotile.database.merging import CopiedRows, MergedStudy, merge_databases, ratio_of_sessions
from autotile.database.paths import looks_like_url
from autotile.database.retention import CleanedStudy, Criteria, clean_database, current_versions, stored_gpu_names
from autotile.database.studies import rows_of_kernel
from autotile.database.winners import Winner
from autotile.errors import InputError
from autotile.exchange.shipped import read_winners
from autotile.kernel.library import KernelName
from autotile.settings import user_path


@dataclass(frozen=True, slots=True)
class ComparedWinners:
    """The winners of two databases under one key.

    Attributes
    ----------
    a, b
        Winners of the first and of the second database.
    same_config
        Whether they have the same configuration.
    ratio
        Time of ``b`` over time of ``a``; None if one of them has no measured time.
    """

    a: Winner
    b: Winner
    same_config: bool
    ratio: Interval | None

    @property
    def verdict(self) -> str:
        """The faster one, or ``unresolved`` if the intervals overlap, or ``unknown``."""
        if self.ratio is None:
            return "unknown"
        if is_tie(self.ratio):
            return "unresolved"
        return "A is faster" if self.ratio.value > 1.0 else "B is faster"


@dataclass(frozen=True, slots=True)
class UnmatchedWinner:
    """A winner for whose key the other database has none.

    Attributes
    ----------
    winner
        Winner.
    differs
        Fields in which its key differs from the nearest key of the other database with the same problem on the same
        GPU; empty if there is none.
    """

    winner: Winner
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseDiff(Displayed):
    """Differences between the winners of two databases, or of files of winners.

    Attributes
    ----------
    a, b
        Locations as given, without passwords.
    only_a, only_b
        Winners without a counterpart in the other database.
    both
        Pairs of winners with the same key.
    """

    a: str
    b: str
    only_a: tuple[UnmatchedWinner, ...]
    only_b: tuple[UnmatchedWinner, ...]
    both: tuple[ComparedWinners, ...]

    def _headline(self) -> str:
        alone = (*self.only_a, *self.only_b)
        keys = (*(pair.a.key for pair in self.both), *(one.winner.key for one in alone))
        same = sum(pair.same_config for pair in self.both)
        only = f"{len(self.only_a)} only in A, {len(self.only_b)} only in B"
        counts = f"{same} same, {len(self.both) - same} different, {only}"
        return f"A {self.a}, B {self.b}: {counted_text(keys, 'problem', 'problems')}: {counts}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (*key_columns(pair.a.key), config_text(pair.a.config), config_text(pair.b.config), pair.verdict)
            for pair in self.both
        ]
        return ("kernel", "problem", "device", "A", "B", "difference"), rows


@dataclass(frozen=True, slots=True, repr=False)
class MergeResult(Displayed):
    """Result of a merge.

    Attributes
    ----------
    output
        Location of the database that was merged into.
    copied
        Location of each source, with the numbers of rows that were new.
    studies
        Studies for which the databases named different winners.
    """

    output: str
    copied: tuple[tuple[str, CopiedRows], ...]
    studies: tuple[MergedStudy, ...]

    def _headline(self) -> str:
        trials = plural(sum(rows.trials for _, rows in self.copied), "new trial")
        winners = counted_text((study.key for study in self.studies), "study", "studies")
        return f"{trials} in {self.output}, {winners} with several winners"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (*key_columns(study.key), config_text(study.served.config), time_text(study.served.time_us), study.decision)
            for study in self.studies
        ]
        return ("kernel", "problem", "device", "served", "time", "decision"), rows


@dataclass(frozen=True, slots=True, repr=False)
class CleanResult(Displayed):
    """Result of a deletion.

    Attributes
    ----------
    location
        Location of the database.
    studies
        Studies with deleted trials.
    dry_run
        Whether the trials were only selected, and not deleted.
    """

    location: str
    studies: tuple[CleanedStudy, ...]
    dry_run: bool

    @property
    def deleted(self) -> int:
        """Number of deleted trials."""
        return sum(study.deleted for study in self.studies)

    def _headline(self) -> str:
        studies = counted_text((study.key for study in self.studies), "study", "studies")
        done = "would be deleted" if self.dry_run else "deleted"
        return f"{plural(self.deleted, 'trial')} of {studies} {done} in {self.location}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rows = [
            (*key_columns(study.key), f"{study.deleted:,}", f"{study.total:,}", ", ".join(study.reasons))
            for study in self.studies
        ]
        return ("kernel", "problem", "device", "deleted", "of", "reason"), rows


@checked
def diff(a: str | Path, b: str | Path) -> DatabaseDiff:
    """Compare the winners of two databases.

    Parameters
    ----------
    a, b
        Path or URL of a database, or path of a file of winners (``.json``).

    Raises
    ------
    InputError
        One of them does not exist or cannot be read.
    """
    winners_a, winners_b = ({winner.key.digest: winner for winner in _read_winners(place)} for place in (a, b))
    return DatabaseDiff(
        a=_place_text(a),
        b=_place_text(b),
        only_a=tuple(_unmatched(one, winners_b.values()) for key, one in winners_a.items() if key not in winners_b),
        only_b=tuple(_unmatched(one, winners_a.values()) for key, one in winners_b.items() if key not in winners_a),
        both=tuple(_compare(winners_a[key], winners_b[key]) for key in winners_a if key in winners_b),
    )


@checked
def merge(sources: Sequence[str | Path], output: str | Path) -> MergeResult:
    """Copy everything that some databases hold into one.

    No trial is lost or duplicated. Where databases name different winners for a study, the fastest is served from then
    on if the intervals of the times tell them apart; otherwise the winner of the newest session is.

    Parameters
    ----------
    sources
        Paths or URLs of the databases to copy.
    output
        Path or URL of the database to merge into. It is created if it does not exist; what it holds is kept.

    Raises
    ------
    InputError
        A source does not exist or cannot be read, or the output cannot be written.
    """
    target_location = parse_location(output)
    with ExitStack() as stack:
        others = [source for source in sources if parse_location(source) != target_location]
        opened = [stack.enter_context(open_existing(other)) for other in others]  # all of them before any is written
        target = stack.enter_context(Database.open(output, set_damage_aside=False))
        copied, studies = merge_databases(target, opened)
        locations = (source.location for source in opened)
        return MergeResult(target.location, tuple(zip(locations, copied, strict=True)), tuple(studies))


@checked
def clean(
    kernel: KernelName | None = None,
    *,
    before: datetime | None = None,
    keep_gpus: Sequence[str] = (),
    stale: bool = False,
    winners: bool = False,
    dry_run: bool = False,
    database: str | Path | None = None,
) -> CleanResult:
    """Delete stored trials that are old, of other GPUs or of other versions of their kernels.

    The best configuration of each study and the verdicts on wrong ones are kept unless ``winners``; trials of a session
    that may still be running are kept in any case. Sessions may go on meanwhile.

    Parameters
    ----------
    kernel
        The only kernel to consider, as for `autotile.tune`; None for all kernels.
    before
        Delete trials recorded before this moment.
    keep_gpus
        Delete trials of all GPUs but these: names as CUDA reports them, or profiles.
    stale
        Delete trials of other versions of the kernels than the current ones. Kernels that are not found are skipped.
    winners
        Delete the best configuration of a study and verdicts too if they are selected.
    dry_run
        Delete nothing; return what would be deleted.
    database
        Path or URL; None for the user's own.

    Raises
    ------
    InputError
        No criterion is given, a GPU to keep is neither in the database nor a profile, there is no such kernel, or the
        database cannot be read or written.
    """
    if before is None and not keep_gpus and not stale:
        raise InputError("nothing selects the trials to delete; pass before, keep_gpus or stale")
    opened = open_for_reading(database)
    if opened is None:
        return CleanResult(location_text(database), (), dry_run)
    with opened:
        kept = frozenset(stored_gpu_names(opened, keep_gpus))
        criteria = Criteria(before, kept, current_versions(kernel) if stale else None, winners)
        name = None
        if kernel is not None:
            studies = rows_of_kernel(opened.studies, kernel)
            if not studies:
                return CleanResult(opened.location, (), dry_run)
            name = studies[0].key.kernel
        if dry_run:
            return CleanResult(opened.location, tuple(clean_database(opened, name, criteria, dry_run=True)), dry_run)
    with Database.open(database_location(database), set_damage_aside=False) as writable:
        return CleanResult(writable.location, tuple(clean_database(writable, name, criteria, dry_run=False)), dry_run)


def _place_text(place: str | Path) -> str:
    """Return a location as given, but with the password of a URL masked."""
    return location_text(place) if looks_like_url(str(place)) else str(place)


def _read_winners(place: str | Path) -> list[Winner]:
    if str(place).endswith(".json") and not looks_like_url(str(place)):
        return read_winners(user_path(place, "a file of winners"))
    with open_existing(place) as opened:
        return [best.winner for best in opened.best()]


def _unmatched(winner: Winner, others: Iterable[Winner]) -> UnmatchedWinner:
    found = [key_differences(winner.key, other.key) for other in others if _subject(other) == _subject(winner)]
    return UnmatchedWinner(winner, tuple(name for name, _, _ in min(found, key=len, default=())))


def _subject(winner: Winner) -> tuple[object, ...]:
    """Return the problem and the GPU of a winner, whatever the kernel's version and the compiler."""
    key = winner.key
    return key.kernel, key.dtype, dict(key.sizes), key.gpu_name


def _compare(a: Winner, b: Winner) -> ComparedWinners:
    same_config = config_key(a.config) == config_key(b.config)
    if a.measurement is None or b.measurement is None:
        return ComparedWinners(a, b, same_config, None)
    return ComparedWinners(a, b, same_config, ratio_of_sessions(a.measurement, b.measurement))


@dataclass(frozen=True, slots=True, repr=False)
class CheckResult(Displayed):
    """Result of a check of a database.

    Attributes
    ----------
    location
        Path or URL of the database, without a password.
    check
        Numbers of rows and faults found; None if there is no database yet.
    """

    location: str
    check: DatabaseCheck | None

    @property
    def whole(self) -> bool:
        """Whether no fault was found; a database that does not exist yet has none."""
        return self.check is None or self.check.ok

    def _headline(self) -> str:
        if self.check is None:
            return f"{self.location} does not exist yet"
        faults = len(self.check.problems) + len(self.check.bad_rows)
        return f"{self.location}: {'whole' if self.whole else plural(faults, 'fault')}"

    def _rows(self) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        counts = self.check.counts if self.check is not None else {}
        return ("table", "rows"), [(name, f"{count:,}") for name, count in counts.items()]


@checked
def db_check(database: str | Path | None = None) -> CheckResult:
    """Check a database for damage, for rows without their study or run, and for rows that cannot be used.

    Parameters
    ----------
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        It cannot be read at all, is not a database, or a database given by name does not exist.
    """
    location = location_text(database)
    try:
        opened = open_for_reading(database)
    except DamagedDatabaseError as error:
        return CheckResult(location, DatabaseCheck.damaged(location, [str(error)]))
    if opened is None:
        return CheckResult(location, None)
    with opened:
        return CheckResult(location, check_database(opened))


@checked
def db_path(database: str | Path | None = None) -> str:
    """Return the location of a database as it may be shown: the password of a URL is masked.

    Parameters
    ----------
    database
        Path or URL; None for the user's own, which need not exist.

    Raises
    ------
    InputError
        The URL is of an unsupported kind.
    """
    return location_text(database)

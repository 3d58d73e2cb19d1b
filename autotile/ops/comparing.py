"""Compare, merge and prune what is tuned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Trial, config_key
from autotile.core.statistics import Interval, ratio_of
from autotile.database.database import Database
from autotile.database.engine import parse_location
from autotile.database.keys import key_differences, space_hash
from autotile.database.merging import Copied, copy_all
from autotile.database.pruning import Criteria, prune
from autotile.database.studies import StoredBest
from autotile.database.winners import Winner
from autotile.errors import AutotileError, InputError
from autotile.exchange.shipped import read_winners
from autotile.kernel.library import kernel_names, load_kernel
from autotile.ops.reading import open_named, open_to_read
from autotile.report.comparison import Compared, DiffReport, Lone, MergedStudy, MergeReport, PruneReport
from autotile.settings import read_settings
from autotile.tuning.finals import widened


def diff_results(a: str, b: str) -> DiffReport:
    """Compare the winners of two databases, or of files of winners (``.json``).

    Raises
    ------
    InputError
        One of them cannot be read.
    """
    ours, theirs = ({winner.key.digest: winner for winner in _winners_of(place)} for place in (a, b))
    both = [_compared(ours[digest], theirs[digest]) for digest in ours if digest in theirs]
    only_ours = [_lone(winner, theirs.values()) for digest, winner in ours.items() if digest not in theirs]
    only_theirs = [_lone(winner, ours.values()) for digest, winner in theirs.items() if digest not in ours]
    return DiffReport(a, b, only_ours, only_theirs, both)


def merge_results(sources: Sequence[str], output: str) -> MergeReport:
    """Put everything that some databases hold into one.

    No trial is lost. Where two of them name another best configuration of a study, the faster is served from then on
    if the intervals of their times tell them apart; if they do not, what the newest session found stays.

    Parameters
    ----------
    sources
        Paths or URLs.
    output
        The database to merge into; what it holds already is kept.

    Raises
    ------
    InputError
        A source is missing or cannot be read, or the output cannot be written.
    """
    target_place = parse_location(output)
    copied: list[tuple[str, Copied]] = []
    rivals: dict[str, list[StoredBest]] = {}
    with ExitStack() as stack:
        others = [source for source in sources if parse_location(source) != target_place]
        opened = [stack.enter_context(open_named(other)) for other in others]  # all of them, before anything is made
        target = stack.enter_context(Database.open(output, set_damage_aside=False))
        for best in (best for database in (target, *opened) for best in database.best()):
            rivals.setdefault(best.key.digest, []).append(best)
        for source in opened:
            copied.append((source.location, copy_all(source, target)))
        settled = [_settle(target, found) for found in rivals.values()]
        return MergeReport(target.location, copied, [study for study in settled if study is not None])


def prune_results(
    kernel: str | None = None,
    *,
    before: datetime | None = None,
    keep_gpus: Sequence[str] = (),
    stale: bool = False,
    winners: bool = False,
    dry_run: bool = False,
    database: str | None = None,
) -> PruneReport:
    """Delete trials that are old, of other GPUs or of other versions of their kernels.

    Parameters
    ----------
    kernel
        Name, or path of a search-space file; None for all kernels.
    before
        Trials recorded before go.
    keep_gpus
        Trials of all other GPUs go; names as CUDA gives them, or of profiles. One that is neither in the database nor
        a profile's is refused, as a slip in it would delete everything.
    stale
        Trials of other versions of the kernels than those that are found by name now (or by the given path) go.
    winners
        The best of each study goes too; it is kept otherwise.
    dry_run
        Delete nothing.

    Raises
    ------
    InputError
        Nothing says what is to go, a GPU to keep is unknown, or the database cannot be read or written.
    """
    if before is None and not keep_gpus and not stale:
        raise InputError("nothing says what is to go; give --older-than, --keep-gpu or --stale")
    opened = open_to_read(database)
    if opened is None:
        return PruneReport(str(parse_location(read_settings().database)), [], dry_run)
    with opened:
        kept = frozenset(_gpu_names(opened, keep_gpus))
        criteria = Criteria(before, kept, _versions(kernel) if stale else None, winners)
        name = None if kernel is None else _kernel_name(opened, kernel)
        if dry_run:
            return PruneReport(opened.location, prune(opened, name, criteria, dry_run=True), dry_run)
    with Database.open(database or read_settings().database, set_damage_aside=False) as writable:
        return PruneReport(writable.location, prune(writable, name, criteria, dry_run=False), dry_run)


def _winners_of(place: str) -> list[Winner]:
    if place.endswith(".json"):
        return read_winners(Path(place).expanduser())
    with open_named(place) as opened:
        return [best.winner for best in opened.best()]


def _lone(winner: Winner, others: Iterable[Winner]) -> Lone:
    """A winner, and what else of its key differs where the others have its problem on its GPU."""

    def subject(one: Winner) -> tuple[object, ...]:
        return one.key.kernel, one.key.dtype, dict(one.key.sizes), one.key.gpu_name

    found = [key_differences(winner.key, other.key) for other in others if subject(other) == subject(winner)]
    return Lone(winner, tuple(name for name, _, _ in min(found, key=len, default=())))


def _compared(ours: Winner, theirs: Winner) -> Compared:
    same = config_key(ours.config) == config_key(theirs.config)
    ratio = None
    if ours.measurement is not None and theirs.measurement is not None:
        ratio = _ratio(ours.measurement, theirs.measurement)
    return Compared(ours, theirs, same, ratio)


def _ratio(a: Measurement, b: Measurement) -> Interval:
    """How many times longer ``b`` takes than ``a``, measured in different sessions."""
    first, second = (Interval(m.time_us, m.low_us, m.high_us) for m in (a, b))
    return widened(ratio_of(first, second))


def _settle(target: Database, rivals: Sequence[StoredBest]) -> MergedStudy | None:
    """See that the fastest of several winners of a study is served, where that is known; None where there was one."""
    confirmed = [best for best in rivals if best.confirmed] or list(rivals)
    candidates = {config_key(best.trial.config): best.trial for best in confirmed if best.trial.measurement}
    served = _served(target, rivals[0])
    if len(candidates) < 2 or served is None or served.measurement is None:
        return None
    fastest = min(candidates.values(), key=lambda trial: trial.time_us or 0.0)
    if config_key(fastest.config) == config_key(served.config):
        others = [trial for trial in candidates.values() if trial is not fastest]
        second = min(others, key=lambda trial: trial.time_us or 0.0)
        ratio = _ratio(_measured(served), _measured(second))
        return MergedStudy(rivals[0].key, served, second, ratio, "kept" if ratio.low > 1.0 else "unresolved")
    ratio = _ratio(_measured(fastest), _measured(served))
    if ratio.low <= 1.0:
        return MergedStudy(rivals[0].key, served, fastest, ratio, "unresolved")
    if _refused_since(target, rivals[0], fastest):
        return MergedStudy(rivals[0].key, served, fastest, ratio, "refused")
    _serve(target, rivals[0], fastest)
    return MergedStudy(rivals[0].key, fastest, served, ratio, "taken")


def _served(target: Database, of: StoredBest) -> Trial | None:
    """What a study serves, after what was refused since is refused here too.

    Trials are numbered as they come in, so that a refusal may have come in before what it refuses.
    """
    study_id = target.find_study(of.key)
    while study_id is not None:
        found = target.best(study_id=study_id)
        if not found:
            return None
        refusals = [
            stored
            for stored in target.stored_trials(study_id, phase="final")
            if not stored.trial.outcome.has_time
            and config_key(stored.trial.config) == config_key(found[0].trial.config)
            and stored.created_at > found[0].created_at
        ]
        if not refusals:
            return found[0].trial
        _record(target, study_id, refusals[-1].trial, rank=None)
    return None


def _refused_since(target: Database, of: StoredBest, trial: Trial) -> bool:
    study_id = target.find_study(of.key)
    finals = target.trials(study_id, phase="final") if study_id is not None else []
    return any(not t.outcome.has_time and config_key(t.config) == config_key(trial.config) for t in finals)


def _serve(target: Database, of: StoredBest, trial: Trial) -> None:
    study_id = target.find_study(of.key)
    if study_id is not None:
        _record(target, study_id, trial, rank=1)


def _record(target: Database, study_id: int, trial: Trial, rank: int | None) -> None:
    """A run that says what merging decided, with a copy of the trial that it decided for or against."""
    run = next((run for run in reversed(target.runs(study_id)) if run.driver), None)
    run_id = target.start_run(study_id, sampler="merge", driver=run.driver if run else "")
    target.add_trial(study_id, run_id, trial, phase="final", rank=rank)
    target.end_run(run_id)


def _measured(trial: Trial) -> Measurement:
    if trial.measurement is None:
        raise ValueError(f"a winner was never measured: {trial.config}")
    return replace(trial.measurement, samples_us=())


def _gpu_names(database: Database, names: Iterable[str]) -> Iterator[str]:
    """Names of GPUs as CUDA gives them: those of the database as they are, others by their profiles."""
    held = {study.key.gpu_name for study in database.studies()}
    for name in names:
        try:
            yield name if name in held else device_profile(name).name
        except InputError as error:
            raise InputError(f"{error}; the database holds results of {', '.join(sorted(held)) or 'no GPU'}") from None


def _versions(kernel: str | None) -> dict[str, tuple[str, str]]:
    """Hashes of the kernels as they are now; those that cannot be read are left alone."""
    found = {}
    for name in [kernel] if kernel is not None else kernel_names():
        try:
            loaded = load_kernel(name)
        except AutotileError:
            if kernel is not None:
                raise
            continue
        found[loaded.name] = (loaded.source_hash, space_hash(loaded.spec))
    return found


def _kernel_name(database: Database, kernel: str) -> str:
    """A kernel that was deleted since is still in the database."""
    return kernel if database.studies(kernel) else load_kernel(kernel).name

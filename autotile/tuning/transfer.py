"""What other studies of the kernel teach a new one: trials at other sizes, on other GPUs, of other versions of it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING

from autotile.ground.model import Config, config_key
from autotile.ground.problem import size_distance
from autotile.search.expectation import Source
from autotile.store.keys import TuningKey

if TYPE_CHECKING:
    from autotile.store.database import Database
    from autotile.store.studies import StudySummary

_MOST = 4
"""Studies that are learnt from: each costs a model, of some tenths of a second."""
_LEAST = 6
"""Trials with a time, below which a study teaches nothing."""
_BEST_OF_EACH = 3


def sources_of(database: Database, key: TuningKey) -> list[Source]:
    """Trials of the nearest other studies of the same kernel and dtype, the nearest first.

    Near is first the same GPU, then the same architecture, then the size. A study without a size in common, such as one
    that was imported with names of its own, is of a problem that cannot be compared. That the trials' configurations
    are valid here is not asked: a model of them answers for the rows of this space, and only those are proposed.
    """
    others = [
        study
        for study in database.studies(key.kernel)
        if study.key != key
        and study.key.dtype == key.dtype
        and study.key.sizes.keys() & key.sizes.keys()
        and study.trials >= _LEAST
    ]
    others.sort(key=lambda study: _distance(study.key, key))
    sources = [_source(database, study, key) for study in others[:_MOST]]
    return [source for source in sources if len(source.configs) >= _LEAST]


def best_of(sources: Iterable[Source]) -> list[Config]:
    """The fastest few configurations of each study: they may be good here too, also where the search would not look."""
    ordered = (sorted(zip(source.times_us, source.configs, strict=True), key=itemgetter(0)) for source in sources)
    return [config for trials in ordered for _, config in trials[:_BEST_OF_EACH]]


def _source(database: Database, study: StudySummary, key: TuningKey) -> Source:
    newest = {
        config_key(trial.config): trial
        for trial in database.trials(study.study_id, phase="search")
        if trial.outcome.has_time and trial.time_us is not None
    }
    times = [trial.time_us for trial in newest.values() if trial.time_us is not None]
    return Source(_name(study.key, key), [trial.config for trial in newest.values()], times)


def _name(other: TuningKey, key: TuningKey) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in other.sizes.items())
    where = f" on {other.gpu_name}" if other.gpu_name != key.gpu_name else ""
    same_code = (other.template_hash, other.space_hash) == (key.template_hash, key.space_hash)
    return sizes + where + ("" if same_code else " of another version")


def _distance(other: TuningKey, key: TuningKey) -> tuple[int, int, float]:
    foreign = (other.gpu_name != key.gpu_name) + (other.compute_capability != key.compute_capability)
    return foreign, *size_distance(other.sizes, key.sizes)

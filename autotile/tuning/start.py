"""What a session starts from: earlier trials, results of other studies, and the rows it may try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Problem, Trial, config_key
from autotile.core.objectives import objective_values
from autotile.database.keys import TuningKey
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance
from autotile.search.kernel_tuner import PREFIX
from autotile.search.samplers import TRANSFERRING, resolve_sampler
from autotile.search.search import Lookahead
from autotile.search.transfer import Source
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.tuning.backend import Backend
from autotile.tuning.options import BRUTE_FORCE, TuneOptions
from autotile.tuning.trial_log import Ledger

if TYPE_CHECKING:
    from autotile.database.database import Database
    from autotile.database.studies import StudySummary
    from autotile.search.search import Shortlist


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


Mask = NDArray[np.bool_]


class Known(NamedTuple):
    """What a session begins with.

    Attributes
    ----------
    trials
        Of earlier sessions of the study.
    incumbent
        What they found; None where none has ended.
    sources
        Other studies that teach.
    configs
        The default, and all configurations that these and the user name.
    """

    trials: list[Trial]
    incumbent: Config | None
    sources: list[Source]
    configs: list[Config]


def known_before(database: Database, study_id: int, key: TuningKey, options: TuneOptions, default: Config) -> Known:
    """What is known before the first trial; the default is tried in any case."""
    trials, best = earlier_trials(database, study_id, options), incumbent(database, study_id)
    sources = sources_of(database, key) if options.transfer else []
    named = [*(options.only or ()), *(trial.config for trial in trials), *([best] if best else [])]
    return Known(trials, best, sources, [dict(default), *named, *best_of(sources)])


def earlier_trials(database: Database, study_id: int, options: TuneOptions) -> list[Trial]:
    """What need not be measured again: neither what was dropped, where nothing is to be, nor what lacks an objective.

    Those that the finals of an earlier session refused come as they were refused.
    """
    if options.fresh:
        return []
    finals = database.trials(study_id, phase="final")
    refused = {config_key(trial.config): trial for trial in finals if not trial.outcome.has_time}
    stored = [refused.get(config_key(trial.config), trial) for trial in database.trials(study_id, phase="search")]
    kept = [trial for trial in stored if options.drops_slow or trial.outcome is not Outcome.PRUNED]
    return [trial for trial in kept if not trial.outcome.has_time or objective_values(trial, options.objectives)]


def incumbent(database: Database, study_id: int) -> Config | None:
    """The best configuration of the sessions that ended, which a new winner must beat; None where none has.

    What a killed session had found by then is not it: the same command would name another winner than if it had not
    been killed.
    """
    confirmed = [best.trial.config for best in database.best(study_id=study_id) if best.confirmed]
    if confirmed:
        return confirmed[0]
    ended = {run.run_id for run in database.runs(study_id) if run.ended_at is not None}
    tried = [stored.trial for stored in database.stored_trials(study_id, phase="search") if stored.run_id in ended]
    ran = [
        (trial.time_us, trial.config) for trial in tried if trial.outcome is Outcome.OK and trial.time_us is not None
    ]
    return min(ran, key=itemgetter(0))[1] if ran else None


def reopened(
    space: SearchSpace, kernel: Kernel, problem: Problem, device: DeviceProperties, configs: Iterable[Config]
) -> SearchSpace:
    """The space with those of the configurations that are only pruned: what was named, tried or taught is in it."""
    outside = [config for config in configs if space.row_of(config) is None]
    return space.including(
        config for config in outside if not check_config(kernel.spec, config, problem.sizes, device, problem.dtype)
    )


def first_to_try(default: Config, incumbent: Config | None, ledger: Ledger) -> list[Config]:
    """What a search begins with: the default, and what is served so far where this study has not tried it.

    The default is named in any case, so that a search that goes on retraces how it began.
    """
    return [default] if incumbent is None or ledger.find(incumbent) is not None else [default, incumbent]


def rows_to_try(kernel: Kernel, dtype: str, space: SearchSpace, backend: Backend, options: TuneOptions) -> Mask | None:
    """Rows that can be run, that the user wants tried, and that are valid for every problem to be right on.

    Returns
    -------
    numpy.ndarray or None
        bool, shape (rows,); None for all.

    Raises
    ------
    InputError
        No configuration is valid for one of the problems.
    """
    masks = [mask for mask in (backend.available(space),) if mask is not None]
    if options.only is not None:
        wanted = np.zeros(len(space), dtype=np.bool_)
        wanted[[row for config in options.only if (row := space.row_of(config)) is not None]] = True
        masks.append(wanted)
    valid = replace(kernel.spec, heuristics=())  # they must be right there, not fast
    masks += [space.rows_in(feasible_space(valid, sizes, backend.device, dtype)) for sizes in options.verify_sizes]
    return np.logical_and.reduce(masks) if masks else None


_AHEAD = 16
"""Candidates proposed before the oldest of them is measured, for samplers that learn: they know that much less
when they propose, so it must not depend on the machine's cores."""
_RANKED_AHEAD = 32
"""The same where what was compiled is ranked before it is measured: the newest so many have until then to compile."""
_PER_MEASURED = 2
"""Candidates that are then proposed for each that is measured; figures of both are in docs/search.md."""
_UNTAUGHT_AHEAD = 4
"""The same a compile worker, for samplers that learn nothing: one slow compilation then leaves no worker idle."""
_UNTAUGHT = ("random", BRUTE_FORCE)
"""Samplers that propose the same whatever they are told."""
_STRATEGY_AHEAD = 1
"""The same for strategies of Kernel Tuner, which wait for each time before they want another."""


def lookahead_of(sampler: str, workers: int) -> Lookahead:
    """How far a search looks ahead.

    Parameters
    ----------
    sampler
        The sampler at work.
    workers
        Compilations at a time.
    """
    if sampler == TRANSFERRING:
        return Lookahead(_RANKED_AHEAD, _PER_MEASURED)
    if sampler.startswith(PREFIX):
        return Lookahead(_STRATEGY_AHEAD)
    return Lookahead(max(_AHEAD, _UNTAUGHT_AHEAD * workers) if sampler in _UNTAUGHT else _AHEAD)


class SearchPlan:
    """Everything about a search that is settled before its first candidate.

    Parameters
    ----------
    kernel, problem, space, options, backend
        The session's.
    known
        What earlier sessions chose, and what other studies teach.
    workers
        Compilations at a time.

    Attributes
    ----------
    default
        The file's default configuration.
    incumbent
        What earlier sessions chose; None where there were none.
    most
        Trials that the study can come to hold.
    learnt_from
        The studies that taught the search, once it has begun.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        space: SearchSpace,
        options: TuneOptions,
        *,
        backend: Backend,
        known: Known,
        workers: int,
    ) -> None:
        self._space = space
        self._options = options
        self._sm_count = backend.device.sm_count
        self._available = rows_to_try(kernel, problem.dtype, space, backend, options)
        candidates = len(space) if self._available is None else int(self._available.sum())
        self._sources = known.sources
        self._sampler = resolve_sampler(options.sampler, space, self._available, options.granted)
        self._lookahead = lookahead_of(self._sampler, workers)
        self.default: Config = dict(kernel.spec.default)
        self.incumbent = known.incumbent
        self.most = min(candidates, options.trial_target or candidates)
        self.learnt_from: tuple[str, ...] = ()

    def begin(self, ledger: Ledger) -> Shortlist:
        """The search, taught by the trials of earlier sessions."""
        from autotile.search.search import Search, Shortlist

        search = Search(
            self._space,
            self._sampler,
            self._options.seed,
            first=first_to_try(self.default, self.incumbent, ledger),
            available=self._available,
            trials=self._options.trial_target,
            ahead=self._lookahead.compiling,
            objectives=self._options.objectives,
            sources=self._sources,
        )
        self.learnt_from = search.learnt_from
        return Shortlist(search, self._lookahead, self._sm_count, earlier=ledger.trials)

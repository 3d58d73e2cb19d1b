"""The start of a session: earlier trials, results of other studies, candidate rows, and the search over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import TIME, Config, Outcome, Problem, Trial, config_key, objective_values
from autotile.database.keys import TuningKey
from autotile.database.winners import UNVERIFIED_SAMPLER
from autotile.kernel.library import Kernel
from autotile.kernel.problem import size_distance
from autotile.search.samplers import lookahead_of, resolve_sampler
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.space.time_estimate import estimate_times
from autotile.tuning.backend import Backend
from autotile.tuning.options import TuneOptions
from autotile.tuning.scoring import session_objective
from autotile.tuning.stopping import TrialLog

if TYPE_CHECKING:
    from autotile.database.database import Database, StudySummary
    from autotile.search.search import Search, Shortlist
    from autotile.search.transfer import MisleadingSource, Source


_MAX_SOURCES = 4
"""Maximum number of studies to transfer from: each needs a model, which takes some tenths of a second to fit."""
_MIN_TIMED_TRIALS = 6
"""Minimum number of trials with a time in a study to transfer from."""
_BEST_OF_EACH = 3
"""Configurations of each of these studies that are in the space even where its heuristics exclude them."""


def find_sources(database: Database, key: TuningKey) -> list[Source]:
    """Return the trials of the nearest other studies of the same kernel and dtype, nearest first.

    Studies are ordered by GPU, then by architecture, then by size. A study without a size in common, such as an
    imported one with size names of its own, cannot be compared. Configurations of these trials may be invalid here: a
    model fitted to them predicts the rows of this space, and only these are proposed.
    """
    others = [
        study
        for study in database.studies(key.kernel)
        if study.key != key
        and study.key.dtype == key.dtype
        and study.key.sizes.keys() & key.sizes.keys()
        and study.trials >= _MIN_TIMED_TRIALS
    ]
    others.sort(key=lambda study: _distance(study.key, key))
    sources = [_source(database, study, key) for study in others[:_MAX_SOURCES]]
    return [source for source in sources if len(source.configs) >= _MIN_TIMED_TRIALS]


def best_configs(sources: Iterable[Source]) -> list[Config]:
    """Return the fastest few configurations of each study: they may be fast here, too."""
    ordered = (sorted(zip(source.times_us, source.configs, strict=True), key=itemgetter(0)) for source in sources)
    return [config for trials in ordered for _, config in trials[:_BEST_OF_EACH]]


def _source(database: Database, study: StudySummary, key: TuningKey) -> Source:
    from autotile.search.transfer import Source  # imports SciPy

    newest = {
        config_key(trial.config): trial
        for trial in database.trials(study.study_id, phase="search")
        if trial.outcome.has_time and trial.time_us is not None
    }
    times = [trial.cost for trial in newest.values() if trial.cost is not None]
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


class PriorResults(NamedTuple):
    """Results that are stored before a session begins.

    Attributes
    ----------
    trials
        Trials of earlier sessions of the study.
    incumbent
        Best configuration of these sessions; None where none has ended.
    served
        Configuration that was served for the problem before it was tuned; None where there is none.
    sources
        Other studies to transfer from.
    configs
        The default, and all configurations that the trials, the sources and the user name.
    """

    trials: list[Trial]
    incumbent: Config | None
    served: Config | None
    sources: list[Source]
    configs: list[Config]


def read_prior_results(
    database: Database, study_id: int, key: TuningKey, options: TuneOptions, default: Config
) -> PriorResults:
    """Read everything that is known before the first trial."""
    trials, incumbent = earlier_trials(database, study_id, options), find_incumbent(database, study_id)
    served = find_served(database, study_id, options)
    sources = find_sources(database, key) if options.transfer else []
    seeded = [config for config in (incumbent, served) if config is not None]
    named = [*(options.only or ()), *options.tries, *(trial.config for trial in trials), *seeded]
    return PriorResults(trials, incumbent, served, sources, [dict(default), *named, *best_configs(sources)])


def earlier_trials(database: Database, study_id: int, options: TuneOptions) -> list[Trial]:
    """Return the stored trials of a study that need not be repeated.

    Left out are pruned trials if this session prunes nothing, trials that lack a value of an objective, those whose
    compiler the system killed, and those of `UNVERIFIED_SAMPLER`. A trial that the finals of an earlier session refused
    is returned with the outcome of that check.
    """
    if options.fresh:
        return []
    finals = database.trials(study_id, phase="final")
    refused = {config_key(trial.config): trial for trial in finals if not trial.outcome.has_time}
    unverified = {run.run_id for run in database.runs(study_id) if run.sampler == UNVERIFIED_SAMPLER}
    searched = database.stored_trials(study_id, phase="search")
    verified = [one.trial for one in searched if one.run_id not in unverified]
    stored = [refused.get(config_key(trial.config), trial) for trial in verified]
    compiled = [trial for trial in stored if trial.outcome is not Outcome.NOT_COMPILED]
    kept = [trial for trial in compiled if options.drops_slow or trial.outcome is not Outcome.PRUNED]
    return [trial for trial in kept if not trial.outcome.has_time or objective_values(trial, options.objectives)]


def find_incumbent(database: Database, study_id: int) -> Config | None:
    """Return the best configuration of the sessions that ended, which a new winner must beat; None where none ended.

    Results of a killed session do not count: otherwise the resumed session could name another winner than an
    uninterrupted one.
    """
    confirmed = [best.trial.config for best in database.best(study_id=study_id) if best.confirmed]
    if confirmed:
        return confirmed[0]
    runs = database.runs(study_id)
    ended = {run.run_id for run in runs if run.ended_at is not None and run.sampler != UNVERIFIED_SAMPLER}
    tried = [stored.trial for stored in database.stored_trials(study_id, phase="search") if stored.run_id in ended]
    ran = [(trial.cost, trial.config) for trial in tried if trial.outcome is Outcome.OK and trial.cost is not None]
    return min(ran, key=itemgetter(0))[1] if ran else None


def find_served(database: Database, study_id: int, options: TuneOptions) -> Config | None:
    """Return the configuration that was served when the study's first session began.

    A session that resumes it must repeat its proposals, although a trial of the study may be served by now.
    """
    if options.fresh:
        return options.served
    recorded = [run.settings["served"] for run in database.runs(study_id) if "served" in run.settings]
    return recorded[0] if recorded else options.served


def extend_space(
    space: SearchSpace, kernel: Kernel, problem: Problem, device: DeviceProperties, configs: Iterable[Config]
) -> SearchSpace:
    """Return the space including those given configurations that only its heuristics exclude, not a rule or a limit."""
    outside = [config for config in configs if space.row_of(config) is None]
    return space.including(
        config for config in outside if not check_config(kernel.spec, config, problem.sizes, device, problem.dtype)
    )


def first_configs(default: Config, served: Config | None, incumbent: Config | None, log: TrialLog) -> list[Config]:
    """Return the first proposals of a search: the default, what was served, and the incumbent if it has no trial here.

    The first two are always among them, so that a resumed search repeats the proposals of its first session.
    """
    is_new = incumbent is not None and log.find(incumbent) is None
    seeded = [default, served, incumbent if is_new else None]
    return list({config_key(config): config for config in seeded if config is not None}.values())


def candidate_rows(
    kernel: Kernel, dtype: str, space: SearchSpace, backend: Backend, options: TuneOptions
) -> Mask | None:
    """Return a mask over the rows that the backend can run, the user allows, and all problems to verify permit.

    Returns
    -------
    numpy.ndarray or None
        bool, shape (rows,); None for all.

    Raises
    ------
    InputError
        No configuration is valid for one of the problems.
    """
    available = backend.available_rows(space)
    masks = [available] if available is not None else []
    if options.only is not None:
        wanted = np.zeros(len(space), dtype=np.bool_)
        wanted[[row for config in options.only if (row := space.row_of(config)) is not None]] = True
        masks.append(wanted)
    valid = replace(kernel.spec, heuristics=())  # a configuration must be correct there, not fast
    masks += [space.rows_in(feasible_space(valid, sizes, backend.device, dtype)) for sizes in options.verify_sizes]
    return np.logical_and.reduce(masks) if masks else None


class SearchPlan:
    """The decisions about a search that precede its first candidate.

    Parameters
    ----------
    kernel, problem, space, options, backend
        As in the session.
    prior
        Results of earlier sessions and of other studies.
    workers
        Number of compile workers.

    Attributes
    ----------
    default
        Default configuration of the search-space file.
    incumbent
        Best configuration of earlier sessions; None where there is none.
    max_trials
        Maximum number of trials that the study can hold.
    seed
        Seed of the search; to be changed before `begin` in a session that joins others.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        space: SearchSpace,
        options: TuneOptions,
        *,
        backend: Backend,
        prior: PriorResults,
        workers: int,
    ) -> None:
        self._space = space
        self._options = options
        self._available = candidate_rows(kernel, problem.dtype, space, backend, options)
        candidates = len(space) if self._available is None else int(self._available.sum())
        self._sources = prior.sources
        self._device = backend.device
        self._problem = problem
        self._spec = kernel.spec
        self._served = prior.served
        self._sampler = resolve_sampler(options.sampler, space, self._available, options.granted)
        self._lookahead = lookahead_of(self._sampler, workers, backend.gpu_count)
        self.seed = options.seed
        self.default: Config = dict(kernel.spec.default)
        self.incumbent = prior.incumbent
        self.max_trials = min(candidates, options.trial_target or candidates)
        self._search: Search | None = None

    @property
    def learnt_from(self) -> tuple[str, ...]:
        """Names of the studies that the search learns from; empty before `begin`."""
        return self._search.learnt_from if self._search is not None else ()

    @property
    def misleading_sources(self) -> tuple[MisleadingSource, ...]:
        """The studies that the search ignores, as its results contradict them; empty before `begin`."""
        return self._search.misleading_sources if self._search is not None else ()

    def begin(self, log: TrialLog) -> Shortlist:
        """Return the search, which has learned from the trials of earlier sessions."""
        from autotile.search.search import Shortlist

        return Shortlist(self.make_search(log), self._lookahead, self._device.sm_count, earlier=log.trials)

    def make_search(self, log: TrialLog) -> Search:
        """Return the search, which has not learned from trials yet."""
        from autotile.search.search import Search

        self._search = Search(
            self._space,
            self._sampler,
            self.seed,
            first=first_configs(self.default, self._served, self.incumbent, log),
            available=self._available,
            trials=self._options.trial_target,
            ahead=self._lookahead.compiling,
            objectives=self._options.objectives,
            sources=self._sources,
            estimate=self._estimated_us if self._minimises_time else None,
        )
        return self._search

    @property
    def _minimises_time(self) -> bool:
        return self._options.objectives == (TIME,) and session_objective(self._spec, self._options) is None

    def _estimated_us(self, space: SearchSpace) -> NDArray[np.float64] | None:
        """Estimate the time of each row in microseconds, shape (rows,); None if the file does not say enough."""
        found = estimate_times(self._spec, self._problem.sizes, self._device, space, self._problem.dtype)
        return found.time_us if found is not None else None

"""A search over a space: its proposals, the candidates that wait to be measured, and its trials as an Optuna study."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import NormalDist

import numpy as np
import optuna
from numpy.typing import ArrayLike
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotile.core.documents import attributes
from autotile.core.model import OBJECTIVES, TIME, Config, Trial, Value, objective_values
from autotile.errors import ConfigError, InputError
from autotile.kernel.spec import Parameter
from autotile.search.gaussian_process import features_of
from autotile.search.gp_sampler import RELATIVE_ERROR, FeasibleGPSampler
from autotile.search.row_sampler import distributions_of, quiet_optuna
from autotile.search.samplers import Lookahead, check_sampler, resolve_sampler, sampler_entry
from autotile.search.transfer import Estimate, MisleadingSource, Source
from autotile.space.search_space import SearchSpace

FAILED = "failed"
"""Constraint of every trial: 1 (violated) if the candidate failed, else 0."""

_COVERAGE = 0.95
_MIN_SAMPLES_OF_COVERAGE = 6
"""Coverage of an interval of a median with at least six samples, see `autotile.core.statistics.median_interval`."""

_VALUE_OF_FIRST_FAILURES = 1e6
"""Value of a failure while nothing has been measured: one second in microseconds, longer than most kernels take."""


def has_failed(trial: Trial) -> bool:
    """Return True if a trial has no time, so that it violates `FAILED`."""
    return objective_values(trial, [TIME]) is None


def results_in_study(names: Sequence[str] = (TIME,)) -> Callable[[Trial], tuple[TrialState, list[float] | None]]:
    """Return a function of trials, in the order in which they end, that returns the state and values in a study.

    The value is the time in microseconds, or for a failure more than any time so far. Optuna's samplers ignore failed
    trials, so a failed candidate is a complete trial in the study: its value is twice the longest time measured so far,
    for samplers that use values only, and the constraint `FAILED` is violated, which keeps it out of Optuna's best
    trial and among the bad trials in TPE. Only a candidate whose result cannot be known is a failed trial. ``names``
    are objectives to minimise, of `autotile.core.model`, each in its own unit.
    """
    worst = [0.0] * len(names)

    def result(trial: Trial) -> tuple[TrialState, list[float] | None]:
        if not trial.outcome.is_finding:
            return TrialState.FAIL, None
        values = objective_values(trial, names)
        if values is None:
            return TrialState.COMPLETE, [2 * value or _VALUE_OF_FIRST_FAILURES for value in worst]
        worst[:] = map(max, worst, values)
        return TrialState.COMPLETE, list(values)

    return result


def attributes_of(trial: Trial) -> dict[str, str | int | float]:
    """Return the user attributes of a trial, which Optuna's tables and dashboard show."""
    shown: dict[str, str | int | float] = {"outcome": str(trial.outcome), "source": trial.source}
    if trial.reason:
        shown |= {"reason": trial.reason, "stage": trial.stage}
    parts: tuple[tuple[object, tuple[str, ...]], ...] = (
        (trial.geometry, ("threads", "dynamic_smem_bytes")),
        (trial.resources, ("registers", "spill_bytes", "static_smem_bytes")),
        (trial.occupancy, ("occupancy", "blocks_per_sm")),
        (trial.measurement, ("low_us", "high_us")),
    )
    for part, names in parts:
        if part is not None:
            shown |= attributes(part, *names)
    if trial.occupancy is not None:
        shown["limited_by"] = ", ".join(trial.occupancy.limited_by)
    if trial.measurement is not None:
        shown[RELATIVE_ERROR] = relative_error(trial)
    return shown


def new_study(
    name: str | None = None, sampler: BaseSampler | None = None, objectives: Sequence[str] = (TIME,)
) -> optuna.Study:
    """Create a study in memory that minimises the time in microseconds, or several objectives."""
    with quiet_optuna():
        study = optuna.create_study(study_name=name, sampler=sampler, directions=["minimize"] * len(objectives))
        study.set_metric_names([OBJECTIVES[objective] for objective in objectives])
    return study


def study_of_trials(parameters: Sequence[Parameter], trials: Iterable[Trial], name: str | None = None) -> optuna.Study:
    """Build a study in memory from stored trials, oldest first, for Optuna's plots or for `study_to_storage`.

    Values of the parameters that occur only in the trials are added. Without a name, Optuna chooses one.
    """
    kept = list(trials)
    values: dict[str, dict[Value, None]] = {each.name: dict.fromkeys(each.values) for each in parameters}
    for trial in kept:
        for parameter, value in trial.config.items():
            values.setdefault(parameter, {})[value] = None
    distributions = {parameter: CategoricalDistribution(tuple(choices)) for parameter, choices in values.items()}
    study, result = new_study(name), results_in_study()
    study.add_trials(frozen_trial(trial, distributions, *result(trial)) for trial in kept)
    return study


def relative_error(trial: Trial) -> float:
    """Return the standard error of a median over the median, from the width of its interval; 0 without a measurement.

    With fewer than six samples, the interval spans all of them and covers the median with a probability of
    ``1 - 2 ** (1 - n)`` instead of 95 %.
    """
    measurement = trial.measurement
    if measurement is None:
        return 0.0
    samples = len(measurement.samples_us)
    coverage = 1 - 2.0 ** (1 - samples) if 1 < samples < _MIN_SAMPLES_OF_COVERAGE else _COVERAGE
    deviations = NormalDist().inv_cdf((1 + coverage) / 2)
    return (measurement.high_us - measurement.low_us) / (2 * deviations * measurement.time_us)


def frozen_trial(
    trial: Trial, distributions: Mapping[str, CategoricalDistribution], state: TrialState, values: list[float] | None
) -> FrozenTrial:
    """Return a trial as one of Optuna with a state and values, see `results_in_study`.

    Raise `ValueError` if the configuration has a parameter or a value that ``distributions`` lacks.
    """
    return create_trial(
        state=state,
        values=values,
        params=dict(trial.config),
        distributions={name: distributions[name] for name in trial.config if name in distributions},
        user_attrs=attributes_of(trial),
        constraints={FAILED: float(has_failed(trial))},
    )


def study_to_storage(study: optuna.Study, path: Path) -> None:
    """Copy a study to an SQLite file, for ``optuna-dashboard`` and `optuna.load_study`.

    The file is created if it does not exist, else the study is added to it. Raise `InputError` if the file is not an
    Optuna storage, cannot be written, or holds a study of that name.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy import URL, NullPool
    from sqlalchemy.exc import DatabaseError

    try:
        with quiet_optuna():
            url = URL.create("sqlite", database=str(path)).render_as_string()
            # without a pool, no connection stays open if Optuna's constructor rejects the file
            storage = RDBStorage(url, engine_kwargs={"poolclass": NullPool})
            try:
                copy = optuna.create_study(storage=storage, study_name=study.study_name, directions=study.directions)
                if study.metric_names is not None:
                    copy.set_metric_names(study.metric_names)
                copy.add_trials(study.get_trials(deepcopy=False))
            finally:
                storage.remove_session()
                storage.engine.dispose()
    except optuna.exceptions.DuplicatedStudyError as error:
        raise InputError(f"{path} holds a study named {study.study_name!r} already; name another file") from error
    except (DatabaseError, RuntimeError) as error:
        cause = getattr(error, "orig", None) or error
        raise InputError(f"{path} cannot be written as an Optuna storage: {cause}; name another file") from error


_EXPECTED_PROPOSALS = 256
"""Number of proposals of an expected gain: some 128 trials where candidates are ranked; see docs/search.md."""


class Search:
    """A sampler with its study: it proposes rows and records their trials; no row is proposed twice.

    The same seed and the same trials give the same proposals. The configurations of ``first`` are proposed first if
    they are available rows; ``available`` is a mask over the rows, shape (rows,), None for all. By the number of
    ``trials`` granted in total, None for any, ``auto`` is resolved, and some strategies of Kernel Tuner schedule their
    search. Trials that ran have a value of each of the objectives to minimise, of `autotile.core.model`. Samplers that
    transfer use the trials of ``sources``; the default one, where there are none, the estimated time of each row.

    ``ahead`` is the number of proposals that the caller makes before it tells the result of the oldest, by which a
    search that is rebuilt from stored trials continues as the original would have. Errors are those of `check_sampler`,
    and an `InputError` if the seed is negative.
    """

    def __init__(
        self,
        space: SearchSpace,
        sampler: str = "auto",
        seed: int = 0,
        *,
        first: Iterable[Config] = (),
        available: ArrayLike | None = None,
        trials: int | None = None,
        ahead: int = 1,
        objectives: Sequence[str] = (TIME,),
        sources: Sequence[Source] = (),
        estimate: Estimate | None = None,
    ) -> None:
        check_sampler(sampler, objectives)
        self.sampler = resolve_sampler(sampler, space, available, trials)
        entry = sampler_entry(self.sampler)
        self._rows = entry.make(space, seed, available, sources=sources, trials=trials, estimate=estimate)
        self._sources = tuple(name for name, _ in sources) if "sources" in entry.takes else ()
        self.study = new_study(sampler=self._rows, objectives=objectives)
        """The trials but those of nominated rows, in the order of the proposals; it minimises the objectives."""
        self.space = space
        self._distributions = distributions_of(space.parameters)
        self._first = deque(row for config in first if (row := space.row_of(config)) is not None)
        self._result = results_in_study(objectives)
        self._pending: dict[int, optuna.Trial | None] = {}
        """Rows that were proposed and not told, with their trials; None for one that was only nominated."""
        self._ahead = ahead
        self._gains: deque[float | None] = deque(maxlen=_EXPECTED_PROPOSALS)
        self._begun = 0
        self._replayed: deque[tuple[int, int, Trial]] = deque()
        """Trials of earlier sessions whose results no proposal may know yet: position among the proposals, number,
        trial."""

    @property
    def misleading_sources(self) -> tuple[MisleadingSource, ...]:
        """Sources that the sampler ignores, as the results contradict them."""
        return self._rows.misleading_sources(self.study)

    @property
    def learnt_from(self) -> tuple[str, ...]:
        """Names of the other sources of a sampler that transfers."""
        misleading = {source.name for source in self.misleading_sources}
        return tuple(name for name in self._sources if name not in misleading)

    def replay(self, trials: Iterable[Trial]) -> int:
        """Learn from trials of earlier sessions, oldest first; they are not proposed again.

        Trials whose configuration the space cannot express any more are ignored; trials that it can express, but that
        are not valid any more, are kept in the study without being learned from. Return the number of trials that were
        learned from.
        """
        begun = self._begun
        for trial in trials:
            if self.space.row_of(trial.config) is not None:
                self._tell_replayed()
                self._replayed.append((self._begun, len(self.study.get_trials(deepcopy=False)), trial))
                self.study.add_trial(frozen_trial(trial, self._distributions, TrialState.RUNNING, None))
                self._begun += 1
                self._rows.remaining(self.study)  # the sampler sees each trial with the results known when it began
            else:
                self.add(trial)
        return self._begun - begun

    def propose(self) -> tuple[int, Config] | None:
        """Propose a row; return it with its configuration, or None if no row is left."""
        self._tell_replayed()
        if not self._rows.remaining(self.study):
            self._gains.clear()
            return None
        while self._first:
            row = self._first.popleft()
            if self._rows.candidates.free[row]:
                self.study.enqueue_trial(self.space.config(row))
                break
        asked = self.study.ask(dict(self._distributions))
        config = asked.params
        proposed = self.space.row_of(config)
        assert proposed is not None
        self._pending[proposed] = asked
        self._gains.append(self._rows.expected_gain)
        self._begun += 1
        return proposed, config

    def nominate(self) -> tuple[int, Config] | None:
        """Choose a row to compile; return it with its configuration, or None if no row is left. No trial begins.

        This is for samplers that rank, see `ranking`. `tell` records the result if the row is measured.
        """
        sampler = self.ranking
        if not sampler.remaining(self.study):
            self._gains.clear()
            return None
        first = next((row for row in self._first if sampler.candidates.free[row]), None)
        row = sampler.nominate(first)
        self._gains.append(sampler.expected_gain)
        self._pending[row] = None
        return row, self.space.config(row)

    def set_aside(self, row: int) -> None:
        """Make a nominated row that was not measured available again."""
        del self._pending[row]
        self.ranking.candidates.release(row)

    def close(self) -> None:
        """Release the resources of the sampler."""
        self._rows.close()

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not measured here, if the space can express its configuration."""
        row = self.space.row_of(trial.config)
        if row is not None and self._pending.get(row) is not None:
            self.tell(row, trial)
            return
        if row is not None:
            self._pending.pop(row, None)
        config, known = trial.config, self._distributions
        if config.keys() == known.keys() and all(value in known[name].choices for name, value in config.items()):
            self.study.add_trial(frozen_trial(trial, known, *self._result(trial)))
            self._rows.remaining(self.study)  # the sampler learns from it now

    def gain_of(self, count: int = _EXPECTED_PROPOSALS) -> float | None:
        """Return the relative gain of the best speed, 0.01 for 1 %, that is expected of the last ``count`` proposals.

        It is the sum of the gains that each was expected to add to the earlier ones, and slightly overestimates their
        joint gain. A rebuilt search has the same, since it makes the same proposals. None until as many proposals were
        made with a model, and if no row is left.
        """
        last = list(self._gains)[-count:]
        known = [gain for gain in last if gain is not None]
        return sum(known) if len(known) == count else None

    def proposals_until(self, gain: float, count: int = _EXPECTED_PROPOSALS) -> int | None:
        """Return after how many more proposals `gain_of` the last ``count`` is below ``gain``.

        Each is taken to add less than the one before, as those of the last quarter did than those of the quarter
        before. None if it would be more than eight times as many, or is not known.
        """
        last = [np.nan if known is None else known for known in self._gains][-count:]
        window = np.array([np.nan] * (count - len(last)) + last)
        quarter = max(1, count // 4)
        coming, before = window[-quarter:].mean(), window[-2 * quarter : -quarter].mean()
        decay = min(1.0, coming / before) ** (1 / quarter) if before > 0 else 1.0
        added = np.concatenate([[0.0], np.cumsum(coming * decay ** np.arange(1, 8 * count + 1))])
        left = np.concatenate([np.cumsum(window[::-1])[::-1], np.zeros(7 * count + 1)])  # of this window
        left += added - np.concatenate([np.zeros(count), added[:-count]])
        below = np.flatnonzero(left < gain)
        return int(below[0]) if len(below) else None

    def tell(self, row: int, trial: Trial) -> None:
        """Record the trial of a proposed row.

        Raise `ConfigError` if the row was not proposed, or was told already.
        """
        if row not in self._pending:
            raise ConfigError(f"row {row} was not proposed or was told already; tell each proposal once")
        asked = self._pending.pop(row)
        state, values = self._result(trial)
        if asked is not None:
            for name, value in attributes_of(trial).items():
                asked.set_user_attr(name, value)
            asked.set_constraint(FAILED, float(has_failed(trial)))
            self.study.tell(asked, values, state)
        elif state is not TrialState.FAIL:
            result = None if has_failed(trial) or values is None else tuple(values)
            self.ranking.tell(row, result, relative_error(trial))

    def _tell_replayed(self) -> None:
        """Tell the replayed trials that the next proposal would have known in their session."""
        while self._replayed and self._replayed[0][0] <= self._begun - self._ahead:
            _, number, trial = self._replayed.popleft()
            state, values = self._result(trial)
            self.study.tell(number, values, state)

    @property
    def ranking(self) -> FeasibleGPSampler:
        """The sampler, which takes note of compiled rows and of those that are being measured.

        Raise `ConfigError` if it cannot rank what was compiled.
        """
        if not isinstance(self._rows, FeasibleGPSampler):
            raise ConfigError(f"the sampler {self.sampler!r} cannot rank what was compiled; propose and tell instead")
        return self._rows


_REJECTED_IN = ("compile", "resources")
"""Stages in which a trial ends before it could be measured."""


class Shortlist:
    """Candidates of a search that are compiled and wait to be measured; more are compiled than measured.

    The best of those that are `ready`, by the results and resources known by then, becomes the next trial, and one that
    does not compile or does not fit the device becomes one at once. Which are ready depends on the number of trials and
    not on the order in which they finish compiling, so that a search is repeatable on any machine (docs/search.md). The
    caller repeats: `propose` until None, `ready`, `tell` a rejected one of these if there is one, else `choose`; and
    while none is ready, `tell` the oldest of the chosen ones.

    The ``lookahead`` may rank only if the sampler of the search does. After trials of ``earlier`` sessions, oldest
    first, it continues as that of the earlier session would have: the candidates that waited wait again.
    """

    def __init__(self, search: Search, lookahead: Lookahead, sm_count: int = 1, earlier: Iterable[Trial] = ()) -> None:
        self._search = search
        self._lookahead = lookahead
        self._sm_count = sm_count
        self._waiting: dict[int, Config | None] = {}
        """Rows that were proposed and not chosen, the oldest first; with the configuration of each that was nominated
        while trials were replayed, and that this session has not compiled."""
        self._running: dict[int, None] = {}
        """Rows that were chosen and whose results were not told, the oldest first."""
        self._begun = 0
        """Number of candidates that were chosen, in this session and the earlier ones."""
        self._set_aside = 0
        self._described: set[int] = set()
        self._earlier: dict[int, Trial] = {}
        """Trials of earlier sessions that no choice may know yet, by row; by a negative number without a valid row."""
        if lookahead.ranks:
            for number, trial in enumerate(earlier):
                row = search.space.row_of(trial.config)
                self._earlier[-1 - number if row is None else row] = trial
        else:
            search.replay(earlier)

    @property
    def expected_gain(self) -> float | None:
        """Gain that is expected of the last 256 proposals together, see `Search.gain_of`."""
        return self._search.gain_of(_EXPECTED_PROPOSALS)

    def trials_until(self, gain: float) -> float | None:
        """Return the number of trials after which `expected_gain` is below ``gain``; None if that is not foreseen."""
        proposals = self._search.proposals_until(gain, _EXPECTED_PROPOSALS)
        return None if proposals is None else proposals / self._lookahead.per_measured

    def propose(self, room: int | None = None) -> tuple[int, Config] | None:
        """Return the next row to compile, with its configuration; None if enough rows wait, or no row is left.

        ``room`` is the number of trials that may still begin; None for any number.
        """
        if room == 0:
            return None
        self._replay()
        if self._is_full:
            return None
        wanted = self._wanted(room)
        again = {row: config for row, config in self._waiting.items() if config is not None}
        if again and len(self._waiting) - len(again) < wanted:
            row = next(iter(again))
            self._waiting[row] = None
            return row, again[row]
        return self._propose(wanted)

    def ready(self) -> list[int]:
        """Return the rows to choose the next trial from, the oldest first; empty if none waits.

        It is also empty while more than `Lookahead.held` chosen rows have no result.
        """
        self._replay()
        return [row for row in self._ready() if self._waiting[row] is None]

    def waiting(self) -> list[int]:
        """Return all rows that `propose` returned and that were not chosen, the oldest first; the ready ones included.

        Those of an earlier session that `propose` has yet to return are not among them.
        """
        return [row for row, config in self._waiting.items() if config is None]

    def choose(self, compiled: Mapping[int, Trial]) -> int:
        """Return the row to measure, given rows that wait with the results of their compilation.

        They are those that are `ready`, or as many others that happen to have compiled first.
        """
        for row in compiled.keys() - self._described:
            self._describe(row, compiled[row])
        rows = list(compiled)
        row = self._search.ranking.select(rows) if self._lookahead.ranks else rows[0]
        self._begin(row)
        return row

    def tell(self, row: int, trial: Trial) -> None:
        """Record the trial of a row that was chosen, or that was ready and rejected."""
        if row in self._running:
            del self._running[row]
        else:
            del self._waiting[row]
        self._describe(row, trial)
        self._search.tell(row, trial)
        while min(len(self._waiting), self._ready_count) > self._lookahead.max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._search.set_aside(oldest)
            self._set_aside += 1

    def leave(self, row: int) -> None:
        """Leave a row that was chosen, or was ready and rejected, to another session; `add` takes its trial."""
        self._running.pop(row, None)
        self._waiting.pop(row, None)

    def add(self, trial: Trial) -> None:
        """Learn from a trial that was not measured here."""
        row = self._search.space.row_of(trial.config)
        if row is not None:
            self._waiting.pop(row, None)
            self._describe(row, trial)
        self._search.add(trial)

    @property
    def _is_full(self) -> bool:
        """Whether a result must be told before the next trial may be chosen."""
        return len(self._running) > self._lookahead.held(self._begun)

    def _wanted(self, room: int | None = None) -> int:
        if not self._lookahead.ranks:
            wanted = self._lookahead.compiling - len(self._running)
            return wanted if room is None else min(wanted, room)
        wanted = self._lookahead.nominated(self._begun)
        if room is not None:
            wanted = min(wanted, self._lookahead.compiled(self._begun + room - 1))
        return wanted - self._begun - self._set_aside

    def _ready(self) -> list[int]:
        return [] if self._is_full else list(islice(self._waiting, self._ready_count))

    @property
    def _ready_count(self) -> int:
        if not self._lookahead.ranks:
            return 1
        return max(1, self._lookahead.compiled(self._begun) - self._begun - self._set_aside)

    def _propose(self, wanted: int) -> tuple[int, Config] | None:
        """Propose a row if fewer than ``wanted`` wait."""
        if len(self._waiting) >= wanted:
            return None
        proposed = self._search.nominate() if self._lookahead.ranks else self._search.propose()
        if proposed is not None:
            self._waiting[proposed[0]] = None
        return proposed

    def _begin(self, row: int) -> None:
        del self._waiting[row]
        self._running[row] = None
        self._begun += 1
        if self._lookahead.ranks:
            self._search.ranking.begin(row)

    def _replay(self) -> None:
        """Repeat the nominations, choices and results of earlier sessions, up to the first choice that they lack.

        Results that this choice must not know are told after it, by a later call. A trial that was not ready when it is
        due is one of another sampler or seed.
        """
        while self._earlier:
            while not self._is_full and (proposed := self._propose(self._wanted())) is not None:
                self._waiting[proposed[0]] = proposed[1]
            ready = self._ready()
            earlier = self._earlier
            due = next((row for row in ready if row in earlier and earlier[row].stage in _REJECTED_IN), None)
            if due is None and not self._is_full:
                chosen = (row for row, trial in earlier.items() if trial.stage not in _REJECTED_IN)
                due = next((row for row in chosen if row not in self._running), None)
                if due is None:
                    return
                if due in self._waiting:
                    self._describe(due, earlier[due])  # as `choose` did: models know what is being measured
                    self._begin(due)
                    continue
            row = next(iter(earlier)) if due is None else due
            trial = earlier.pop(row)
            if row in self._running or row in self._waiting:
                self.tell(row, trial)
            else:
                self.add(trial)

    def _describe(self, row: int, trial: Trial) -> None:
        self._described.add(row)
        features = features_of(trial, self._sm_count) if self._lookahead.ranks else None
        if features is not None:
            self._search.ranking.describe(row, features)

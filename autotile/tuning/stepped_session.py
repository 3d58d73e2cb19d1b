"""A tuning session that a search of the user's own drives: it evaluates what is asked for, and can propose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from autotile.core.model import Config, Measurement, Outcome, Trial, config_key
from autotile.errors import InputError
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace
from autotile.tuning.parameter_effects import find_parameter_effects
from autotile.tuning.result import TuneResult
from autotile.tuning.session_run import Session

if TYPE_CHECKING:
    from autotile.search.search import Search

_TOLD = "told"
"""Stage of a result that was measured elsewhere."""


class SteppedSession(Session):
    """A session without a search loop; `begin` comes first and `finish` or `abort` last.

    Trials are compiled, verified, measured and stored as in any session.
    """

    _own_search: Search | None = None

    def begin(self) -> None:
        """Record the start of the run, and wait until candidates can be run.

        Raises
        ------
        InputError, ToolchainError
            As for `autotile.tuning.session.tune`.
        """
        self._resources = ExitStack()
        self._start_run()
        self._resources.enter_context(self._record)
        try:
            with self._phase("start"):
                self._backend.wait()
        except BaseException:
            self.abort()
            raise

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks for the user."""
        return self._notices

    @property
    def space(self) -> SearchSpace:
        """The valid configurations."""
        return self._space

    @property
    def best(self) -> Trial | None:
        """The fastest trial that was verified and measured to the end."""
        return self._log.best

    def ask(self, count: int) -> list[Config]:
        """Return up to ``count`` configurations that the session's sampler proposes; fewer if no others are left.

        A configuration is proposed once. The sampler learns from every trial and every result that is told.
        """
        search = self._search_of_session()
        asked: list[Config] = []
        for _ in range(count):
            proposed = search.propose()
            if proposed is None:
                break
            asked.append(dict(proposed[1]))
        return asked

    def tell(self, config: Config, time_us: float | None) -> None:
        """Pass a result that was measured elsewhere on to the sampler; it is neither stored nor served.

        Parameters
        ----------
        config
            A configuration of the space.
        time_us
            Time in microseconds; None if the configuration does not work.
        """
        measured = Measurement(time_us, time_us, time_us) if time_us is not None else None
        outcome = Outcome.OK if time_us is not None else Outcome.CRASHED
        self._learn(Trial(dict(config), outcome, stage=_TOLD, measurement=measured))

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Trial]:
        """Try configurations, and yield their trials: invalid ones first, then in the order in which they end.

        A configuration that has a trial is not run again. Those that only a heuristic excludes are valid.
        """
        self._drain()
        valid: list[Config] = []
        for config in {config_key(config): config for config in configs}.values():
            reason = check_config(
                self._kernel.spec, config, self._problem.sizes, self._backend.device, self._problem.dtype
            )
            known = self._log.find(config)
            if reason:
                yield Trial(dict(config), Outcome.INFEASIBLE, reason, "limits")
            elif known is not None:
                yield known
            else:
                valid.append(config)
        with self._timeline.span("session", "evaluate", configurations=len(valid)):
            for trial in self._trials_of(valid):
                self._learn(trial)
                yield trial

    def finish(self) -> TuneResult:
        """Race the best configurations and the default, store the result, and close the session."""
        try:
            for _ in self.evaluate([self._plan.default]):  # the winner is compared with it
                pass
            with self._phase("finals"):
                finals = self._hold_finals()
            self._effects = find_parameter_effects(self._space, self.trials)
            result = self._result(finals, interrupted=False)
            self._record.end(result.to_json())
        finally:
            self.abort()
        return result

    def abort(self) -> None:
        """Close the session without a result; its trials are stored."""
        self._compile_pool.close()
        self._backend.close()
        self._write_trace()
        self._resources.close()

    def _drain(self) -> None:
        """Store the trials that an interrupted evaluation left running."""
        while self._pipeline.running:
            _, trial = self._pipeline.end_next()
            self._commit(trial)
            self._count(trial)
            self._learn(trial)

    def _search_of_session(self) -> Search:
        if self._own_search is None:
            self._own_search = self._plan.make_search(self._log)
            self._resources.callback(self._own_search.close)
            _add_all(self._own_search, self._log.trials)
        return self._own_search

    def _learn(self, trial: Trial) -> None:
        """Pass a trial on to the search, if proposals were asked for; otherwise it reads the log when they are."""
        search = self._own_search
        if search is None and trial.stage != _TOLD:
            return
        search = search or self._search_of_session()
        row = search.row_of(trial.config)
        if row is not None and search.is_pending(row):
            search.tell(row, trial)
        elif row is not None:
            search.add(trial)
        elif trial.stage == _TOLD:
            raise InputError("the configuration is not in the space; tell results of valid configurations")


def _add_all(search: Search, trials: Iterable[Trial]) -> None:
    for trial in trials:
        search.add(trial)

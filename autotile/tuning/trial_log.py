"""The trials of a session, and the detection of a kernel for which every candidate fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autotile.core.model import SAME_CODE, Config, Outcome, Trial, config_key, config_text
from autotile.errors import InputError
from autotile.space.search_space import SearchSpace


class TrialLog:
    """The newest trial of each configuration, including those of earlier sessions.

    Counts are updated with each trial: they are read after every one of tens of thousands of trials.

    Parameters
    ----------
    space
        The feasible space.
    earlier
        Stored trials of earlier sessions, oldest first. Those whose configurations are no longer in the space are
        left out: a value or a rule may have changed since, and an invalid configuration must not win.

    Attributes
    ----------
    resumed
        Number of trials taken over from earlier sessions.
    """

    def __init__(self, space: SearchSpace, earlier: Iterable[Trial]) -> None:
        self._space = space
        self._trials: dict[str, Trial] = {}
        self._outcomes: Counter[Outcome] = Counter()
        self._stages: Counter[str] = Counter()
        self._best: Trial | None = None
        newest = {config_key(trial.config): trial for trial in earlier}
        for trial in newest.values():
            if space.row_of(trial.config) is not None:
                self.add(trial)
        self.resumed = len(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    @property
    def trials(self) -> list[Trial]:
        """All trials."""
        return list(self._trials.values())

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Number of trials by outcome."""
        return self._outcomes.copy()

    @property
    def best(self) -> Trial | None:
        """The best trial that was measured to the end."""
        return self._best

    @property
    def gates(self) -> Mapping[str, int]:
        """Configurations left after the rules and the limits, and candidates rejected or passed at the later gates."""
        rules = self._space.rules
        return {
            "combinations": self._space.combinations,
            "rules": rules[-1].remaining if rules else self._space.combinations,
            "limits": len(self._space),
            "compile_rejected": self._stages["compile"],
            "resources_rejected": self._stages["resources"],
            "same_code": self._stages[SAME_CODE],
            "launched": len(self) - sum(self._stages[stage] for stage in ("compile", "resources", SAME_CODE)),
        }

    def add(self, trial: Trial) -> None:
        """Add the trial of a configuration that has none yet."""
        self._trials[config_key(trial.config)] = trial
        self._outcomes[trial.outcome] += 1
        self._stages[trial.stage] += 1
        if trial.outcome is Outcome.OK and _cost(trial) < _cost(self._best):
            self._best = trial

    def find(self, config: Config) -> Trial | None:
        """Return the trial of a configuration."""
        return self._trials.get(config_key(config))


def _cost(trial: Trial | None) -> float:
    return float("inf") if trial is None or trial.cost is None else trial.cost


_MIN_FAILURES = 8
"""Candidates, the default among them, that must fail with the same outcome before the kernel itself is blamed."""

_KERNEL_FAILURES = {
    Outcome.COMPILE_FAILED: "no candidate compiles; the compiler says of",
    Outcome.WRONG_RESULT: "no candidate agrees with the reference; correct one of the two. This is wrong with",
}


def kernel_failure(outcomes: Mapping[Outcome, int], last: Trial, default: Trial | None, max_trials: int) -> str:
    """Return the error of the kernel itself, if every candidate failed with the same outcome; empty otherwise.

    Parameters
    ----------
    outcomes
        Number of trials by outcome.
    last
        The newest trial.
    default
        Trial of the default configuration, if there is one. The default is expected to run: without its trial,
        nothing is concluded until all candidates have failed.
    max_trials
        Number of candidates that the study will try.
    """
    required = max_trials if default is None else min(_MIN_FAILURES, max_trials)
    if len(outcomes) != 1 or sum(outcomes.values()) < required or last.outcome not in _KERNEL_FAILURES:
        return ""
    example = default or last
    return f"{_KERNEL_FAILURES[example.outcome]} {config_text(example.config)}: {example.reason}"


def check_kernel_failure(source: str, log: TrialLog, last: Trial, default: Config, max_trials: int) -> None:
    """Raise if the kernel itself is at fault, instead of failing every candidate for the same reason.

    Parameters
    ----------
    source
        File of the kernel.
    log, last, default, max_trials
        As for `kernel_failure`; ``default`` is the configuration.

    Raises
    ------
    InputError
        Every candidate failed with the same outcome.
    """
    failure = kernel_failure(log.outcomes, last, log.find(default), max_trials)
    if failure:
        raise InputError(f"{source}: {failure}")

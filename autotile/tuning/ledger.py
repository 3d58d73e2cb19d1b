"""The trials of a session and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autotile.ground.model import SAME_CODE, Config, Outcome, Trial, config_key
from autotile.ground.space import SearchSpace


class Ledger:
    """The newest trial of each configuration, those of earlier sessions included.

    Its sums are kept up to date with each trial, for it is asked after every one, of tens of thousands.

    Parameters
    ----------
    space
        The feasible space.
    earlier
        Trials that earlier sessions stored, oldest first. Those of configurations that the space no longer holds are
        left out: a value or a rule may have changed since, and what is not valid must not win.
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
        """How many trials ended how."""
        return self._outcomes.copy()

    @property
    def best(self) -> Trial | None:
        """The fastest trial that ran to its end."""
        return self._best

    @property
    def best_us(self) -> float | None:
        """Its time."""
        return self._best.time_us if self._best is not None else None

    @property
    def gates(self) -> dict[str, int]:
        """Configurations left after rules and limits, and what became of the candidates at the later gates."""
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
        """Enter the trial of a configuration that has none yet."""
        self._trials[config_key(trial.config)] = trial
        self._outcomes[trial.outcome] += 1
        self._stages[trial.stage] += 1
        if trial.outcome is Outcome.OK and _time_us(trial) < _time_us(self._best):
            self._best = trial

    def find(self, config: Config) -> Trial | None:
        """The trial of a configuration."""
        return self._trials.get(config_key(config))


def _time_us(trial: Trial | None) -> float:
    return float("inf") if trial is None or trial.time_us is None else trial.time_us

"""The trials of a session and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autotile.ground.model import Config, Outcome, Trial, config_key
from autotile.ground.space import SearchSpace


class Ledger:
    """The newest trial of each configuration, those of earlier sessions included.

    Parameters
    ----------
    space
        The feasible space.
    earlier
        Trials that earlier sessions stored, oldest first.
    """

    def __init__(self, space: SearchSpace, earlier: Iterable[Trial]) -> None:
        self._space = space
        self._trials = {config_key(trial.config): trial for trial in earlier}
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
        return Counter(trial.outcome for trial in self._trials.values())

    @property
    def best(self) -> Trial | None:
        """The fastest trial that ran to its end."""
        ran = [trial for trial in self._trials.values() if trial.outcome is Outcome.OK]
        return min(ran, key=lambda trial: trial.time_us or float("inf"), default=None)

    @property
    def gates(self) -> dict[str, int]:
        """Configurations left after rules and limits, and what became of the candidates at the later gates."""
        stages = Counter(trial.stage for trial in self._trials.values())
        rules = self._space.rules
        return {
            "combinations": self._space.combinations,
            "rules": rules[-1].remaining if rules else self._space.combinations,
            "limits": len(self._space),
            "compile_rejected": stages["compile"],
            "resources_rejected": stages["resources"],
            "launched": len(self) - stages["compile"] - stages["resources"],
        }

    def add(self, trial: Trial) -> None:
        """Enter a trial."""
        self._trials[config_key(trial.config)] = trial

    def find(self, config: Config) -> Trial | None:
        """The trial of a configuration."""
        return self._trials.get(config_key(config))

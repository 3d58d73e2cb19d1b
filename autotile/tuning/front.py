"""The configurations that are worth a look where more counts than time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotile.ground.model import Trial, config_key
from autotile.ground.objectives import OBJECTIVES, objective_values
from autotile.ground.pareto import non_dominated
from autotile.tuning.finals import Finals


@dataclass(frozen=True, slots=True)
class Front:
    """Trials that no other one is better than in one objective and at least as good as in the others.

    Attributes
    ----------
    objectives
        Time and one or more others.
    trials
        The fastest first.
    """

    objectives: tuple[str, ...]
    trials: tuple[Trial, ...]

    def values(self, trial: Trial) -> tuple[float, ...]:
        """What a trial reached in each objective."""
        reached = objective_values(trial, self.objectives)
        assert reached is not None
        return reached

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary."""
        keys = [OBJECTIVES[name] for name in self.objectives]
        entries = [
            {"config": dict(trial.config), **dict(zip(keys, self.values(trial), strict=True))} for trial in self.trials
        ]
        return {"objectives": list(self.objectives), "front": entries}


def front_of(trials: Iterable[Trial], finals: Finals | None, objectives: Sequence[str]) -> Front | None:
    """The front of a study's trials; None where time is the only objective.

    Finalists count with their times from the finals, and those that were refused there do not count.
    """
    if len(objectives) == 1:
        return None
    newest = {config_key(trial.config): trial for trial in trials}
    if finals is not None:
        newest |= {config_key(trial.config): trial for trial in (*finals.ranked, *finals.refused)}
    reached = [(values, trial) for trial in newest.values() if (values := objective_values(trial, objectives))]
    kept = non_dominated([values for values, _ in reached]) if reached else ()
    best = [pair for pair, is_kept in zip(reached, kept, strict=True) if is_kept]
    return Front(tuple(objectives), tuple(trial for _, trial in sorted(best, key=lambda pair: pair[0])))

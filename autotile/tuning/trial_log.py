"""The trials of a session, and the detection of a kernel that fails throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autotile.core.model import SAME_CODE, Config, Outcome, Trial, config_key, config_text
from autotile.errors import InputError
from autotile.space.search_space import SearchSpace


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


_ENOUGH = 8
"""When so many candidates, the default among them, fail alike and none runs, the fault is the kernel's own."""

_FAULTS = {
    Outcome.COMPILE_FAILED: "no candidate compiles; the compiler says of",
    Outcome.WRONG_RESULT: "no candidate agrees with the reference; correct one of the two. This is wrong with",
}


def kernel_fault(outcomes: Mapping[Outcome, int], last: Trial, default: Trial | None, most: int) -> str:
    """What is wrong with the kernel itself, where every candidate failed for the same reason; else empty.

    Parameters
    ----------
    outcomes
        Trials by how they ended.
    last
        The newest of them.
    default
        The default configuration's, where it was tried. The default is expected to run: without it nothing is said
        before all have failed.
    most
        Candidates that are to be tried.
    """
    enough = most if default is None else min(_ENOUGH, most)
    if len(outcomes) != 1 or sum(outcomes.values()) < enough or last.outcome not in _FAULTS:
        return ""
    example = default or last
    return f"{_FAULTS[example.outcome]} {config_text(example.config)}: {example.reason}"


def check_kernel(source: str, ledger: Ledger, last: Trial, default: Config, most: int) -> None:
    """Say once what is wrong with the kernel itself, instead of failing every candidate for the same reason.

    Raises
    ------
    InputError
        There is a `kernel_fault`; ``source`` is the kernel's file.
    """
    fault = kernel_fault(ledger.outcomes, last, ledger.find(default), most)
    if fault:
        raise InputError(f"{source}: {fault}")

"""Tuning of the fault kit's kernel, with short timeouts that fit its small kernel."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotile.core.model import Outcome, Trial
from autotile.kernel.problem import resolve_problem
from autotile.search.samplers import BRUTE_FORCE
from autotile.settings import Settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune
from faults.fault_kit import HEALTHY, fault_kernel

RUN_DEADLINE_S = 4.0
"""Timeout of one candidate. A healthy one takes 0.3 s, and up to 2.5 s in a new worker, including the warm-up."""
COMPILE_DEADLINE_S = 5.0
"""Timeout of one compilation. A healthy candidate takes 0.1 s, the first of a worker one second."""


@dataclass(frozen=True, slots=True)
class FaultSession:
    """Result of a session over healthy and faulty configurations, and its wall time."""

    result: TuneResult
    trials: tuple[Trial, ...]
    seconds: float

    def trial_of(self, fault: str) -> Trial | None:
        return next((trial for trial in self.trials if trial.config["FAULT"] == fault), None)

    def damage(self) -> list[str]:
        """Return what went wrong with the healthy configurations; empty if nothing did."""
        healthy = [trial for trial in self.trials if trial.config["FAULT"] == HEALTHY]
        found = [f"{t.config}: {t.outcome}: {t.reason}" for t in healthy if not t.outcome.has_time]
        if len(healthy) != 4:
            found.append(f"{len(healthy)} of 4 healthy configurations were tried")
        if not any(trial.outcome is Outcome.OK for trial in healthy):
            found.append("no healthy configuration was measured to the end")
        winner = self.result.winner
        if winner is None or winner.config["FAULT"] != HEALTHY:
            found.append(f"the winner is {winner.config if winner is not None else None}")
        return found


def tune_faults(
    folder: Path,
    *faults: str,
    cache: Path | None = None,
    finals: int = 4,
    devices: tuple[int, ...] = (),
    observe: Callable[[Progress], None] = lambda _: None,
) -> FaultSession:
    """Try every configuration of the kit that has one of the given faults, or none; the folder is empty.

    The faults are all if none is named, `HEALTHY` for none. A cubin cache of its own is made unless one is given.
    """
    kernel = fault_kernel(folder, *faults)
    settings = Settings(str(folder / "tuning.db"), cache or folder / "cache", 10**9, (), ())
    options = TuneOptions(
        sampler=BRUTE_FORCE,
        finals=finals,
        sample_limit_s=0.02,
        workers=4,
        run_deadline_s=RUN_DEADLINE_S,
        compile_deadline_s=COMPILE_DEADLINE_S,
        devices=devices,
    )
    trials: list[Trial] = []

    def watch(progress: Progress) -> None:
        observe(progress)
        if progress.last is not None:
            trials.append(progress.last)

    start = time.perf_counter()
    result = tune(kernel, resolve_problem(kernel.spec, kernel.spec.sizes), settings, options, watch)
    return FaultSession(result, tuple(trials), time.perf_counter() - start)

"""Sessions that are disturbed by faults, compared with the same session without a fault.

A session tries each of a list of configurations once. Nothing is lost if the database holds one trial of each, with the
trials that the session has reported among them, each configuration runs that ran undisturbed, and a configuration wins
that is as fast as the undisturbed winner.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Trial, config_key
from autotile.database.database import Database
from autotile.errors import AutotileError
from autotile.exchange.recording import Recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.space.search_space import feasible_space
from autotile.tuning.progress_state import Progress
from autotile.tuning.result import TuneResult
from autotile.workers.gpu import GpuUse

_TOLERANCE = 0.01
"""Excess of the winner's time over that of the undisturbed winner that noise explains."""
_POLL_S = 0.005
_MAX_PENDING = 2
"""Faults that may be due and not injected: the session waits for further ones, so that it does not end before."""
_SOON, _SOON_S = 0.75, 0.25
"""Share of the random faults that follow within so many seconds; the others take longer, and meet what restarts."""


class Watch:
    """Observer of a session, which its disturbance waits for; pass it to `tune`.

    Attributes
    ----------
    acknowledged
        Outcome of each configuration whose trial was reported, by its key.
    faults
        What was done to the session, one line each.
    ended
        Set when the session has ended.
    points
        Numbers of trials after which a fault each is injected.
    held_at
        Number of trials at which the session waits until this is None.
    finds_nothing
        Whether a fault that is due finds nothing to disturb, as idle workers that died are replaced at their next
        candidate: the session then goes on.
    """

    def __init__(self) -> None:
        self.acknowledged: dict[str, str] = {}
        self.faults: list[str] = []
        self.ended = threading.Event()
        self.points: Sequence[int] = ()
        self.held_at: int | None = None
        self.finds_nothing = False
        self._in_finals = False

    def __call__(self, progress: Progress) -> None:
        """Note the newest trial, which is stored."""
        self._in_finals |= progress.phase == "finals"
        if progress.last is not None:
            self.acknowledged[config_key(progress.last.config)] = str(progress.last.outcome)
        while self._is_held():
            time.sleep(_POLL_S)

    def _is_held(self) -> bool:
        done, held_at = len(self.acknowledged), self.held_at
        due = sum(point <= done for point in self.points)
        pending = due - len(self.faults)
        if self.finds_nothing:
            return False
        return pending > (_MAX_PENDING if due < len(self.points) else 0) or (held_at is not None and done >= held_at)

    def await_trials(self, count: int) -> bool:
        """Wait for so many trials; return whether the search has not ended."""
        while len(self.acknowledged) < count and not self._in_finals:
            if self.ended.wait(_POLL_S):
                return False
        return not self._in_finals


Disturbance = Callable[[Watch], None]


@dataclass(frozen=True, slots=True)
class Run:
    """A session and what it left."""

    name: str
    trials: Sequence[Trial]
    """Trials of the search in the database."""
    acknowledged: dict[str, str]
    faults: Sequence[str]
    seconds: float
    winner: Config | None = None
    ties: Sequence[Config] = ()
    uses: Sequence[GpuUse] = ()
    notices: Sequence[str] = ()
    error: str = ""
    outcomes: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Index the trials by configuration."""
        object.__setattr__(self, "outcomes", {config_key(t.config): str(t.outcome) for t in self.trials})

    def time_us(self, config: Config) -> float | None:
        """Return the time of a configuration in the search, in microseconds."""
        return next((trial.time_us for trial in self.trials if config_key(trial.config) == config_key(config)), None)

    def compared(self, undisturbed: Run, expected: Sequence[Config]) -> dict[str, Any]:
        """Return what was lost, as plain data; ``verdict`` is ``nothing lost`` if nothing was."""
        keys = {config_key(config) for config in expected}
        counts = Counter(config_key(trial.config) for trial in self.trials)
        timed = {config_key(t.config) for t in undisturbed.trials if t.outcome.has_time}
        now_timed = {config_key(trial.config) for trial in self.trials if trial.outcome.has_time}
        excess = self._excess(undisturbed)
        losses = {
            "acknowledged trials lost": len(self.acknowledged.keys() - counts.keys()),
            "candidates without a trial": len(keys - counts.keys()),
            "candidates tried twice": sum(count > 1 for count in counts.values()),
            "candidates that failed": len(timed - now_timed),
        }
        complaints = [f"{count} {what}" for what, count in losses.items() if count]
        if self.error:
            complaints.append(f"ended: {self.error}")
        if excess is None or excess > _TOLERANCE:
            complaints.append(f"another winner: {self.winner}")
        return {
            "fault": self.name,
            "injected": len(self.faults),
            "trials": len(self.trials),
            "acknowledged": len(self.acknowledged),
            **{what.replace(" ", "_"): count for what, count in losses.items()},
            "winner_excess": excess,
            "gpus_at_end": sum(not use.lost for use in self.uses),
            "uses": [use.to_json() for use in self.uses],
            "seconds": round(self.seconds, 2),
            "verdict": "; ".join(complaints) or "nothing lost",
            "faults": list(self.faults),
            "notices": list(self.notices),
        }

    def _excess(self, undisturbed: Run) -> float | None:
        """Return by how much the winner is slower than the undisturbed one, both timed in the undisturbed search.

        It is 0 for one that the undisturbed finals could not tell apart.
        """
        if self.winner is None or undisturbed.winner is None:
            return None
        if config_key(self.winner) in map(config_key, (undisturbed.winner, *undisturbed.ties)):
            return 0.0
        own_us, best_us = undisturbed.time_us(self.winner), undisturbed.time_us(undisturbed.winner)
        return round(own_us / best_us - 1.0, 5) if own_us and best_us else None


def run_session(
    name: str, tune: Callable[[Watch], TuneResult], database: str, disturb: Disturbance = lambda watch: None
) -> Run:
    """Run a session on a new database while a thread disturbs it, and read what it stored."""
    watch = Watch()
    broken: list[str] = []

    def disturbed() -> None:
        try:
            disturb(watch)
        except Exception as error:  # of the disturbance itself: the run then proves nothing
            broken.append(f"the fault could not be injected: {type(error).__name__}: {error}")

    thread = threading.Thread(target=disturbed, name="disturbance")
    begun = time.monotonic()
    thread.start()
    result, error = None, ""
    try:
        result = tune(watch)
    except AutotileError as found:
        error = str(found)
    finally:
        watch.ended.set()
        thread.join()
    seconds = time.monotonic() - begun
    with Database.open(database) as opened:
        trials = [trial for study in opened.studies() for trial in opened.trials(study.study_id, phase="search")]
    return Run(
        name=name,
        trials=trials,
        acknowledged=watch.acknowledged,
        faults=watch.faults,
        seconds=seconds,
        winner=result.winner.config if result is not None and result.winner is not None else None,
        ties=result.ties if result is not None else (),
        uses=result.gpus if result is not None else (),
        notices=result.notices if result is not None else (),
        error="; ".join(filter(None, [error, *broken])),
    )


def at_random(
    count: int, trials: int, seed: int, inject: Callable[[Random], str | None], *, spread_s: float
) -> Disturbance:
    """Return a disturbance that injects faults at random moments of the search.

    Each waits for a random number of trials, and then for a random time of up to ``spread_s``: so every fault meets a
    session that goes on, in any of its states. The function of an injected fault returns what it did, or None to be
    called again.
    """

    def disturb(watch: Watch) -> None:
        rng = Random(seed)
        watch.points = sorted(rng.randrange(1, trials) for _ in range(count))
        for point in watch.points:
            wait_s = rng.uniform(0.0, _SOON_S if rng.random() < _SOON else spread_s)
            if not watch.await_trials(point) or watch.ended.wait(wait_s):
                return
            while (done := inject(rng)) is None:
                watch.finds_nothing = True
                if watch.ended.wait(_POLL_S):
                    return
            watch.finds_nothing = False
            watch.faults.append(f"after {len(watch.acknowledged)} trials: {done}")

    return disturb


def some_configs(
    kernel: str, sizes: dict[str, int], device: DeviceProperties, count: int, recording: Recording | None = None
) -> list[Config]:
    """Return random valid configurations of a kernel, of those that are recorded if a recording is given."""
    loaded = load_kernel(kernel)
    problem = resolve_problem(loaded.spec, sizes, None)
    space = feasible_space(loaded.spec, problem, device)
    rows: Sequence[int] = range(len(space))
    if recording is not None:
        found = (space.row_of(recording.config(row)) for row in range(len(recording)))
        rows = [row for row in found if row is not None]
    return [space.config(row) for row in Random(0).sample(rows, min(count, len(rows)))]


def show_runs(entries: Sequence[dict[str, Any]]) -> None:
    """Print one line for each run."""
    counts = (
        "acknowledged_trials_lost",
        "candidates_without_a_trial",
        "candidates_tried_twice",
        "candidates_that_failed",
    )
    headings = ("acknowledged lost", "untried", "tried twice", "failed", "winner", "GPUs at the end", "seconds")
    table = Table("GPUs", "fault", "injected", "trials", *headings, "verdict")
    for entry in entries:
        excess = entry.get("winner_excess", 0.0)
        winner = "none" if excess is None else f"{100 * excess:+.2f} %" if excess else "same"
        row = [entry.get(name, 0) for name in ("gpus", "fault", "injected", "trials", *counts)]
        style = "green" if entry["verdict"] == "nothing lost" else "red"
        verdict = f"[{style}]{escape(entry['verdict'])}[/{style}]"
        table.add_row(*map(str, row), winner, str(entry["gpus_at_end"]), f"{entry['seconds']:.1f}", verdict)
    Console(width=180).print(table)

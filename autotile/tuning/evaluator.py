"""Where a candidate's launch is answered: by a GPU, or by a recording of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from autotile.device.timing import DISCARD_RATIO, discard_reason
from autotile.ground.errors import WorkerError
from autotile.ground.model import Outcome
from autotile.process.gpu import Gpu
from autotile.process.messages import Candidate, Evaluation
from autotile.process.sanitizer import Finding, Sanitizer
from autotile.store.recording import Recording


class Evaluator(Protocol):
    """Runs candidates, one at a time."""

    source: Literal["cuda", "replayed"]

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Load, verify and measure one candidate."""

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]] | None:
        """Interleaved times in microseconds, one row a candidate; None where nothing can be run again."""

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Verify one candidate again and again; ok where nothing can be run again."""

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """What compute-sanitizer's tools say, one row a candidate; empty rows where it was not asked for."""

    def close(self) -> None:
        """Release what is held."""


class GpuEvaluator:
    """A live GPU behind a worker process.

    Parameters
    ----------
    gpu
        Where candidates run.
    sanitizer
        What finalists are run under; None for nothing.
    """

    source: Literal["cuda", "replayed"] = "cuda"

    def __init__(self, gpu: Gpu, sanitizer: Sanitizer | None = None) -> None:
        self._gpu = gpu
        self._sanitizer = sanitizer

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Run the candidate; a crash or hang is an outcome."""
        return self._gpu.evaluate(candidate, best_us)

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]] | None:
        """Time the candidates in turn; None where the worker died of it."""
        try:
            return self._gpu.race(candidates, rounds, seed)
        except WorkerError:
            return None  # the search's own measurements stand

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Run the candidate ``repeats`` times; a crash or hang is an outcome."""
        return self._gpu.verify(candidate, repeats)

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Run the candidates in processes of their own."""
        return [[] for _ in candidates] if self._sanitizer is None else self._sanitizer.check_all(candidates)

    def close(self) -> None:
        """End the worker."""
        self._gpu.close()


class ReplayEvaluator:
    """A recording of a GPU: launches are looked up, never invented."""

    source: Literal["cuda", "replayed"] = "replayed"

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def evaluate(self, candidate: Candidate, best_us: float | None) -> Evaluation:
        """Look the candidate up."""
        result = self._recording.lookup(candidate.config)
        if result is None:
            return Evaluation(Outcome.NOT_AVAILABLE, "the recording does not hold this configuration", "replay")
        measured = result.measurement
        if best_us is not None and measured is not None and measured.time_us > DISCARD_RATIO * best_us:
            return Evaluation(Outcome.PRUNED, discard_reason(best_us), result.stage, measured)
        return Evaluation(result.outcome, result.reason, result.stage, measured)

    def race(self, candidates: Sequence[Candidate], rounds: int, seed: int) -> list[list[float]] | None:
        """Nothing can be timed again."""
        return None

    def verify(self, candidate: Candidate, repeats: int) -> Evaluation:
        """Nothing can be run again."""
        return Evaluation(Outcome.OK, stage="replay")

    def sanitize(self, candidates: Sequence[Candidate]) -> list[list[Finding]]:
        """Nothing can be run again."""
        return [[] for _ in candidates]

    def close(self) -> None:
        """Nothing is held."""

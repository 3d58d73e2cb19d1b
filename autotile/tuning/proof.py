"""What a finalist must pass beyond the search's own verification before it is served."""

from __future__ import annotations

from collections.abc import Sequence

from autotile.ground.model import Outcome
from autotile.process.messages import Candidate
from autotile.process.sanitizer import Finding, Verdict
from autotile.tuning.evaluator import Evaluator

_REPEATS = 75
"""Of two runs each: a kernel that is wrong in one run of fifty is then found with 95 %: 1 - 0.98 ** 150."""
_HURRIED_REPEATS = 10


class Proof:
    """Proves finalists: verified again and again, and under compute-sanitizer where that was asked for.

    Parameters
    ----------
    evaluator
        Where they run.
    hurried
        Whether the user wants to leave: fewer repeats, and no sanitizer.

    Attributes
    ----------
    notices
        What could not be checked, a line each.
    """

    def __init__(self, evaluator: Evaluator, *, hurried: bool) -> None:
        self._evaluator = evaluator
        self._hurried = hurried
        self._findings: dict[str, list[Finding]] = {}
        self.notices: list[str] = []

    def sanitize(self, candidates: Sequence[Candidate]) -> None:
        """Run all finalists under the sanitizer at once; what it finds is told when they are proved."""
        if self._hurried:
            return
        found = self._evaluator.sanitize(candidates)
        self._findings = {c.cubin_path: findings for c, findings in zip(candidates, found, strict=True)}
        unchecked = [finding for findings in found for finding in findings if finding.verdict is Verdict.UNCHECKED]
        if unchecked:
            self.notices.append(f"{len(unchecked)} of the sanitizer's checks were not made; {unchecked[0].reason}")

    def __call__(self, candidate: Candidate) -> tuple[Outcome, str, str]:
        """How the candidate ends, the reason, and the stage that decided."""
        faults = [f for f in self._findings.get(candidate.cubin_path, ()) if f.verdict is Verdict.FAILED]
        if faults:
            outcome = Outcome.OUT_OF_BOUNDS if faults[0].tool == "memcheck" else Outcome.WRONG_RESULT
            return outcome, f"{faults[0].tool}: {faults[0].reason}", "sanitize"
        evaluation = self._evaluator.verify(candidate, _HURRIED_REPEATS if self._hurried else _REPEATS)
        return evaluation.outcome, evaluation.reason, evaluation.stage

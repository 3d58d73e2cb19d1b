"""The gates in one line: how many configurations there were, were valid, and were tried, and how those ended."""

from __future__ import annotations

from collections.abc import Mapping

from autotile.core.model import Outcome


def funnel_text(gates: Mapping[str, int], outcomes: Mapping[Outcome, int]) -> str:
    """``8,294,400 combinations -> 24,906 valid -> 200 tried: 180 ok, 12 pruned``."""
    tried = sum(outcomes.values())
    left = f"{gates['combinations']:,} combinations -> {gates['limits']:,} valid -> {tried:,} tried"
    return f"{left}: {outcomes_text(outcomes)}" if tried else left


def outcomes_text(outcomes: Mapping[Outcome, int]) -> str:
    """``180 ok, 12 pruned, 8 compile_failed``, in the order of the pipeline, without those that did not occur."""
    return ", ".join(f"{outcomes[outcome]:,} {outcome}" for outcome in Outcome if outcomes.get(outcome))

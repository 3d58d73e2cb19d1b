"""The record of the search benchmark is of the present sampler."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import search_methods  # noqa: E402


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("search", {"measured:feasible", "session:feasible"}),
        ("search_estimates", {"measured:feasible", "measured-estimated:feasible", "session-estimated:feasible"}),
    ],
)
def test_the_record_is_of_the_present_proposals(name: str, methods: set[str]) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert record["proposals"] == search_methods.proposals_digest(), (
        f"the default sampler proposes other configurations than when benchmarks/results/{name}.json was recorded: "
        "record it again as its command says"
    )
    assert methods <= record["methods"].keys()


def test_estimates_save_more_than_half_of_the_first_trials() -> None:
    """Of the record: ten trials with estimates are worth what 25 are without, within 0.02."""
    methods = json.loads((ROOT / "benchmarks" / "results" / "search_estimates.json").read_text(encoding="utf-8"))[
        "methods"
    ]
    for kind in ("measured", "session"):
        plain, estimated = methods[f"{kind}:feasible"], methods[f"{kind}-estimated:feasible"]
        own = [name for name in plain["spaces"] if "h200" in name]
        assert min(estimated["spaces"][name]["10"] for name in own) > 0.85
        assert estimated["mean"]["10"][0] > plain["mean"]["25"][0] - 0.02

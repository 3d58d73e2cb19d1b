"""The record of the search benchmark is of the present sampler."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import search_methods  # noqa: E402


def test_the_record_is_of_the_present_proposals() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "search.json").read_text(encoding="utf-8"))
    assert record["proposals"] == search_methods.proposals_digest(), (
        "the default sampler proposes other configurations than when benchmarks/results/search.json was recorded: "
        "record it again as its command says"
    )
    assert {"measured:feasible", "session:feasible"} <= record["methods"].keys()

"""Comparison of outputs by a Python function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spec_samples import SGEMM

from autotile.api.tunable import comparison_of
from autotile.errors import SpecError
from autotile.kernel.parser import parse_spec

SPEC = parse_spec(SGEMM, "sgemm.toml")
CONTENTS = {"C.expected": np.array([1.0, 2.0]), "C.value": np.array([1.0, 2.1])}


def fails(expected: Any, got: Any) -> bool:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda expected, got: np.allclose(expected, got, atol=1), ""),
        (lambda expected, got: None, ""),
        (lambda expected, got: expected == got, "found a difference"),
        (lambda expected, got: f"off by {np.abs(expected - got).max():.1f}", "off by 0.1"),
        (lambda expected, got, tolerance: tolerance == 1e-5, ""),
        (fails, "the comparison raises ValueError: no"),
    ],
)
def test_what_a_comparison_says(function: Any, said: str, tmp_path: Path) -> None:
    inspection = comparison_of(SPEC, function, tmp_path)
    assert inspection.buffers == ("C.expected", "C.value")
    folder = tmp_path / "outputs"
    folder.mkdir()
    for name, values in CONTENTS.items():
        np.save(folder / f"{name}.npy", values)
    wrong, _ = inspection.inspect({}, folder)
    assert said in wrong
    assert bool(said) == bool(wrong)


def test_a_comparison_belongs_to_the_reference() -> None:
    text = SGEMM.replace("tolerance = 1e-5", 'comparison = "near"')
    assert parse_spec(text, "k.toml").reference.comparison == "near"
    assert "near" in parse_spec(text, "k.toml").reference.notice
    with pytest.raises(SpecError, match="no expected values"):
        parse_spec(text.replace('outputs = { C = "alpha * (A @ B) + C" }', 'verify = "agreement"'), "k.toml")

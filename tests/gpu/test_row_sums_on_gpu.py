"""The example of an operation of two kernels, and its benchmark at random sizes, on a real device."""

from __future__ import annotations

from pathlib import Path

import pytest

import autotile
from autotile.core.model import Outcome, Trial

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "row_sums"


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        ("row_sums_whole", {"ROWS": 389, "N": 4096}),
        ("row_sums_whole", {"ROWS": 1001, "N": 33}),
        ("row_sums_split", {"ROWS": 3, "N": 1_000_001}),
        ("row_sums_split", {"ROWS": 64, "N": 20_000}),
    ],
)
def test_every_configuration_is_right(kernel: str, sizes: dict[str, int]) -> None:
    trials: list[Trial] = []
    options = autotile.TuneOptions(sampler="random", trials=8, finals=0, discard=False, workers=4)
    autotile.tune(
        str(FOLDER / f"{kernel}.toml"),
        sizes,
        options=options,
        observe=lambda progress: trials.append(progress.last) if progress.last is not None else None,
    )
    assert len(trials) == 8
    assert {trial.outcome for trial in trials} == {Outcome.OK}

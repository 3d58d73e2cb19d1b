"""The example of an operation of two kernels, and its benchmark at random sizes, on a real device."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import autotile
from autotile.core.model import Outcome, Trial
from autotile.serving import operations
from autotile.settings import child_environment

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


@pytest.mark.parametrize("library", [True, False])
def test_what_is_served_is_right(library: bool, monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    monkeypatch.setattr(operations, "_added", {})
    runpy.run_path(str(FOLDER / "row_sums.py"))
    for rows, n in ((1, 1_000_000), (64, 200_001), (4097, 33)):
        x = cupy.random.default_rng(0).standard_normal((rows, n), dtype=cupy.float32)
        kernel = autotile.get_best_kernel(str(FOLDER / "row_sums.toml"), ROWS=rows, N=n, library=library)
        assert kernel.is_library == library
        sums, want = cupy.full(rows, cupy.nan, cupy.float32), x.sum(axis=1, dtype=cupy.float64)
        for launch in (partial(kernel, x, sums), kernel.bind(x, sums)):
            sums.fill(cupy.nan)
            launch()
            assert float(cupy.abs(sums - want).max()) < 1e-4 * n**0.5


def test_the_benchmark_at_random_sizes(tmp_path: Path) -> None:
    output = tmp_path / "any_size.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "any_size.py"), "--operation", str(FOLDER / "row_sums.toml")]
    command += ["--python", str(FOLDER / "row_sums.py"), "ROWS=1..4096", "N=16..100000", "--count", "4"]
    command += ["--limit", "6", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=child_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert {row["class"]: None for row in rows} == {"float32": None, "float32_no_library": None}
    assert len(rows) == 8
    for row in rows:
        assert not row["fault"]
        assert row["error"] <= row["tolerance"]
        assert row["library"] == "cupy"
        assert row["grid"] or row["class"] == "float32"

"""`autotile list --misses`: the time that fallbacks may have cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from answers import Run
from stored_runs import Book, record_miss

from autotile.core.model import Problem
from autotile.database.database import Database
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.plan import missed_problems

FAST = {"THREADS": 256, "WORK": 4}
SLOW = {"THREADS": 64, "WORK": 2}
DEFAULT = {"THREADS": 128, "WORK": 1}
H200 = "NVIDIA H200"


@pytest.fixture
def study(scale_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Store a study: its winner first, every configuration with its time."""
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    return Book(tmp_path / "tuning.db", scale_toml).rank


def miss(n: int, tier: str, count: int, gpu: str = H200, kernel: str = "scale") -> None:
    with Database.open(read_settings().database) as database:
        record_miss(database, Problem(kernel, {"n": n}, "float32"), gpu, tier, count)


def only_row(run: Run) -> dict[str, Any]:
    (row,) = run("list", "--misses", "--json").document
    return row


def test_of_the_default_as_elsewhere_on_this_gpu(study: Any, run: Run) -> None:
    """Half as slow again at one tuned problem and as fast at another: a quarter lost, of a time that grows with n."""
    study(1024, (FAST, 10.0), (DEFAULT, 15.0))
    study(2048, (DEFAULT, 20.0), (SLOW, 21.0))
    miss(8192, "default", 1000)
    row = only_row(run)
    assert row["call_us"] == pytest.approx(80.0 * 1.25)
    assert row["lost_s"] == pytest.approx(1000 * 80.0 * 0.25 * 1e-6)
    assert (row["measured"], row["tuned"], row["count"]) == (False, False, 1000)
    assert "about 20 ms" in run("list", "--misses").out


def test_of_the_nearest_by_leaving_out_each_tuned_problem(study: Any, run: Run) -> None:
    study(1024, (FAST, 10.0), (SLOW, 11.0))
    study(2048, (SLOW, 20.0), (FAST, 26.0))
    miss(4096, "nearest", 10)
    assert only_row(run)["lost_s"] == pytest.approx(10 * 40.0 * ((0.1 + 0.3) / 2) * 1e-6)


def test_of_another_gpus_configuration(study: Any, run: Run) -> None:
    study(1024, (FAST, 10.0), (SLOW, 14.0))
    study(2048, (SLOW, 30.0), gpu="a100")
    miss(2048, "transferred", 100)
    assert only_row(run)["lost_s"] == pytest.approx(100 * 20.0 * 0.4 * 1e-6)


def test_what_was_tuned_since_is_known(study: Any, run: Run) -> None:
    study(1024, (FAST, 10.0), (DEFAULT, 12.0))
    miss(1024, "default", 50)
    row = only_row(run)
    assert (row["measured"], row["tuned"]) == (True, True)
    assert row["lost_s"] == pytest.approx(50 * 2.0 * 1e-6)
    assert "tuned" in run("list", "--misses").out


def test_where_too_little_is_tuned_nothing_is_made_up(study: Any, run: Run) -> None:
    study(1024, (FAST, 10.0))  # the default was not measured, and no other problem is tuned
    study(1024, (FAST, 10.0), (DEFAULT, 99.0), template_hash="0" * 64)
    for n, tier in ((4096, "default"), (2048, "nearest"), (512, "transferred"), (256, "family")):
        miss(n, tier, 3)
    miss(64, "default", 1, gpu="NVIDIA A100-SXM4-80GB")
    miss(32, "default", 1, kernel="gone")
    assert {(row["call_us"], row["lost_s"]) for row in run("list", "--misses", "--json").document} == {(None, None)}


def test_the_costliest_come_first_and_are_tuned_first(study: Any, run: Run, scale_toml: Path) -> None:
    study(1024, (FAST, 10.0), (DEFAULT, 15.0))
    miss(2048, "default", 100)
    miss(65536, "default", 10)
    miss(4096, "default", 1)
    miss(2048, "nearest", 5)
    order = [row["problem"]["n"] for row in run("list", "--misses", "--json").document]
    assert order[:3] == [65536, 2048, 4096]
    options = TuneOptions(replay="auto")
    waiting = missed_problems(None, options)
    assert [(one.problem.sizes["n"], count) for one, count, _ in waiting] == [(65536, 10), (2048, 105), (4096, 1)]
    assert {one.asked_as for one, *_ in waiting} == {"scale"}
    assert {one.asked_as for one, *_ in missed_problems(str(scale_toml), options)} == {str(scale_toml)}

"""Kernels of several steps, tuned and served on a real device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from step_kernels import write_steps

import autotile
from autotile.core.model import Outcome, Trial
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.tuning.options import TuneOptions

pytestmark = pytest.mark.gpu
ALL = TuneOptions(sampler="brute-force", discard=False, finals=0)


def tuned(path: Path, options: TuneOptions = ALL, **sizes: int) -> list[Trial]:
    trials: list[Trial] = []
    autotile.tune(
        str(path), options=options, observe=lambda p: trials.append(p.last) if p.last is not None else None, **sizes
    )
    return trials


def test_a_reduction_of_two_kernels(tmp_path: Path, cp: Any) -> None:
    path = write_steps(tmp_path, "two_step_sum")
    found = tuned(path, N=1000000)
    assert len(found) == 16
    for trial in found:
        assert trial.outcome is (Outcome.WRONG_RESULT if trial.config["WRONG"] else Outcome.OK), trial.reason
        if trial.outcome is Outcome.OK:
            assert {"step_us.0.partial_sums", "step_us.1.total"} <= trial.telemetry.keys()
    forget_served()
    kernel = get_best_kernel(str(path), N=1000000)
    assert (kernel.tier, len(kernel.launches)) == ("exact", 2)
    for _ in range(5):  # the third call launches a graph of both kernels
        x = cp.random.random((1, 1000000), dtype=cp.float32)
        for _ in range(3):
            assert abs(float(kernel(x)[0]) / float(x.sum(dtype=cp.float64)) - 1) < 1e-5


@pytest.mark.parametrize("split", [1, 4])
def test_a_second_pass_with_a_condition(tmp_path: Path, cp: Any, split: int) -> None:
    path = write_steps(tmp_path, "split_rows")
    path.write_text(path.read_text().replace("SPLIT = 1\n", f"SPLIT = {split}\n"))
    forget_served()
    kernel = get_best_kernel(str(path), M=1000, N=512)
    assert len(kernel.launches) == (1 if split == 1 else 2)
    x, y = cp.random.standard_normal((1000, 512), dtype=cp.float32), cp.zeros(1000, cp.float32)
    launch = kernel.bind(x, y)
    for _ in range(4):
        y.fill(cp.nan)
        launch()
        cp.testing.assert_allclose(y, x.sum(axis=1), rtol=1e-3, atol=1e-3)


def test_both_sides_of_a_condition_are_tuned(tmp_path: Path) -> None:
    found = tuned(write_steps(tmp_path, "split_rows"), M=1000, N=512)
    assert [trial.outcome for trial in found] == [Outcome.OK] * 4


def test_repetitions_exchange_their_arrays(tmp_path: Path, cp: Any) -> None:
    path = write_steps(tmp_path, "scan_rounds")
    found = tuned(path, TuneOptions(sampler="brute-force", finals=2), N=4000)
    assert {trial.outcome for trial in found} <= {Outcome.OK, Outcome.PRUNED}
    forget_served()
    kernel = get_best_kernel(str(path), N=4000)
    x = cp.random.random(4000, dtype=cp.float32)
    expected = cp.cumsum(x)
    for _ in range(4):
        cp.testing.assert_allclose(kernel(x), expected, rtol=1e-5)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        y = kernel(x)
    stream.synchronize()
    cp.testing.assert_allclose(y, expected, rtol=1e-5)


def test_energy_of_a_call(tmp_path: Path) -> None:
    options = TuneOptions(sampler="brute-force", finals=0, trials=1, objectives=("time", "energy"))
    (trial,) = tuned(write_steps(tmp_path, "scan_rounds"), options, N=4000)[:1]
    assert float(trial.telemetry["energy_mj"]) > 0


@pytest.mark.parametrize(("name", "count"), [("several_steps", 6), ("block_sums", 3)])
def test_arrays_and_references_that_depend_on_parameters(tmp_path: Path, cp: Any, name: str, count: int) -> None:
    path = write_steps(tmp_path, name)
    found = tuned(path, TuneOptions(sampler="brute-force", discard=False, finals=3), N=100000)
    assert [trial.outcome for trial in found if trial.stage == "measure"] == [Outcome.OK] * count
    forget_served()
    kernel = get_best_kernel(str(path), N=100000)
    x = cp.random.random(100000, dtype=cp.float32)
    outputs = kernel(x)
    if name == "block_sums":
        assert outputs.shape == kernel.shapes["sums"]
        assert abs(float(outputs.sum()) / float(x.sum(dtype=cp.float64)) - 1) < 1e-4
    else:
        steps = kernel.config["STEPS"]
        assert outputs[1].shape == kernel.shapes["rows"] == (steps, 100000)
        cp.testing.assert_allclose(outputs[0], steps * x, rtol=1e-6)
    with pytest.raises(autotile.errors.ArgumentError, match="see the kernel's attribute shapes"):
        kernel(x, *(cp.zeros(7, cp.float32) for _ in range(len(kernel.shapes) - 1)))


def test_steps_that_share_no_parameters_are_tuned_apart(tmp_path: Path) -> None:
    """Seven trials have every setting of both steps, of 21 pairs; then the best of each are combined."""
    trials: list[Trial] = []
    result = autotile.tune(
        str(write_steps(tmp_path, "apart")),
        options=TuneOptions(sampler="random"),
        observe=lambda p: trials.append(p.last) if p.last is not None else None,
        N=1000,
    )
    assert any("steps that share no parameters were tuned apart in" in notice for notice in result.notices)
    assert 7 <= len(trials) <= 7 + 4
    assert result.winner is not None
    assert result.stopped is not None
    assert result.stopped.rule == "space"


def test_an_objective_decides(tmp_path: Path) -> None:
    """Three steps in one launch take less than three launches of one step, so the cost of a step falls."""
    path = write_steps(tmp_path, "several_steps")
    path.write_text(path.read_text().replace("[work]", '[metrics]\nrate = "N * STEPS / time_us"\n[work]'))
    options = TuneOptions(sampler="brute-force", objectives=("time_us / STEPS ** 2",))
    result = autotile.tune(str(path), options=options, N=100000)
    assert result.winner is not None
    assert result.winner.config["STEPS"] == 3
    assert result.winner.scores.keys() == {"objective", "rate"}
    forget_served()
    assert get_best_kernel(str(path), N=100000).config["STEPS"] == 3

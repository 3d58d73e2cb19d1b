"""Kernels from Python, sessions of the caller's own search, and the judge, on a real device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotile
from autotile import Buffer, Scalar
from autotile.core.model import Outcome

pytestmark = pytest.mark.gpu

CODE = """
extern "C" __global__ void scale(const float* x, float* y, int n) {
    const int first = (blockIdx.x * BLOCK + threadIdx.x) * WORK;
    for (int i = first; i < first + WORK && i < n; ++i) y[i] = 2.0f * x[i];
}
"""
OPTIONS = autotile.TuneOptions(trials=4, finals=2)


@pytest.fixture
def scale() -> autotile.TunableKernel:
    return autotile.kernel(
        CODE,
        "scale",
        sizes={"n": 1 << 20},
        parameters={"BLOCK": [64, 128, 256], "WORK": [1, 2, 4]},
        rules=[lambda BLOCK, WORK: BLOCK * WORK <= 512],
        arguments=[Buffer("float32", "n"), Buffer("float32", "n", "out"), Scalar("int32", "n")],
        launch=("BLOCK", "ceil_div(n, BLOCK * WORK)"),
        reference="2.0 * x",
        bytes="8 * n",
    )


def test_a_kernel_from_python_is_tuned_and_served(scale: autotile.TunableKernel, cupy: Any) -> None:
    result = scale.tune(options=OPTIONS, progress=False)
    assert result.winner is not None
    best = scale.best()
    assert best.tier == "exact"
    x = cupy.arange(1 << 20, dtype=np.float32)
    assert bool((best(x) == 2 * x).all())


def test_arrays_are_inputs_and_answers() -> None:
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    described: dict[str, Any] = {
        "parameters": {"BLOCK": [64, 128], "WORK": [1, 2]},
        "arguments": [x, Buffer("float32", x.shape, "out"), np.int32(x.size)],
        "launch": ("BLOCK", f"ceil_div({x.size}, BLOCK * WORK)"),
    }
    right = autotile.kernel(CODE, "scale", reference=2 * x, **described).tune(options=OPTIONS, progress=False)
    assert right.outcomes == {Outcome.OK: 4} or Outcome.WRONG_RESULT not in right.outcomes
    wrong = autotile.kernel(CODE, "scale", reference=3 * x, **described)
    with pytest.raises(autotile.InputError, match="no candidate agrees with the reference"):
        wrong.tune(options=OPTIONS, progress=False)


def test_a_search_of_the_callers_own(scale: autotile.TunableKernel) -> None:
    with autotile.session(scale, n=1 << 18, options=autotile.TuneOptions(finals=2)) as session:
        trials = session.evaluate([{"BLOCK": 64}, {"BLOCK": 256, "WORK": 4}, *session.ask(2)])
        assert [trial.outcome for trial in trials[:2]] == [Outcome.OK, Outcome.INFEASIBLE]
    assert session.result is not None
    assert session.result.winner is not None
    assert scale.best(n=1 << 18).tier == "exact"


MEMORY = "__device__ float kept[1 << 20]; __device__ int known[1 << 20];\n"
CANDIDATES: dict[str, tuple[str, str, str]] = {
    "the same": ("2.0f", "2.0f", "right"),
    "wrong everywhere": ("2.0f", "3.0f", "wrong_result"),
    "wrong at the edge": ("i < n; ++i", "i < n / 64 * 64; ++i", "wrong_result"),
    "writes outside": ("i < n; ++i", "i <= n; ++i", "out_of_bounds"),
    "keeps an earlier result": (
        "y[i] = 2.0f * x[i]",
        "y[i] = n < 1 << 20 || !known[i] ? 2.0f * x[i] : kept[i], kept[i] = y[i], known[i] = n == 1 << 20",
        "wrong_result",
    ),
    "crashes": ("y[i] = 2.0f", "((float*)8)[i] = 2.0f", "crashed"),
    "does not compile": ("y[i]", "z[i]", "compile_failed"),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_candidate_is_judged(scale: autotile.TunableKernel, tmp_path: Path, name: str) -> None:
    old, new, expected = CANDIDATES[name]
    assert old in CODE
    (tmp_path / "rewritten.cu").write_text(MEMORY + CODE.replace(old, new))
    found: Any = autotile.check(tmp_path / "rewritten.cu", scale)
    if expected == "right":
        assert found.verdict in ("equal", "faster", "slower"), found
        assert found.speedup.low <= found.speedup.value <= found.speedup.high
        assert found.repeats > 1
    else:
        assert found.verdict == "wrong", found
        assert found.candidate.outcome == expected, found


@pytest.mark.parametrize(("factor", "right"), [("2.0f", True), ("3.0f", False)])
def test_a_candidate_for_a_kernel_without_a_reference(tmp_path: Path, factor: str, right: bool) -> None:
    kernel = autotile.kernel(
        CODE,
        "scale",
        sizes={"n": 1 << 20},
        parameters={"BLOCK": [64, 128, 256], "WORK": [1, 2, 4]},
        arguments=[Buffer("float32", "n"), Buffer("float32", "n", "out"), Scalar("int32", "n")],
        launch=("BLOCK", "ceil_div(n, BLOCK * WORK)"),
    )
    (tmp_path / "rewritten.cu").write_text(CODE.replace("2.0f", factor))
    assert autotile.check(tmp_path / "rewritten.cu", kernel).is_right is right


def test_a_new_kernel_tunes_as_it_is(tmp_path: Path) -> None:
    made = autotile.new("blur", tmp_path)
    result = autotile.tune(made.space, N=1 << 20, options=OPTIONS, progress=False)
    assert result.winner is not None
    assert set(result.outcomes) <= {Outcome.OK, Outcome.PRUNED}


def test_a_kernel_from_python_is_bundled(scale: autotile.TunableKernel, tmp_path: Path, cupy: Any) -> None:
    scale.tune(options=OPTIONS, progress=False)
    autotile.bundle(scale, output=tmp_path / "scale.autotile")
    served = autotile.get_best_kernel("scale", n=1 << 20, bundle=tmp_path / "scale.autotile")
    x = cupy.arange(1 << 20, dtype=np.float32)
    assert bool((served(x) == 2 * x).all())

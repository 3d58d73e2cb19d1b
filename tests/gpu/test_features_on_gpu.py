"""Flags, stacks of matrices, workspaces, tensor maps and clusters, tuned and served on a real device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feature_kernels import CLUSTER_SPACE, CLUSTER_TEMPLATE, SPLIT_SPACE, SPLIT_TEMPLATE, write_kernel

import autotile
from autotile.core.model import Outcome
from autotile.cuda.driver import live_device
from autotile.errors import ArgumentError
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import forget_served, get_best_kernel
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress

pytestmark = pytest.mark.gpu
TRANSPOSE = Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml"
ALL = TuneOptions(sampler="brute-force", discard=False, finals=0)


@pytest.fixture
def hopper() -> None:
    if live_device().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def split_toml(tmp_path: Path) -> Path:
    return write_kernel(tmp_path, SPLIT_TEMPLATE, SPLIT_SPACE)


def with_default(toml: Path, **values: object) -> Path:
    """Change the default configuration of a kernel."""
    head, _, tail = toml.read_text().partition("[default]\n")
    body, _, rest = tail.partition("\n[")
    lines = dict(line.split(" = ") for line in body.splitlines() if line) | {k: str(v) for k, v in values.items()}
    toml.write_text(head + "[default]\n" + "\n".join(f"{k} = {v}" for k, v in lines.items()) + "\n\n[" + rest)
    forget_served()
    return toml


@pytest.mark.parametrize(("dtype", "flags"), [("float32", {}), ("float16", {"OUT_FP32": 1, "TRANS_B": 1})])
def test_workspaces_are_verified(split_toml: Path, dtype: str, flags: dict[str, int]) -> None:
    """Correct configurations pass, and each fault is identified by its effect on a workspace."""
    trials = []
    sizes = {"M": 256, "N": 192, "K": 320, **flags}
    autotile.tune(str(split_toml), dtype=dtype, options=ALL, observe=lambda p: trials.append(p.last), **sizes)
    found = {tuple(trial.config.values()): (trial.outcome, trial.reason) for trial in trials if trial is not None}
    assert len(found) == 3 * (1 + 2 * 4)
    for (_, _, fault), (outcome, reason) in found.items():
        wanted, said = {
            0: (Outcome.OK, ""),
            1: (Outcome.WRONG_RESULT, "words of the workspace counters other than zero"),
            2: (Outcome.OUT_OF_BOUNDS, "words outside partials"),
            3: (Outcome.WRONG_RESULT, "elements of C are wrong"),
        }[fault]
        assert (outcome, said in reason) == (wanted, True), (fault, outcome, reason)


@pytest.mark.parametrize("split_k", [1, 5])
@pytest.mark.parametrize("shape", list(product([0, 1], [0, 1], [1, 3])))
def test_flags_and_stacks(split_toml: Path, cp: Any, split_k: int, shape: tuple[int, int, int]) -> None:
    trans_a, trans_b, batch = shape
    kernel = get_best_kernel(
        str(with_default(split_toml, SPLIT_K=split_k)), M=33, N=17, K=70, BATCH=batch, TRANS_A=trans_a, TRANS_B=trans_b
    )
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((batch, 33, 70)), generator.standard_normal((batch, 70, 17))
    stored_a, stored_b = a.swapaxes(1, 2) if trans_a else a, b.swapaxes(1, 2) if trans_b else b
    given = [cp.asarray(np.ascontiguousarray(each), np.float32) for each in (stored_a, stored_b)]
    for _ in range(2):  # the second launch uses the workspaces in the state after the first
        np.testing.assert_allclose(kernel(*given).get(), a @ b, rtol=1e-4, atol=1e-4)


def test_a_stack_of_one_is_taken_and_returned_as_a_matrix(split_toml: Path, cp: Any) -> None:
    kernel = get_best_kernel(str(split_toml), M=33, N=17, K=70)
    a, b = cp.ones((33, 70), np.float32), cp.ones((70, 17), np.float32)
    assert kernel(a, b).shape == (33, 17)
    assert kernel(a[None], b[None]).shape == (1, 33, 17)
    out = cp.zeros((33, 17), np.float32)
    assert kernel(a, b, out) is out
    assert float(out.min()) == float(out.max()) == 70.0
    with pytest.raises(ArgumentError, match=r"A has shape \(2, 33, 70\), expected \(1, 33, 70\)"):
        kernel(cp.ones((2, 33, 70), np.float32), b)


def test_a_result_of_another_type(split_toml: Path, cp: Any) -> None:
    kernel = get_best_kernel(str(split_toml), dtype="float16", M=33, N=17, K=70, OUT_FP32=True)
    out = kernel(cp.ones((33, 70), np.float16), cp.full((70, 17), 0.1, np.float16))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.get(), 70 * float(np.float16(0.1)), rtol=1e-6)


def test_streams_have_workspaces_of_their_own(split_toml: Path, cp: Any) -> None:
    """With shared workspaces, concurrent launches would corrupt each other's partial sums and counters."""
    kernel = get_best_kernel(str(with_default(split_toml, SPLIT_K=5)), M=512, N=512, K=512)
    b = cp.asarray(np.random.default_rng(0).standard_normal((512, 512)), np.float32)
    expected = (cp.eye(512, dtype=np.float32) @ b).get()
    kernel(cp.eye(512, dtype=np.float32), b)
    cp.cuda.Device().synchronize()

    def work(number: int) -> float:
        a = (number + 1) * cp.eye(512, dtype=np.float32)
        cp.cuda.Device().synchronize()
        with cp.cuda.Stream(non_blocking=True) as stream:
            outs = [kernel(a, b) for _ in range(20)]
            stream.synchronize()
        return max(float(np.abs(out.get() - (number + 1) * expected).max()) for out in outs)

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(work, range(8))) < 1e-4


@pytest.mark.usefixtures("hopper")
class TestTensorMaps:
    def test_every_configuration_is_right(self) -> None:
        """For every swizzle, at a tuned and at a ragged shape."""
        last: list[Progress] = []
        result = autotile.tune(str(TRANSPOSE), M=1000, N=520, options=ALL, observe=last.append)
        reasons = [p.last.reason for p in last if p.last is not None and p.last.outcome is not Outcome.OK]
        assert result.outcomes == {Outcome.OK: 81}, reasons[:3]

    @pytest.mark.parametrize("swizzle", [0, 128])
    def test_it_is_served(self, cp: Any, swizzle: int) -> None:
        kernel: BoundKernel = get_best_kernel(str(TRANSPOSE), M=301, N=44)
        a = cp.asarray(np.random.default_rng(0).standard_normal((301, 44)), np.float32)
        np.testing.assert_array_equal(kernel(a).get(), a.get().T)
        again = cp.asarray(np.random.default_rng(1).standard_normal((301, 44)), np.float32)
        np.testing.assert_array_equal(kernel(again).get(), again.get().T)
        launch = kernel.bind(a, out := cp.empty((44, 301), np.float32))
        launch()
        np.testing.assert_array_equal(out.get(), a.get().T)

    def test_an_address_that_no_map_takes(self, cp: Any) -> None:
        kernel = get_best_kernel(str(TRANSPOSE), M=8, N=8)
        flat = cp.zeros(65, np.float32)
        with pytest.raises(ArgumentError, match="A starts at an address 4 bytes past a multiple of 16"):
            kernel(flat[1:].reshape(8, 8))


@pytest.mark.usefixtures("hopper")
def test_clusters(tmp_path: Path) -> None:
    toml = write_kernel(tmp_path, CLUSTER_TEMPLATE, CLUSTER_SPACE)
    result = autotile.tune(str(toml), n=100_000, options=ALL)
    assert result.outcomes == {Outcome.OK: result.valid}
    assert result.winner is not None

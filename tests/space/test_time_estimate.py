"""Estimated times against recordings, and what they must do for any kernel."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from spec_samples import SGEMM, make_spec

from autotile.core.device import device_profile, profile_names
from autotile.core.model import Value
from autotile.exchange.recording import read_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.search_space import SearchSpace, feasible_space
from autotile.space.time_estimate import TimeEstimate, estimate_times

ROOT = Path(__file__).parents[2]
H200 = device_profile("h200")
RECORDINGS = sorted((ROOT / "recordings").glob("*.npz"))
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*/*.toml")) if "[kernel]" in path.read_text("utf-8")]


def estimate(spec: KernelSpec, space: SearchSpace, **sizes: int) -> TimeEstimate:
    return estimate_times(spec, spec.at({**spec.sizes, **sizes}), H200, space)


def table(spec: KernelSpec, *configs: dict[str, Value]) -> SearchSpace:
    return SearchSpace.of(spec, configs)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_first_of_the_order_are_fast(path):
    recording = read_recording(path)
    header = recording.header
    space = SearchSpace(header.parameters, np.asfortranarray(recording.codes), 0, (), (), 0.0)
    spec, device = load_kernel(header.key.kernel).spec, header.device or H200
    found = estimate_times(spec, header.key.problem, device, space)
    times = np.where(recording.ok, recording.columns["time_us"], np.inf)
    order = np.argsort(found.time_us)
    order = order[recording.ok[order]]
    assert times[order[:10]].min() <= times.min() / 0.9
    ratio = found.time_us[recording.ok] / times[recording.ok]
    assert 0.4 < np.median(ratio) < 2.5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_estimated(path):
    spec = load_kernel(str(path)).spec
    space = feasible_space(spec, spec.at(), H200)
    found = estimate(spec, space)
    assert found.time_us.shape == (len(space),)
    assert (found.time_us > 0).all()


@pytest.mark.parametrize("name", profile_names())
def test_every_device_is_estimated(name):
    spec, device = parse_spec(SGEMM, "sgemm.toml"), device_profile(name)
    space = feasible_space(spec, spec.at(), H200)
    assert estimate_times(spec, spec.at(), device, space) is not None
    assert estimate_times(spec, spec.at(), replace(device, clock_mhz=0.0), space) is not None


def test_a_part_of_a_space_has_the_same_times():
    spec = load_kernel("sgemm").spec
    space = feasible_space(spec, spec.at(), H200)
    kept = np.random.default_rng(0).random(len(space)) < 0.01
    whole, part = estimate(spec, space), estimate(spec, space.select(kept))
    np.testing.assert_allclose(part.time_us, whole.time_us[kept])


def test_tiles_larger_than_the_problem_and_strided_warps_are_slower():
    spec = load_kernel("matmul_naive").spec
    base = {"BX": 32, "BY": 32, "UNROLL": 4}
    found = estimate(spec, table(spec, {**base, "COALESCED": True}, {**base, "COALESCED": False}))
    assert found.time_us[1] > 1.5 * found.time_us[0]
    spec = load_kernel("sgemm_2d").spec
    large, small = dict(spec.default), {**spec.default, "BM": 32, "TM": 4, "BN": 64, "TN": 4}
    found = estimate(spec, table(spec, large, small), M=16)
    assert found.time_us[1] < found.time_us[0]
    assert found.blocks.tolist() == [32, 64]


def test_a_split_fills_an_idle_device_and_a_persistent_kernel_has_the_blocks_of_its_work():
    spec = load_kernel("sgemm").spec
    found = estimate(spec, table(spec, dict(spec.default), {**spec.default, "SPLIT_K": 16}), M=128, N=1024, K=8192)
    assert found.time_us[1] < found.time_us[0] / 2
    even = estimate(spec, table(spec, dict(spec.default), {**spec.default, "SPLIT_K": 16}))
    assert even.time_us[1] > even.time_us[0]
    spec = load_kernel("gemm_wgmma").spec
    found = estimate(spec, table(spec, dict(spec.default), {**spec.default, "GROUP": 4}, {**spec.default, "BN": 128}))
    assert found.blocks.tolist() == [512, 512, 1024]
    strides = make_spec({"WAVES": [1, 4]}, launch={"grid": ["WAVES * (device.sm_count // 2)"]}, sizes={"N": 2**20})
    found = estimate(strides, table(strides, {"WAVES": 1}, {"WAVES": 4}))
    assert (found.blocks.tolist(), found.time_us.max() < 100.0) == ([66, 264], True)


@settings(max_examples=40)
@given(st.tuples(*[st.integers(1, 2**20)] * 3), st.sampled_from(["float32", "float64"]))
def test_any_problem_has_finite_times(sizes, dtype):
    spec = parse_spec(SGEMM, "sgemm.toml")
    space = feasible_space(spec, spec.at(), H200)
    found = estimate_times(spec, spec.at(dict(zip("MNK", sizes, strict=True)), dtype), H200, space)
    assert np.isfinite(found.time_us).all()
    assert (found.time_us > 0).all()


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ('grid = ["ceil_div(N, BN)", "ceil_div(M, BM)"]', 'grid = ["2 ** 62 * M * BM"]', {"BM": 32}),  # overflows
        ("[arguments]", '[computed]\nblocks = "number"\n\n[arguments]', {"BM": 32}),
        ("", "", {"LAYOUT": "column"}),  # launches alike
    ],
)
def test_a_file_that_says_too_little_has_no_estimate(old, new, change):
    spec = parse_spec(SGEMM.replace(old, new), "sgemm.toml")
    space = table(spec, dict(spec.default), {**spec.default, **change})
    assert estimate_times(spec, spec.at(), H200, space) is None


def test_work_and_registers_make_it_more_than_a_guess():
    stated, naive = load_kernel("sgemm").spec, load_kernel("matmul_naive").spec
    assert estimate(stated, table(stated, dict(stated.default), {**stated.default, "BM": 64})).is_declared
    assert not estimate(naive, table(naive, dict(naive.default), {**naive.default, "BX": 64})).is_declared

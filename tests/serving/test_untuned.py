"""What is served where nothing is tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, config_key
from autotile.exchange.recording import read_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving import selection
from autotile.serving.choice import Choice, Estimated, explain
from autotile.serving.selection import KernelRequest, Shelf, choose, untuned_config
from autotile.space.limits import check_config
from autotile.space.search_space import SearchSpace
from autotile.space.time_estimate import CONFIDENT_FACTOR, estimate_times

H200 = device_profile("h200")
RECORDINGS = sorted((Path(__file__).parents[2] / "recordings").glob("*.npz"))


def serve(name: str, device: DeviceProperties = H200, **options: Any) -> tuple[Config, Estimated | None]:
    sizes = {size: options.pop(size) for size in ("M", "N", "K")}
    kernel = load_kernel(name)
    request = KernelRequest(kernel, resolve_problem(kernel.spec, sizes, None), device, "13.0", Shelf())
    vars(request)["wrong"] = options.pop("wrong", set())
    return untuned_config(request, **options)


@pytest.mark.parametrize("name", ["sgemm", "sgemm_2d", "gemm_mma", "gemm_wgmma"])
def test_the_default_is_served_where_it_fits(name: str) -> None:
    assert serve(name, M=4096, N=4096, K=4096) == (dict(load_kernel(name).spec.default), None)


def test_one_block_of_a_deep_product_is_split() -> None:
    config, estimated = serve("gemm_mma", M=64, N=64, K=131072)
    assert estimated is not None
    assert estimated.default_us is not None
    assert estimated.default_us > 20 * estimated.time_us
    assert config["SPLIT_K"] > 8  # type: ignore[operator]
    assert "the default's 1 block of 128 threads on 1 of 132 SMs" in estimated.reason
    kernel = load_kernel("gemm_mma")
    problem = resolve_problem(kernel.spec, {"M": 64, "N": 64, "K": 131072}, None)
    assert not check_config(kernel.spec, config, problem.sizes, H200, problem.dtype)
    choice = choose(KernelRequest(kernel, problem, H200, "13.0", Shelf()))
    assert choice == Choice("default", config, estimated=estimated)
    text = explain(problem, H200, choice)
    assert "It is estimated to be faster than the default: about" in text
    assert "each within about a factor of two" in text
    assert estimated.reason in text
    assert choose(KernelRequest(kernel, problem, H200, "13.0", Shelf(estimates=False))).config == kernel.spec.default


def test_where_the_default_does_not_suit_the_least_estimate_is_served() -> None:
    config, estimated = serve("sgemm", M=2047, N=2049, K=2051)
    assert config["VEC"] == 1
    assert estimated is not None
    assert estimated.default_us is None
    first, nothing = serve("sgemm", M=2047, N=2049, K=2051, estimates=False)
    assert nothing is None
    assert first != config


class AllBut:
    """A set of all configurations but one."""

    def __init__(self, config: Config) -> None:
        self._key = config_key(config)

    def __contains__(self, key: str) -> bool:
        return key != self._key


def test_a_wrong_configuration_is_not_served() -> None:
    best, _ = serve("gemm_mma", M=16, N=4096, K=4096)
    other, estimated = serve("gemm_mma", M=16, N=4096, K=4096, wrong={config_key(best)})
    assert other != best
    assert estimated is not None
    default = dict(load_kernel("gemm_mma").spec.default)
    assert serve("gemm_mma", M=16, N=4096, K=4096, wrong=AllBut(default)) == (default, None)


def test_a_guess_does_not_replace_a_default() -> None:
    default = dict(load_kernel("matmul_naive").spec.default)
    assert serve("matmul_naive", M=4096, N=1, K=4096) == (default, None)


def test_a_look_up_does_not_enumerate_a_huge_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_MAX_COMBINATIONS", 10)
    assert serve("gemm_mma", M=16, N=4096, K=4096) == (dict(load_kernel("gemm_mma").spec.default), None)


def test_of_a_large_space_a_sample_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = serve("gemm_mma", M=16, N=4096, K=4096)[1]
    monkeypatch.setattr(selection, "_MAX_ROWS", 200)
    sample = serve("gemm_mma", M=16, N=4096, K=4096)[1]
    assert whole is not None
    assert sample is not None
    assert whole.time_us <= sample.time_us < 1.5 * whole.time_us


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_what_is_confident_is_never_slower(path: Path) -> None:
    """Each recorded configuration in the place of the default, against the recorded one of the least estimate."""
    recording = read_recording(path)
    header, spec = recording.header, load_kernel(recording.header.key.kernel).spec
    space = SearchSpace(header.parameters, np.asfortranarray(recording.codes), 0, (), (), 0.0)
    found = estimate_times(spec, header.key.sizes, header.device or H200, space, header.key.dtype)
    assert found is not None
    if not found.is_declared:
        return
    estimated, measured = found.time_us[recording.ok], recording.columns["time_us"][recording.ok]
    served = int(np.argmin(estimated))
    replaced = estimated >= CONFIDENT_FACTOR * estimated[served]
    assert (measured[served] <= measured[replaced]).all()

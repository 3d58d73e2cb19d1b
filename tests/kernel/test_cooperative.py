"""Cooperative launches and clusters: parsed, limited to what is resident, and passed to the driver as attributes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from test_element_types import SPACE

from autotile.core.device import device_profile
from autotile.core.model import LaunchGeometry, Resources
from autotile.cuda import driver
from autotile.database.keys import space_hash
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config, compiled_steps

H200 = device_profile("h200")


def spec_of(launch: str, blocks: str = "64") -> KernelSpec:
    text = SPACE.replace("@type", "float32").replace("@more", "")
    return parse_spec(text.replace('grid = ["ceil_div(N, BLOCK)"]', f"grid = [{blocks}]\n{launch}"), "k.toml")


def test_both_are_part_of_the_plan() -> None:
    spec = spec_of('cooperative = true\ncluster = ["BLOCK // 32", 2]', blocks="64, 2")
    (launch,) = LaunchPlan.of(spec, spec.default, spec.sizes, H200).launches
    assert (launch.is_cooperative, launch.cluster) == (True, (2, 2, 1))
    plain = spec_of("")
    (launch,) = LaunchPlan.of(plain, plain.default, plain.sizes, H200).launches
    assert (launch.is_cooperative, launch.cluster) == (False, None)
    assert space_hash(plain) == space_hash(spec_of("cooperative = false"))
    assert space_hash(plain) != space_hash(spec_of("cooperative = true"))


def test_more_blocks_than_are_resident_are_refused() -> None:
    resident = H200.sm_count * 32  # blocks of 64 threads
    for blocks, is_cooperative, fits in ((resident, True, True), (resident + 1, True, False), (10**6, False, True)):
        spec = spec_of("cooperative = true" if is_cooperative else "", blocks=str(blocks))
        reason = check_config(spec, spec.default, spec.sizes, H200)
        assert (reason == "") == fits
        if not fits:
            assert f"a cooperative launch of {blocks:,} blocks, of which {H200.name} holds {resident:,}" in reason


def test_the_compiled_registers_count() -> None:
    spec = spec_of("cooperative = true", blocks=str(H200.sm_count * 32))
    plan = LaunchPlan.of(spec, spec.default, spec.sizes, H200)
    for registers, fits in ((32, True), (128, False)):
        (step,) = compiled_steps(spec, plan, {"k": Resources(registers, 0, 0, 0, 0)}, H200)
        assert (step.fault == "") == fits
        assert fits or "a cooperative launch" in step.fault


@pytest.mark.parametrize(
    ("is_cooperative", "cluster", "expected"),
    [(True, None, [(2, (1,))]), (False, (2, 4, 1), [(4, (2, 4, 1))]), (True, (8, 1, 1), [(2, (1,)), (4, (8, 1, 1))])],
)
def test_the_driver_gets_the_attributes(
    monkeypatch: pytest.MonkeyPatch, is_cooperative: bool, cluster: Any, expected: list[Any]
) -> None:
    calls: list[Any] = []

    def launch_kernel(config: Any, function: Any, parameters: Any, extra: Any) -> int:
        given = config._obj
        assert ctypes.sizeof(given) == 56
        found = [given.attributes[i] for i in range(given.attribute_count)]
        words = [(a.id, tuple(a.value.words[: len(w)])) for a, (_, w) in zip(found, expected, strict=True)]
        calls.append((tuple(given.grid), tuple(given.block), given.dynamic_smem_bytes, given.stream, words))
        calls.append((function.value, parameters.value, extra))
        return 0

    monkeypatch.setattr(driver, "load_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch_kernel))
    error = SimpleNamespace(CUDADriverError=RuntimeError)
    monkeypatch.setattr(driver, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=error)))
    geometry = LaunchGeometry(grid=(8, 4, 1), block=(64, 2, 1), dynamic_smem_bytes=1024)
    driver.attribute_launch(5, geometry, is_cooperative=is_cooperative, cluster=cluster)(7, 99, 0)
    assert calls == [((8, 4, 1), (64, 2, 1), 1024, 7, expected), (5, 99, None)]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_driver", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *_: 720))
    error = SimpleNamespace(CUDADriverError=RuntimeError)
    monkeypatch.setattr(driver, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=error)))
    launch = driver.attribute_launch(5, LaunchGeometry((1, 1, 1), (1, 1, 1), 0), is_cooperative=True, cluster=None)
    with pytest.raises(RuntimeError, match="720"):
        launch(7, 99, 0)

"""Launches of one kernel: geometry, cooperative launches and clusters, and the attributes that the driver gets."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from spec_samples import SGEMM, copy_spec, make_spec

from autotile.core.device import EXPRESSION_NAMES, device_profile
from autotile.core.model import LaunchGeometry, Resources
from autotile.cuda import driver
from autotile.database.keys import space_hash
from autotile.errors import ConfigError, ProblemError, SpecError
from autotile.kernel.launch import LaunchPlan, fixed_names, launch_geometry
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import check_config, compiled_steps

H200 = device_profile("h200")


def test_block_grid_and_dynamic_shared_memory_which_the_device_may_shape() -> None:
    spec = parse_spec(SGEMM, "sgemm.toml")
    geometry = launch_geometry(spec, spec.default, {"M": 100, "N": 4096, "K": 7}, H200)
    assert (geometry.block, geometry.grid, geometry.dynamic_smem_bytes) == ((8, 8, 1), (64, 2, 1), 4096)
    unstaged = launch_geometry(spec, {**spec.default, "STAGED": False}, spec.sizes, H200)
    assert (unstaged.dynamic_smem_bytes, unstaged.threads, unstaged.blocks) == (0, 64, 4096)
    spec = make_spec({"P": [2]}, launch={"grid": ["P * device.sm_count"], "block": ["device.warp_size"]})
    geometry = launch_geometry(spec, {"P": 2}, {"N": 5}, H200)
    assert (geometry.grid, geometry.block, geometry.dynamic_smem_bytes) == ((264, 1, 1), (32, 1, 1), 0)


@pytest.mark.parametrize("launch", [{"block": ["P - 2"]}, {"grid": [1, "2 - P"]}, {"dynamic_smem_bytes": "-P"}])
def test_what_cannot_be_launched(launch: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"k: the configuration gives the grid .* add a rule that excludes it"):
        launch_geometry(make_spec({"P": [2]}, launch=launch), {"P": 2}, {"N": 5}, H200)
    with pytest.raises(SpecError, match="division by zero where N = 5, P = 0") as caught:
        launch_geometry(make_spec({"P": [0]}, launch={"block": ["N // P"]}), {"P": 0}, {"N": 5}, H200)
    assert caught.value.key == "launch.block"


def test_names_that_no_parameter_decides() -> None:
    spec = parse_spec(SGEMM, "sgemm.toml")
    names = fixed_names(spec, spec.sizes, H200)
    assert (names["M"], names["device.sm_count"], len(names)) == (4096, 132, 3 + len(EXPRESSION_NAMES))
    with pytest.raises(ProblemError, match=r"sgemm: the size K is missing; give K=\.\.\., a whole number of at least"):
        fixed_names(spec, {"M": 1, "N": 1}, H200)


def launched(launch: str, blocks: str = "64") -> KernelSpec:
    text = copy_spec().text
    return parse_spec(text.replace('grid = ["ceil_div(N, BLOCK)"]', f"grid = [{blocks}]\n{launch}"), "k.toml")


def plan(spec: KernelSpec) -> LaunchPlan:
    return LaunchPlan.of(spec, spec.default, spec.sizes, H200)


def test_cooperation_and_clusters_are_part_of_the_plan() -> None:
    (launch,) = plan(launched('cooperative = true\ncluster = ["BLOCK // 32", 2]', blocks="64, 2")).launches
    assert (launch.is_cooperative, launch.cluster) == (True, (2, 2, 1))
    plain = launched("")
    (launch,) = plan(plain).launches
    assert (launch.is_cooperative, launch.cluster) == (False, None)
    assert space_hash(plain) == space_hash(launched("cooperative = false"))
    assert space_hash(plain) != space_hash(launched("cooperative = true"))


def test_more_cooperative_blocks_than_are_resident_are_refused() -> None:
    resident = H200.sm_count * 32  # blocks of 64 threads
    for blocks, is_cooperative, fits in ((resident, True, True), (resident + 1, True, False), (10**6, False, True)):
        spec = launched("cooperative = true" if is_cooperative else "", blocks=str(blocks))
        reason = check_config(spec, spec.default, spec.sizes, H200)
        assert (reason == "") == fits
        if not fits:
            assert f"a cooperative launch of {blocks:,} blocks, of which {H200.name} holds {resident:,}" in reason


@pytest.mark.parametrize(("registers", "fits"), [(32, True), (128, False)])
def test_the_compiled_registers_count(registers: int, fits: bool) -> None:
    spec = launched("cooperative = true", blocks=str(H200.sm_count * 32))
    (step,) = compiled_steps(spec, plan(spec), {"k": Resources(registers, 0, 0, 0, 0)}, H200)
    assert (step.fault == "") == fits
    assert fits or "a cooperative launch" in step.fault


def replace_driver(monkeypatch: pytest.MonkeyPatch, launch_kernel: Any) -> None:
    monkeypatch.setattr(driver, "load_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch_kernel))
    error = SimpleNamespace(CUDADriverError=RuntimeError)
    monkeypatch.setattr(driver, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=error)))


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
        words = [(a.id, tuple(a.words[: len(w)])) for a, (_, w) in zip(found, expected, strict=True)]
        calls.append((tuple(given.grid), tuple(given.block), given.dynamic_smem_bytes, given.stream, words))
        calls.append((function.value, parameters.value, extra))
        return 0

    replace_driver(monkeypatch, launch_kernel)
    geometry = LaunchGeometry(grid=(8, 4, 1), block=(64, 2, 1), dynamic_smem_bytes=1024)
    driver.attribute_launch(5, geometry, is_cooperative=is_cooperative, cluster=cluster)(7, 99, 0)
    assert calls == [((8, 4, 1), (64, 2, 1), 1024, 7, expected), (5, 99, None)]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_driver(monkeypatch, lambda *_: 720)
    launch = driver.attribute_launch(5, LaunchGeometry((1, 1, 1), (1, 1, 1), 0), is_cooperative=True, cluster=None)
    with pytest.raises(RuntimeError, match="720"):
        launch(7, 99, 0)

"""Kernels of several steps without a GPU: what is compiled, gated, packed and served."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from step_kernels import KERNELS, write_steps

from autotile.core.device import device_profile
from autotile.core.model import Problem
from autotile.cuda import function as function_module
from autotile.cuda import packing
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.cuda.function import LaunchSequence, ParameterBlock, StepFunctions
from autotile.cuda.packing import pack_launches
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names, problem_scalars
from autotile.kernel.library import Kernel, load_kernel
from autotile.serving.launching import CallArguments
from autotile.space.limits import compiled_steps

H200 = device_profile("h200")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return load_kernel(str(write_steps(tmp_path, request.param)))


@pytest.fixture
def scan(tmp_path: Path) -> Kernel:
    return load_kernel(str(write_steps(tmp_path, "scan_rounds")))


def plan_of(kernel: Kernel, **sizes: int) -> LaunchPlan:
    return LaunchPlan.of(kernel.spec, kernel.spec.default, {**kernel.spec.sizes, **sizes}, H200)


def test_one_cubin_holds_every_step(kernel: Kernel) -> None:
    spec = kernel.spec
    compiled = compile_cubin(compile_job(kernel, spec.default, "float32", "sm_90"))
    assert tuple(compiled.functions) == spec.entries
    resources = {entry: function.resources for entry, function in compiled.functions.items()}
    plan = plan_of(kernel)
    steps = compiled_steps(spec, plan, resources, H200)
    assert [step.fault for step in steps] == [""] * len(plan.steps)
    assert steps[0].geometry == plan.main.geometry
    assert {step.entry for step in steps} == {spec.steps[launch.step].entry for launch in plan.launches}


def packed(kernel: Kernel, **sizes: int) -> tuple[LaunchPlan, tuple[tuple[Any, ...], ...]]:
    spec, all_sizes = kernel.spec, {**kernel.spec.sizes, **sizes}
    plan = plan_of(kernel, **sizes)
    data = LaunchData.of(spec, "float32", known_names(spec, spec.default, all_sizes, H200))
    arrays = {buffer.name: 1000 + number for number, buffer in enumerate(spec.buffers)}
    memory = {workspace.name: 2000 + number for number, workspace in enumerate(data.workspaces)}
    scalars = problem_scalars(spec, all_sizes, "float32", check=False)
    return plan, pack_launches(spec, plan, data, "float32", pointers=arrays, scalars=scalars, workspaces=memory)


def test_every_launch_has_its_own_values(scan: Kernel) -> None:
    _, launches = packed(scan, N=300)
    x, y, a, b = 1000, 1001, 2000, 2001
    assert len(launches) == 11
    assert [int(value) for value in launches[0]] == [x, a, 300]
    assert [[int(value) for value in launch] for launch in launches[1:4]] == [
        [a, b, 1, 300],
        [b, a, 2, 300],
        [a, b, 4, 300],
    ]
    assert [int(value) for value in launches[10]] == [b, y, 300]  # nine sweeps end in b
    assert launches[1][2].dtype == np.int32


def test_one_block_of_parameters_serves_all_launches(scan: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int, int]] = []

    def driver_launch(pointer: str, geometry: Any) -> Any:
        return lambda stream, address, _: launched.append((pointer, stream, address))

    monkeypatch.setattr(function_module, "driver_launch", driver_launch)
    monkeypatch.setattr(
        function_module,
        "Module",
        lambda _: SimpleNamespace(pointer=1, function=lambda name: SimpleNamespace(pointer=name)),
    )
    plan, launches = packed(scan, N=300)
    functions = StepFunctions(scan.spec.steps, b"", {"sweep": "_Z5sweep"})
    functions.driver_launch(plan)(7, 4096, 0)
    assert [name for name, _, _ in launched] == ["copy", *["_Z5sweep"] * 9, "copy"]
    assert [(address - 4096) // 8 for _, _, address in launched] == [0, *range(3, 39, 4), 39]
    block = ParameterBlock([value for launch in launches for value in launch], spare_words=2)
    assert len(block.starts) == 42


def test_new_addresses_reach_every_launch(tmp_path: Path) -> None:
    kernel = load_kernel(str(write_steps(tmp_path, "split_rows")))
    spec, config = kernel.spec, {**kernel.spec.default, "SPLIT": 4}
    plan = LaunchPlan.of(spec, config, spec.sizes, H200)
    data = LaunchData.of(spec, "float32", known_names(spec, config, spec.sizes, H200))
    scalars = problem_scalars(spec, spec.sizes, "float32", check=False)
    problem = Problem(spec.name, spec.sizes, "float32")
    arguments = CallArguments(spec, problem, config, plan, data=data, scalars=scalars, device_index=0)
    views = {name: SimpleNamespace(data=SimpleNamespace(ptr=at)) for name, at in (("x", 100), ("y", 200))}
    values = arguments.pack(views, {}, {"partials": 300})
    assert [int(value) for value in values] == [100, 200, 300, 1000, 512, 200, 300, 1000]
    block = ParameterBlock(values, spare_words=2)
    layout = arguments.layout(block.starts, len(block.words))
    assert layout.words == (block.starts[0], block.starts[1])
    assert layout.copies == ((block.starts[1], block.starts[5]),)


def test_a_map_of_a_workspace_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """New addresses of arrays do not reach it: it belongs to the stream, as its workspace does."""
    spec = load_kernel("gemm_wgmma_padded").spec
    plan = LaunchPlan.of(spec, spec.default, spec.sizes, H200)
    data = LaunchData.of(spec, "float16", known_names(spec, spec.default, spec.sizes, H200))
    scalars = problem_scalars(spec, spec.sizes, "float16", check=False)
    problem = Problem(spec.name, spec.sizes, "float16")
    arguments = CallArguments(spec, problem, spec.default, plan, data=data, scalars=scalars, device_index=0)
    monkeypatch.setattr(packing, "encode_tensor_map", lambda _, pointer: np.full(16, pointer, np.uint64))
    views = {name: SimpleNamespace(data=SimpleNamespace(ptr=at)) for name, at in (("A", 2), ("B", 4), ("C", 6))}
    workspaces = {workspace.name: 256 * index for index, workspace in enumerate(data.workspaces, 1)}
    values = arguments.pack(views, {}, workspaces)
    block = ParameterBlock(values, spare_words=3)
    layout = arguments.layout(block.starts, len(block.words))
    assert [block.words[word] for word in layout.words] == [2, 4, 6]
    assert [tensor_map.name for _, _, tensor_map in layout.maps] == ["C_map"]
    assert [int(value[0]) for value in values if np.ndim(value)] == [256, 512, 6]


def test_a_function_gets_the_most_shared_memory_of_its_launches(monkeypatch: pytest.MonkeyPatch, scan: Kernel) -> None:
    opted: list[tuple[str, int]] = []
    launched: list[str] = []

    def function(name: str) -> Any:
        return SimpleNamespace(
            opt_in=lambda smem_bytes: opted.append((name, smem_bytes)), launch=lambda *_: launched.append(name)
        )

    monkeypatch.setattr(function_module, "Module", lambda _: SimpleNamespace(function=function, pointer=1))
    plan, launches = packed(scan, N=300)
    calls = LaunchSequence(StepFunctions(scan.spec.steps, b"", {}), plan, launches)
    calls()
    assert opted == [("copy", 0), ("sweep", 0)]
    assert launched == ["copy", *["sweep"] * 9, "copy"]
    assert (calls.count, [len(part) for part in calls.by_step().values()]) == (11, [1, 9, 1])


def test_its_functions_stay_loaded(monkeypatch: pytest.MonkeyPatch, scan: Kernel) -> None:
    launched: list[tuple[Any, ...]] = []
    function = SimpleNamespace(opt_in=lambda _: None, launch=lambda *given: launched.append(given))
    module = SimpleNamespace(function=lambda _: function, pointer=1)
    monkeypatch.setattr(function_module, "Module", lambda _: module)
    plan, launches = packed(scan, N=300)
    functions = StepFunctions(scan.spec.steps, b"", {})
    loaded = weakref.ref(functions)
    calls = LaunchSequence(functions, plan, launches)
    del functions
    gc.collect()
    assert loaded() is not None
    assert loaded().module == module.pointer
    calls()
    geometries = [one.geometry for one in plan.launches]
    assert [given[:2] for given in launched] == [(one.grid, one.block) for one in geometries]
    assert [given[2] for given in launched] == list(launches)
    assert loaded() is not None
    del calls
    gc.collect()
    assert loaded() is None  # and no longer than the launches


def test_a_fault_names_its_step(kernel: Kernel) -> None:
    spec, plan = kernel.spec, plan_of(kernel)
    compiled = compile_cubin(compile_job(kernel, spec.default, "float32", "sm_90")).functions
    resources = {entry: function.resources for entry, function in compiled.items()}
    last = spec.steps[plan.launches[-1].step].entry
    resources[last] = replace(resources[last], static_smem_bytes=10**6)
    faults = {step.entry: step.fault for step in compiled_steps(spec, plan, resources, H200)}
    named = f"{last}: " if len(spec.steps) > 1 else ""
    assert faults[last].startswith(f"{named}no block fits on an SM")

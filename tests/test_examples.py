"""The examples: every kernel is valid, explained and compiles; what needs a GPU is in tests/gpu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotile.core.device import device_profile
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.kernel.library import Kernel, load_kernel
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

FOLDER = Path(__file__).parents[1] / "examples"
H200 = device_profile("h200")
NEEDS_HEADERS = {"cute_copy"}
"""Examples that include a library which is not installed with autotile."""


@pytest.fixture(scope="module", params=sorted(FOLDER.glob("*/*.toml")), ids=lambda path: path.stem)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load_kernel(str(request.param))


def test_the_default_is_valid_at_both_shapes(kernel: Kernel) -> None:
    for sizes in (kernel.spec.sizes, kernel.spec.ragged):
        assert check_config(kernel.spec, kernel.spec.default, sizes, H200) == ""


def test_there_is_a_choice(kernel: Kernel) -> None:
    assert len(feasible_space(kernel.spec, kernel.spec.sizes, H200)) >= 20


def test_the_source_explains_every_parameter(kernel: Kernel) -> None:
    text = "\n".join(path.read_text() for path in kernel.template_path.parent.glob("*.cu*"))
    compiled_in = [p.name for p in kernel.spec.parameters if re.search(rf"\b{p.name}\b", text)]
    for name in compiled_in:
        assert re.search(rf"^// {{3}}.*\b{name}\b.* {{2}}", text, re.MULTILINE), name


def test_the_default_compiles_without_spilling(kernel: Kernel) -> None:
    if kernel.name in NEEDS_HEADERS:
        pytest.skip("CUTLASS is not installed with autotile")
    for dtype in kernel.spec.dtypes:
        job = compile_job(kernel, kernel.spec.default, dtype, "sm_90")
        assert compile_cubin(job).resources.spill_bytes == 0


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"^\| \[(\w+)\]\(\1/", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in FOLDER.iterdir() if path.is_dir()}

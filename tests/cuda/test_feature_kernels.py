"""Kernels with flags, workspaces, tensor maps and clusters compile for their target and with their macros."""

from pathlib import Path

import pytest
from feature_kernels import CLUSTER_SPACE, CLUSTER_TEMPLATE, SPLIT_SPACE, SPLIT_TEMPLATE, write_kernel

from autotile.core.device import device_profile
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.kernel.library import load_kernel
from autotile.space.search_space import feasible_space

ROOT = Path(__file__).parents[2]
TRANSPOSE = ROOT / "examples" / "transpose_tma" / "transpose_tma.toml"
H200 = device_profile("h200")


def test_flags_are_macros_and_part_of_the_cubins_key(tmp_path: Path) -> None:
    kernel = load_kernel(str(write_kernel(tmp_path, SPLIT_TEMPLATE, SPLIT_SPACE)))
    plain = compile_job(kernel, kernel.spec.default, "float16", "sm_90")
    assert plain.options[-4:] == ("-DTRANS_A=0", "-DTRANS_B=0", "-DOUT_FP32=0", "-DDTYPE=__half")
    turned = compile_job(kernel, kernel.spec.default, "float16", "sm_90", {**kernel.spec.sizes, "TRANS_B": 1})
    assert "-DTRANS_B=1" in turned.options
    assert turned.key != plain.key
    assert compile_cubin(turned).cubin != compile_cubin(plain).cubin


def test_a_kernel_without_flags_compiles_as_before() -> None:
    kernel = load_kernel("sgemm_2d")
    job = compile_job(kernel, kernel.spec.default, "float32", "sm_90", {"M": 1, "N": 1, "K": 1})
    assert job.options == (*(f"-D{name}={value}" for name, value in kernel.spec.default.items()), "-DDTYPE=float")
    assert job.architecture == "sm_90"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_is_the_kernels_own(tmp_path: Path, dtype: str) -> None:
    kernel = load_kernel(str(write_kernel(tmp_path, CLUSTER_TEMPLATE, CLUSTER_SPACE)))
    job = compile_job(kernel, {"THREADS": 64, "CLUSTER": 8, "WHOLE": True}, dtype, "sm_90")
    assert job.architecture == "sm_90a"
    assert compile_cubin(job).resources.static_smem_bytes == 256


@pytest.mark.parametrize("row", [0, 40, 80])
def test_the_example_with_a_tensor_map_compiles(row: int) -> None:
    kernel = load_kernel(str(TRANSPOSE))
    config = feasible_space(kernel.spec, kernel.spec.sizes, H200).config(row)
    resources = compile_cubin(compile_job(kernel, config, "float32", "sm_90")).resources
    assert resources.spill_bytes == 0
    assert 0 <= resources.static_smem_bytes - (4 * int(config["ROWS"]) * int(config["COLUMNS"]) + 8) < 1024


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "file-format.md").read_text(encoding="utf-8")
    section = page.partition("## Example with a tensor map")[2].partition("\n## ")[0]
    shown = [line.strip() for line in section.splitlines() if line.startswith("    ") and line.strip()]
    files = [TRANSPOSE.read_text(encoding="utf-8"), TRANSPOSE.with_suffix(".cu").read_text(encoding="utf-8")]
    known = {line.strip() for text in files for line in text.splitlines()}
    told = {line for line in shown if line not in known}
    assert len(shown) > 20
    assert {line.split(":")[0] for line in told} <= {"tensor_maps", "= 128"}

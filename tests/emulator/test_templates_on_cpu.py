"""The templates match the references of their search spaces, at ragged shapes too: built for the CPU and run there."""

import functools
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.dtypes import DTYPES, output_tolerance
from autotile.core.model import Config
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel, load_kernel
from autotile.space.limits import check_config

_LAUNCHER, _KERNEL = (Path(__file__).with_name(name) for name in ("cuda_on_cpu.cpp", "kernel_on_cpu.cpp"))
_FLAGS = ["-std=c++17", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-Werror=return-type"]


@functools.cache
def why_not() -> str:
    """Return the reason why templates cannot run on this machine's CPU; empty if they can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    probe = subprocess.run(
        ["g++", "-fsanitize=undefined", "-x", "c++", "-", "-o", "/dev/null"],
        input="#include <ucontext.h>\nint main() {}",
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if probe.returncode == 0 else f"g++ cannot build the emulator: {probe.stderr.strip()}"


def _compile(*arguments: str) -> None:
    subprocess.run(["g++", *_FLAGS, *arguments], check=True, capture_output=True, text=True)


class CpuKernel:
    """A configuration of a kernel, compiled for the CPU with the object file of the launcher."""

    def __init__(self, kernel: Kernel, config: Config, launcher: Path, folder: Path) -> None:
        self._spec = kernel.spec
        self._config = config
        self._folder = folder
        self._program = folder / "kernel"
        macros = {"KERNEL_FILE": f'"{kernel.template_path}"', "ENTRY": kernel.spec.entry, **config}
        defines = [f"-D{name}={int(v) if isinstance(v, bool) else v}" for name, v in macros.items()]
        _compile(*defines, str(_KERNEL), str(launcher), "-o", str(self._program))

    def run(
        self, sizes: Mapping[str, int], device: DeviceProperties, values: Mapping[str, np.ndarray | float]
    ) -> dict[str, np.ndarray]:
        """Launch with buffers and scalars given by name and return all buffers after the launch.

        An `AssertionError`: it accessed memory beyond a buffer, read a misaligned vector or overflowed an integer.
        """
        geometry = launch_geometry(self._spec, self._config, self._spec.at(sizes), device)
        buffers = {b.name: np.asarray(values[b.name]) for b in self._spec.buffers}
        files = {name: self._folder / f"{name}.bin" for name in buffers}
        for name, file in files.items():
            buffers[name].tofile(file)
        arguments = [str(files[a.name]) if a.is_given else f"={values[a.name]}" for a in self._spec.arguments]
        launch = [str(extent) for extent in (*geometry.grid, *geometry.block)]
        done = subprocess.run(
            [str(self._program), *launch, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{self._config} at {sizes}: exit code {done.returncode}\n{done.stderr}"
        return {name: np.fromfile(files[name], old.dtype).reshape(old.shape) for name, old in buffers.items()}


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
ROOT = Path(__file__).parents[2]
H200 = device_profile("h200")
FLOAT32 = DTYPES["float32"]

Sizes = dict[str, int]
Values = dict[str, np.ndarray | float]


def kernel_named(name: str) -> Kernel:
    file = f"{name}.toml"
    return load_kernel(str(ROOT / ("examples/stencil_2d" if name == "stencil_2d" else "search_spaces") / file))


def inputs(kernel: Kernel, sizes: Sizes, **scalars: float) -> Values:
    """Return random inputs; outputs hold NaN, and so does the inout buffer unless ``beta`` uses its old values."""
    rng = np.random.default_rng(7)
    values: Values = {}
    for buffer in kernel.spec.buffers:
        shape = tuple(extent.evaluate(sizes) for extent in buffer.shape)
        read = buffer.access == "in" or (buffer.access == "inout" and scalars.get("beta", 0.0) != 0.0)
        values[buffer.name] = (rng.standard_normal(shape) if read else np.full(shape, np.nan)).astype(np.float32)
    for scalar in kernel.spec.scalars:
        own = scalar.operand(sizes, check=False)
        values[scalar.name] = own if scalar.default is None else scalars.get(scalar.name, own)
    return values


def expect_right(kernel: Kernel, program: CpuKernel, sizes: Sizes, **scalars: float) -> None:
    values = inputs(kernel, sizes, **scalars)
    results = program.run(sizes, H200, values)
    exact = {name: np.nan_to_num(np.float64(value)) for name, value in values.items()}
    for name, expression in kernel.spec.reference.outputs.items():
        expected = expression.evaluate(exact)
        error = np.abs(results.pop(name) - expected).max() / np.sqrt(np.mean(expected**2))
        tolerance = output_tolerance(FLOAT32, [FLOAT32], kernel.spec.reference.reduction.evaluate(sizes))
        assert error <= tolerance, f"{name} at {sizes} is off by {error:.1e} of its RMS"
    for name, untouched in results.items():
        assert np.array_equal(untouched, values[name]), f"the kernel wrote to its input {name}"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """The object file that is the same for all kernels."""
    launcher = tmp_path_factory.mktemp("launcher") / "launcher.o"
    _compile("-c", str(_LAUNCHER), "-o", str(launcher))
    return launcher


def checked(kernel: Kernel, overrides: Config, sizes: Sizes, launcher: Path, folder: Path) -> CpuKernel:
    """Compile the default configuration of a kernel with some values replaced, which is valid at these sizes."""
    config = {**kernel.spec.default, **overrides}
    assert check_config(kernel.spec, config, kernel.spec.at(sizes), H200) == ""
    return CpuKernel(kernel, config, launcher, folder)


RAGGED, WHOLE = [(1, 1, 1), (3, 130, 2), (67, 45, 33), (32, 64, 96)], [(8, 8, 8), (40, 24, 16)]
PLANES = [(1, 1), (67, 45), (5, 131), (64, 64)]


@pytest.mark.parametrize(
    ("name", "overrides", "shapes"),
    [
        ("matmul_naive", {}, RAGGED),
        ("matmul_naive", {"BX": 4, "BY": 16, "UNROLL": 8}, RAGGED),
        ("matmul_naive", {"BX": 64, "BY": 2, "COALESCED": False, "UNROLL": 1}, RAGGED),
        ("matmul_tiled", {}, RAGGED),
        ("matmul_tiled", {"TILE": 4, "UNROLL": 2, "PAD": 1}, RAGGED),
        ("matmul_tiled", {"TILE": 32, "UNROLL": 32}, RAGGED),
        ("matmul_tiled", {"TILE": 8, "UNROLL": 4, "GUARDED": False}, WHOLE),
        ("stencil_2d", {}, PLANES),
        ("stencil_2d", {"BX": 16, "BY": 4, "COLUMNS": 4, "ROWS": 2}, PLANES),
        ("stencil_2d", {"BX": 64, "BY": 1, "COLUMNS": 2, "ROWS": 8, "USE_SMEM": False}, PLANES),
    ],
    ids=str,
)
def test_products_and_stencils(name, overrides, shapes, launcher, tmp_path):
    kernel = kernel_named(name)
    problems = [dict(zip(kernel.spec.sizes, shape, strict=True)) for shape in shapes]
    program = checked(kernel, overrides, problems[-1], launcher, tmp_path)
    for sizes in problems:
        expect_right(kernel, program, sizes, centre=0.5, neighbour=0.125)


# Each value of each parameter appears.
SGEMM = [
    {},
    {"BM": 32, "BN": 32, "BK": 32, "TM": 4, "TN": 4, "LANES_X": 4, "STAGES": 1, "PAD": 0, "MIN_BLOCKS": 1},
    {"BM": 256, "BN": 64, "BK": 16, "TM": 16, "TN": 4, "LANES_X": 16, "STAGES": 1, "UNROLL": 16},
    {"BM": 64, "BN": 256, "BK": 8, "TM": 8, "TN": 16, "LANES_X": 16, "VEC": 2, "PAD": 0, "MIN_BLOCKS": 1},
    {"BM": 64, "BN": 64, "BK": 16, "TM": 4, "TN": 8, "LANES_X": 8, "VEC": 1, "MIN_BLOCKS": 3},
]


@pytest.fixture(scope="module", params=SGEMM, ids=str)
def sgemm(request, launcher, tmp_path_factory):
    kernel = kernel_named("sgemm_2d")
    return checked(kernel, request.param, dict(kernel.spec.sizes), launcher, tmp_path_factory.mktemp("sgemm"))


@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1, 1, 1),
        (67, 45, 33),
        (68, 44, 33),  # all buffers start on a vector boundary, the second row of A does not
        (68, 45, 36),  # nor does the second row of B
        (68, 44, 36),  # every row does, and the last vector ends at the end of the buffer
        (260, 132, 64),  # whole tiles along K, blocks that extend beyond two edges
    ],
)
def test_sgemm(sgemm, M, N, K):
    kernel = kernel_named("sgemm_2d")
    sizes = {"M": M, "N": N, "K": K}
    expect_right(kernel, sgemm, sizes, alpha=0.75, beta=-0.5)
    expect_right(kernel, sgemm, sizes)  # beta is 0 and C holds NaN


@pytest.mark.parametrize("shifted", ["A", "B", "C"])
def test_sgemm_takes_pointers_off_the_vector_boundary(sgemm, shifted):
    kernel = kernel_named("sgemm_2d")
    sizes = {"M": 12, "N": 20, "K": 24}
    values = inputs(kernel, sizes)
    expected = values["A"] @ values["B"]
    # Buffers end at the end of a page: one more float shifts the start by 4 bytes.
    values[shifted] = np.append(values[shifted], np.float32(np.nan))
    result = sgemm.run(sizes, H200, values)["C"].ravel()
    np.testing.assert_allclose(result[: 12 * 20].reshape(12, 20), expected, rtol=1e-4, atol=1e-5)
    assert np.isnan(result[12 * 20 :]).all()


def test_sgemm_keeps_nan_and_infinity_where_they_belong(sgemm):
    kernel = kernel_named("sgemm_2d")
    sizes = {"M": 37, "N": 41, "K": 29}
    values = inputs(kernel, sizes)
    values["A"][36, 28] = np.nan  # the element that clamped rows read again
    values["B"][28, 40] = np.inf
    result = sgemm.run(sizes, H200, values)["C"]
    assert np.isfinite(result[:36, :40]).all()
    assert np.isnan(result[36]).all()


def test_the_emulator_sees_a_step_beyond_a_buffer(launcher, tmp_path):
    kernel = kernel_named("matmul_tiled")
    sizes = {"M": 35, "N": 35, "K": 35}
    unguarded = CpuKernel(kernel, {**kernel.spec.default, "GUARDED": False}, launcher, tmp_path)
    with pytest.raises(AssertionError, match="exit code"):
        unguarded.run(sizes, H200, inputs(kernel, sizes))


@pytest.mark.parametrize("missing", [1, 2])
def test_the_emulator_sees_a_missing_barrier(missing, launcher, tmp_path):
    kernel = kernel_named("matmul_tiled")
    barrier = "__syncthreads();"
    parts = kernel.source.split(barrier)
    racing = tmp_path / "racing.cu"
    racing.write_text(barrier.join(parts[:missing]) + barrier.join(parts[missing:]))
    kernel = structs.replace(kernel, template_path=racing)
    program = CpuKernel(kernel, kernel.spec.default, launcher, tmp_path)
    with pytest.raises(AssertionError, match="off by"):
        expect_right(kernel, program, {"M": 40, "N": 40, "K": 40})

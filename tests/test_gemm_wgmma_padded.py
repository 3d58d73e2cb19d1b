"""The wgmma template over padded copies: the copy is right on the CPU, and the space compiles; needs no GPU."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autotile.core.device import device_profile
from autotile.cuda.compiler import compile_cubin, compile_job
from autotile.errors import InputError
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.library import load_kernel
from autotile.space.search_space import feasible_space

TEMPLATES = Path(__file__).parents[1] / "templates"
KERNEL = load_kernel("gemm_wgmma_padded")
SPEC = KERNEL.spec
H200 = device_profile("h200")

COPY_ON_CPU = """
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::min;
struct uint4 { unsigned x, y, z, w; };

const unsigned short *first, *last;  // of the matrix
bool outside = false;

uint4 __ldcs(const uint4* from)
{
    const auto* at = reinterpret_cast<const unsigned short*>(from);
    outside |= reinterpret_cast<size_t>(from) % 16 != 0 || at < first || at + 8 > last;
    uint4 word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits)
{
    return bits ? low >> bits | high << (32 - bits) : low;
}

#include "padded_rows.cuh"

template <unsigned UNIT>
bool is_right(unsigned rows, unsigned length, unsigned offset)
{
    std::vector<uint4> room(rows * length / 8 + 4, uint4{~0u, ~0u, ~0u, ~0u});
    auto* matrix = reinterpret_cast<unsigned short*>(room.data()) + offset;
    for (unsigned i = 0; i < rows * length; ++i) matrix[i] = 1 + i;
    first = matrix, last = matrix + rows * length;
    const unsigned pitch = (length + UNIT - 1) / UNIT * UNIT;
    std::vector<uint4> copy(rows * pitch / 8, uint4{~0u, ~0u, ~0u, ~0u});
    const PaddedRows<UNIT> padded(matrix, copy.data(), rows, length);
    if (padded.count() != copy.size()) return false;
    for (unsigned chunk = 0; chunk < padded.count(); ++chunk) padded.copy(chunk);
    const auto* found = reinterpret_cast<const unsigned short*>(copy.data());
    for (unsigned i = 0; i < rows * pitch; ++i) {
        const unsigned row = i / pitch, column = i % pitch;
        if (found[i] != (column < length ? matrix[row * length + column] : 0)) return false;
    }
    return !outside;
}

int main()
{
    for (unsigned rows : {1u, 2u, 3u, 17u})
        for (unsigned length = 1; length < 140; ++length)
            for (unsigned offset = 0; offset < 9; ++offset)
                if (!is_right<8>(rows, length, offset) || !is_right<64>(rows, length, offset)) {
                    std::printf("%u x %u at %u is wrong", rows, length, offset);
                    return 1;
                }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_rows_of_any_length_at_any_address_are_copied(tmp_path: Path) -> None:
    """With zeros behind each row, and without a load outside of the matrix."""
    source, program = tmp_path / "copy.cpp", tmp_path / "copy"
    source.write_text(COPY_ON_CPU)
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{TEMPLATES}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("part", range(3))
def test_configurations_spread_over_the_space_compile_without_spilling(part: int) -> None:
    problem = {**SPEC.sizes, "M": 1905, "N": 653, "K": 4737, "TRANS_A": part % 2, "TRANS_B": part // 2}
    space = feasible_space(SPEC, problem, H200)
    assert 1000 <= len(space) <= 100_000
    job = compile_job(KERNEL, dict(space.config((2 * part + 1) * len(space) // 6)), "float16", "sm_90a", problem)
    cubin = compile_cubin(replace(job, options=(*job.options, "--ptxas-options=-Werror")))
    assert {entry: found.resources.spill_bytes for entry, found in cubin.functions.items()} == {
        "pad_rows": 0,
        "gemm_wgmma": 0,
    }


def test_the_product_is_the_main_step() -> None:
    plan = LaunchPlan.of(SPEC, SPEC.default, SPEC.sizes, H200)
    assert (len(plan.launches), plan.main.step) == (2, 1)
    assert plan.launches[0].threads > plan.main.threads


def test_copies_are_limited() -> None:
    with pytest.raises(InputError, match="copies_of_a_gibibyte"):
        feasible_space(SPEC, {**SPEC.sizes, "M": 2**15 + 1, "K": 2**14 + 1}, H200)
    with pytest.raises(InputError, match="copies_of_a_gibibyte"):
        feasible_space(SPEC, {**SPEC.sizes, **dict.fromkeys("MNK", 2**31 - 1)}, H200)

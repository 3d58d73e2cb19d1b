"""Structs by value: their layout is the compiler's, and their content is what the file declares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_element_types import spec_of

from autotile.core.device import device_profile
from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.cuda.packing import pack_arguments
from autotile.database.keys import space_hash
from autotile.errors import SpecError
from autotile.kernel.arguments import StructArgument, scalar_value
from autotile.kernel.launch import LaunchData, known_names

STRUCT = """p = { struct = {
    flag = { scalar = "bool", value = true },
    n = { scalar = "int64", value = "N" },
    tag = { scalar = "uint8", value = 7 },
    origin = { scalar = "float3", value = [1, 2, 3] },
    color = { scalar = "uchar4", value = [1, 2, 3, 4] },
    corners = { scalar = "float2", value = [1, 2, 3, 4] },
    box = { scalar = "double4", value = [1, 2, 3, "BLOCK"] },
    x = { pointer = "x" },
    inner = { struct = { small = { scalar = "int16", value = -1 }, y = { pointer = "y" } } },
    weights = { scalar = "float16", value = [0.5, 0.25, 0.125] },
    factor = { scalar = "complex64", value = [1, -1] },
    last = { scalar = "int8", value = -3 } } }""".replace("\n", " ")

SOURCE = """
#include <cuda_fp16.h>
struct Inner { short small; float* y; };
struct P {
    bool flag; long long n; unsigned char tag; float3 origin; uchar4 color; float2 corners[2]; double4 box;
    const float* x; Inner inner; __half weights[3]; float2 factor; signed char last;
};
CHECKS
extern "C" __global__ void k(P p) {}
"""


def test_the_layout_is_that_of_the_compiler() -> None:
    struct = spec_of("float32", STRUCT).arguments[-1]
    assert isinstance(struct, StructArgument)
    layout = struct.layout("float32")
    offsets = [offset for offset, _, _ in layout.scalars] + [offset for offset, _ in layout.pointers]
    members = ["flag", "n", "tag", "origin", "color", "corners[0]", "corners[1]", "box", "inner.small"]
    members += ["weights[0]", "weights[1]", "weights[2]", "factor", "last", "x", "inner.y"]
    checks = [f'static_assert(__builtin_offsetof(P, {m}) == {o}, "");' for m, o in zip(members, offsets, strict=True)]
    checks.append(f'static_assert(sizeof(P) == {layout.size_bytes}, "");')
    source = SOURCE.replace("CHECKS", "\n".join(checks))
    compile_cubin(CompileJob(source, source, str(Path(__file__)), "k", "sm_90", ()))


def test_values_and_addresses_are_packed() -> None:
    more = 'p = { struct = { n = { scalar = "int32", value = "N" }, x = { pointer = "x" }, w = { pointer = "w" } } }'
    space = 'w = { workspace = "float32", shape = ["BLOCK"], pass = false }\n' + more
    spec = spec_of("float32", space)
    data = LaunchData.of(spec, "float32", known_names(spec, spec.default, spec.sizes, device_profile("h200")))
    packed = pack_arguments(
        spec,
        data,
        pointers={"x": 0x1000, "y": 0x2000},
        scalars={s.name: scalar_value(s, spec.sizes, "float32", check=False) for s in spec.scalars},
        workspaces={"w": 0x3000},
    )
    assert len(packed) == 3
    assert packed[-1].tobytes() == np.array([4096, 0x1000, 0x3000], np.uint64).tobytes()


def test_the_members_are_part_of_the_hash() -> None:
    one, two = (f'p = {{ struct = {{ n = {{ scalar = "int32", value = {n} }} }} }}' for n in (1, 2))
    assert space_hash(spec_of("float32", one)) != space_hash(spec_of("float32", two))


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ("", "has no members"),
        ('a = { pointer = "z" }', "names no buffer or workspace"),
        ("a = { value = 1 }", "exactly one of the keys scalar, pointer, struct"),
        ('a = { scalar = "float2", value = [1, 2, 3] }', "expected 2 numbers for each float2"),
        ('a = { scalar = "int32", value = 1.5 }', "expected a whole number"),
        ('a = { scalar = "int32", value = "M" }', "unknown name"),
        ('"a b" = { scalar = "int32", value = 1 }', "is not a C identifier"),
        (f'a = {{ scalar = "double4", value = [{", ".join(["1"] * 516)}] }}', "has 4128 bytes"),
    ],
)
def test_malformed_structs(members: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        spec_of("float32", f"p = {{ struct = {{ {members} }} }}")

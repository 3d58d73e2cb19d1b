"""Textures in search-space files, and their objects."""

from __future__ import annotations

import pytest
from test_element_types import SPACE

from autotile.core.device import device_profile
from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.cuda.packing import texture_object
from autotile.database.keys import space_hash
from autotile.errors import ArgumentError, CompileError, SpecError
from autotile.kernel.launch import LaunchData, known_names
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec

IMAGE = 'image = { buffer = "uchar4", shape = [16, "N"], access = "in", pass = false }'
TEXTURE = 't = { texture = "image", filter = "linear", address = "wrap", normalized = true, read = "normalized_float" }'


def spec_of(*arguments: str) -> KernelSpec:
    text = SPACE.replace("@type", "float32").replace("@more", "\n".join(arguments))
    return parse_spec(text.replace("4096 }", "4096 }\nragged = { N = 96 }"), "k.toml")


def test_a_texture_is_passed_instead_of_its_buffer() -> None:
    spec = spec_of(IMAGE, TEXTURE)
    assert spec.steps[0].arguments == ("x", "y", "t")
    data = LaunchData.of(spec, "float32", known_names(spec, spec.default, spec.sizes, device_profile("h200")))
    (texture,) = data.textures
    assert (texture.shape, texture.dtype, texture.pitch_bytes) == ((16, 4096), "uchar4", 16384)
    assert (texture.filter, texture.address, texture.is_normalized) == ("linear", "wrap", True)
    assert space_hash(spec) != space_hash(spec_of(IMAGE, TEXTURE.replace("wrap", "mirror")))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"image", f', '"imag", f', "names no buffer; did you mean 'image'"),
        ('"linear"', '"cubic"', "is not accepted"),
        (", normalized = true", "", "needs normalized = true"),
        ('"uchar4"', '"float3"', "textures do not hold"),
        ('"uchar4"', '"float64"', "textures do not hold"),
        ('"uchar4"', '"float4"', "only integers of 8 and 16 bits"),
        (', read = "normalized_float"', "", "is filtered only with read"),
        ('[16, "N"]', '["N"]', "a texture of one axis is read with tex1Dfetch"),
        ('[16, "N"]', '[2, 16, "N"]', "has 3 axes"),
        ('access = "in"', 'access = "inout"', "textures are read only"),
        ('"N"]', '"N + 1"]', "rows of image are 16388 bytes apart"),
        ('"N"]', '"max(N, 100)"]', "at the ragged sizes, rows of image are 400 bytes apart"),
    ],
)
def test_refusals(old: str, new: str, problem: str) -> None:
    assert old in IMAGE + TEXTURE
    with pytest.raises(SpecError, match=problem):
        spec_of(IMAGE.replace(old, new), TEXTURE.replace(old, new))


def test_addresses_and_rows_that_a_texture_cannot_have() -> None:
    spec = spec_of(IMAGE, TEXTURE)
    texture = spec.arguments[-1].texture("float32", spec.sizes)
    assert texture is not None
    with pytest.raises(ArgumentError, match="16 bytes past a multiple of 512"):
        texture_object(texture, 0x1000 + 16)
    with pytest.raises(ArgumentError, match="rows of image are 12 bytes apart"):
        texture_object(texture._replace(shape=(4, 3)), 0x1000)


def test_texture_references_have_a_cure() -> None:
    source = "texture<float, 2> tex; __global__ void k(float* y) { y[0] = tex2D(tex, 0, 0); }"
    with pytest.raises(CompileError, match="texture references were removed in CUDA 12"):
        compile_cubin(CompileJob(source, source, "/k.cu", "k", "sm_90", ()))

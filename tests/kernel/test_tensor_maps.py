"""Limits of tensor maps, for one configuration and for columns of configurations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.device import device_profile
from autotile.errors import SpecError
from autotile.kernel.descriptors import TensorMap, TensorMapDemand, strides_bytes
from autotile.kernel.launch import LaunchData, known_names
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.space.limits import check_config
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")
TRANSPOSE = Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml"
SPEC = load_kernel(str(TRANSPOSE)).spec
TEXT = TRANSPOSE.read_text()
SIZES = {"M": 1000, "N": 520}
DEFAULT = {"ROWS": 64, "COLUMNS": 32, "SWIZZLE": 128, "THREADS": 256}


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


Shape = tuple[int, ...]


def demand(box: Shape, steps: Shape, in_bytes: tuple[int, int], shape: Shape) -> TensorMapDemand:
    columns = [tuple(map(column, values)) for values in (box, steps)]
    return TensorMapDemand("m", "A", shape, 4, *columns, *map(column, in_bytes))


def test_it_is_evaluated_for_a_configuration() -> None:
    data = LaunchData.of(SPEC, "float32", known_names(SPEC, DEFAULT, SIZES, H200))
    (found,) = data.tensor_maps
    assert found == TensorMap("A_map", "A", "float32", (1000, 520), (64, 32), (1, 1), 128, 128)
    assert found.strides_bytes == (4 * 520,)
    assert hash(data) == hash(LaunchData.of(SPEC, "float32", known_names(SPEC, dict(DEFAULT), SIZES, H200)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_strides_are_numpys(shape: list[int], element_bytes: int) -> None:
    expected = np.empty(shape, f"V{element_bytes}").strides[:-1]
    assert strides_bytes(tuple(shape), element_bytes) == expected


@pytest.mark.parametrize(
    ("box", "steps", "in_bytes", "shape", "said"),
    [
        ((64, 32), (1, 1), (128, 128), (1000, 520), ""),
        ((256, 256), (8, 1), (0, 0), (7, 4), ""),
        ((-1, 32), (1, 1), (0, 0), (8, 8), "has a box of -1 x 32 elements, expected 1 to 256 along each axis"),
        ((257, 32), (1, 1), (0, 0), (8, 8), "has a box of 257 x 32 elements"),
        ((1, 3), (1, 1), (0, 0), (8, 8), "a box of 12 bytes along the innermost axis, expected a multiple of 16"),
        ((1, 4), (1, 1), (16, 0), (8, 8), "has swizzle_bytes = 16, expected one of 0, 32, 64 or 128"),
        ((1, 64), (1, 1), (128, 0), (8, 8), "256 bytes along the innermost axis, more than its swizzle_bytes = 128"),
        ((1, 4), (9, 1), (0, 0), (8, 8), "has element strides of 9 x 1, expected 1 to 8, and 1 along"),
        ((1, 4), (1, 2), (0, 0), (8, 8), "has element strides of 1 x 2"),
        ((1, 4), (1, 1), (0, 32), (8, 8), "has l2_promotion_bytes = 32, expected one of 0, 64, 128 or 256"),
        ((1, 4), (1, 1), (0, 0), (8, 99), "has rows 396 bytes apart in the shape 8 x 99, expected a multiple of 16"),
        ((1, 1, 4), (1, 1, 1), (0, 0), (2, 2**30, 2**9), "beyond what a map can address"),
    ],
)  # fmt: skip
def test_what_the_hardware_takes(box: Shape, steps: Shape, in_bytes: tuple[int, int], shape: Shape, said: str) -> None:
    found = demand(box, steps, in_bytes, shape)
    assert bool(found.fits()[0]) == (not said)
    assert said in found.explain()
    assert bool(found.explain()) == bool(said)


def test_a_table_and_one_row_agree() -> None:
    spec = parse_spec(TEXT.replace("SWIZZLE == 0 or COLUMNS * 4 == SWIZZLE", "ROWS > 0"), str(TRANSPOSE))
    found = feasible_space(spec, SIZES, H200)
    configs = [found.config(row) for row in range(len(found))]
    for rows in (32, 256):
        for columns in (8, 16, 32, 64):
            for swizzle in (0, 32, 64, 128):
                config = {"ROWS": rows, "COLUMNS": columns, "SWIZZLE": swizzle, "THREADS": 128}
                fits = swizzle == 0 or columns * 4 <= swizzle
                assert ("tensor_maps" in check_config(spec, config, SIZES, H200)) == (not fits)
                assert (config in configs) == (fits and rows * columns * 4 + 8 <= 48 * 1024)


def test_a_box_without_extent_is_no_map() -> None:
    """As for an output that a configuration stores without the map; then the row pitch is not restricted."""
    text = TEXT.replace('box = ["ROWS", ', 'box = ["0 if THREADS == 512 else ROWS", ')
    spec = parse_spec(text, str(TRANSPOSE))
    found = feasible_space(spec, {"M": 8, "N": 9}, H200)
    assert {found.config(row)["THREADS"] for row in range(len(found))} == {512}
    (absent,) = LaunchData.of(spec, "float32", known_names(spec, found.config(0), SIZES, H200)).tensor_maps
    assert absent.is_absent
    parse_spec(text.replace("N = 276", "N = 277").replace("THREADS = 256\n", "THREADS = 512\n"), str(TRANSPOSE))


def test_sizes_that_no_map_takes_leave_nothing() -> None:
    with pytest.raises(SpecError, match="the limit tensor_maps of NVIDIA H200 leaves none of the 84"):
        feasible_space(SPEC, {"M": 8, "N": 9}, H200)


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ('tensor_map = "A"', 'tensor_map = "M"', "arguments.A_map.tensor_map", "names no buffer (buffers: A, B)"),
        ('box = ["ROWS", "COLUMNS"]', 'box = ["ROWS"]', "arguments.A_map.box", "expected 2 expressions"),
        ('box = ["ROWS"', 'box = ["ROW"', "arguments.A_map.box", "did you mean 'ROWS'"),
        ('"SWIZZLE", l2', '"SWIZZLE", element_strides = [1], l2', "arguments.A_map.element_strides", "expected 2"),
        ("N = 276 }", "N = 277 }", "arguments.A_map.tensor_map", "rows of A are 1108 bytes apart"),
        ("pass = false", "pass = 0", "arguments.A.pass", "expected true or false"),
        ('tensor_map = "A", box', 'tensor_map = "B", box', "arguments.A", "'A' is not passed, has no tensor map"),
        ("l2_promotion_bytes", "l2_promotion", "arguments.A_map.l2_promotion", "unknown key"),
    ],
)
def test_refusals(old: str, new: str, key: str, said: str) -> None:
    text = TEXT.replace(old, new).replace("M = 389", "M = 388")
    assert text != TEXT
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "t.toml")
    assert caught.value.key == key
    assert said in caught.value.problem


def test_a_map_of_more_than_five_axes() -> None:
    text = TEXT.replace('shape = ["M", "N"]', 'shape = [1, 1, 1, 1, "M", "N"]')
    with pytest.raises(SpecError, match="A has 6 axes, a tensor map describes at most 5"):
        parse_spec(text, "t.toml")

"""Limits of tensor maps, for one configuration and for columns of configurations."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.device import device_profile
from autotile.cuda import packing
from autotile.cuda.packing import pack_arguments
from autotile.errors import SpecError
from autotile.kernel.arguments import TensorMap, strides_bytes
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


Shape = tuple[int, ...]


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
    one = TensorMap("m", "A", "float32", shape, box, steps, *in_bytes)
    parts = [tuple(np.array([value, value]) for value in values) for values in (shape, box, steps, in_bytes)]
    table = TensorMap("m", "A", "float32", *parts[:3], *parts[3])
    assert [one.fits(), *table.fits()] == [not said] * 3
    assert said in one.explain()
    assert bool(one.explain()) == bool(said)


def test_a_table_and_one_row_agree() -> None:
    spec = parse_spec(TEXT.replace("SWIZZLE == 0 or COLUMNS * 4 == SWIZZLE", "ROWS > 0"), str(TRANSPOSE))
    found = feasible_space(spec, SIZES, H200)
    configs = [found.config(row) for row in range(len(found))]
    for rows, columns, swizzle in product((32, 256), (8, 16, 32, 64), (0, 32, 64, 128)):
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


OF_A_WORKSPACE = TEXT.replace('tensor_map = "A"', 'tensor_map = "W"').replace(", pass = false }", " }") + (
    '\n[arguments.W]\nworkspace = "float32"\nshape = ["0 if ROWS == 256 else M", "THREADS // 2 - 63"]\npass = false\n'
)


class TestOfAWorkspace:
    def text(self, columns: str) -> str:
        return OF_A_WORKSPACE.replace("THREADS // 2 - 63", columns)

    def test_its_shape_is_that_of_the_configuration(self) -> None:
        spec = parse_spec(self.text("THREADS + N - N"), str(TRANSPOSE))
        (found,) = LaunchData.of(spec, "float32", known_names(spec, DEFAULT, SIZES, H200)).tensor_maps
        assert (found.buffer, found.shape, found.is_absent) == ("W", (1000, 256), False)
        config = {**DEFAULT, "ROWS": 256}
        (found,) = LaunchData.of(spec, "float32", known_names(spec, config, SIZES, H200)).tensor_maps
        assert (found.shape, found.is_absent) == ((0, 256), True)

    def test_the_limits_follow_the_configuration(self) -> None:
        """Rows of 508 bytes with 128 threads, of whole 16 bytes with others; an empty workspace has no map."""
        spec = parse_spec(self.text("127 if THREADS == 128 else THREADS"), str(TRANSPOSE))
        found = feasible_space(spec, SIZES, H200)
        configs = [found.config(row) for row in range(len(found))]
        assert {config["ROWS"] for config in configs if config["THREADS"] == 128} == {256}
        assert {config["ROWS"] for config in configs if config["THREADS"] == 512} == {32, 64, 128, 256}
        said = check_config(spec, {**DEFAULT, "THREADS": 128}, SIZES, H200)
        assert "tensor_maps: the tensor map A_map of W has rows 508 bytes apart in the shape 1,000 x 127" in said

    def test_its_rows_at_the_ragged_sizes(self) -> None:
        with pytest.raises(SpecError, match="at the ragged sizes, rows of W are 260 bytes apart"):
            parse_spec(self.text("THREADS // 2 - 63"), str(TRANSPOSE))

    def test_no_map_and_no_struct_leads_to_it(self) -> None:
        text = OF_A_WORKSPACE.replace('tensor_map = "W"', 'tensor_map = "A"')
        with pytest.raises(SpecError, match="'W' is not passed, has no tensor map"):
            parse_spec(text, str(TRANSPOSE))

    def test_its_address_is_encoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = parse_spec(self.text("THREADS"), str(TRANSPOSE))
        data = LaunchData.of(spec, "float32", known_names(spec, DEFAULT, SIZES, H200))
        monkeypatch.setattr(packing, "encode_tensor_map", lambda tensor_map, pointer: (tensor_map.name, pointer))
        addresses = {"A": 16, "B": 32, "W": 256}
        packed = pack_arguments(spec, data, addresses=addresses, scalars={"M": 1000, "N": 520})
        assert packed == (16, 32, ("A_map", 256), 1000, 520)

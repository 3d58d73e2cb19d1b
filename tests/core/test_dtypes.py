"""Element types: rounding, names, tolerances; ``.npy`` files, read as NumPy reads them or refused with words."""

import io
import itertools
import math
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.core.dtypes import DTYPES, canonical_dtype, dtype_name, load_npy, map_npy, output_tolerance, parse_npy
from autotile.errors import AutotileError, DataError, InputError
from autotile.exchange.recording import list_recordings, read_recording
from autotile.kernel.contents import InputFile
from autotile.settings import data_folder

BFLOAT16 = DTYPES["bfloat16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
FLOAT, HALF, DOUBLE, BRAIN, INT = (DTYPES[name] for name in ("float32", "float16", "float64", "bfloat16", "int32"))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the maximum error relative to max(|expected|, RMS of expected), as in verification."""
    scale = math.sqrt(float(np.mean(np.square(want))))
    return float(np.max(np.abs(got - want) / np.maximum(np.abs(want), scale)))


def product(k: int, outputs: int = 400) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(k)
    a, b = generator.standard_normal((2, outputs, k), dtype=np.float32)
    return a, b


def one_after_another(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros(len(a), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k] * b[:, k]
    return total.astype(np.float64)


class TestDtypes:
    @given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126))
    def test_bfloat16_rounds_to_nearest(self, value):
        rounded = BFLOAT16.decode(BFLOAT16.encode(np.array([value])))[0]
        assert abs(rounded - value) <= BFLOAT16.unit_roundoff * abs(value) + 1e-40

    @pytest.mark.parametrize("name", ["float16", "float32", "float64"])
    def test_unit_roundoff_is_half_an_ulp_of_one(self, name):
        assert DTYPES[name].unit_roundoff == np.finfo(name).eps / 2

    @pytest.mark.parametrize("name", FP8)
    def test_every_finite_8_bit_float_is_encoded_as_itself(self, name):
        stored = np.arange(256, dtype=np.uint8)
        values = DTYPES[name].decode(stored)
        finite = np.isfinite(values)
        np.testing.assert_array_equal(DTYPES[name].encode(values[finite]), stored[finite])
        assert values[finite].max() == DTYPES[name].largest

    @pytest.mark.parametrize("name", FP8)
    @given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6))
    def test_8_bit_floats_round_to_nearest_and_saturate(self, name, value):
        dtype = DTYPES[name]
        every = dtype.decode(np.arange(256, dtype=np.uint8))
        every = every[np.isfinite(every)]
        rounded = dtype.decode(dtype.encode(np.array([value])))[0]
        assert abs(rounded - value) == np.abs(every - value).min()

    def test_ties_go_to_even(self):
        ties = np.array([1 + 2**-8, 1 + 3 * 2**-8])
        np.testing.assert_array_equal(BFLOAT16.decode(BFLOAT16.encode(ties)), [1.0, 1 + 2**-6])
        ties = np.array([1 + 1 / 16, 1 + 3 / 16, 2.0**-10, 3 * 2.0**-10, -(1 + 1 / 16)])
        e4m3 = DTYPES["float8_e4m3fn"]
        np.testing.assert_array_equal(e4m3.decode(e4m3.encode(ties)), [1, 1.25, 0, 2.0**-8, -1])
        barely = np.array([np.nextafter(1 + 1 / 16, 2), np.nextafter(1 + 1 / 16, 1)])
        np.testing.assert_array_equal(e4m3.decode(e4m3.encode(barely)), [1.125, 1])

    @pytest.mark.parametrize("name", FP8)
    def test_8_bit_floats_saturate_infinity_and_keep_nan(self, name):
        dtype = DTYPES[name]
        decoded = dtype.decode(dtype.encode(np.array([np.inf, -np.inf, np.nan], np.float32)))
        np.testing.assert_array_equal(decoded, [dtype.largest, -dtype.largest, np.nan])

    def test_vectors_are_arrays_of_their_components(self):
        float4 = DTYPES["float4"]
        assert (float4.size_bytes, float4.alignment_bytes, float4.array_shape((5,))) == (16, 16, (5, 4))
        assert float4.component is DTYPES["float32"]
        names = ("float3", "uchar4", "double4", "half2", "complex128")
        assert [DTYPES[name].alignment_bytes for name in names] == [4, 4, 16, 4, 16]

    def test_complex_values_keep_both_parts_and_names_of_other_libraries_are_known(self):
        single = DTYPES["complex64"]
        assert single.decode(single.encode(np.array([1 + 2j])))[0] == 1 + 2j
        assert (single.is_complex, single.is_integer) == (True, False)
        assert canonical_dtype("float8_e4m3") == "float8_e4m3fn"
        names = [dtype_name(one) for one in ("torch.float8_e5m2", np.complex64, bool)]
        assert names == ["float8_e5m2", "complex64", "bool"]

    @pytest.mark.parametrize("k", [1, 16, 149, 1024, 4096])
    def test_only_a_right_fp32_sum_is_within_the_tolerance(self, k):
        a, b = product(k)
        want = np.sum(a.astype(np.float64) * b, axis=1)
        tolerance = output_tolerance(FLOAT, [FLOAT, FLOAT], k)
        assert relative_error(one_after_another(a, b), want) < tolerance
        if k < 149:
            return

        def as_tf32(values: np.ndarray) -> np.ndarray:
            return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

        assert relative_error(one_after_another(as_tf32(a), as_tf32(b)), want) > tolerance
        one_left_out = np.sum(a[:, 1:].astype(np.float64) * b[:, 1:], axis=1)
        assert relative_error(one_left_out, want) > tolerance

    def test_a_half_result_of_an_fp32_sum_is_right_and_a_half_sum_is_wrong(self):
        """A template must not accumulate in fp16."""
        a, b = (HALF.decode(HALF.encode(x)) for x in product(1024))
        got = HALF.decode(HALF.encode(one_after_another(a.astype(np.float32), b.astype(np.float32))))
        assert relative_error(got, np.sum(a * b, axis=1)) < output_tolerance(HALF, [HALF, HALF], 1024)
        a, b = (x.astype(np.float16) for x in product(4096))
        total = np.zeros(len(a), np.float16)
        for k in range(a.shape[1]):
            total += a[:, k] * b[:, k]
        want = np.sum(a.astype(np.float64) * b, axis=1)
        assert relative_error(total.astype(np.float64), want) > output_tolerance(HALF, [HALF, HALF], 4096)

    @pytest.mark.parametrize(
        ("output", "inputs", "reduction", "expected"),
        [
            (INT, [FLOAT, INT], 10_000, 0.0),  # integers must be exact
            (INT, [DTYPES["int8"]], 64, 0.0),
            (FLOAT, [FLOAT], 400, 20 * 8 * 2.0**-24),  # it grows with the root of the sum
            (FLOAT, [FLOAT], 0, 8 * 2.0**-24),
            (DOUBLE, [DOUBLE], 100, 80 * 2.0**-53),  # the accumulator is fp32 or the widest
            (FLOAT, [HALF, HALF], 100, 80 * 2.0**-24),
            (FLOAT, [INT, INT], 100, 80 * 2.0**-24),
            (FLOAT, [DOUBLE], 100, 2 * 2.0**-24 + 80 * 2.0**-53),  # a narrow output adds its own rounding
            (HALF, [HALF], 100, 2 * 2.0**-11 + 80 * 2.0**-24),
            (BRAIN, [BRAIN], 100, 2 * 2.0**-8 + 80 * 2.0**-24),
        ],
    )
    def test_the_tolerance_follows_its_formula(self, output, inputs, reduction, expected):
        assert output_tolerance(output, inputs, reduction) == pytest.approx(expected)
        assert output_tolerance(FLOAT, [FLOAT], 400_000) < 3.1e-4 < 2.0**-11  # of TF32, at the length that is promised


STORAGE = sorted({np.dtype(dtype.storage).str for dtype in DTYPES.values()} | {">f4", "<V2", "|V1", "<c16"})
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 4), (2, 0, 3), (2, 3, 4), (1,) * 32]


def sample(dtype: str, shape: tuple[int, ...], order: str = "C") -> np.ndarray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=int)) * kind.itemsize
    data = np.random.default_rng(1).integers(0, 2 if kind.kind == "b" else 256, count, np.uint8)
    return np.asarray(data.view(kind).reshape(shape), order=order)  # type: ignore[call-overload]


def written(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=False)
    return stream.getvalue()


def with_header(text: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    length = struct.pack("<H" if version == (1, 0) else "<I", len(raw))
    return b"\x93NUMPY" + bytes(version) + length + raw + data


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
DESCR = "{'descr': %s, 'fortran_order': False, 'shape': (4,)}"
LARGE = "9" * 19
HEADERS = [
    "", "{", "(" * 5000, "-" * 9000 + "1", "\0" * 100, b"\xff" * 100, " if x:\n  y\n z",
    "{'descr': '<f4', 'fortran_order': False}",
    "{'descr': '<f4', 'descr': '<f4', 'shape': (4,)}",
    "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (4,)}",
    "{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}",
    SHAPE % "(4,), 'extra': 1",
    SHAPE.removesuffix("}") % ("(" * 9000),
    *(SHAPE % shape for shape in ("(4)", "(-4,)", "(,)", "(4,,)", "(4.0,)", "(True,)", "__import__('os')")),
    *(SHAPE % f"({extents})" for extents in ("9" * 5000 + ",", f"{LARGE},", f"0, {LARGE}, {LARGE}", "1," * 33)),
    *(SHAPE % shape for shape in (f"({'4294967296, ' * 4})", "(" + "1" * 9000)),
    *(DESCR % f"'{name}'" for name in ("|O", "<U4", "<M8[ns]", "<f99999999", "|V0", "|V999999999")),
    *(DESCR % descr for descr in ("False", "[('a', '<f4')]")),
]  # fmt: skip


def refused(path: Path, data: bytes) -> None:
    """Assert that a file is refused, from memory and from the disk, with a few printable words."""
    path.write_bytes(data)
    for call in (lambda: parse_npy(data), lambda: map_npy(path), lambda: load_npy(path)):
        with pytest.raises(DataError) as caught:
            call()
        assert len(str(caught.value)) < 300
        assert str(caught.value).isprintable()


def mutations(data: bytes, count: int, seed: int, head: int) -> Iterator[bytes]:
    """Yield variants of a file: bytes replaced, removed and inserted, mostly in its first ``head`` bytes."""
    random = Random(seed)
    tokens = [b"(", b"{", b"'", b",", b"9" * 20, b"-", b"L", b"[", b"O", b"\0", b"\xff", b"PK", b"\n", b"#", b"\\"]
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 4, 12))):
            end = len(changed) if random.random() < 0.1 else min(head, len(changed))
            at = random.randrange(max(1, end))
            match random.randrange(5):
                case 0:
                    changed[at : at + 1] = bytes([random.randrange(256)])
                case 1:
                    del changed[at : at + random.choice((1, 2, 8, 64))]
                case 2:
                    changed[at:at] = random.choice(tokens) * random.choice((1, 1, 2, 50))
                case 3:
                    changed[at : at + 1] = bytes([changed[at] ^ (1 << random.randrange(8))]) if changed else b""
                case _:
                    changed[at : at + 1] = random.choice(tokens)
        yield bytes(changed)


def fault_of(path: Path) -> str:
    """Return why a recording is refused; "" if it is read."""
    try:
        read_recording(path)
    except AutotileError as error:
        return str(error)
    return ""


class TestNpyFiles:
    @pytest.mark.parametrize("dtype", STORAGE)
    def test_what_numpy_writes_is_read_as_by_numpy(self, tmp_path, dtype):
        for shape, order, version in itertools.product(SHAPES, "CF", [(1, 0), (2, 0), (3, 0)]):
            data = written(sample(dtype, shape, order), version)
            path = tmp_path / "a.npy"
            path.write_bytes(data)
            expected = np.load(path)
            for found in (parse_npy(data), map_npy(path), load_npy(path)):
                assert same(found, expected)
                assert found.flags.f_contiguous == expected.flags.f_contiguous
            assert load_npy(path).flags.writeable

    @pytest.mark.parametrize("header", HEADERS, ids=lambda header: repr(header)[:40])
    def test_a_hostile_header_is_refused(self, tmp_path, header):
        for version in [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (255, 255)]:
            refused(tmp_path / "a.npy", with_header(header, bytes(16), version))

    @pytest.mark.parametrize(
        "data",
        [
            b"", b"PK", b"PK\x03\x04" + bytes(100), b"PK\x05\x06" + bytes(18), b"\x80\x04\x95" + bytes(100),
            b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff", b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", bytes(15)),
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", bytes(17)),
        ],
    )  # fmt: skip
    def test_what_is_no_whole_array_is_refused(self, tmp_path, data):
        refused(tmp_path / "a.npy", data)

    def test_a_type_that_numpy_does_not_know_and_a_path_that_cannot_be_opened(self, tmp_path):
        data = with_header("{'descr': '<f1', 'fortran_order': False, 'shape': (4,), }", b"abcd")  # of ml_dtypes
        assert same(parse_npy(data), np.frombuffer(b"abcd", "V1"))
        (tmp_path / "loop.npy").symlink_to("loop.npy")
        for path in ("none.npy", "loop.npy", "a\0b.npy", "x" * 3000 + ".npy", "."):
            with pytest.raises(DataError):
                map_npy(tmp_path / path)
            with pytest.raises(InputError):
                InputFile(str(tmp_path / path)).read("x", (4,), DTYPES["float32"])

    def test_altered_files_are_read_or_refused(self, tmp_path):
        path = tmp_path / "a.npy"
        read = rejected = 0
        for number, dtype in enumerate(STORAGE):  # of one of the three versions each
            array = sample(dtype, (3, 4), "CF"[number % 2])
            file = InputFile(str(path))
            for data in mutations(written(array, (number % 3 + 1, 0)), 150, seed=number, head=100):
                try:
                    found = parse_npy(data)
                    read += 1
                except DataError:
                    rejected += 1
                    found = None
                if found is not None and b"f1'" not in data:  # what is accepted is what NumPy reads
                    assert same(found, np.load(io.BytesIO(data), allow_pickle=False))
                if number % 4 == 0:
                    path.write_bytes(data)
                    with suppress(InputError):
                        file.read("x", (3, 4), DTYPES["float32"])
        assert read > 10
        assert rejected > 1000

    def test_altered_recordings_are_read_or_refused(self, tmp_path):
        """Altered anywhere, or in the directory of the archive; the arrays within are files as above."""
        source = data_folder("recordings") / "matmul_tiled-nvidia-h200-2048x2048x2048-float32.npz"
        data, path = source.read_bytes(), tmp_path / "recording.npz"
        assert fault_of(source) == ""
        directory = data.index(b"PK\x01\x02")
        for number in range(250):
            kept = directory if number % 2 else 0
            (changed,) = mutations(data[kept:], 1, seed=number, head=len(data) - kept)
            path.write_bytes(data[:kept] + changed)
            assert "\n" not in fault_of(path)
            list_recordings([tmp_path])

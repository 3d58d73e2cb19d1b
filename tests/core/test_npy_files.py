"""``.npy`` files: what NumPy writes is read as `numpy.load` reads it, and anything else is refused with words."""

from __future__ import annotations

import io
import itertools
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest

from autotile.core.dtypes import DTYPES, load_npy, map_npy, parse_npy
from autotile.errors import AutotileError, DataError, InputError
from autotile.exchange.recording import list_recordings, read_recording
from autotile.kernel.contents import InputFile
from autotile.settings import data_folder

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


@pytest.mark.parametrize("version", [None, (1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", STORAGE)
def test_what_numpy_writes_is_read_as_numpy_reads_it(
    tmp_path: Path, dtype: str, version: tuple[int, int] | None
) -> None:
    for shape, order in itertools.product(SHAPES, "CF"):
        data = written(sample(dtype, shape, order), version)
        path = tmp_path / "a.npy"
        path.write_bytes(data)
        expected = np.load(path)
        for found in (parse_npy(data), map_npy(path), load_npy(path)):
            assert same(found, expected)
            assert found.flags.f_contiguous == expected.flags.f_contiguous
        assert load_npy(path).flags.writeable


def test_a_type_of_ml_dtypes_that_numpy_does_not_know() -> None:
    data = with_header("{'descr': '<f1', 'fortran_order': False, 'shape': (4,), }", b"abcd")
    assert same(parse_npy(data), np.frombuffer(b"abcd", "V1"))


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


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: repr(header)[:40])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (255, 255)])
def test_a_hostile_header_is_refused(tmp_path: Path, header: str, version: tuple[int, int]) -> None:
    refused(tmp_path / "a.npy", with_header(header, bytes(16), version))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK",
        b"PK\x03\x04" + bytes(100),
        b"PK\x05\x06" + bytes(18),
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x80\x04\x95" + bytes(100),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", bytes(15)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", bytes(17)),
    ],
)
def test_what_is_no_whole_array_is_refused(tmp_path: Path, data: bytes) -> None:
    refused(tmp_path / "a.npy", data)


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    for path in ("none.npy", "loop.npy", "a\0b.npy", "x" * 3000 + ".npy", "."):
        with pytest.raises(DataError):
            map_npy(tmp_path / path)
        with pytest.raises(InputError):
            InputFile(str(tmp_path / path)).read("x", (4,), DTYPES["float32"])


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


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_altered_files_are_read_or_refused(tmp_path: Path, version: tuple[int, int]) -> None:
    path = tmp_path / "a.npy"
    read = refused = 0
    for number, dtype in enumerate(STORAGE):
        array = sample(dtype, (3, 4), "CF"[number % 2])
        file = InputFile(str(path))
        for data in mutations(written(array, version), 200, seed=number, head=100):
            try:
                found = parse_npy(data)
                read += 1
            except DataError:
                refused += 1
                found = None
            if found is not None and b"f1'" not in data:  # what is accepted is what NumPy reads
                assert same(found, np.load(io.BytesIO(data), allow_pickle=False))
            if number % 4 == 0:
                path.write_bytes(data)
                with suppress(InputError):
                    file.read("x", (3, 4), DTYPES["float32"])
    assert read > 10
    assert refused > 1000


def npz(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def fault_of(path: Path) -> str:
    """Return why a recording is refused; "" if it is read."""
    try:
        read_recording(path)
    except AutotileError as error:
        return str(error)
    return ""


def test_altered_recordings_are_read_or_refused(tmp_path: Path) -> None:
    source = data_folder("recordings") / "matmul_tiled-nvidia-h200-2048x2048x2048-float32.npz"
    data, path, random = source.read_bytes(), tmp_path / "recording.npz", Random(3)
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    path.write_bytes(npz(members))
    assert len(read_recording(path))
    for number in range(600):  # members
        name = random.choice(sorted(members))
        (changed,) = mutations(members[name], 1, seed=number, head=100)
        path.write_bytes(npz({**members, name: changed}, zipfile.ZIP_STORED))
        assert "\n" not in fault_of(path)
        list_recordings([tmp_path])
    directory = data.index(b"PK\x01\x02")
    for number in range(600):  # bytes, of the directory or of the whole file
        rest = data[directory:] if number % 2 else data
        (changed,) = mutations(rest, 1, seed=number, head=len(rest))
        path.write_bytes(data[:directory] + changed if number % 2 else changed)
        assert "\n" not in fault_of(path)

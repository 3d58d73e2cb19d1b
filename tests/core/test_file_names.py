"""File names made of names from outside: always one plain component, and different for different names."""

import itertools
from pathlib import Path

import pytest

from autotile.core.text import file_name

HOSTILE = [
    "../x", "../../x", "/abs", "a/b", "..", ".", "", " ", "\0", "a\0b", "a\nb", "x" * 5000, "é" * 300, "\ud800", "-rf",
    ".hidden", "a\\b", "~root", "$(x)", "CON", "\u202egpj",
]  # fmt: skip


@pytest.mark.parametrize(("separator", "suffix"), [("-", ".npz"), (".", ".json")])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_gives_a_file_in_its_folder(tmp_path: Path, name: str, separator: str, suffix: str) -> None:
    for words in ((name,), (name, name), ("matmul", name, "float32")):
        file = file_name(*words, separator=separator, suffix=suffix)
        assert file.endswith(suffix)
        assert file.isascii()
        assert file.isprintable()
        assert not set("/\\ $~") & set(file)
        assert file[0] not in ".-"
        assert len(file) < 255
        (tmp_path / file).write_text("x")
        assert [path.name for path in tmp_path.iterdir()] == [file]
        (tmp_path / file).unlink()


def test_different_names_give_different_files() -> None:
    names = [*HOSTILE, "x", "abs", "a-b", "x" * 100, "x" * 101, "x" * 4999]
    found = {file_name(name) for name in names}
    assert len(found) == len(names)
    assert len({file_name("a", name, "b") for name in names}) == len(names)
    long = ["a" * length for length in (60, 61, 62)]
    assert len({file_name(*words) for words in itertools.product(long, repeat=4)}) == 81


def test_plain_names_are_kept() -> None:
    assert file_name("nvidia h200", "matmul", "float32", separator=".", suffix=".json") == (
        "nvidia-h200.matmul.float32.json"
    )
    assert file_name("sgemm_2d", "nvidia-a100-sxm4-40gb", "4096x1") == "sgemm_2d-nvidia-a100-sxm4-40gb-4096x1"

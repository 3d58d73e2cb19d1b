"""TOML and files that are read, and TOML that is written and read back."""

import os
import signal
import socket
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.documents import MAX_KEY_PARTS, NotRegularError, open_regular, parse_toml, read_regular, toml_text

DEEP = ".".join("a" * 40_000)
"""A dotted key of 80 kB, for which tomllib takes the better part of a minute and some gigabytes."""


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    """Fail a test that waits for a file, rather than wait with it."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP} = 1", f"[{DEEP}]", f"[[{DEEP}]]", f"[ {DEEP} ]\n" + "b.c = 1\n", f"x = {{ {DEEP} = 1 }}",
        f"x = [1, {{ y = {{ z = 1, {DEEP} = 1 }} }}]", DEEP.replace(".", " . ") + " = 1",
        DEEP.replace(".", "\t.") + " = 1", DEEP.replace("a", '"a.b"') + " = 1", DEEP.replace("a", "'a'") + " = 1",
        DEEP.replace("a", '""') + " = 1", DEEP.replace("a", "1") + " = 1", f'# "\n{DEEP} = 1',
        f'x = """\n# \\"""""\n{DEEP} = 1', f"x = '''\n# \\'''''\n{DEEP} = 1", f'x = """a""\\""""\r\n{DEEP} = 1',
        f'x = "\\"" # \'\ny = \'\\\'\nz = ""\n{DEEP} = 1', f'x = "#"\ny = [\n  1, # [\n]\nz = 1.5\n{DEEP} = 1',
    ],
)  # fmt: skip
def test_a_key_of_many_parts_is_refused_at_once(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(
        ValueError, match=rf"dotted key has more than {MAX_KEY_PARTS} parts \(at line \d+, column \d+\)$"
    ):
        parse_toml(text)
    assert time.perf_counter() - started < 1


def test_its_line_and_column() -> None:
    with pytest.raises(ValueError, match=r"\(at line 3, column 2\)"):
        parse_toml(f"x = 1\n\n[{DEEP}]\ny = 1")


@pytest.mark.parametrize(
    "text",
    [
        f"# {DEEP}\nx = 1", f"x = '{DEEP}'", f'x = "{DEEP}"', f"x = '''\n{DEEP}\n'' '''",
        f'x = """\n{DEEP}\n"" \\""""', f'"{DEEP}" = 1', "x = [" + "1.5, " * 100 + "]",
        "x = [" + "1979-05-27T07:32:00.999, " * 30 + "]", "x = 1.5\r\n" * 1 + "y = " + "'......................'",
        ".".join("a" * MAX_KEY_PARTS) + " = 1", "[" + ".".join(["a", "'.'"] * (MAX_KEY_PARTS // 2)) + "]\nx.y = 1",
    ],
)  # fmt: skip
def test_dots_elsewhere_are_read(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "." * 2**20, '"' * 2**20, "'" * 2**20, 'x = """' + '\\"""' * 2**18 + "." * 20, "a. " * 2**18, "\"'." * 2**18,
        "a " * 2**19,
    ],
)  # fmt: skip
def test_what_is_not_toml_is_refused_in_little_time(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError):  # noqa: PT011 - which fault is found first does not matter
        parse_toml(text)
    assert time.perf_counter() - started < 10


@given(st.text(alphabet="a1.\"'\\#= \n[]{},", max_size=60))
def test_other_texts_are_parsed_as_tomllib_does(text: str) -> None:
    def result(parse: Callable[[str], object]) -> object:
        try:
            return parse(text)
        except ValueError as error:
            return str(error)

    found = result(parse_toml)
    assert found == result(tomllib.loads) or "dotted key" in str(found)


def special_files(folder: Path) -> list[tuple[Path, str]]:
    pipe, link, name = folder / "pipe", folder / "link", folder / "socket"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(name))
    return [(pipe, "named pipe"), (link, "device"), (Path("/dev/zero"), "device"), (name, "socket")]


def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, kind in special_files(tmp_path):
        with pytest.raises(NotRegularError, match=f"it is a {kind}, expected a regular file"), open_regular(path):
            pass
    with pytest.raises(IsADirectoryError), open_regular(tmp_path):
        pass
    with pytest.raises(FileNotFoundError), open_regular(tmp_path / "missing"):
        pass


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, regular = tmp_path / "pipe", tmp_path / "regular"
    os.mkfifo(pipe)
    regular.write_text("")
    before, descriptors = regular.stat(), len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(Path, "stat", lambda self: before)
    with pytest.raises(NotRegularError), open_regular(pipe):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_the_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(path, 4)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
tables = st.dictionaries(texts, values, max_size=5)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(texts, tables, max_size=5))
def test_a_document_is_read_back(document):
    assert tomllib.loads(toml_text(document)) == document


@settings(max_examples=30, deadline=None)
@given(st.lists(tables, min_size=1, max_size=3))
def test_an_array_of_tables_is_read_back(steps):
    assert tomllib.loads(toml_text({"steps": steps})) == {"steps": steps}


def test_an_entry_has_one_line_and_none_is_left_out():
    text = toml_text({"arguments": {"x": {"buffer": "float32", "shape": ["N"], "init": None}}})
    assert text == '[arguments]\nx = { buffer = "float32", shape = ["N"] }\n'


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_what_toml_cannot_hold_is_refused(value):
    with pytest.raises(TypeError, match="TOML cannot hold"):
        toml_text({"kernel": {"name": value}})

"""A template that overrides the parameters, and texts of a search-space file that give the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotile.errors import InputError, SpecError
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec


@pytest.mark.parametrize(
    "line",
    ["#define THREADS 128", " # define THREADS", "#ifdef X\n#endif\n#define THREADS 128", "#define THREADS(x) x"],
)
def test_a_parameter_that_the_template_defines(scale_toml: Path, line: str) -> None:
    template = scale_toml.with_suffix(".cu")
    template.write_text(f"{line}\n{template.read_text()}")
    with pytest.raises(InputError, match=r"#define THREADS in the template overrides .* between #ifndef THREADS"):
        load_kernel(scale_toml)


@pytest.mark.parametrize(
    "line",
    [
        "#ifndef THREADS\n#define THREADS 128\n#endif",
        "#if !defined(THREADS)\n#  define THREADS 128\n#endif",
        "// #define THREADS 128",
        "/*\n#define THREADS 128\n*/",
        "#define THREADS_Y 128\n#define N_THREADS (2 * THREADS)",
    ],
)
def test_a_default_in_the_template(scale_toml: Path, line: str) -> None:
    template = scale_toml.with_suffix(".cu")
    template.write_text(f"{line}\n{template.read_text()}")
    assert load_kernel(scale_toml).name == "scale"


@pytest.mark.parametrize(
    ("old", "new", "cure"),
    [
        ('block = ["THREADS"]', 'block = "THREADS"', r'write block = \["THREADS"\]'),
        ('block = ["THREADS"]', "block = 128", r"write block = \[128\]"),
        ('buffer = "dtype"', 'buffer = "float"', "write 'float32'"),
        ('buffer = "dtype"', 'buffer = "__half"', "write 'float16'"),
        ('scalar = "int32"', 'scalar = "unsigned int"', "write 'uint32'"),
        ('scalar = "int32"', 'scalar = "size_t"', "write 'uint64'"),
        ("x = {", "in = {", "such as in_; it need not be the name in the source"),
        ('shape = ["n"], access = "out"', 'shape = [1], access = "out"', "shape"),
    ],
)
def test_an_error_gives_the_cure(scale_toml: Path, old: str, new: str, cure: str) -> None:
    text = scale_toml.read_text()
    assert old in text
    with pytest.raises(SpecError, match=cure):
        parse_spec(text.replace(old, new, 1), "x.toml")


def test_a_sum_for_a_buffer_of_one_element(scale_toml: Path) -> None:
    text = scale_toml.read_text().replace('shape = ["n"], access = "out"', 'shape = [1], access = "out"')
    with pytest.raises(SpecError, match=r"write reshape\(\.\.\., 1\)"):
        parse_spec(text.replace('"factor * x"', '"sum(x)"'), "x.toml")
    parse_spec(text.replace('"factor * x"', '"reshape(sum(x), 1)"'), "x.toml")


def test_a_reference_of_several_lines(scale_toml: Path) -> None:
    text = scale_toml.read_text().replace('"factor * x"', '"""\n  t = factor * x;\n  t\n"""')
    assert parse_spec(text, "x.toml").reference.outputs["y"].text == "t = factor * x;   t"

"""Contents of buffers: expressions with generators, files, captured calls, and what is refused."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from child_python import python
from feature_kernels import write_call
from spec_samples import copy_spec

from autotile.core.dtypes import DTYPES
from autotile.core.model import Problem
from autotile.database.keys import space_hash
from autotile.errors import InputError, SpecError
from autotile.kernel.contents import encode_chunks
from autotile.kernel.inputs import input_maker, missing_input, read_captured_call, with_captured_call
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.serving.launching import CaptureFolder
from autotile.settings import read_settings


def spec_of(content: str, dtype: str = "float32", shape: str = '["N"]', more: str = "", folder: str = "") -> KernelSpec:
    """The kernel that copies a vector, with another x, a scalar, and z of which nothing else is said unless given."""
    if "z =" not in more:
        more += '\nz = { buffer = "float32", shape = ["N"], access = "in" }'
    scale = 'scale = { scalar = "float32", value = 3.0, check = 5.0 }'
    text = copy_spec(scale, more, sizes="N = 4096, K = 16 }\nragged = { N = 100, K = 7").text
    plain = 'x = { buffer = "float32", shape = ["N"], access = "in" }'
    assert plain in text
    text = text.replace(plain, f'x = {{ buffer = "{dtype}", shape = {shape}, access = "in", {content} }}')
    return parse_spec(text.replace('y = "x"', 'y = "0.0 * z"'), "k.toml", folder=folder)


def values_of(spec: KernelSpec, *, check: bool = False, seed: int = 0) -> np.ndarray:
    sizes = spec.ragged if check else spec.sizes
    return input_maker(spec, spec.at(sizes), seed=seed, check=check)("x")


def test_generators_take_their_parameters_which_may_depend_on_sizes():
    uniform = values_of(spec_of('init = "uniform(-2, 5)"'))
    assert uniform.dtype == np.float32
    assert -2 <= uniform.min() < -1.9
    assert 4.9 < uniform.max() <= 5
    normal = values_of(spec_of('init = "normal(10, 0.5)"'))
    assert (normal.mean(), normal.std()) == (pytest.approx(10, abs=0.1), pytest.approx(0.5, rel=0.1))
    integers = spec_of('init = "integers(-3, K)"', dtype="int16")
    for check, upper, count in ((False, 16, 4096), (True, 7, 100)):
        values = values_of(integers, check=check)
        assert (values.shape, set(np.unique(values))) == ((count,), set(range(-3, upper)))
    for text in ("permutation(N)", "permutation()"):
        values = values_of(spec_of(f'init = "{text}"', dtype="int32"))
        assert not np.array_equal(values, np.arange(4096))
        np.testing.assert_array_equal(np.sort(values), np.arange(4096))


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("init = 2.5", lambda n, k, scale: np.full(n, 2.5)),
        ('init = "0.5 * K"', lambda n, k, scale: np.full(n, 0.5 * k)),
        ("init = -1", lambda n, k, scale: np.full(n, -1.0)),
        ('init = "scale * arange(N) + K"', lambda n, k, scale: scale * np.arange(n) + k),
        ('init = "scale * arange() + K"', lambda n, k, scale: scale * np.arange(n) + k),
    ],
)
def test_numbers_and_expressions_of_sizes_scalars_and_generators(content, value):
    spec = spec_of(content)
    np.testing.assert_array_equal(values_of(spec), value(4096, 16, 3))
    np.testing.assert_array_equal(values_of(spec, check=True), value(100, 7, 5))


def test_expressions_use_other_inputs_as_the_kernel_gets_them():
    more = 'z = { buffer = "float16", shape = ["N"], access = "in", init = "uniform(0, 1)" }'
    spec = spec_of('init = "2 * z + 1"', more=more)
    maker = input_maker(spec, spec.at())
    np.testing.assert_array_equal(maker("x"), (2 * maker("z").astype(np.float64) + 1).astype(np.float32))


def test_each_generator_draws_numbers_of_its_own():
    first = values_of(spec_of('init = "uniform(0, 1) - uniform(0, 1)"'))
    assert np.abs(first).max() > 0.5
    np.testing.assert_array_equal(first, values_of(spec_of('init = "uniform(0, 1) - uniform(0, 1)"')))
    assert not np.array_equal(first, values_of(spec_of('init = "uniform(0, 1) - uniform(0, 1)"'), seed=1))


def test_another_process_makes_the_same_values():
    spec = spec_of('init = "normal(0, 1) + permutation(N) + integers(0, 10)"')
    program = (
        "import hashlib; from autotile.kernel import inputs; from autotile.kernel.parser import parse_spec\n"
        f"spec = parse_spec({spec.text!r}, 'k.toml')\n"
        "print(hashlib.sha256(inputs.input_maker(spec, spec.at())('x').tobytes()).hexdigest())"
    )
    assert python("-c", program, check=True).stdout.strip() == hashlib.sha256(values_of(spec).tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('init = "gaussian"', "is not accepted.*known: normal"),
        ('init = "unifrm(0, 1)"', "cannot be called"),
        ('init = "uniform(1)"', r"uniform is called as uniform\(low, high\)"),
        ('init = "integers()"', r"integers is called as"),
        ('init = "integers(0, high=3)"', r"integers is called as"),
        ('init = "integers(0, arange(3))"', r"integers is called as .* with numbers"),
        ('init = "integers(0, q)"', "unknown name 'q'"),
        ('init = "uniform(0, inf)"', r"uniform\(0, inf\) is not of finite numbers"),
        ('init = "normal(0, inf - inf)"', r"normal\(0, nan\) is not of finite numbers"),
        ('init = "arange(K)"', r"the content has the shape \(16,\), but the buffer x has \(4096,\)"),
        ('init = "2 * x"', "unknown name 'x'"),
        ('init = "y"', "is not accepted.*known: normal"),
        ('init = "ones", file = "x.npy"', "remove init"),
        ('file = "x.txt"', "ends in .npy"),
        ('file = "x.npy", sha256 = "12"', "64 hexadecimal digits"),
        ("whole = true", "belongs to a file"),
        ("restore = true", "remove restore"),
        ('init = "z + 1"', "depends on itself"),
    ],
)
def test_refusals(content, problem):
    z = 'z = { buffer = "float32", shape = ["N"], access = "in", init = "x + 1" }'
    with pytest.raises(SpecError, match=problem):
        spec_of(content, more=z if "z" in content else "")


@pytest.mark.parametrize(
    ("content", "dtype", "problem"),
    [
        ('init = "uniform(0, 1)"', "int32", "which is not in int32"),
        ('init = "integers(0, 1000)"', "uint8", "which is not in uint8"),
        ('init = "integers(K, 0)"', "int32", "is empty"),
        ('init = "1.0 / arange()"', "int32", "which is not in int32"),
    ],
)
def test_values_that_do_not_fit(content, dtype, problem):
    with pytest.raises(InputError, match=problem):
        values_of(spec_of(content, dtype=dtype))


def test_the_content_is_part_of_the_hash_also_that_of_an_output():
    one, two, spaced = (
        space_hash(spec_of(f'init = "{text}"')) for text in ("integers(0,3)", "integers(0,4)", "integers( 0, 3 )")
    )
    assert one != two
    assert one == spaced
    text = spec_of('init = "normal"').text.replace('access = "out"', 'access = "out", init = "zeros", restore = true')
    spec = parse_spec(text, "k.toml")
    assert spec.buffer("y").is_initialized
    assert not spec.buffer("y").is_read
    assert space_hash(spec) != space_hash(spec_of('init = "normal"'))


# --- files


def of_file(folder: Path, values: np.ndarray, more: str = "") -> KernelSpec:
    np.save(folder / "x.npy", values.astype(np.float32))
    return spec_of(f'file = "x.npy"{more}', folder=str(folder))


def test_a_file_is_read_beside_the_search_space_file(tmp_path):
    spec = of_file(tmp_path, np.arange(4096))
    np.testing.assert_array_equal(values_of(spec), np.arange(4096))
    np.testing.assert_array_equal(values_of(spec, check=True), np.arange(100))
    assert missing_input(spec, spec.at(spec.ragged)) == ""
    assert "expected (5000,) or more" in missing_input(spec, spec.at({"N": 5000, "K": 1}))
    whole = of_file(tmp_path, np.arange(4096), ", whole = true")
    assert missing_input(whole, whole.at(spec.sizes)) == ""
    assert "expected (100,) for x" in missing_input(whole, whole.at(spec.ragged))


def test_the_hash_is_that_of_the_files_content_or_a_declared_one_that_is_checked(tmp_path):
    spec = of_file(tmp_path, np.zeros(4096))
    before = space_hash(spec)
    (tmp_path / "z.npy").write_bytes((tmp_path / "x.npy").read_bytes())
    assert space_hash(spec_of('file = "z.npy"', folder=str(tmp_path))) == before
    declared = of_file(tmp_path, np.ones(4096), f', sha256 = "{"0" * 64}"')
    assert space_hash(spec) != before
    space_hash(declared)
    with pytest.raises(InputError, match="the SHA-256 is"):
        values_of(declared)


def write_archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"abc"), "cannot be read as a .npy file"),
        (lambda path: path.write_bytes(b""), "cannot be read as a .npy file"),
        (lambda path: np.save(path, np.array([{}], object), allow_pickle=True), "cannot be read as a .npy file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: np.save(path, np.zeros(4096)), "has the dtype float64, expected float32 for x"),
        (lambda path: np.save(path, np.zeros((64, 64), np.float32)), r"has the shape \(64, 64\)"),
        (write_archive, "an archive of several arrays"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, write, problem):
    write(tmp_path / "x.npy")  # type: ignore[operator]
    with pytest.raises(InputError, match=problem):
        values_of(spec_of('file = "x.npy"', folder=str(tmp_path)))


def test_the_sparse_matrix_of_the_documentation():
    """Rows of random lengths begin at 0, end at the number of elements, and never overlap."""
    page = (Path(__file__).parents[2] / "docs" / "file-format.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in page.splitlines() if line.startswith(("    row_start = ", "    column = "))]
    assert len(lines) == 2
    text = spec_of('init = "normal"').text.replace("K = 16", "K = 16, M = 500, NNZ = 7000")
    spec = parse_spec(text.replace("[reference]", "\n".join([*lines, "", "[reference]"])), "k.toml")
    for sizes in (spec.sizes, spec.ragged):
        maker = input_maker(spec, spec.at(sizes))
        row_start, column = maker("row_start"), maker("column")
        assert (row_start[0], row_start[-1], len(row_start)) == (0, sizes["NNZ"], sizes["N"] + 1)
        assert (np.diff(row_start) >= 0).all()
        assert column.min() >= 0
        assert column.max() < sizes["M"]


@pytest.mark.parametrize("old", ["x = {", "y = {"])
def test_a_buffer_named_like_a_size_is_refused_before_contents_are_computed(old):
    text = spec_of('init = "floor(K * uniform())"').text
    text = text.replace('access = "out"', 'access = "inout", init = "ones(N) * K"')
    parse_spec(text, "k.toml")
    with pytest.raises(SpecError, match="'K' already names a size; use another name"):
        parse_spec(text.replace(old, "K = {"), "k.toml")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "int32"])
def test_arrays_of_any_size_are_rounded_alike(name):
    large = 1e3 * np.random.default_rng(0).standard_normal((1100, 1001))[..., ::-1]
    for values in np.array(7.0), large[:0], large:
        np.testing.assert_array_equal(encode_chunks(values, DTYPES[name]), DTYPES[name].encode(values))


SPEC = copy_spec('alpha = { scalar = "float32", value = 1.0, check = 2.0 }')


class View(np.ndarray):
    """A CuPy array as far as a capture needs it."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


def kernel() -> Any:
    return SimpleNamespace(definition=SimpleNamespace(spec=SPEC), problem=Problem("k", {"N": 100}, "float32"))


def views() -> dict[str, Any]:
    return {name: np.arange(100, dtype=np.float32).view(View) for name in ("x", "y")}


def test_a_call_is_written_and_used(tmp_path):
    folder = tmp_path / "calls"
    written = CaptureFolder(folder, 1, 10**6).write(kernel(), views(), {"alpha": 0.5})
    assert folder.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in written.iterdir()) == ["call.json", "x.npy"]  # y is written only
    call = read_captured_call(folder)
    assert (call.kernel, call.sizes, call.dtype, call.scalars) == ("k", {"N": 100}, "float32", {"alpha": 0.5})
    spec = with_captured_call(SPEC, folder)
    maker = input_maker(spec, spec.at(call.sizes), check=True)
    np.testing.assert_array_equal(maker("x"), np.arange(100))
    assert spec.scalars[0].given(call.sizes, check=True) == 0.5
    assert missing_input(spec, spec.at({"N": 99}))  # used as a whole only


def test_the_limits_hold_and_a_folder_must_be_writable(tmp_path):
    by_count = CaptureFolder(tmp_path / "a", 2, 10**6)
    assert [by_count.write(kernel(), views(), {}) is not None for _ in range(3)] == [True, True, False]
    assert by_count.is_full
    by_size = CaptureFolder(tmp_path / "b", 9, 500)
    assert [by_size.write(kernel(), views(), {}) is not None for _ in range(2)] == [True, False]
    assert len(list((tmp_path / "b").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be captured"):
        CaptureFolder(tmp_path / "file", 1, 10**6).write(kernel(), views(), {})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kernel": "other"}, "is not 'other'"),
        ({"arrays": {"z": "z.npy"}}, "has no argument 'z'"),
        ({"arrays": {"x": "../x.npy"}}, "is not the document of a captured call"),
        ({"sizes": {"N": "4"}}, "is not the document of a captured call"),
        ({"more": 1}, "is not the document of a captured call"),
    ],
)
def test_documents_that_are_refused(tmp_path, changes, problem):
    with pytest.raises(InputError, match=problem):
        with_captured_call(SPEC, write_call(tmp_path / "call", **changes))


def test_one_of_several_calls_must_be_chosen(tmp_path):
    with pytest.raises(InputError, match=r"it has no call\.json"):
        read_captured_call(tmp_path)
    for name in ("one", "two"):
        write_call(tmp_path / name)
    with pytest.raises(InputError, match="choose one of one, two"):
        read_captured_call(tmp_path)


def test_settings(monkeypatch, tmp_path):
    assert read_settings().capture is None
    monkeypatch.setenv("AUTOTILE_CAPTURE", str(tmp_path))
    monkeypatch.setenv("AUTOTILE_CAPTURE_CALLS", "3")
    monkeypatch.setenv("AUTOTILE_CAPTURE_LIMIT_MIB", "2")
    settings = read_settings()
    assert (settings.capture, settings.capture_calls, settings.capture_limit_bytes) == (tmp_path, 3, 2 << 20)
    monkeypatch.setenv("AUTOTILE_CAPTURE_CALLS", "many")
    with pytest.raises(InputError, match="AUTOTILE_CAPTURE_CALLS"):
        read_settings()

"""Finding kernels, and the hash that detects changes."""

from pathlib import Path

import pytest

from autotile.cuda.compiler import CompileJob, compile_cubin
from autotile.errors import InputError, SpecError, UnknownKernelError
from autotile.kernel.library import kernel_names, load_kernel
from autotile.settings import data_folder


def source_hash(toml: Path) -> str:
    return load_kernel(str(toml)).source_hash


class TestFinding:
    @pytest.mark.parametrize("name", ["matmul_naive", "matmul_tiled", "sgemm_2d"])
    def test_built_in_kernels_by_name(self, name: str) -> None:
        kernel = load_kernel(name)
        assert kernel.name == name
        assert kernel.template_path == data_folder("templates") / f"{name}.cu"
        assert kernel.source == kernel.template_path.read_text()
        assert name in kernel_names()

    def test_a_path(self, scale_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert load_kernel(str(scale_toml)).template_path == scale_toml.with_suffix(".cu")
        monkeypatch.chdir(scale_toml.parent)
        for spelling in ("scale.toml", "./scale.toml", "../kernels/scale.toml"):
            assert load_kernel(spelling).name == "scale"

    def test_the_users_home(self, scale_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(scale_toml.parent))
        assert load_kernel("~/scale.toml").name == "scale"

    def test_the_users_folders_come_first(self, scale_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
        assert load_kernel("scale").template_path == scale_toml.with_suffix(".cu")
        assert load_kernel("sgemm_2d").template_path.parent == data_folder("templates")
        scale_toml.rename(scale_toml.with_name("sgemm_2d.toml"))
        assert load_kernel("sgemm_2d").name == "scale"

    def test_folders_are_looked_through_in_order(self, scale_toml: Path, tmp_path: Path) -> None:
        assert load_kernel("scale", [tmp_path / "missing", scale_toml.parent]).name == "scale"
        assert kernel_names([tmp_path / "missing", scale_toml.parent]) == ["scale"]

    def test_a_template_beside_or_in_the_sister_folder(self, scale_toml: Path, tmp_path: Path) -> None:
        (tmp_path / "templates").mkdir()
        moved = scale_toml.with_suffix(".cu").rename(tmp_path / "templates" / "scale.cu")
        assert load_kernel(str(scale_toml)).template_path == moved

    def test_the_sister_folder_from_within(
        self, scale_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "templates").mkdir()
        scale_toml.with_suffix(".cu").rename(tmp_path / "templates" / "scale.cu")
        inside = tmp_path / "spaces"
        inside.mkdir()
        scale_toml.rename(inside / "scale.toml")
        monkeypatch.chdir(inside)
        assert load_kernel("scale.toml").template_path.samefile(tmp_path / "templates" / "scale.cu")


class TestRefusals:
    def test_a_misspelt_name(self) -> None:
        with pytest.raises(UnknownKernelError, match=r"no kernel named 'sgemm_2'; did you mean sgemm_2d"):
            load_kernel("sgemm_2")

    def test_a_name_like_no_other(self) -> None:
        with pytest.raises(UnknownKernelError, match=r"known kernels: .*matmul_naive, .*path/to/mine\.toml"):
            load_kernel("quux")

    @pytest.mark.parametrize(
        "name",
        ["nowhere/x.toml", "x.toml", "folder/kernel", "scale.cu/", "~nobody_of_that_name/x.toml", "a" * 5000 + ".toml"],
    )
    def test_a_path_without_a_file(self, name: str) -> None:
        with pytest.raises(UnknownKernelError, match=r"expected the path of a \.toml file that exists"):
            load_kernel(name)

    @pytest.mark.parametrize("name", ["", "a\0b", "a" * 5000, "*", "."])
    def test_names_that_no_file_can_have(self, name: str) -> None:
        with pytest.raises(UnknownKernelError, match="no kernel named"):
            load_kernel(name)

    def test_a_missing_template(self, scale_toml: Path) -> None:
        scale_toml.with_suffix(".cu").unlink()
        with pytest.raises(SpecError, match=r"\[kernel\.template\]: there is no template .*kernels/scale\.cu nor "):
            load_kernel(str(scale_toml))

    @pytest.mark.parametrize("suffix", [".toml", ".cu"])
    def test_what_is_not_text(self, scale_toml: Path, suffix: str) -> None:
        scale_toml.with_suffix(suffix).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InputError, match="is not UTF-8 text"):
            load_kernel(str(scale_toml))

    def test_a_malformed_file_is_named(self, scale_toml: Path) -> None:
        scale_toml.write_text("[kernel\n")
        with pytest.raises(SpecError, match=r"scale\.toml"):
            load_kernel(str(scale_toml))


class TestHash:
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("\nextern", '\n// A better comment: don\'t "quote" me.\nextern'),
            ("\nextern", "\n/* More\n   than one line. */\nextern"),
            ("    const int first", "\tconst   int first"),
            ("\nextern", "\n\n\nextern"),
            ("factor * x[i];", "factor * x[i];  // doubled"),
        ],
    )
    def test_comments_and_spaces_do_not_count(self, scale_toml: Path, old: str, new: str) -> None:
        before = source_hash(scale_toml)
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text().replace(old, new))
        assert template.read_text().count(new) == 1
        assert source_hash(scale_toml) == before

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("factor * x[i]", "x[i] * factor"),
            ("++i", "i++"),
            ("\nextern", "\n#define NOTHING\nextern"),
            ("\nextern", '\n__device__ const char* at = "http://a";\nextern'),
        ],
    )
    def test_code_counts(self, scale_toml: Path, old: str, new: str) -> None:
        before = source_hash(scale_toml)
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text().replace(old, new))
        assert source_hash(scale_toml) != before

    @pytest.mark.parametrize("quote", ["const char* at = ", "const char c = '\"'; const char* at = "])
    def test_what_looks_like_a_comment_in_a_string_counts(self, scale_toml: Path, quote: str) -> None:
        template = scale_toml.with_suffix(".cu")
        hashes = set()
        for page in ("a", "b"):
            template.write_text(f'{quote}"http://{page}";\n')
            hashes.add(source_hash(scale_toml))
        assert len(hashes) == 2

    def test_the_search_space_does_not_count(self, scale_toml: Path) -> None:
        before = source_hash(scale_toml)
        scale_toml.write_text(scale_toml.read_text().replace("WORK = [1, 2, 4]", "WORK = [1, 2]"))
        assert source_hash(scale_toml) == before


class TestIncludes:
    """A header of the author is hashed wherever the compiler finds it."""

    @pytest.fixture
    def header(self, scale_toml: Path) -> Path:
        """``deep/inner.cuh`` includes ``outer.cuh``, which is in the folder of the template."""
        folder = scale_toml.parent
        (folder / "deep").mkdir()
        (folder / "deep" / "inner.cuh").write_text('#pragma once\n#include "outer.cuh"\n')
        (folder / "outer.cuh").write_text("#pragma once\n#define TWICE(x) (2 * (x))\n")
        return folder / "outer.cuh"

    @pytest.mark.parametrize(
        "line", ['#include "deep/inner.cuh"', "#include <deep/inner.cuh>", '# include  "outer.cuh"']
    )
    def test_a_change_in_it_changes_the_hash(self, scale_toml: Path, header: Path, line: str) -> None:
        template = scale_toml.with_suffix(".cu")
        template.write_text(f"{line}\n{template.read_text()}")
        before = source_hash(scale_toml)
        header.write_text(header.read_text().replace("2 * (x)", "(x) + (x)"))
        assert source_hash(scale_toml) != before
        header.write_text("// a comment\n" + header.read_text().replace("(x) + (x)", "2 * (x)"))
        assert source_hash(scale_toml) == before

    @pytest.mark.usefixtures("header")
    @pytest.mark.parametrize("line", ['#include "deep/inner.cuh"', "#include <deep/inner.cuh>"])
    def test_the_compiler_finds_the_same_files(self, scale_toml: Path, line: str) -> None:
        source = f'{line}\nextern "C" __global__ void f(int* x) {{ x[0] = TWICE(x[0]); }}'
        path = str(scale_toml.with_suffix(".cu"))
        assert compile_cubin(CompileJob(source, "hash", path, "f", "sm_90", ())).cubin

    def test_headers_that_include_each_other_end(self, scale_toml: Path) -> None:
        folder = scale_toml.parent
        (folder / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n')
        (folder / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n')
        template = scale_toml.with_suffix(".cu")
        template.write_text('#include "a.cuh"\n' + template.read_text())
        assert len(source_hash(scale_toml)) == 64

    def test_the_toolkits_headers_are_not_read(self, scale_toml: Path) -> None:
        template = scale_toml.with_suffix(".cu")
        template.write_text("#include <cuda_fp16.h>\n#include <cuda/std/array>\n" + template.read_text())
        assert len(source_hash(scale_toml)) == 64


def test_the_same_object_until_a_file_changes(tmp_path: Path) -> None:
    """Thousands of served problems share one object, and a changed file is read again."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name in ("sgemm_2d.toml", "sgemm_2d.cu"):
        source = data_folder("search_spaces" if name.endswith(".toml") else "templates") / name
        (folder / name).write_text(source.read_text())
    path = folder / "sgemm_2d.toml"
    first = load_kernel(str(path))
    assert load_kernel(str(path)) is first
    template = folder / "sgemm_2d.cu"
    template.write_text(template.read_text().replace("max(", "min("))
    template.write_text(template.read_text() + "\n__device__ int more;\n")
    second = load_kernel(str(path))
    assert second is not first
    assert second.source_hash != first.source_hash
    path.write_text(path.read_text().replace("BK = [8, 16, 32]", "BK = [8, 16]"))
    third = load_kernel(str(path))
    assert [len(p.values) for p in third.spec.parameters if p.name == "BK"] == [2]
    assert load_kernel(str(path)) is third

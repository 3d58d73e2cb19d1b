"""Finding kernels, and the hash that detects changes."""

import os
import re
import socket
from contextlib import chdir
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotile.errors import InputError, SpecError, UnknownKernelError
from autotile.kernel import sources
from autotile.kernel.library import kernel_names, load_kernel
from autotile.settings import data_folder


def source_hash(toml: Path) -> str:
    return load_kernel(str(toml)).source_hash


class TestFinding:
    def test_a_path_and_the_users_home(self, scale_toml, monkeypatch):
        assert load_kernel(str(scale_toml)).template_path == scale_toml.with_suffix(".cu")
        monkeypatch.chdir(scale_toml.parent)
        for spelling in ("scale.toml", "./scale.toml", "../kernels/scale.toml"):
            assert load_kernel(spelling).name == "scale"
        monkeypatch.setenv("HOME", str(scale_toml.parent))
        assert load_kernel("~/scale.toml").name == "scale"

    def test_the_users_folders_come_first_and_are_looked_through_in_order(self, scale_toml, tmp_path, monkeypatch):
        assert load_kernel("scale", [tmp_path / "missing", scale_toml.parent]).name == "scale"
        assert kernel_names([tmp_path / "missing", scale_toml.parent]) == ["scale"]
        monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
        assert load_kernel("scale").template_path == scale_toml.with_suffix(".cu")
        built_in = load_kernel("sgemm_2d")
        assert built_in.template_path == data_folder("templates") / "sgemm_2d.cu"
        assert (built_in.name, built_in.source) == ("sgemm_2d", built_in.template_path.read_text())
        assert {"scale", "sgemm_2d", "matmul_naive"} <= {*kernel_names()}
        scale_toml.rename(scale_toml.with_name("sgemm_2d.toml"))
        assert load_kernel("sgemm_2d").name == "scale"

    def test_a_template_in_the_sister_folder(self, scale_toml, tmp_path, monkeypatch):
        (tmp_path / "templates").mkdir()
        moved = scale_toml.with_suffix(".cu").rename(tmp_path / "templates" / "scale.cu")
        assert load_kernel(str(scale_toml)).template_path == moved
        inside = tmp_path / "spaces"  # which nothing was loaded from
        inside.mkdir()
        scale_toml.rename(inside / "scale.toml")
        monkeypatch.chdir(inside)
        assert load_kernel("scale.toml").template_path.samefile(moved)


class TestRefusals:
    PATHS = ("nowhere/x.toml", "x.toml", "folder/kernel", "scale.cu/", "~nobody_of_that_name/x.toml")

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("sgemm_2", r"no kernel named 'sgemm_2'; did you mean sgemm_2d"),
            ("quux", r"known kernels: .*matmul_naive, .*path/to/mine\.toml"),
            *((path, r"expected the path of a \.toml file that exists") for path in (*PATHS, "a" * 5000 + ".toml")),
            *((name, "no kernel named") for name in ("", "a\0b", "a" * 5000, "*", ".")),
        ],
    )
    def test_names_and_paths_of_no_kernel(self, name, said):
        with pytest.raises(UnknownKernelError, match=said):
            load_kernel(name)

    @pytest.mark.parametrize("name", ["scale", "scale.cu", "./scale.cu"])
    def test_a_file_that_has_nearly_the_name(self, name, scale_toml, monkeypatch):
        monkeypatch.chdir(scale_toml.parent)
        with pytest.raises(UnknownKernelError, match=r"did you mean (\./)?scale\.toml\?"):
            load_kernel(name)

    def test_a_missing_template_and_a_malformed_file_are_named(self, scale_toml):
        scale_toml.with_suffix(".cu").unlink()
        with pytest.raises(SpecError, match=r"\[kernel\.template\]: there is no template .*kernels/scale\.cu nor "):
            load_kernel(str(scale_toml))
        scale_toml.write_text("[kernel\n")
        with pytest.raises(SpecError, match=r"scale\.toml"):
            load_kernel(str(scale_toml))

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [("template", f'"{"a" * 300}.cu"', "no template"), ("include", f'["{"a" * 300}"]', "no folder .* of headers")],
    )
    def test_names_that_no_file_can_have(self, scale_toml, key, value, said):
        text = re.sub(r"template = .*", "", scale_toml.read_text()) if key == "template" else scale_toml.read_text()
        scale_toml.write_text(text.replace("[kernel]", f"[kernel]\n{key} = {value}"))
        with pytest.raises(SpecError, match=rf"\[kernel\.{key}\]: there is {said}"):
            load_kernel(str(scale_toml))

    @pytest.mark.parametrize("suffix", [".toml", ".cu"])
    def test_what_is_not_text(self, scale_toml, suffix):
        before, file = load_kernel(str(scale_toml)).source_hash, scale_toml.with_suffix(suffix)
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # a byte order mark is left out
        assert load_kernel(str(scale_toml)).source_hash == before
        file.write_bytes(file.read_bytes() + b"\0")
        lines = len(file.read_bytes().split(b"\n"))
        with pytest.raises(InputError, match=f"holds a NUL character in line {lines}; remove it"):
            load_kernel(str(scale_toml))
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InputError, match="is not UTF-8 text"):
            load_kernel(str(scale_toml))


class TestFormsOfIncludes:
    """What the compiler reads is hashed, however the directive is spelled."""

    @pytest.fixture
    def folder(self, scale_toml):
        return scale_toml.parent

    @pytest.mark.parametrize(
        ("line", "counts"),
        [
            ('#if __has_include("x.h")', True),
            ("#if __has_include ( <x.h> )", True),
            ("#if __has_include_next(<x.h>)", True),
            ('#if __has_include("none.h") || __has_include("x.h")', True),
            ('#if __has_inc\\\nlude(/**/"x.h")', True),
            ("#if defined(__has_include) && __has_include(HEADER)", True),
            ('#define HAS __has_include\n#if HAS("x.h")', True),
            # checks for the operator, which name no file
            ("#ifdef __has_include", False),
            ("#if defined(__has_include)", False),
        ],
    )
    def test_the_existence_of_a_file(self, scale_toml, folder, line, counts):
        scale_toml.with_suffix(".cu").write_text(f"{line}\n#define FOUND\n#endif\n")
        before = source_hash(scale_toml)
        (folder / "x.h").write_text("")
        assert (source_hash(scale_toml) != before) == counts

    MACRO = "#define HEADER {}\n#include HEADER\n"

    @pytest.mark.parametrize(
        ("text", "changed"),
        [
            (MACRO.format('"../common/x.h"'), "common/x.h"),
            (MACRO.format("STR(../common/x_##N.h)"), "common/x_8.h"),
            (MACRO.format('".hidden/x.h"'), "kernels/.hidden/x.h"),
            (MACRO.format('"deep/x.h"'), "common/below.h"),  # which it includes in turn
            (MACRO.format('"latin.h"'), "kernels/latin.h"),
            ('#include "links/a.h"\n', "kernels/links/x.h"),  # a link includes what is beside it
            *(  # trigraphs of C++14
                (f'{begin} "x.h"\n', "kernels/x.h")
                for begin in ("??=include", "#inc??/\nlude", "// a comment ??/\n*/\n#include")
            ),
        ],
    )
    def test_a_header_counts(self, scale_toml, tmp_path, folder, text, changed):
        for name in ("common", "kernels/.hidden", "kernels/deep", "kernels/links"):
            (tmp_path / name).mkdir()
        (folder / "deep" / "x.h").write_text('#include "../../common/below.h"\n')
        (folder / "deep" / "a.h").write_text('#include "x.h"\n')
        (folder / "links" / "a.h").symlink_to(folder / "deep" / "a.h")
        (folder / "latin.h").write_bytes(b"// \xe9t\xe9\n")
        scale_toml.with_suffix(".cu").write_text(text)
        hashes = {source_hash(scale_toml)}
        for content in ("#define VALUE 1\n", "#define VALUE 2\n"):
            (tmp_path / changed).write_text(content)
            hashes.add(source_hash(scale_toml))
        assert len(hashes) == 3

    def test_what_a_macro_cannot_name(self, scale_toml, folder):
        """Lists of values, databases and the files of version control may change."""
        scale_toml.with_suffix(".cu").write_text("#include HEADER\n")
        (folder / ".git").mkdir()
        (folder / "README.md").write_text("See ../../ and /usr.\n")
        before = source_hash(scale_toml)
        (folder / ".git" / "HEAD").write_text("main\n")
        (folder / "autotile.db").write_bytes(b"SQLite format 3\0")
        os.truncate(folder / "autotile.db", sources._MAX_FILE_BYTES + 1)
        (folder / "autotile.db-wal").write_bytes(b"")
        scale_toml.write_text(scale_toml.read_text() + "\n")
        (folder / "loop").symlink_to(folder)
        assert source_hash(scale_toml) == before
        (folder / "moved.h").write_text("")
        moved = source_hash(scale_toml)
        (folder / "moved.h").rename(folder / "elsewhere.h")
        assert len({before, moved, source_hash(scale_toml)}) == 3

    def test_bounds(self, scale_toml, folder, monkeypatch):
        template = scale_toml.with_suffix(".cu")
        template.write_text("#include HEADER\n")
        (folder / "x.h").write_text("int a;\n" * 100)
        for limit, message in (
            ("_MAX_TREE_ENTRIES", r"all files below .*kernels count as its source, and there are more than 1 files"),
            ("_MAX_TREE_BYTES", r"more than 0 MiB of text; name the file in the #include"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(sources, limit, 1)
                with pytest.raises(InputError, match=message):
                    source_hash(scale_toml)
        template.write_text('#include "x.h"\n')
        with (folder / "x.h").open("r+b") as file:
            file.truncate(sources._MAX_FILE_BYTES + 1)
        with pytest.raises(InputError, match=r"the included file .*x\.h is larger than 16 MiB"):
            source_hash(scale_toml)

    @pytest.fixture
    def special_files(self, folder):
        os.mkfifo(folder / "x.h")
        (folder / "zero").symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as server:
            with chdir(folder):  # the path of a socket has 107 characters at most
                server.bind("socket.h")
            yield

    @pytest.mark.parametrize(
        "text",
        [
            '#include "a.cuh"',  # which includes b.cuh, which includes a.cuh
            "#include <cuda_fp16.h>\n#include <cuda/std/array>",
            *(f'#define HEADER "{name}"\n#include HEADER' for name in ("x.h", "/dev/zero")),
            *(
                f'#include "{n}"\n#if __has_include(<{n}>)\n#endif'
                for n in ("a\0b", 5000 * "a", "", ".", "..", "self.h")
            ),
        ],
    )
    @pytest.mark.usefixtures("special_files")
    def test_circles_end_and_no_special_file_or_name_of_none_is_opened(self, scale_toml, folder, text):
        (folder / "self.h").symlink_to("self.h")
        for name, other in ("ab", "ba"):
            (folder / f"{name}.cuh").write_text(f'#pragma once\n#include "{other}.cuh"\n')
        (folder / "own.h").write_text(f"{text}\n")
        scale_toml.with_suffix(".cu").write_text(f'#include "own.h"\n{text}\n'.replace("\0", ""))  # none in a template
        assert len(source_hash(scale_toml)) == 64

    @pytest.mark.parametrize(
        "name", ["x.h", "zero", "/dev/zero", "socket.h", "/proc/self/environ", "link.h", "/etc/passwd"]
    )
    @pytest.mark.usefixtures("special_files")
    def test_what_must_not_be_included(self, scale_toml, folder, name):
        """A pipe would block the compiler, and an error shows lines of the file."""
        (folder / "link.h").symlink_to("/etc/passwd")
        scale_toml.with_suffix(".cu").write_text('\n#include "between.h"\n')
        (folder / "between.h").write_text(f'// one\n// two\n#include "{name}"\n')
        with pytest.raises(InputError, match=rf"between\.h:3: '{name}' is .*; (include a regular|copy it into)"):
            source_hash(scale_toml)

    @pytest.mark.parametrize("around", [True, False])
    def test_hidden_files_and_the_home_folder_are_out_of_reach(self, scale_toml, folder, monkeypatch, around):
        name = ".ssh/key" if around else "notes.txt"
        if not around:
            monkeypatch.setenv("HOME", str(folder.parent))
        (folder.parent / name).parent.mkdir(exist_ok=True)
        (folder.parent / name).write_text("secret")
        scale_toml.with_suffix(".cu").write_text(f'#include "../{name}"\n')
        with pytest.raises(InputError, match=r"scale\.cu:1: .* is outside of the kernel's folder"):
            source_hash(scale_toml)


class TestNormalizing:
    """Code that differs for the compiler differs in the hash."""

    DIFFERENT = (
        ("#define A 1 \\\n\nint b;", "#define A 1 \\\nint b;"),  # a blank line ends the macro
        ("#define A 1 \\\n// c\nint b;", "#define A 1 \\\nint b;"),
        ("#define A 1 \\ \nint b;", "#define A 1 \\\nint b;"),  # not a continuation in NVRTC
        ("ab\\\ncd", "ab\\\n  cd"),
        ('R"(a\n  b)"', 'R"(a\nb)"'),
        ('R"x(a)" // b)x"', 'R"x(a)" // c)x"'),
        ('R"(a\\\nb)"', 'R"(ab)"'),
        ("1'000; '\"'; \"//a\"", "1'000; '\"'; \"//b\""),
        ('"\\\\\n"//a"', '"\\\\\n"//b"'),
        ("// a ??/\nb", "// a ??/\nc"),
        ("int a = b * c;", "int a = c * b;"),
        ("int a;", "#define NOTHING\nint a;"),
        ('const char c = \'"\'; const char* at = "http://a";', 'const char c = \'"\'; const char* at = "http://b";'),
    )
    EQUAL = (
        ("int a; // b \\\n c\nint d;", "int a;\nint d;"),
        ("/\\\n/ b\nint d;", "int d;"),
        ("/\\\n* b *\\\n/int d;", "int d;"),
        ("int a;\n/* unclosed", "int a;"),
        ("#define A(x) \\\n    x\n", "#define A(x) \\\n  x\n"),
        ("int a;", '// A better comment: don\'t "quote" me.\nint a;'),
        ("int a;", "/* More\n   than one line. */\nint a;"),
        ("    const int a;", "\tconst   int a;"),
        ("int a;\nint b;", "int a;\n\n\nint b;"),
    )

    @pytest.mark.parametrize(("one", "other", "hashes"), [*((*p, 2) for p in DIFFERENT), *((*p, 1) for p in EQUAL)])
    def test_code_counts_and_comments_and_spaces_do_not(self, one, other, hashes):
        assert len({sources.OwnSources(Path("none/x.cu"), text).digest for text in (one, other)}) == hashes

    @pytest.mark.parametrize(
        "unit",
        [
            "/*", "/", '"', "'", "\\", "\\\n", "/\\\n", '"\\\n', "1\\\n", "1'", "1.", "'1", 'R"x(', 'R"', 'u8R"(',
            "*\\\n", "#include <", "#include", "%:", "__has_include(<", "__has_include", "defined ", "include <a//",
            "??/", "\r",
        ],
    )  # fmt: skip
    def test_time_is_linear(self, unit):
        """It takes a fraction of a second; quadratic time would exceed the minutes that a test has."""
        sources.OwnSources(Path("none/x.cu"), "'1' " + unit * (700_000 // len(unit)))

    @given(st.lists(st.sampled_from(["/", "*", '"', "'", "\\", "\n", "\\\n", "a", "1", ".", " ", "//", "/*", "*/"])))
    @example(['"', "\\", "\\\n", '"', "//"])
    @example(["1", "'", "1", '"', "'", "//"])
    def test_comments_are_those_of_the_standard(self, pieces):
        text = "".join(pieces)
        assert sources.strip_comments(text).replace("\\\n", "") == _phases_2_and_3(text)


def _phases_2_and_3(text: str) -> str:
    """Splice lines, then replace comments, by the letter of C++17 [lex.phases]."""
    text, out, at = text.replace("\\\n", ""), "", 0
    while at < len(text):
        if text.startswith("//", at):
            at = (text + "\n").index("\n", at)
            out += " "
        elif text.startswith("/*", at):
            end = text.find("*/", at + 2)
            at = end + 2 if end >= 0 else len(text)
            out += " "
        else:
            word = re.compile(r"\.?\d(?:[\w.]|'\w)*|\w+|(['\"])(?:\\[^\n]|(?!\1)[^\\\n]|\\)*\1?|.", re.DOTALL)
            match = word.match(text, at)
            out += match[0]
            at = match.end()
    return out


def test_the_same_object_until_a_file_changes(scale_toml):
    """Thousands of served problems share one object, and a changed file is read again."""
    first = load_kernel(str(scale_toml))
    assert load_kernel(str(scale_toml)) is first
    template = scale_toml.with_suffix(".cu")
    template.write_text(template.read_text() + "\n__device__ int more;\n")
    second = load_kernel(str(scale_toml))
    assert second is not first
    assert second.source_hash != first.source_hash
    scale_toml.write_text(scale_toml.read_text().replace("WORK = [1, 2, 4]", "WORK = [1, 2]"))
    third = load_kernel(str(scale_toml))
    assert [len(p.values) for p in third.spec.parameters if p.name == "WORK"] == [2]
    assert third.source_hash == second.source_hash  # the search space is no part of it
    assert load_kernel(str(scale_toml)) is third

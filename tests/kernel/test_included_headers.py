"""Headers count, however they are named and wherever: the key of results, the key of the cubin, and the code."""

import os
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from spec_samples import make_spec

from autotile.cuda.compiler import CompileJob, CubinCache, compile_job
from autotile.cuda.toolchain import installed_nvcc
from autotile.errors import InputError
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.sources import OwnSources, check_unchanged

_SPEC = make_spec({"TILE": [32, 64], "NAME": ["x", "y"]}, launch={"block": ["TILE"]}).text
_ENTRY = 'extern "C" __global__ void k(float* x) { x[0] = VALUE; }\n'


@dataclass
class Own:
    """A kernel whose header is in a further folder."""

    toml: Path
    folder: Path

    include: str
    """Line of the search-space file that names the folder."""

    def write(self, text: str, build: str = "") -> None:
        self.toml.write_text(_SPEC.replace("[problem]", f"{build}\n{self.include}\n[problem]"))
        self.toml.with_suffix(".cu").write_text(text + "\n" + _ENTRY)

    @property
    def kernel(self) -> Kernel:
        return load_kernel(str(self.toml))

    def job(self, **config: object) -> CompileJob:
        kernel = self.kernel
        return compile_job(kernel, {**kernel.spec.default, **config}, kernel.spec.at(), "sm_90")

    def notices(self, path: Path, content: str, **config: object) -> bool:
        """Write a file, and return True if what is compiled has another key then."""
        before = self.job(**config).key
        path.write_text(content)
        return self.job(**config).key != before


@pytest.fixture
def own(request, tmp_path, monkeypatch):
    """``x.h`` and others beside the kernel, or in a folder of which its file, or the environment, has the path."""
    (tmp_path / "own" / "kernels").mkdir(parents=True)
    place = getattr(request, "param", "include")
    folder = tmp_path / ("own/kernels" if place == "beside" else "elsewhere/headers")
    for name in ("deep/x.h", "x.h", "x_32.h"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#define VALUE 1\n")
    monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path / "cache"))
    toml = tmp_path / "own" / "kernels" / "k.toml"
    if place == "AUTOTILE_INCLUDE":
        monkeypatch.setenv("AUTOTILE_INCLUDE", str(folder))
    return Own(toml, folder, f'include = ["{folder}"]' if place == "include" else "")


_TEXTS = [
    '#define H "x.h"\n#include H',
    "#define H <x.h>\n#include H",
    "#define NAMED(x) #x\n#include NAMED(x.h)",
    "#define STR(x) #x\n#define NAMED(x) STR(x)\n#define BASE deep\n#include NAMED(BASE/x.h)",
    "#define JOIN(a, b) <a##b>\n#include JOIN(x., h)",
    "#define STR(x) #x\n#define NAMED(x) STR(x)\n#define PASTE(a, b) a##b\n#define P(a, b) PASTE(a, b)\n"
    "#include NAMED(P(x_, TILE).h)",
    "#define STR(x) #x\n#define NAMED(x) STR(x)\n#include NAMED(NAME.h)",  # chosen by a parameter
    "#include DEFINED",  # a macro of the search-space file
    '%: /* a */ define H "x.h"\n%:include/**/H',
    '#define H "x.h"\n#inc\\\nlude \\\nH',
    '#include "sets_h.h"\n#include H',  # defined in a header
    '#include "by_macro.h"',  # a header of the folder includes by a macro of its own
    '#define CONFIG "x.h"\n#include <asks.h>',  # and by one of the template
    '#if __has_include("x.h")\n#define H "x.h"\n#include H\n#endif',
    '#define H "x.h"\n#if __has_include(H)\n#include H\n#endif',
    "#if TILE == 32\n#define H <x.h>\n#endif\n#ifdef H\n#include H\n#endif",
    '#define H "x.h"\n#include_next H',
    '#include "literal.h"',
    '#include "digraph.h"',
    '#include "comment.h"',
    '#include "continued.h"',
    '#include "guarded.h"',
    '#include "next.h"',
]
_FORMS = [
    '#include/* " */"x.h"',
    '#include /*\n*/ <x.h> // "y.h"',
    '/* two\n lines */ # /* more */ include /**/ "x.h"',
    '#include \\\n"x.h"',
    "#include <x\\\n.h>",
    '/\\\n* #include "none.h" *\\\n/ #include "x.h"',
    '#include_next "x.h"',
    "#include_next <x.h>",
    '\f#\vinclude\t"x.h"',
    '#include "continued.h"',
    '#include "deep/inner.h"',
    "#include <deep/inner.h>",
    "#include <deep//x.h>",
    '#define NUMBER 1\'000\n#define QUOTE \'"\'\n#define URL "/*"\n#include "x.h" // */',
    'inline constexpr char text[] = R"(/*)";\n#include "x.h"\nstatic_assert(sizeof(text) == 3 /* */);',
    'inline constexpr char text[] = R"a(\\")"/*)a";\n#include "x.h"\nstatic_assert(sizeof(text) == 7 /* */);',
]


NVCC = pytest.mark.skipif(not installed_nvcc(), reason="needs nvcc")


@pytest.mark.parametrize(
    ("own", "text", "build"),
    [
        *product(["beside"], [*_FORMS, *_TEXTS[:3], _TEXTS[4], "#include DEFINED"], [""]),
        *product(["include"], _TEXTS, [""]),
        *product(["AUTOTILE_INCLUDE"], [_TEXTS[0], _TEXTS[3], '#include "next.h"'], [""]),
        pytest.param("include", _TEXTS[0], 'compiler = "nvcc"', marks=NVCC),
    ],
    indirect=["own"],
)
def test_a_changed_header_is_compiled(own, text, build):
    headers = {
        "sets_h.h": '#define H "x.h"\n',
        "by_macro.h": '#define MINE "x.h"\n#include MINE\n',
        "asks.h": "#include CONFIG\n",
        "literal.h": "#pragma once\n# include <x.h>\n",
        "digraph.h": '%:include "x.h"\n',
        "comment.h": '/* a\n comment */ # /**/ include /* b */ "x.h" // "y.h"\n',
        "continued.h": '#inc\\\r\nlude "x\\\r\n.h"\r\n',
        "guarded.h": '#if __has_include("x.h")\n#  define SEEN\n#endif\n#ifdef SEEN\n#include "x.h"\n#endif\n',
        "next.h": "#include_next <x.h>\n",
        "deep/inner.h": '#pragma once\n#include "x_outer.h"\n',
        "x_outer.h": "#define VALUE 1\n",
    }
    for name, content in headers.items():
        (own.folder / name).write_text(content)
    own.write(text, f"defines = {{ DEFINED = '<x.h>' }}\n{build}")
    cache = CubinCache(own.toml.parents[1] / "cubins", 1 << 30)
    first = own.job()
    before = cache.get_or_compile(first)
    assert own.job().key == first.key
    for header in own.folder.rglob("x*.h"):
        header.write_text("#define VALUE 2\n")
    second = own.job()
    assert own.kernel.source_hash == second.source_hash != first.source_hash
    assert second.key != first.key
    assert cache.get_or_compile(second).cubin_hash != before.cubin_hash
    for header in own.folder.rglob("x*.h"):
        header.write_text("// a comment\n#define VALUE 2\n")
    is_beside = own.folder == own.toml.parent  # in further folders, comments count
    assert (own.kernel.source_hash == second.source_hash) == is_beside


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # chosen by a parameter: the configuration that is compiled need not be the default
        ("y.h", "#define STR(x) #x\n#define NAMED(x) STR(x)\n#include NAMED(NAME.h)"),
        ("new.h", '#define H "new.h"\n#if __has_include(H)\n#define VALUE 2\n#else\n#define VALUE 1\n#endif'),
    ],
)
def test_a_header_that_appears(own, name, text):
    own.write(text)
    assert own.notices(own.folder / name, "#define VALUE 3\n", NAME="y")


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ('#include "reaches.h"', '#include "../outside.h"'),
        ('#include "reaches.h"', '#define O "../outside.h"\n#include O'),
        ('#include "reaches.h"', '#include "{}"'),
        ('#include "reaches.h"', "#include <linked.h>"),
        ("#include DEFINED", ""),  # a macro of the search-space file may name a header that no folder holds
    ],
)
def test_a_header_outside_of_the_folder(own, text, header):
    outside = own.folder.parent / "outside.h"
    outside.write_text("#define VALUE 1\n")
    (own.folder / "reaches.h").write_text(header.format(outside) + "\n")
    if "linked" in header:
        (own.folder / "linked.h").symlink_to(outside)
    own.write(text, f"defines = {{ DEFINED = '<{outside}>' }}" if "DEFINED" in text else "")
    assert own.notices(outside, "#define VALUE 2\n")


@pytest.mark.parametrize(
    "text", ['#include "x.h"', "#include <x.h> // as in #include OTHER", '/* #include H */#include "x.h"']
)
def test_other_headers_do_not_count_where_all_names_are_literal(own, text):
    (own.folder / "x.h").write_text("// See #include MACRO, and include what you use.\n#define VALUE 1\n")
    own.write(text)
    assert not own.notices(own.folder / "deep" / "x.h", "#define VALUE 2\n")
    assert not own.notices(own.folder / "other.h", "")


def test_the_key_of_literal_names_stays(tmp_path):
    """Results are stored under it. It was computed before names by macros were followed into further folders."""
    folder = tmp_path / "headers"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.h").write_text('#pragma once\n// include all\n#include "deep/b.h"\n#include <c.h>\n')
    (folder / "deep" / "b.h").write_text("#if __has_include(<c.h>)\n#include <c.h>\n#endif\n")
    (folder / "c.h").write_text("#pragma once\n#define C 1\n")
    digest = OwnSources(tmp_path / "k.cu", '#include "a.h"\n#include <c.h>\n__global__ void k() {}\n', [folder]).digest
    assert digest == "e8304343be245de9b4cbfce33a5202e8e415176e96bf7b3449371b1bc6f13580"


def test_a_changed_header_is_noticed_at_once(tmp_path):
    """A file system may give two changes the same time."""
    header = tmp_path / "headers" / "x.h"
    header.parent.mkdir()
    found, now_ns = set(), time.time_ns()
    for value in range(10):
        header.write_text(f"#define VALUE {value}\n")
        os.utime(header, ns=(now_ns, now_ns))
        found.add(OwnSources(tmp_path / "k.cu", '#include "x.h"\n', [header.parent]).digest)
    assert len(found) == 10


@pytest.mark.parametrize("text", ["#define VALUE 2\n", "neither C nor C++\n"])
def test_a_header_that_changes_while_a_session_runs_is_not_compiled_as_what_it_was(own, text):
    own.write("#include <x.h>")
    cache, job = CubinCache(own.folder.parent / "cubins", 1 << 30), own.job()
    for header in own.folder.rglob("x.h"):
        header.write_text(text)
    with pytest.raises(InputError, match=r"x\.h has changed since the kernel was read"):
        cache.get_or_compile(job)
    assert cache.get(job.key) is None
    beside = own.folder.parent / "k.h"
    beside.write_text("int k;")
    headers = OwnSources(beside.with_suffix(".cu"), '#include "k.h"\n').headers
    beside.write_text("int  k; // a comment")
    check_unchanged(headers)
    beside.write_text(text)
    with pytest.raises(InputError, match=r"k\.h has changed"):
        check_unchanged(headers)


def test_files_for_another_machine_and_limits_of_a_folder_of_headers(own, monkeypatch):
    """Compilers of other machines get every file that a macro may name."""
    own.write('#define H "x.h"\n#include H')
    kernel = own.kernel
    assert own.folder / "x.h" in OwnSources(kernel.template_path, kernel.source, kernel.include_folders).included
    own.write("#include DEFINED", "defines = { DEFINED = '<x.h>' }")
    for limit in ("_MAX_LIBRARY_ENTRIES", "_MAX_LIBRARY_BYTES"):
        with monkeypatch.context() as patch:
            patch.setitem(OwnSources.__init__.__globals__, limit, 1)
            with pytest.raises(InputError, match=r"all files below .*headers count as its source.*name the file"):
                own.kernel  # noqa: B018


@pytest.mark.parametrize("text", ['#embed "data.bin"', "#embed <data.bin> limit(4)", '#define D "data.bin"\n#embed D'])
@pytest.mark.parametrize("place", ["own/kernels", "elsewhere/headers"])
def test_embedded_data(own, tmp_path, text, place):
    """Every byte counts, also what would be a comment."""
    data = tmp_path / place / "data.bin"
    data.write_bytes(b"\0// one\n")
    own.write(text)
    assert own.notices(data, "\0// two\n")

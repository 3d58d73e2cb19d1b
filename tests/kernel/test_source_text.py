"""CUDA C++ as text: functions and their parameters, host code, entries, signatures, and macros of the parameters."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import make_spec

from autotile.core.model import Resources
from autotile.cuda.compiler import CachedCubin, CompiledFunction, check_signatures
from autotile.errors import InputError, SpecError
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.sources import GlobalFunction, global_functions, signature_fault, without_host_functions
from autotile.kernel.spec import is_entry

SOURCES = Path(__file__).with_name("sources")


class TestGlobalFunctions:
    SOURCE = (SOURCES / "functions.cu").read_text()
    WHOLE = GlobalFunction("g", (), (("n", "int"),))

    def test_functions_and_their_parameters(self):
        found = {function.name: function for function in global_functions(self.SOURCE)}
        assert list(found) == ["plain", "tiled", "none", "nested", "split"]
        plain = [("x", "const float*"), ("y", "float*"), ("n", "int")]
        assert found["plain"] == GlobalFunction("plain", (), tuple(plain))
        assert found["tiled"].template == ("int B", "typename T = std::pair<float, int>")
        assert list(found["tiled"].parameters[1::2]) == [("n", "unsigned long long"), ("b", "float4")]
        assert found["none"].parameters == ()
        assert [name for name, _ in found["nested"].parameters] == ["s", "map", "", "x", "table"]
        assert [kind.endswith("*") for _, kind in found["nested"].parameters] == [False, False, False, True, True]
        assert found["split"].parameters == (("a", "int"),)

    @pytest.mark.parametrize(
        "text",
        ["", "__global__", "__global__ void f(", "__global__ void f(((", "template < typename T", "}" * 99, "/*", '"'],
    )
    def test_what_is_not_whole_is_no_function(self, text):
        assert global_functions(text) == []
        if text not in ("/*", '"'):  # which take the rest of the source
            assert global_functions(f"{text}; __global__ void g(int n) {{}}") == [self.WHOLE]
        assert global_functions(f"__global__ void g(int n) {{}}\n{text}") == [self.WHOLE]

    @given(
        st.lists(
            st.sampled_from([*"(){}<>,;=*&\"'\\\n", "__global__ ", "template ", "void f", "int n", "//", "/*", "*/"])
        )
    )
    def test_any_text_is_read(self, parts):
        text = "".join(parts)
        for function in global_functions(text):
            assert function.name in text
            assert all(name in text for name, _ in function.parameters)
        assert self.WHOLE in global_functions(f"__global__ void g(int n) {{}}\n{text}")


class TestHostCode:
    KEPT = (SOURCES / "device_code.cu").read_text()
    HOST = (SOURCES / "host_code.cu").read_text()

    def test_host_functions_are_blanked_and_lines_kept(self):
        blank = "".join(" " * len(line) + "\n" for line in self.HOST.splitlines())
        assert without_host_functions(self.KEPT + self.HOST + self.KEPT) == self.KEPT + blank + self.KEPT

    def test_what_is_not_balanced_and_directives_in_host_functions_stay(self):
        for source in ("int main() {", "}", "#if A\nvoid f() {\n#else\nvoid f(int) {\n#endif\n}\n"):
            assert without_host_functions(source) == source
        source = "int main() {\n#ifdef A\n  f();\n#endif\n}\n"
        assert without_host_functions(source).split() == ["#ifdef", "A", "#endif"]


ENTRIES = (
    "softmax", "space::inner::softmax", "::softmax", "softmax<>", "softmax<BLOCK, float>", "softmax <'a'>",
    "n::softmax<BLOCK * 2, n::Pair<float, 3>, (A > B), sizeof(float[4])>",
    "(void (*)(float*, const int&))softmax", "(void(*)(float *))n::softmax<4>",
)  # fmt: skip
NO_ENTRIES = (
    "", "a-b", "4th", "softmax<BLOCK", "softmax<BLOCK>; int x", "softmax<BLOCK)", "softmax<(BLOCK>", 'softmax<"a">',
    "softmax<4>\n#include <x>", "softmax /* a */", "softmax<4> // >", "softmax()", "(softmax)",
    "(int (*)(float*))softmax", "a" * 1001, "softmäx", "softmax<{4}>", "a<b>) + c<d>",
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES + NO_ENTRIES)
def test_names_of_functions(entry):
    assert is_entry(entry) == (entry in ENTRIES)


class TestSignatures:
    SPEC = make_spec(
        {"B": [32, 64]},
        more={
            "kernel": {"entry": "inner::scale<B>"},
            "arguments.a": {"scalar": "float64", "value": 2.0},
            "arguments.N": {"scalar": "int32", "value": "N"},
        },
    )
    SOURCE = "namespace inner { template <int B> __global__ void scale(float* x, double const a, int n) {} }"

    @pytest.mark.parametrize(
        ("taken", "more", "said"),
        [
            ((8, 8, 4), "", ""),
            (None, "", ""),
            ((8, 8), "", "takes 2 parameters, but 3 are declared as arguments; remove N from"),
            ((8, 4, 4), "", "the argument a has 8 bytes, but parameter 2 of inner::scale<B> (double const a) has 4"),
            ((4, 8, 4), "", "the argument X has 8 bytes"),
            ((), "", "remove X from"),
            ((8, 8, 4, 4), "", "add parameter 4 of inner::scale<B> to [arguments]"),
            ((8, 8, 4, 16), ", const float4 b", "add parameter 4 of inner::scale<B> (const float4 b) to [arguments]"),
        ],
    )
    def test_faults(self, taken, more, said):
        source = self.SOURCE.replace("int n", f"int n{more}")
        found = signature_fault(self.SPEC, self.SPEC.steps[0], "float32", taken, source)
        assert said in found
        assert bool(said) == bool(found)

    def test_the_error_names_the_file(self):
        taken = {self.SPEC.entry: CompiledFunction("scale", Resources(8, 0, 0, 0, 0), (8,))}
        kernel = Kernel(self.SPEC, self.SOURCE, Path("sample.cu"), "")
        with pytest.raises(SpecError, match=r"sample\.toml.*arguments"):
            check_signatures(kernel, "float32", CachedCubin(Path("x.cubin"), "", taken))


OVERRIDING = (
    "#define THREADS 128",
    " # define THREADS",
    "#ifdef X\n#endif\n#define THREADS 128",
    "#define THREADS(x) x",
)
TILE = "template <int WORK> struct Tile {};\n"
HARMLESS = (
    "#ifndef THREADS\n#define THREADS 128\n#endif",
    "#if !defined(THREADS)\n#  define THREADS 128\n#endif",
    "// #define THREADS 128",
    "/*\n#define THREADS 128\n*/",
    "#define THREADS_Y 128\n#define N_THREADS (2 * THREADS)",
    "template <int N> struct Tile {};\n#if WORK > 1 && N_WORK\n#endif",
)


@pytest.mark.parametrize(
    ("lines", "works", "said"),
    [
        *((lines, "[1, 2, 4]", "#define THREADS in the") for lines in OVERRIDING),
        *((lines, "[1, 2, 4]", "") for lines in HARMLESS),
        ("#define WORK 1", "[1, 2, 4]", "#define WORK in the"),
        ("#define WORK 1", "[1]", ""),  # its only value once more
        (f"{TILE}#ifndef WORK\n#endif", "[1, 2, 4]", "WORK is no macro"),
        (f"{TILE}#if 0\n#elif 1 && \\\n WORK > 2\n#endif", "[1, 2, 4]", "WORK is no macro"),
        (f'{TILE}#include "tests.h"', "[1, 2, 4]", "WORK is no macro"),
    ],
)
def test_a_parameter_that_the_template_defines(scale_toml, lines, works, said):
    template = scale_toml.with_suffix(".cu")
    template.write_text(f"{lines}\n{template.read_text()}")
    template.with_name("tests.h").write_text("#ifdef WORK\n#endif\n")
    scale_toml.write_text(scale_toml.read_text().replace("WORK = [1, 2, 4]", f"WORK = {works}"))
    overrides = r" template overrides .* of (\w+); .* between #ifndef \2|, .* test it by #if; rename"
    with pytest.raises(InputError, match=f"{said}({overrides})") if said else nullcontext():
        assert load_kernel(scale_toml).name == "scale"


def test_a_sum_for_a_buffer_of_one_element_and_a_reference_of_several_lines(scale_toml):
    text = scale_toml.read_text().replace('shape = ["n"], access = "out"', 'shape = [1], access = "out"')
    with pytest.raises(SpecError, match="shape"):
        parse_spec(text, "x.toml")
    with pytest.raises(SpecError, match=r"write reshape\(\.\.\., 1\)"):
        parse_spec(text.replace('"factor * x"', '"sum(x)"'), "x.toml")
    parse_spec(text.replace('"factor * x"', '"reshape(sum(x), 1)"'), "x.toml")
    text = scale_toml.read_text().replace('"factor * x"', '"""\n  t = factor * x;\n  t\n"""')
    assert parse_spec(text, "x.toml").reference.outputs["y"].text == "t = factor * x;   t"

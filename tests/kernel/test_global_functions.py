import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.kernel.sources import FunctionParameter, GlobalFunction, global_functions

SOURCE = """
// __global__ void commented(int x);
#define KERNEL __global__ void macro(int y)
/* __global__ void too(int x); */
extern "C" __global__ void __launch_bounds__(BM * (BN / 2), 2)
plain(const float* __restrict__ x, float *y, int n) { const char* s = "__global__ void text(int)"; }
template <int B, typename T = std::pair<float, int>>
__global__ __launch_bounds__(B) void tiled(T const* const x, unsigned long long n, T (&a)[4], float4 b = {1, 2});
namespace n { __global__ void none(void) {} }
template <class T> struct S {};
__global__ void nested(S<float> s, const __grid_constant__ Map map, int, float x[16], int* table[]);
__global__
void
__launch_bounds__(32)
split(int
  a)
{ }
__global__ void unclosed(int a
"""


def test_functions_and_their_parameters() -> None:
    found = {function.name: function for function in global_functions(SOURCE)}
    assert list(found) == ["plain", "tiled", "none", "nested", "split"]
    assert found["plain"] == GlobalFunction(
        "plain",
        (),
        (FunctionParameter("x", "const float*"), FunctionParameter("y", "float*"), FunctionParameter("n", "int")),
    )
    assert found["tiled"].template == ("int B", "typename T = std::pair<float, int>")
    assert [(p.name, p.type) for p in found["tiled"].parameters][1::2] == [("n", "unsigned long long"), ("b", "float4")]
    assert found["none"].parameters == ()
    assert [p.name for p in found["nested"].parameters] == ["s", "map", "", "x", "table"]
    assert [p.type.endswith("*") for p in found["nested"].parameters] == [False, False, False, True, True]
    assert found["split"].parameters == (FunctionParameter("a", "int"),)


WHOLE = GlobalFunction("g", (), (FunctionParameter("n", "int"),))


@pytest.mark.parametrize(
    "text",
    ["", "__global__", "__global__ void f(", "__global__ void f(((", "template < typename T", "}" * 99, "/*", '"'],
)
def test_what_is_not_whole_is_no_function(text: str) -> None:
    assert global_functions(text) == []
    if text not in ("/*", '"'):  # which take the rest of the source
        assert global_functions(f"{text}; __global__ void g(int n) {{}}") == [WHOLE]
    assert global_functions(f"__global__ void g(int n) {{}}\n{text}") == [WHOLE]


@given(
    st.lists(st.sampled_from([*"(){}<>,;=*&\"'\\\n", "__global__ ", "template ", "void f", "int n", "//", "/*", "*/"]))
)
def test_any_text_is_read(parts: list[str]) -> None:
    """No text is an error, and every name and parameter that is found stands in it."""
    text = "".join(parts)
    for function in global_functions(text):
        assert function.name in text
        assert all(parameter.name in text for parameter in function.parameters)
    assert WHOLE in global_functions(f"__global__ void g(int n) {{}}\n{text}")

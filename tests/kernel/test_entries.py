import pytest

from autotile.kernel.spec import is_entry


@pytest.mark.parametrize(
    "entry",
    [
        "softmax",
        "space::inner::softmax",
        "::softmax",
        "softmax<>",
        "softmax<BLOCK, float>",
        "n::softmax<BLOCK * 2, n::Pair<float, 3>, (A > B), sizeof(float[4])>",
        "(void (*)(float*, const int&))softmax",
        "(void(*)(float *))n::softmax<4>",
        "softmax <'a'>",
    ],
)
def test_names(entry: str) -> None:
    assert is_entry(entry)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "a-b",
        "4th",
        "softmax<BLOCK",
        "softmax<BLOCK>; int x",
        "softmax<BLOCK)",
        "softmax<(BLOCK>",
        'softmax<"a">',
        "softmax<4>\n#include <x>",
        "softmax /* a */",
        "softmax<4> // >",
        "softmax()",
        "(softmax)",
        "(int (*)(float*))softmax",
        "a" * 1001,
        "softmäx",
        "softmax<{4}>",
        "a<b>) + c<d>",
    ],
)
def test_what_is_no_name(entry: str) -> None:
    assert not is_entry(entry)

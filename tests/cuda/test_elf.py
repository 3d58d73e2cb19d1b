import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotile.cuda.compiler import CompileJob, compile_cubin, parameter_bytes

SOURCE = """
struct alignas(64) Map { char bytes[128]; };
struct Three { float a; double b; char c; };
template <class T> __global__ void k(T* x, int n, char c, Three s, const __grid_constant__ Map m, T d) {
    x[n] = c + s.a + m.bytes[3] + d;
}
extern "C" __global__ void none() {}
"""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_parameters_of_compiled_functions(architecture: str) -> None:
    job = CompileJob(SOURCE, "hash", "/nowhere/x.cu", "k<double>", architecture, (), ("none", "k<int>"))
    functions = compile_cubin(job).functions
    assert functions["k<double>"].parameter_bytes == (8, 4, 1, 24, 128, 8)
    assert functions["k<int>"].parameter_bytes == (8, 4, 1, 24, 128, 4)
    assert functions["none"].parameter_bytes == ()


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return compile_cubin(CompileJob(SOURCE, "hash", "/nowhere/x.cu", "k<int>", "sm_90", ())).cubin


@given(at=st.integers(0, 4000), byte=st.integers(0, 255), length=st.integers(0, 9000))
def test_a_damaged_file_has_unknown_or_few_parameters(cubin: bytes, at: int, byte: int, length: int) -> None:
    damaged = bytearray(cubin)
    damaged[min(at, len(cubin) - 1)] = byte
    found = parameter_bytes(bytes(damaged[:length]), "_Z1kIiEvPT_ic5Three3MapS0_")
    assert found is None or len(found) < 1000

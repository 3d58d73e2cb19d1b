from autotile.kernel.sources import without_host_functions

KEPT = """#include <vector>
#define DEV static __device__
#define KERNEL(name) __global__ void name
using namespace std;
namespace a { namespace {
DEV float macro(float x) { return x; }
constexpr int div_up(int a, int b) { return (a + b - 1) / b; }
} }
struct P { int n; __device__ int get() const { return n; } P(int m) : n(m) {} };
template <class T, int N = (3 > 2)> struct Op { __device__ T operator()(T a) const { return a; } };
extern "C" {
__global__ void plain(float* x) { if (x) { x[0] = 1; } }
}
KERNEL(by_macro)(float* x) { x[0] = 1; }
template <int B> __global__ void __launch_bounds__(B) k(float* x, P p) { x[0] = p.n; }
template __global__ void k<4>(float*, P);
__host__ __device__ inline float both(float x) { return x; }
static const char* text = "int main() {";
const int table[] = {1, 2, (3)};
static_assert(sizeof(int) == (4), "size");
auto lambda = [] __device__(int x) { return x; };
"""

HOST = """
void run(std::vector<float>& v);
static double seconds() { return 0; }
template <typename T> void launch(T* x) { k<4><<<1, 32>>>(x, P{1}); }
int main(int argc, char** argv)
{
    std::vector<float> h(10); /* } */
    std::cout << "}" << '}' << std::endl; // }
    return 0;
}
inline std::vector<float> make(int n = 3) { return std::vector<float>(n); }
"""


def test_host_functions_are_blanked_and_lines_kept() -> None:
    source = KEPT + HOST + KEPT
    found = without_host_functions(source)
    assert found == KEPT + "".join(" " * len(line) + "\n" for line in HOST.splitlines()) + KEPT


def test_directives_in_host_functions_stay() -> None:
    source = "int main() {\n#ifdef A\n  f();\n#endif\n}\n"
    assert without_host_functions(source).split() == ["#ifdef", "A", "#endif"]


def test_what_is_not_balanced_stays() -> None:
    for source in ("int main() {", "}", "#if A\nvoid f() {\n#else\nvoid f(int) {\n#endif\n}\n"):
        assert without_host_functions(source) == source

struct alignas(64) Map { char bytes[128]; };
struct Three { float a; double b; char c; };
template <class T> __global__ void k(T* x, int n, char c, Three s, const __grid_constant__ Map m, T d) {
    x[n] = c + s.a + m.bytes[3] + d;
}
extern "C" __global__ void __launch_bounds__(96) none() {}

template <int N, unsigned long long ID> struct Tree {
    static constexpr unsigned leaves = Tree<N - 1, 2 * ID>::leaves + Tree<N - 1, 2 * ID + 1>::leaves;
};
template <unsigned long long ID> struct Tree<0, ID> { static constexpr unsigned leaves = 1; };
extern "C" __global__ void fill(unsigned* x) { x[0] = Tree<DEPTH, 1>::leaves; }

// Compiles a CUDA kernel for the CPU; cuda_on_cpu.cpp runs it. It includes little, as each configuration compiles it.
//
//     g++ -std=c++17 -DKERNEL_FILE='"sgemm_2d.cu"' -DENTRY=sgemm_2d -DBM=128 ... kernel_on_cpu.cpp cuda_on_cpu.o

#include "cuda_on_cpu.h"

#include <cstdlib>
#include <tuple>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("block_memory")))

template <typename T>
static T min(T a, T b)
{
    return b < a ? b : a;
}

#include KERNEL_FILE

template <typename T>
static T parse_argument(const char* text)
{
    if constexpr (std::is_pointer_v<T>)
        return static_cast<T>(guarded_buffer(text));
    else
        return static_cast<T>(std::atof(text + 1));
}

template <typename... Parameters>
struct Arguments {
    static constexpr int count = sizeof...(Parameters);
    std::tuple<Parameters...> values;

    explicit Arguments(void (*)(Parameters...)) {}

    void parse(char** texts)
    {
        values = {parse_argument<Parameters>(*texts++)...};  // in braces, from left to right
    }
};

static Arguments arguments(ENTRY);
const int parameter_count = arguments.count;
void parse_arguments(char** texts) { arguments.parse(texts); }
void run_kernel() { std::apply(ENTRY, arguments.values); }

// C = alpha A B + beta C through the driver API, with the configuration tuned for the sizes.
//
//     cpp_dispatch FOLDER [M N K]...
//
// FOLDER holds the cubins written by `autotile export --format c-header`. Without sizes, a few examples are run. Each
// product is verified against double precision on the CPU and timed over many launches.
#include "kernels/sgemm_2d.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <vector>

namespace sgemm = autotile::sgemm_2d;

namespace {

constexpr int kChecked = 200;    // elements of C per product
constexpr int kLaunches = 20;    // between two events
constexpr float kAlpha = 0.75f;
constexpr float kBeta = -0.5f;

void check(CUresult status) {
    if (status == CUDA_SUCCESS) return;
    const char* text = nullptr;
    cuGetErrorString(status, &text);
    throw std::runtime_error(text != nullptr ? text : "unknown CUDA error");
}

/// A matrix on the device and its initial values.
struct Matrix {
    std::vector<float> values;
    CUdeviceptr address = 0;

    Matrix(std::int64_t elements, std::mt19937& random) : values(static_cast<std::size_t>(elements)) {
        std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
        for (float& value : values) value = uniform(random);
        check(cuMemAlloc(&address, bytes()));
        check(cuMemcpyHtoD(address, values.data(), bytes()));
    }
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;
    ~Matrix() { cuMemFree(address); }

    std::size_t bytes() const { return values.size() * sizeof(float); }
    std::vector<float> read() const {
        std::vector<float> now(values.size());
        check(cuMemcpyDtoH(now.data(), address, bytes()));
        return now;
    }
};

/// The largest error of some elements, relative to the rounding error bound of a sum of K products.
double greatest_error(const sgemm::Sizes& sizes, const Matrix& a, const Matrix& b, const Matrix& c,
                      std::mt19937& random) {
    const std::vector<float> result = c.read();
    double greatest = 0.0;
    for (int n = 0; n < kChecked; ++n) {
        const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(sizes.M));
        const auto column = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(sizes.N));
        double sum = 0.0;
        for (std::int64_t k = 0; k < sizes.K; ++k) {
            sum += double(a.values[static_cast<std::size_t>(row * sizes.K + k)]) *
                   double(b.values[static_cast<std::size_t>(k * sizes.N + column)]);
        }
        const auto index = static_cast<std::size_t>(row * sizes.N + column);
        const double expected = kAlpha * sum + kBeta * c.values[index];
        const double allowed = 1e-6 * std::sqrt(double(sizes.K)) * std::max(1.0, std::abs(expected));
        greatest = std::max(greatest, std::abs(result[index] - expected) / allowed);
    }
    return greatest;
}

/// Microseconds per launch, averaged over consecutive launches with warm caches.
double time_us(sgemm::Kernel& kernel, const sgemm::Kernel::Prepared& prepared, const sgemm::Arguments& arguments) {
    CUevent begin = nullptr;
    CUevent end = nullptr;
    check(cuEventCreate(&begin, CU_EVENT_DEFAULT));
    check(cuEventCreate(&end, CU_EVENT_DEFAULT));
    check(cuEventRecord(begin, nullptr));
    for (int n = 0; n < kLaunches; ++n) kernel.launch_prepared(prepared, arguments);
    check(cuEventRecord(end, nullptr));
    check(cuEventSynchronize(end));
    float milliseconds = 0.0f;
    check(cuEventElapsedTime(&milliseconds, begin, end));
    check(cuEventDestroy(begin));
    check(cuEventDestroy(end));
    return 1e3 * milliseconds / kLaunches;
}

const char* tier_name(sgemm::Tier tier) {
    switch (tier) {
        case sgemm::Tier::exact: return "exact";
        case sgemm::Tier::family: return "family";
        case sgemm::Tier::nearest: return "nearest";
        case sgemm::Tier::transferred: return "transferred";
        case sgemm::Tier::fallback: return "default";
    }
    return "";
}

/// Multiply once, verify and time. Returns true if the result is correct.
bool multiply(sgemm::Kernel& kernel, const sgemm::Sizes& sizes) {
    std::mt19937 random(1);
    const Matrix a(sizes.M * sizes.K, random);
    const Matrix b(sizes.K * sizes.N, random);
    const Matrix c(sizes.M * sizes.N, random);
    const sgemm::Arguments arguments{a.address, b.address, c.address, kAlpha, kBeta};

    const sgemm::Kernel::Prepared prepared = kernel.prepare(sizes);
    kernel.launch_prepared(prepared, arguments);
    const double error = greatest_error(sizes, a, b, c, random);

    const double us = time_us(kernel, prepared, arguments);
    const double flops = 2.0 * double(sizes.M) * double(sizes.N) * double(sizes.K);
    const sgemm::Config& config = sgemm::configs[prepared.choice.config];
    std::printf("M=%-5lld N=%-5lld K=%-5lld %-11s BM=%-3lld BN=%-3lld BK=%-2lld %10.1f us %6.2f TFLOP/s  %s\n",
                static_cast<long long>(sizes.M), static_cast<long long>(sizes.N), static_cast<long long>(sizes.K),
                tier_name(prepared.choice.tier), static_cast<long long>(config.BM), static_cast<long long>(config.BN),
                static_cast<long long>(config.BK), us, flops / us / 1e6, error <= 1.0 ? "right" : "WRONG");
    return error <= 1.0;
}

}  // namespace

int main(int count, char** words) {
    if (count < 2 || (count - 2) % 3 != 0) {
        std::fprintf(stderr, "usage: %s FOLDER [M N K]...\n", words[0]);
        return 2;
    }
    std::vector<sgemm::Sizes> problems;
    for (int n = 2; n < count; n += 3) {
        problems.push_back({std::atoll(words[n]), std::atoll(words[n + 1]), std::atoll(words[n + 2])});
    }
    if (problems.empty()) problems = {{512, 512, 512}, {2048, 2048, 2048}, {1000, 3000, 777}};
    try {
        check(cuInit(0));
        CUdevice device = 0;
        CUcontext context = nullptr;
        check(cuDeviceGet(&device, 0));
        check(cuDevicePrimaryCtxRetain(&context, device));
        check(cuCtxSetCurrent(context));
        bool right = true;
        {
            sgemm::Kernel kernel(words[1]);
            std::printf("%s\n", kernel.device().name.c_str());
            for (const sgemm::Sizes& sizes : problems) right = multiply(kernel, sizes) && right;
        }
        check(cuDevicePrimaryCtxRelease(device));
        return right ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
}

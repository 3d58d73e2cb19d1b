// @@title@@
//
// Written by autotile @@version@@; do not edit. It chooses a configuration from the sizes as `autotile.get_best_kernel`
// does (what was tuned for them, else for the nearest sizes, else the default) and launches it through the driver API.
// It needs C++17, cuda.h, the driver (-lcuda), and the cubins @@stem@@.*.cubin.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace autotile::@@namespace@@ {

/// A problem.
struct Sizes {
@@sizes@@
};

/// A value for every tunable parameter.
struct Config {
@@parameters@@
};

/// The arrays, by device address and row-major, and the scalars that a caller may set.
struct Arguments {
@@arguments@@
};

/// A grid of blocks; int64, as it is checked against the device before it is launched.
struct Launch {
    std::int64_t grid[3];
    std::int64_t block[3];
    std::int64_t dynamic_smem_bytes;
};

/// What was tuned: the fastest configuration for a problem on a GPU, and the time that it took there.
struct Tuned {
    Sizes sizes;
    std::size_t config;
    double time_us;
    const char* gpu;
    int compute_capability;
};

/// A configuration compiled for an architecture@@and_flags@@.
struct Cubin {
    std::size_t config;
    int compute_capability;     ///< 90 for sm_90
    bool this_capability_only;  ///< as sm_90a, and chips of the embedded line
    int registers;              ///< a thread
    int static_smem_bytes;
@@cubin_flags@@    const char* file;
};

enum class Tier {
    exact,        ///< tuned for these sizes on this GPU
    family,       ///< by a rule that was learned from other problems of its family on this GPU
    nearest,      ///< tuned for other sizes on this GPU
    transferred,  ///< tuned on another GPU
    fallback,     ///< the default configuration
};

inline constexpr Config configs[] = {
@@configs@@
};

inline constexpr std::size_t default_config = @@default_config@@;

/// Newest first.
inline constexpr Tuned tuned[] = {
@@tuned@@
};
inline constexpr std::size_t tuned_count = @@tuned_count@@;

inline constexpr Cubin cubins[] = {
@@cubins@@
};

namespace detail {

inline void check(CUresult status, std::string_view what) {
    if (status == CUDA_SUCCESS) return;
    const char* name = nullptr;
    cuGetErrorName(status, &name);
    throw std::runtime_error("@@name@@: " + std::string(what) + ": " + (name != nullptr ? name : "unknown error"));
}

// Division that rounds towards minus infinity, and the remainder that has the divisor's sign.
constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
constexpr std::int64_t floor_mod(std::int64_t a, std::int64_t b) { return a - floor_div(a, b) * b; }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return -floor_div(-a, b); }
constexpr std::int64_t power(std::int64_t base, std::int64_t exponent) {
    std::int64_t product = 1;
    for (; exponent > 0; --exponent) product *= base;
    return product;
}

}  // namespace detail

/// What rules and limits ask of a device.
struct Device {
    std::string name;
    int compute_capability = 0;
    std::int64_t max_block[3] = {};
    std::int64_t max_grid[3] = {};
@@device@@

    static Device of(CUdevice device) {
        const auto attribute = [device](CUdevice_attribute which) {
            int value = 0;
            detail::check(cuDeviceGetAttribute(&value, which, device), "a property of the device");
            return value;
        };
        char name[256] = {};
        detail::check(cuDeviceGetName(name, sizeof name, device), "the device's name");
        Device found;
        found.name = name;
        found.compute_capability = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                                   attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        found.max_block[0] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
        found.max_block[1] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
        found.max_block[2] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
        found.max_grid[0] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
        found.max_grid[1] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
        found.max_grid[2] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
@@device_attributes@@
        return found;
    }
};

/// Whether a configuration keeps the kernel's rules for a problem.
inline bool keeps_rules([[maybe_unused]] const Config& config, [[maybe_unused]] const Sizes& sizes,
                        [[maybe_unused]] const Device& device) {
@@rules@@
    return true;
}

/// How a configuration is launched.
inline Launch launch_of([[maybe_unused]] const Config& config, [[maybe_unused]] const Sizes& sizes,
                        [[maybe_unused]] const Device& device) {
    return {
        {@@grid@@},
        {@@block@@},
        @@dynamic_smem_bytes@@,
    };
}

/// Whether a device can hold a block of a launch, and its grid.
inline bool fits(const Launch& launch, const Cubin& cubin, const Device& device) {
    for (int axis = 0; axis < 3; ++axis) {
        if (launch.block[axis] < 1 || launch.block[axis] > device.max_block[axis]) return false;
        if (launch.grid[axis] < 1 || launch.grid[axis] > device.max_grid[axis]) return false;
    }
    const std::int64_t threads = launch.block[0] * launch.block[1] * launch.block[2];
    const std::int64_t registers_per_warp = detail::ceil_div(cubin.registers * 32, 256) * 256;  // allocated in 256s
    return threads <= device.max_threads_per_block &&
           detail::ceil_div(threads, 32) * registers_per_warp <= device.registers_per_block &&
           cubin.static_smem_bytes + launch.dynamic_smem_bytes <= device.smem_per_block_optin_bytes;
}

/// Whether a cubin runs on a device: on its own major version, from its minor version upward.
constexpr bool runs_on(const Cubin& cubin, int compute_capability) {
    if (cubin.this_capability_only) return cubin.compute_capability == compute_capability;
    return cubin.compute_capability / 10 == compute_capability / 10 && cubin.compute_capability <= compute_capability;
}

/// A configuration that can be launched for a problem, and its cubin; null where there is none.
struct Choice {
    std::size_t config = default_config;
    const Cubin* cubin = nullptr;
    Tier tier = Tier::fallback;
};

namespace detail {

/// The cubin of a configuration that is valid for a problem on a device; null where there is none.
inline const Cubin* usable(std::size_t config, const Sizes& sizes, const Device& device) {
    if (!keeps_rules(configs[config], sizes, device)) return nullptr;
    const Launch launch = launch_of(configs[config], sizes, device);
    const Cubin* found = nullptr;
    for (const Cubin& cubin : cubins) {
        if (cubin.config != config || !runs_on(cubin, device.compute_capability)@@flags_differ@@) continue;
        if (fits(launch, cubin, device) &&
            (found == nullptr || cubin.compute_capability > found->compute_capability)) {
            found = &cubin;
        }
    }
    return found;
}

inline double doublings(std::int64_t a, std::int64_t b) {
    return std::abs(std::log2(static_cast<double>(a) / static_cast<double>(b)));
}

/// The largest power of two that divides a size, 256 at most.
inline double alignment(std::int64_t size) { return static_cast<double>(std::min<std::int64_t>(size & -size, 256)); }

inline double blocks(std::size_t config, const Sizes& sizes, const Device& device) {
    const Launch launch = launch_of(configs[config], sizes, device);
    double product = 1.0;
    for (const std::int64_t extent : launch.grid) product *= static_cast<double>(std::max<std::int64_t>(extent, 1));
    return product;
}

/// How far what was tuned is from what is asked: another GPU, another architecture, flags, doublings over all sizes.
using Distance = std::tuple<bool, bool, int, double>;

inline Distance distance(const Tuned& from, const Sizes& sizes, const Device& device) {
    const bool other_gpu = device.name != from.gpu;
    const bool other_architecture = device.compute_capability != from.compute_capability;
    return {other_gpu, other_architecture, @@flag_distance@@, @@size_distance@@};
}

}  // namespace detail
@@families@@
/// The configuration for a problem; its cubin is null where none can be launched.
inline Choice choose(const Sizes& sizes, const Device& device) {
    Choice best;
    detail::Distance least;
    for (std::size_t index = 0; index < tuned_count; ++index) {
        const Tuned& candidate = tuned[index];
        const detail::Distance distance = detail::distance(candidate, sizes, device);
        if (best.cubin != nullptr && !(distance < least)) continue;
        const Cubin* cubin = detail::usable(candidate.config, sizes, device);
        if (cubin == nullptr) continue;
        least = distance;
        const bool same = std::get<2>(distance) == 0 && std::get<3>(distance) == 0.0;
        best = {candidate.config, cubin, std::get<0>(distance) ? Tier::transferred : same ? Tier::exact : Tier::nearest};
    }
@@by_family@@    if (best.cubin == nullptr) best.cubin = detail::usable(default_config, sizes, device);
    return best;
}

/// The kernel in the CUDA context that is current when this is made.
///
/// Cubins are loaded when they are first needed. Several threads may launch at the same time.
class Kernel {
public:
    /// @param folder Where the cubins lie.
    explicit Kernel(std::string folder) : folder_(std::move(folder)) {
        CUdevice device = 0;
        detail::check(cuCtxGetDevice(&device), "there is no current CUDA context");
        device_ = Device::of(device);
    }
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;
    ~Kernel() {
        for (const auto& [file, loaded] : loaded_) cuModuleUnload(loaded.module);
@@free_workspaces@@    }

    const Device& device() const { return device_; }

    /// A configuration that is loaded for a problem, ready to be launched any number of times.
    struct Prepared {
        Sizes sizes;
        Choice choice;
        Launch launch;
        CUfunction function;
    };

    Prepared prepare(const Sizes& sizes) {
        const Choice choice = autotile::@@namespace@@::choose(sizes, device_);
        if (choice.cubin == nullptr) {
            throw std::runtime_error("@@name@@: no configuration in this header can be launched for these sizes on " +
                                     device_.name);
        }
        const Launch launch = launch_of(configs[choice.config], sizes, device_);
        return {sizes, choice, launch, function(*choice.cubin, launch.dynamic_smem_bytes)};
    }

    /// Queue a launch.
    void launch_prepared(const Prepared& prepared, const Arguments& arguments, CUstream stream = nullptr) {
        [[maybe_unused]] const Config& config = configs[prepared.choice.config];
        [[maybe_unused]] const Sizes& sizes = prepared.sizes;
        [[maybe_unused]] const Device& device = device_;
@@values@@
        void* values[] = {@@value_pointers@@};
        const auto side = [](std::int64_t extent) { return static_cast<unsigned>(extent); };
        const Launch& shape = prepared.launch;
        detail::check(cuLaunchKernel(prepared.function, side(shape.grid[0]), side(shape.grid[1]), side(shape.grid[2]),
                                     side(shape.block[0]), side(shape.block[1]), side(shape.block[2]),
                                     side(shape.dynamic_smem_bytes), stream, values, nullptr),
                      "the launch");
    }

    /// Choose, load where that is needed, and queue a launch.
    void launch(const Sizes& sizes, const Arguments& arguments, CUstream stream = nullptr) {
        launch_prepared(prepare(sizes), arguments, stream);
    }

private:
    struct Loaded {
        CUmodule module;
        CUfunction function;
        std::int64_t dynamic_smem_bytes;  ///< opted in to
    };

    CUfunction function(const Cubin& cubin, std::int64_t dynamic_smem_bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto found = loaded_.find(cubin.file);
        if (found == loaded_.end()) found = loaded_.emplace(cubin.file, load(cubin.file)).first;
        Loaded& loaded = found->second;
        if (dynamic_smem_bytes > loaded.dynamic_smem_bytes) {
            detail::check(cuFuncSetAttribute(loaded.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                             static_cast<int>(dynamic_smem_bytes)),
                          "opting in to shared memory");
            loaded.dynamic_smem_bytes = dynamic_smem_bytes;
        }
        return loaded.function;
    }

    Loaded load(const std::string& file) const {
        const std::string path = folder_ + "/" + file;
        std::ifstream stream(path, std::ios::binary);
        const std::string image((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
        if (image.empty()) throw std::runtime_error("@@name@@: cannot read " + path);
        Loaded loaded{};
        detail::check(cuModuleLoadData(&loaded.module, image.data()), "loading " + path);
        detail::check(cuModuleGetFunction(&loaded.function, loaded.module, "@@entry@@"), "the entry of " + path);
        return loaded;
    }
@@workspace_methods@@
    std::string folder_;
    Device device_;
    std::mutex mutex_;
    std::map<std::string, Loaded> loaded_;@@workspace_members@@
};

}  // namespace autotile::@@namespace@@

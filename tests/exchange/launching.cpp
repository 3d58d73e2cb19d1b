// Launches on a driver that notes what it is asked.
#include <iostream>
#include "launching.hpp"
namespace kernel = autotile::launching;
extern "C" {
CUresult cuCtxGetDevice(CUdevice*) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int*, CUdevice_attribute, CUdevice) { return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(std::size_t*, CUdevice) { return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char*, int, CUdevice) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char**) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule*, const void*) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncGetModule(CUmodule*, CUfunction) { return CUDA_SUCCESS; }
CUresult cuModuleGetGlobal(CUdeviceptr*, std::size_t* size_bytes, CUmodule, const char*) {
    *size_bytes = 2048;
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr, CUdeviceptr, std::size_t, CUstream) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction function) {
    *value = function != nullptr;
    return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void*, const cuuint64_t* extents,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill) {
    for (unsigned axis = 0; axis < rank; ++axis) std::cout << extents[axis] << ' ' << box[axis] << ' ' << steps[axis] << ' ';
    std::cout << strides[0] << ' ' << (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) << ' '
              << (promotion == CU_TENSOR_MAP_L2_PROMOTION_L2_64B) << ' ';
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction, void** values, void**) {
    std::cout << how->gridDimX << ' ' << how->blockDimX << ' ' << how->sharedMemBytes;
    for (unsigned at = 0; at < how->numAttrs; ++at) {
        const CUlaunchAttribute& one = how->attrs[at];
        if (one.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) std::cout << " cooperative " << one.value.cooperative;
        if (one.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) std::cout << " cluster " << one.value.clusterDim.x;
    }
    std::cout << " C " << *static_cast<CUdeviceptr*>(values[0]) << " B " << *static_cast<CUdeviceptr*>(values[1]);
    std::cout << " n " << static_cast<short*>(values[3])[4] << " per " << *static_cast<int*>(values[6]) << '\n';
    return CUDA_SUCCESS;
}
}
int main() {
    kernel::Kernel one("");
    kernel::Arguments arguments;
    arguments.B = 17;
    arguments.C = 18;
    int declares = 0;
    for (void* function : {static_cast<void*>(nullptr), static_cast<void*>(&declares)}) {
        const auto launch = kernel::launch_of(kernel::configs[0], {}, one.device());
        one.launch_prepared({{}, {}, launch, static_cast<CUfunction>(function)}, arguments);
    }
    try {
        one.launch_prepared({{512, 512, 513, 1}, {}, {}, nullptr}, arguments);
    } catch (const std::runtime_error& error) {
        std::cout << error.what() << '\n';
    }
    kernel::Device device;
    for (const std::int64_t n : {32768, 32769})
        std::cout << kernel::keeps_rules(kernel::configs[0], {512, n, 512, 1}, device);
    for (int axis = 0; axis < 3; ++axis) device.max_block[axis] = device.max_grid[axis] = 1;
    device.max_threads_per_block = 1024;
    device.registers_per_block = device.smem_per_block_optin_bytes = 65536;
    for (const std::int64_t smem_bytes : {0, -1})
        std::cout << kernel::fits({{1, 1, 1}, {1, 1, 1}, smem_bytes}, kernel::cubins[0], device);
    std::cout << kernel::detail::holds<std::uint64_t>(-1) << kernel::detail::holds<std::int64_t>(-1) << '\n';
}

// Occupancies by NVIDIA's cuda_occupancy.h: for each device and kernel that it reads, the limits and the blocks.
#include <stdio.h>
#include "cuda_occupancy.h"
int main(void) {
    struct cudaOccDeviceProp device;
    struct cudaOccFuncAttributes kernel;
    struct cudaOccDeviceState state;
    struct cudaOccResult result;
    int threads;
    memset(&device, 0, sizeof device);
    memset(&state, 0, sizeof state);
    device.warpSize = 32;
    device.numSms = 1;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
    while (scanf("%d %d %d %d %d %d %zu %zu %zu %zu", &device.computeMajor, &device.computeMinor,
                 &device.maxThreadsPerBlock, &device.maxThreadsPerMultiprocessor, &device.regsPerBlock,
                 &device.regsPerMultiprocessor, &device.sharedMemPerBlock, &device.sharedMemPerMultiprocessor,
                 &device.sharedMemPerBlockOptin, &device.reservedSharedMemPerBlock) == 10) {
        memset(&kernel, 0, sizeof kernel);
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.numBlockBarriers = 1;
        if (scanf("%d %d %zu", &threads, &kernel.numRegs, &kernel.maxDynamicSharedSizeBytes) != 3) return 1;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                    kernel.maxDynamicSharedSizeBytes) != CUDA_OCC_SUCCESS) return 2;
        printf("%d %d %d %d %d\n", result.blockLimitWarps, result.blockLimitRegs, result.blockLimitSharedMem,
               result.blockLimitBlocks, result.activeBlocksPerMultiprocessor);
    }
    return 0;
}

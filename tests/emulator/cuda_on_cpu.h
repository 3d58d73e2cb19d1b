// What a CUDA kernel and its launcher on the CPU have in common; see cuda_on_cpu.cpp.

#pragma once

struct Index {
    unsigned x, y, z;
};

extern Index threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads();

// Defined with the kernel.
extern const int parameter_count;
void parse_arguments(char** texts);  // once, before the first thread
void run_kernel();                   // as one thread

// A copy of a file that ends at the start of an unreadable page and is written back after the run.
void* guarded_buffer(const char* path);

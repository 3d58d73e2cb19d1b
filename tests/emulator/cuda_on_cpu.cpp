// Runs a CUDA kernel on the CPU, so that templates can be tested without a GPU.
//
// The threads of a block are fibers: each runs until it reaches a barrier or its end, then the next one runs. The order
// is reversed after every barrier, so that a missing barrier shows as a wrong result. Shared memory holds NaN when a
// block starts; each buffer ends at an unreadable page, so that an access beyond it ends the process.
//
//     g++ -std=c++17 -c cuda_on_cpu.cpp
//     g++ -std=c++17 -DKERNEL_FILE='"sgemm_2d.cu"' -DENTRY=sgemm_2d -DBM=128 ... kernel_on_cpu.cpp cuda_on_cpu.o -o kernel
//     ./kernel GRID_X GRID_Y GRID_Z BLOCK_X BLOCK_Y BLOCK_Z ARGUMENT...
//
// An argument is a file of raw values (a buffer: read before the run, written back after it) or, beginning with "=",
// a number.

#include "cuda_on_cpu.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;

// The linker defines the start and stop of the section of all __shared__ variables; without any, there is no section.
extern "C" char __start_block_memory[] __attribute__((weak));
extern "C" char __stop_block_memory[] __attribute__((weak));

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    Index index;
    bool done;
};

static ucontext_t scheduler;
static Fiber* running;

void __syncthreads()
{
    Fiber* self = running;
    swapcontext(&self->context, &scheduler);
    running = self;
    threadIdx = self->index;
}

static void run_thread()
{
    run_kernel();
    running->done = true;
}

static void start(Fiber& fiber, unsigned i)
{
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_thread, 0);
}

static void run_block(std::vector<Fiber>& fibers)
{
    std::fill(__start_block_memory, __stop_block_memory, static_cast<char>(0xff));
    std::vector<Fiber*> waiting;
    for (unsigned i = 0; i < fibers.size(); ++i) {
        start(fibers[i], i);
        waiting.push_back(&fibers[i]);
    }
    while (!waiting.empty()) {
        for (Fiber* fiber : waiting) {
            running = fiber;
            threadIdx = fiber->index;
            swapcontext(&scheduler, &fiber->context);
        }
        waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [](Fiber* f) { return f->done; }), waiting.end());
        std::reverse(waiting.begin(), waiting.end());
    }
}

struct GuardedBuffer {
    std::string path;
    size_t size;
    char* data;

    explicit GuardedBuffer(const std::string& file) : path(file)
    {
        std::ifstream stream(path, std::ios::binary);
        const std::vector<char> content((std::istreambuf_iterator<char>(stream)), {});
        const size_t page = sysconf(_SC_PAGESIZE);
        size = content.size();
        const size_t room = (size + page - 1) / page * page;
        char* pages = static_cast<char*>(
            mmap(nullptr, room + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(pages, page, PROT_NONE);
        mprotect(pages + page + room, page, PROT_NONE);
        data = pages + page + room - size;
        std::memcpy(data, content.data(), size);
    }

    void write_back() const { std::ofstream(path, std::ios::binary).write(data, size); }
};

static std::vector<GuardedBuffer> buffers;

void* guarded_buffer(const char* path)
{
    return buffers.emplace_back(path).data;
}

int main(int argc, char** argv)
{
    const auto number = [&](int i) { return static_cast<unsigned>(std::atoi(argv[i])); };
    gridDim = {number(1), number(2), number(3)};
    blockDim = {number(4), number(5), number(6)};
    if (argc - 7 != parameter_count) {
        std::fprintf(stderr, "the kernel takes %d arguments, not %d\n", parameter_count, argc - 7);
        return 2;
    }
    parse_arguments(argv + 7);

    std::vector<Fiber> fibers(blockDim.x * blockDim.y * blockDim.z);
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(fibers);
    for (const GuardedBuffer& buffer : buffers) buffer.write_back();
}

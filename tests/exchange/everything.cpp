#include <iostream>
#include "everything.hpp"
namespace kernel = autotile::every_thing_bfloat16;
int main() {
    kernel::Device device;
    device.compute_capability = 90;
    device.max_threads_per_block = 1024;
    device.registers_per_block = 65536;
    device.smem_per_block_optin_bytes = 232448;
    device.sm_count = 132;
    for (int axis = 0; axis < 3; ++axis) device.max_block[axis] = device.max_grid[axis] = 1024;
    const kernel::Sizes sizes{1000, 512, 256, 3, 1};
    const kernel::Choice choice = kernel::choose(sizes, device);
    const kernel::Launch launch = kernel::launch_of(kernel::configs[0], sizes, device);
    std::cout << choice.cubin->file << ' ' << kernel::Arguments{}.alpha << ' '
              << launch.grid[2] << ' ' << launch.dynamic_smem_bytes << '\n';
    const auto lacks = [&](const kernel::Sizes& asked) { return kernel::choose(asked, device).cubin == nullptr; };
    std::cout << lacks({1000, 512, 257, 3, 1}) << ' ' << lacks({1000, 512, 256, 1LL << 32, 1}) << ' ';
    std::cout << lacks({1030, 512, 256, 3, 1}) << ' ' << lacks(sizes) << ' ';
    device.compute_capability = 100;
    std::cout << lacks(sizes) << '\n';
}

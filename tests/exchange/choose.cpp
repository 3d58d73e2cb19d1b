#include <iostream>
#include <string>
#include "sgemm_2d.hpp"

namespace sgemm = autotile::sgemm_2d;

int main(int, char** words) {
    sgemm::Device device;
    device.name = words[1];
    device.compute_capability = std::stoi(words[2]);
    device.max_threads_per_block = 1024;
    device.registers_per_block = 65536;
    device.registers_per_sm = 65536;
    device.smem_per_block_optin_bytes = std::stoi(words[3]);
    for (int axis = 0; axis < 3; ++axis) {
        device.max_block[axis] = axis < 2 ? 1024 : 64;
        device.max_grid[axis] = axis < 1 ? 2147483647 : 65535;
    }
    sgemm::Sizes sizes;
    while (std::cin >> sizes.M >> sizes.N >> sizes.K) {
        const sgemm::Choice choice = sgemm::choose(sizes, device);
        if (choice.cubin == nullptr) { std::cout << "none\n"; continue; }
        const sgemm::Launch launch = sgemm::launch_of(sgemm::configs[choice.config], sizes, device);
        std::cout << choice.config << ' ' << static_cast<int>(choice.tier) << ' ' << launch.grid[0] << ' '
                  << launch.grid[1] << ' ' << launch.block[0] << ' ' << choice.cubin->file << '\n';
    }
}

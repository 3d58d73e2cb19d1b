#include "common/helper.cuh"
#include <check.h>
static std::string title = "kernel";
__global__ void k(int* x) { x[0] = scaled(twice(x[1])); }
int main() { Options options(devices()); report(options.sizes[0]); }

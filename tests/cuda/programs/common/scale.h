#pragma once
__device__ inline int scaled(int x) { return 3 * x; }

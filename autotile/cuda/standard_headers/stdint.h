#pragma once  // NVRTC has no standard headers; the toolkit's own headers agree on these types
#include <cuda/std/cstdint>

#pragma once  // what nvcc declares without any #include, as it includes cuda_runtime.h and with it the host's headers
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iosfwd>

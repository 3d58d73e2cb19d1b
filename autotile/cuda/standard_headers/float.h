#pragma once
#include <cuda/std/cfloat>

#include "softmax.cuh"

// A string of 4 GiB in the compiler's front end.
#define TIMES_16(x) x x x x x x x x x x x x x x x x
#define TIMES_65536(x) TIMES_16(TIMES_16(TIMES_16(TIMES_16(x))))
__device__ const char text[] = TIMES_65536(TIMES_65536("."));
extern "C" __global__ void fill(char* x) { x[0] = text[x[1]]; }

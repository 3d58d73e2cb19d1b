inline int devices() { int n; cudaGetDeviceCount(&n); return n; }

// The same convolution, as plainly as it can be written, added in double.
__global__ void convolution_reference(const float* image, const float* weights, float* out, int H, int W)
{
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= W || y >= H) return;
    double sum = 0.0;
    for (int i = 0; i < K; ++i)
        for (int j = 0; j < K; ++j) {
            const int row = y + i - K / 2, column = x + j - K / 2;
            if (row >= 0 && row < H && column >= 0 && column < W)
                sum += static_cast<double>(weights[i * K + j]) * image[static_cast<long long>(row) * W + column];
        }
    out[static_cast<long long>(y) * W + x] = static_cast<float>(sum);
}

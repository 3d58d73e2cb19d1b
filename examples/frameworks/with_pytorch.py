"""PyTorch: a product with gradients, inside torch.compile, on the current stream."""

import torch

import autotile
import autotile.torch

x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
weights = torch.nn.Parameter(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16) / 32)  # N x K


@torch.compile(fullgraph=True)
def layer(x: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer; the transposed weights are used without a copy."""
    return torch.relu(autotile.torch.matmul(x, weights.T))


layer(x).float().square().mean().backward()
print("output:", tuple(layer(x).shape), "gradient of the weights:", tuple(weights.grad.shape))

want = (x.double() @ weights.detach().double().T).float()
got = autotile.matmul(x, weights.detach().T)
print("largest difference from float64:", float((got.float() - want).abs().max()), "of", float(want.abs().max()))

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    autotile.matmul(x, weights.detach().T, got)  # queued on the side stream
side.synchronize()

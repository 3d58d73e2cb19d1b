"""Classify images with a vision transformer, eager and compiled: the time of torch beside that of autotile.

    python examples/image_model/classify.py [--batches 1 7 64] [--dtypes float32 float16]

The weights are random, so nothing is downloaded. An image is 196 patches and a token for its class.
"""

import argparse
import copy
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import autotile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batches", type=int, nargs="+", default=[1, 7, 64])
parser.add_argument("--dtypes", nargs="+", default=["float32", "float16"])
parser.add_argument("--modes", nargs="+", default=["eager", "reduce-overhead"])
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--device", default="cuda")
given = parser.parse_args()
synchronize = torch.cuda.synchronize if given.device == "cuda" else lambda: None


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence with what the layer adds."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


class VisionTransformer(nn.Module):
    """Logits of 1,000 classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 197, width))
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 1000)`` for images of shape ``(batch, 3, 224, 224)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.positions
        return self.head(self.layers(x)[:, 0])


def ms(model: nn.Module, images: Tensor, steps: int = 5) -> float:
    """Return the time to classify a batch."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        model(images)
    synchronize()
    return 1e3 * (time.perf_counter() - begin) / steps


torch.manual_seed(0)
print(f"{'':25} {'batch':>5} {'torch, ms':>10} {'autotile, ms':>12}   largest difference of logits")
for dtype in given.dtypes:
    with torch.device(given.device):
        plain = VisionTransformer(given.width, given.layers).to(getattr(torch, dtype)).eval()
    ours = copy.deepcopy(plain)
    report = autotile.torch.accelerate(ours)
    for mode in given.modes:
        for batch in given.batches:
            images = torch.randn(batch, 3, 224, 224, device=given.device, dtype=getattr(torch, dtype))
            torch.compiler.reset()
            sides, logits = [], []
            with torch.inference_mode():
                for model in (plain, ours):
                    autotile.torch.join_inductor(model is ours)  # else Inductor would choose kernels for both
                    sides.append(model if mode == "eager" else torch.compile(model, mode=mode, dynamic=False))
                    logits.append(sides[-1](images).float().clone())
                times = [[ms(model, images) for model in sides] for _ in range(given.rounds + 2)][2:]
            torch_ms, ours_ms = (statistics.median(column) for column in zip(*times, strict=True))
            difference = float((logits[0] - logits[1]).abs().max())
            print(f"{dtype + ', ' + mode:25} {batch:5} {torch_ms:10.2f} {ours_ms:12.2f}   {difference:.2g}")
print(report)

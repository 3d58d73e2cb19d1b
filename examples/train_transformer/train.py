"""Train a small language model on the bytes of this documentation: the time of torch beside that of autotile.

    python examples/train_transformer/train.py [--steps 100] [--dtypes float32 bfloat16]

Once in fp32, and once in bf16 by autocast with the parameters in fp32. Both sides begin with the same weights and see
the same text.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import autotile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--device", default="cuda")
given = parser.parse_args()
synchronize = torch.cuda.synchronize if given.device == "cuda" else lambda: None


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each after a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence with what the layer adds."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


class Model(nn.Module):
    """Logits of the next byte at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, given.width), nn.Embedding(given.length, given.width)
        self.layers = nn.Sequential(*(Layer(given.width) for _ in range(given.layers)), nn.LayerNorm(given.width))
        self.head = nn.Linear(given.width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape ``(batch, length, 256)``."""
        return self.head(self.layers(self.bytes(ids) + self.positions.weight[: ids.shape[1]]))


pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
text = text.to(given.device, torch.int64)


def step(model: Model, optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype) -> float:
    """Train one step; return its time in ms."""
    generator = torch.Generator().manual_seed(number)
    begins = torch.randint(len(text) - given.length - 1, (given.batch, 1), generator=generator).to(given.device)
    ids = text[begins + torch.arange(given.length + 1, device=given.device)]
    synchronize()
    begin = time.perf_counter()
    with torch.autocast(given.device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
        losses[model] = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    losses[model].backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


for name in given.dtypes:
    torch.manual_seed(0)
    with torch.device(given.device):
        plain = Model()
    ours = copy.deepcopy(plain)
    report = autotile.torch.accelerate(ours)
    sides = {model: torch.optim.AdamW(model.parameters(), lr=3e-4) for model in (plain, ours)}
    losses: dict[Model, Tensor] = {}
    times: dict[Model, list[float]] = {model: [] for model in sides}
    for number in range(given.steps):
        for model, optimizer in sides.items():
            times[model].append(step(model, optimizer, number, getattr(torch, name)))
    torch_ms, autotile_ms = (statistics.median(found[len(found) // 4 :]) for found in times.values())
    loss, our_loss = (losses[model].item() for model in sides)
    print(f"{name:9} torch {torch_ms:7.2f} ms a step, loss {loss:.3f}; autotile {autotile_ms:7.2f} ms, {our_loss:.3f}")
print(report)

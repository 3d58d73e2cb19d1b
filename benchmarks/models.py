"""Whole models: PyTorch with and without autotile, eager and compiled, in one process and one run.

    python benchmarks/models.py [--models llama bert ...] [--modes eager reduce-overhead ...] [--cells decode ...]
        [--all] [--layers 4] [--width 4096] [--rounds 12] [--tune 20] [--budget 420] [--output models.json]

The models are plain PyTorch with random weights. Each cell is one model at one size in one mode: a copy of the model is
given to `autotile.torch.accelerate`, and both are run in turns, some steps at a time. The table gives medians of the
time of a step until the GPU is done (its own time is less where the host cannot keep up), and of the host's part of it;
and the ratio of the times of each turn with its 95 % interval. Outputs, or gradients of a training step, are compared
with those of a copy in float64: autotile's error may be `FACTOR` times torch's. A cell misses if the ratio is below its
target; "noise" means that the interval contains the target.

Compiled modes take the essential cells, all with --all; eager takes all, the essential ones first. A cell that would
begin after the budget is skipped and listed; the record is written after each cell. A run of the default modes takes
about 3 minutes on an H100. On a machine without a GPU, `--device cpu --width 128 --layers 1` shows that the program
works.
"""

# ruff: noqa: D102  the forward of a module is its class
from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import autotile
from autotile.core.statistics import Interval, paired_ratio
from autotile.serving.dispatcher import default_dispatcher

MODES = ("eager", "compile", "reduce-overhead", "max-autotune")
SIDES = ("torch", "autotile")
FACTOR = 1.5
"""Largest accepted ratio of autotile's error to torch's: both are sums of many roundings, which differ by chance."""
CONTEXT = 1024
"""Tokens in the key-value cache of a decoding step."""


class Attention(nn.Module):
    """Attention with a layer for each projection; heads may share keys, and keys and values may be cached."""

    def __init__(self, width: int, heads: int, shared: int, head: int, *, bias: bool = False, cache: int = 0) -> None:
        super().__init__()
        self.shape, self.groups = (-1, head), heads // shared
        self.q, self.o = nn.Linear(width, heads * head, bias=bias), nn.Linear(heads * head, width, bias=bias)
        self.k, self.v = (nn.Linear(width, shared * head, bias=bias) for _ in range(2))
        if cache:  # sequences
            self.register_buffer("keys", torch.randn(cache, shared, CONTEXT, head))
            self.register_buffer("values", torch.randn(cache, shared, CONTEXT, head))

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None, position: Tensor | None = None
    ) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, self.shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if rotation is not None:
            q, k = rotated(q, *rotation), rotated(k, *rotation)
        if position is None:
            causal = rotation is not None
            made = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.groups > 1)
        else:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            seen = torch.arange(CONTEXT, device=x.device) <= position
            grouped = q.unflatten(1, (-1, self.groups)).squeeze(3)  # heads that share keys are rows of one product
            made = functional.scaled_dot_product_attention(
                grouped, self.keys, self.values, attn_mask=seen.expand(self.groups, -1)
            )
            made = made.flatten(1, 2).unsqueeze(2)
        return self.o(made.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of components by their position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class SwiGlu(nn.Module):
    """The feed-forward part of Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """Llama-like: RMSNorm, rotary positions, grouped queries, SwiGLU; logits of the last token."""

    def __init__(self, width: int, heads: int, inner: int, layers: int, *, vocabulary: int, cache: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        shared, head = max(1, heads // 4), 128
        self.attention = nn.ModuleList(Attention(width, heads, shared, head, cache=cache) for _ in range(layers))
        self.inner = nn.ModuleList(SwiGlu(width, inner) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width, 1e-5) for _ in range(2 * layers + 1))
        frequencies = 10000.0 ** (-torch.arange(0, head, 2) / head)
        angles = (torch.arange(4096)[:, None] * frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, position: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        at = position if position is not None else slice(ids.shape[1])
        rotation = self.cos[at], self.sin[at]
        for i, (attention, inner) in enumerate(zip(self.attention, self.inner, strict=True)):
            x = x + attention(self.norms[2 * i](x), rotation, position)
            x = x + inner(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x[:, -1]))


class Encoder(nn.Module):
    """Layers of BERT (norms after each part) or ViT (before), with biases and GELU."""

    def __init__(self, width: int, layers: int, before: bool) -> None:
        super().__init__()
        heads = width // 64
        self.before = before
        self.attention = nn.ModuleList(Attention(width, heads, heads, 64, bias=True) for _ in range(layers))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))

    def forward(self, x: Tensor) -> Tensor:
        parts = [part for pair in zip(self.attention, self.inner, strict=True) for part in pair]
        for part, norm in zip(parts, self.norms, strict=False):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return self.norms[-1](x)


class Bert(nn.Module):
    """BERT-like: embedded tokens through an encoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(30522, width), nn.Embedding(512, width)
        self.encoder = Encoder(width, layers, before=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embed(ids) + self.positions.weight[: ids.shape[1]])


class Vit(nn.Module):
    """ViT-like: 196 patches of an image and a token for its class through an encoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 16, 16), nn.Linear(width, 1000)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 197, width))
        self.encoder = Encoder(width, layers, before=True)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Mixtral(nn.Module):
    """A Mixtral-like block: each token goes to two of eight experts, whose numbers of tokens the router decides."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 8, bias=False)
        self.experts = nn.ModuleList(SwiGlu(width, inner) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        # the router stays in fp32: in bf16, its roundings would send tokens to other experts
        weights, chosen = self.router(x.to(self.router.weight.dtype)).softmax(-1).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tokens, rank = torch.where(chosen == i)
            made.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, rank, None])
        return made


Made = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Cell:
    """A model at a size; ``make`` returns it with its inputs."""

    model: str
    name: str
    dtype: torch.dtype
    make: Callable[[], Made]
    target: float = 0.99
    """Least ratio of torch's time to autotile's."""
    essential: bool = False
    trains: bool = False


def cells_of(width: int, layers: int) -> Iterator[Cell]:
    """Yield the cells; with another width than 4096, all models are scaled."""
    heads, inner = max(1, width // 128), int(3.5 * width)
    narrow = 64 * max(1, 12 * width // 4096)
    odd_heads = max(1, heads // 2)
    odd = 128 * odd_heads + 1  # 2,049

    def llama(batch: int, length: int, cache: int = 0) -> Made:
        position = (torch.tensor([CONTEXT - 1]),) if cache else ()
        model = Llama(width, heads, inner, layers, vocabulary=32000, cache=cache)
        return model, (torch.randint(32000, (batch, length)), *position)

    def unaligned(batch: int, length: int, cache: int = 0) -> Made:
        position = (torch.tensor([CONTEXT - 1]),) if cache else ()
        model = Llama(odd, odd_heads, 3 * odd + 2, layers, vocabulary=32001, cache=cache)
        return model, (torch.randint(32001, (batch, length)), *position)

    def bert(batch: int, length: int) -> Made:
        return Bert(narrow, layers), (torch.randint(30522, (batch, length)),)

    def vit(batch: int) -> Made:
        return Vit(narrow, layers), (torch.randn(batch, 3, 224, 224),)

    def mixtral(tokens: int) -> Made:
        return Mixtral(width, inner), (torch.randn(tokens, width),)

    def mlp(batch: int) -> Made:
        # smooth: an element that a rounding moves across the edge of a ReLU would decide the error of the gradients
        hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*hidden, nn.Linear(width, 1000)), (torch.randn(batch, width),)

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for shape in ((1, 1), (1, 16), (1, 128), (1, 777), (4, 1024), (1, 4096)):
        essential = shape in {(1, 777), (4, 1024)}
        yield Cell("llama", "prefill {} x {}".format(*shape), bf16, partial(llama, *shape), 0.99, essential)
    for batch in (1, 4, 16, 64):
        yield Cell("llama", f"decode {batch}", bf16, partial(llama, batch, 1, batch), 1.0, batch in {1, 16})
    for shape in ((1, 128), (8, 512), (64, 77)):
        yield Cell("bert", "{} x {}".format(*shape), fp16, partial(bert, *shape), 0.99, shape == (8, 512))
    for batch in (1, 8, 64):
        yield Cell("vit", f"images {batch}", bf16, partial(vit, batch), 0.99, batch == 8)
    for tokens in (16, 333, 2048):
        yield Cell("mixtral", f"tokens {tokens}", bf16, partial(mixtral, tokens), 0.99, tokens == 333)
    for length in (777, 2047):
        yield Cell("unaligned", f"prefill 1 x {length}", bf16, partial(unaligned, 1, length), 1.3, length == 2047)
    for batch in (1, 16):
        yield Cell("unaligned", f"decode {batch}", bf16, partial(unaligned, batch, 1, batch), 1.0, batch == 16)
    for batch in (16, 512, 4096):  # with 16 rows, reading the weights takes all of the time
        target = 0.99 if batch == 16 else 1.4
        yield Cell("mlp", f"inference {batch}", fp32, partial(mlp, batch), target, batch == 512)
    for batch in (256, 2048):
        yield Cell("mlp", f"training {batch}", fp32, partial(mlp, batch), 0.99, batch == 2048, trains=True)


def main() -> None:
    """Measure the cells in turn, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], help="all unless given")
    parser.add_argument("--modes", nargs="+", default=["eager", "reduce-overhead"], choices=MODES)
    parser.add_argument("--cells", nargs="+", default=[], help="cells whose name contains one of these")
    parser.add_argument("--all", action="store_true", help="all cells in compiled modes, too")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side")
    parser.add_argument("--turn-ms", type=float, default=60.0, help="length of a turn")
    parser.add_argument("--tune", metavar="SECONDS", type=float, help="tune what each cell asks for, for so long")
    parser.add_argument("--budget", metavar="SECONDS", type=float, default=float("inf"))
    parser.add_argument("--same", action="store_true", help="torch on both sides: what chance does")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    given = parser.parse_args()
    cells = sorted(cells_of(given.width, given.layers), key=lambda cell: not cell.essential)
    if unknown := set(given.models) - {cell.model for cell in cells}:
        parser.error(f"unknown models {sorted(unknown)}; expected {list(dict.fromkeys(cell.model for cell in cells))}")
    document = {
        **provenance(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{name: getattr(given, name) for name in ("layers", "width", "rounds", "tune", "same")},
        "rows": [],
        "skipped": [],
    }
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # what ships is served unless a database is named, and nothing stands in for it while it is compiled
        os.environ.setdefault("AUTOTILE_DB", f"{folder}/autotile.db")
        os.environ.setdefault("AUTOTILE_WAIT", "on")
        for mode in given.modes:
            for cell in cells:
                if given.models and cell.model not in given.models:
                    continue
                if given.cells and not any(part in cell.name for part in given.cells):
                    continue
                if mode != "eager" and not (cell.essential or given.all or given.cells):
                    continue
                head = {"model": cell.model, "cell": cell.name, "mode": mode}
                if time.monotonic() - begin > given.budget:
                    document["skipped"].append(head)
                    continue
                try:
                    row = head | measured(cell, mode, given)
                except Exception as error:  # another cell may work
                    row = head | {"verdict": "failed", "error": f"{type(error).__name__}: {error}"}
                print(" ".join(_shown(row)), f"at {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
                document["rows"].append(row)
                if given.output:
                    given.output.write_text(json.dumps(document, indent=1) + "\n")
    _show(document)
    if given.output:
        given.output.write_text(json.dumps(document, indent=1) + "\n")
    raise SystemExit(any(row["verdict"] in {"failed", "wrong"} for row in document["rows"]))


def measured(cell: Cell, mode: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of both sides of a cell in a mode, and the errors of what they compute."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()  # nothing happens without a GPU
    default_dispatcher.clear()
    with torch.device(given.device):
        model, inputs = cell.make()
    inputs = tuple(x.to(cell.dtype) if x.is_floating_point() else x for x in inputs)
    model.to(cell.dtype).train(cell.trains)
    if isinstance(model, Mixtral):
        model.router.float()
    exact = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    expected = computed(copy.deepcopy(model).double(), exact, cell.trains)
    model, ours = copy.deepcopy(model), copy.deepcopy(model)  # a copy's attributes are slower to find than the model's
    report = None if given.same else autotile.torch.accelerate(ours)
    if given.tune:
        with autotile.tuning(budget=f"{given.tune}s"):
            computed(ours, inputs, cell.trains)
    steps: dict[str, Callable[[], object]] = {}
    errors, first_s = {}, {}
    for side, module in zip(SIDES, (model, ours), strict=True):
        called = module
        if mode != "eager":
            autotile.torch.join_inductor(side == "autotile" and not given.same)
            called = torch.compile(module, mode="default" if mode == "compile" else mode)
        begin = time.perf_counter()
        made = computed(called, inputs, cell.trains)
        first_s[side] = time.perf_counter() - begin
        errors[side] = float((made.double() - expected).norm() / expected.norm())
        steps[side] = step_of(called, inputs, cell.trains)
        for _ in range(4):  # CUDA graphs are recorded by the second
            steps[side]()
    slowest_ms = max(turn(step, 3, given.device)["wall_ms"] for step in steps.values())
    count = max(1, min(300, round(given.turn_ms / slowest_ms)))
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    orders = np.random.default_rng(0)  # a host that is disturbed at each second turn must not always slow the same side
    gc.collect()
    gc.disable()
    try:
        for _ in range(given.rounds):
            for side in orders.permutation(SIDES):
                turns[side].append(turn(steps[side], count, given.device))
    finally:
        gc.enable()
    kernels = default_dispatcher.products.kernels.values()
    walls = [[one["wall_ms"] for one in turns[side]] for side in SIDES]
    ratio = paired_ratio(walls[1], walls[0])
    return {
        "dtype": str(cell.dtype).removeprefix("torch."),
        "steps_a_turn": count,
        **{
            side: {
                **{name: float(np.median([one[name] for one in turns[side]])) for name in turns[side][0]},
                "wall_ms_of_turns": [one["wall_ms"] for one in turns[side]],
                "first_s": first_s[side],
                "error": errors[side],
            }
            for side in SIDES
        },
        "ratio": [ratio.value, ratio.low, ratio.high],
        "target": cell.target,
        "verdict": verdict(ratio, cell.target, errors["torch"], errors["autotile"]),
        "replaced": [name for layer in report.replaced for name in layer.names] if report else [],
        "left": report.left if report else {},
        "served": sorted({f"{served.operation}: {served.kernel}, {served.tier}" for served in kernels}),
    }


def computed(model: Callable[..., Tensor], inputs: Sequence[Tensor], trains: bool) -> Tensor:
    """Return the output of a model, or the gradients of a training step as one vector."""
    if not trains:
        with torch.no_grad():
            return model(*inputs).clone()
    model(*inputs).square().mean().backward()
    parameters = list(model.parameters())
    gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
    for parameter in parameters:
        parameter.grad = None
    return gradients


def step_of(model: Callable[..., Tensor], inputs: Sequence[Tensor], trains: bool) -> Callable[[], object]:
    """Return a function that runs a step."""
    if not trains:
        return torch.no_grad()(lambda: model(*inputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def turn(step: Callable[[], object], count: int, device: str) -> dict[str, float]:
    """Return the time of a step in ms: until the GPU is done, by its own clock, and until the host has queued it."""
    on_gpu = device.startswith("cuda")
    synchronize = torch.cuda.synchronize if on_gpu else nullcontext
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
    synchronize()
    begin = time.perf_counter()
    for event in events[:1]:
        event.record()
    for _ in range(count):
        step()
    queued = time.perf_counter()
    for event in events[1:]:
        event.record()
    synchronize()
    end = time.perf_counter()
    gpu = {"gpu_ms": events[0].elapsed_time(events[1]) / count} if on_gpu else {}
    return {"wall_ms": 1e3 * (end - begin) / count, **gpu, "host_ms": 1e3 * (queued - begin) / count}


def verdict(ratio: Interval, target: float, theirs: float, ours: float) -> str:
    """Judge a cell by the ratio of its times and the errors of both sides."""
    if not ours <= FACTOR * theirs:
        return "wrong"
    if ratio.value >= target:
        return "ok"
    return "noise" if ratio.high >= target else "miss"


def _show(document: dict[str, Any]) -> None:
    names = ("model", "cell", "mode", "torch ms", "(host)", "autotile ms", "(host)", "ratio", "95 %", "target", "error")
    table = Table(*names, "")
    for row in document["rows"]:
        table.add_row(*_shown(row))
    console = Console(width=140)
    console.print(table)
    console.print(f"{document['device']}, {document['versions']}")
    if document["skipped"]:
        cells = ", ".join(" ".join(one.values()) for one in document["skipped"])
        console.print(f"not run, as the budget was spent: {cells}")


def _shown(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table; the error is autotile's over torch's."""
    head = [row["model"], row["cell"], row["mode"]]
    if "error" in row:
        return [*head, *[""] * 8, f"failed: {row['error'].splitlines()[0]}"]
    times = [f"{row[side][name]:.3f}" for side in SIDES for name in ("wall_ms", "host_ms")]
    value, low, high = row["ratio"]
    error = row["autotile"]["error"] / row["torch"]["error"] if row["torch"]["error"] else float("nan")
    return [
        *head, *times, f"{value:.3f}", f"{low:.3f} to {high:.3f}", f"{row['target']:.2f}", f"{error:.2f}",
        row["verdict"],
    ]  # fmt: skip


if __name__ == "__main__":
    main()

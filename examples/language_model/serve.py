"""Serve a language model of Hugging Face transformers: the time of torch beside that of autotile.

    python examples/language_model/serve.py [--batches 1 4 16 64] [--longest 512] [--new 32] [--tune 60s]

The weights are random, so nothing is downloaded. Each batch holds prompts of any length, padded on the left.
"""

import argparse
import random
import statistics
import time
from contextlib import nullcontext

import torch

import autotile

try:
    import transformers
except ModuleNotFoundError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompt")
parser.add_argument("--new", type=int, default=32, help="tokens to generate")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--tune", metavar="TIME", help="tune what the batches ask for, such as for 60s")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()
synchronize = torch.cuda.synchronize if given.device == "cuda" else lambda: None

torch.manual_seed(0)
random.seed(0)
config = transformers.LlamaConfig(
    hidden_size=given.width,
    intermediate_size=7 * given.width // 2,
    num_hidden_layers=given.layers,
    num_attention_heads=given.width // 128,
    num_key_value_heads=max(1, given.width // 512),
    pad_token_id=0,
    eos_token_id=None,  # all sequences of a batch get as many tokens
)
with torch.device(given.device):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Return a batch of prompts as transformers takes it."""
    lengths = [random.randint(1, given.longest) for _ in range(batch)]
    ids = torch.zeros(batch, max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, config.vocab_size, (length,))
        mask[row, -length:] = 1
    return {"input_ids": ids.to(given.device), "attention_mask": mask.to(given.device)}


def seconds(batch: dict[str, torch.Tensor], tokens: int) -> float:
    """Return the time to generate so many tokens for a batch."""
    synchronize()
    begin = time.perf_counter()
    model.generate(**batch, max_new_tokens=tokens, do_sample=False)
    synchronize()
    return time.perf_counter() - begin


batches = {size: prompts(size) for size in given.batches}
if given.tune:
    with autotile.torch.accelerate(model), autotile.tuning(given.tune):
        for batch in batches.values():
            seconds(batch, 2)

print(f"{'batch':>5} {'prompt':>6}   {'first token, ms':^23}   {'each further, ms':^23}")
print(" " * 15 + f"{'torch':>9} {'autotile':>9} {'':3}   {'torch':>9} {'autotile':>9}")
for size, batch in batches.items():
    times = {"torch": [], "autotile": []}
    for turn in range(given.rounds + 1):  # the first warms up
        for side, found in times.items():
            with autotile.torch.accelerate(model) if side == "autotile" else nullcontext():
                first, all_of_them = seconds(batch, 1), seconds(batch, given.new)
            if turn:
                found.append((1e3 * first, 1e3 * (all_of_them - first) / (given.new - 1)))
    torch_ms, ours_ms = ([statistics.median(part) for part in zip(*times[side], strict=True)] for side in times)
    columns = (f"{theirs:9.2f} {ours:9.2f}" for theirs, ours in zip(torch_ms, ours_ms, strict=True))
    print(f"{size:5} {batch['input_ids'].shape[1]:6}   " + "       ".join(columns))

print(autotile.torch.accelerate(model))

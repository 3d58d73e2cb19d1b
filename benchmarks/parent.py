"""CPU time of the tuning process itself in a session of many trials, per trial and by what it does.

    python benchmarks/parent.py [--trials 1000] [--output parent.json]

A kernel of one line with 15,360 configurations is tuned in replay of a recording whose times are made up, with the
default sampler, in a fresh process. A first session fills the cubin cache, so that compilers take no time of the
others, each with an empty database. The second is measured; the third writes the timeline, which takes time itself.
The CPU time is that of the whole process, with all of its threads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from checkouts import ROOT, python
from provenance import provenance

KERNEL = """
extern "C" __global__ void scale(const float* x, float* y, int N)
{
    for (int i = blockIdx.x * A + threadIdx.x; i < N; i += A * B + C + D + E + F) y[i] = 2.0f * x[i];
}
"""
SPEC = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "scale"

[problem]
sizes = { N = 1048576 }

[parameters]
%s

[default]
A = 32
B = 1
C = 1
D = 1
E = 1
F = 1

[launch]
block = ["A"]
grid = ["ceil_div(N, A)"]

[arguments]
x = { buffer = "float32", shape = ["N"], access = "in" }
y = { buffer = "float32", shape = ["N"], access = "out" }
N = { scalar = "int32", value = "N" }

[reference]
outputs = { y = "2 * x" }
"""
VALUES = {
    "A": [32, 64, 128, 256, 512],
    "B": [1, 2, 4, 8, 16, 32],
    "C": [1, 2, 3, 4, 6, 8, 12, 16],
    "D": [1, 2, 3, 4, 5, 6, 7, 8],
    "E": [1, 2],
    "F": [1, 2, 3, 4],
}
SESSION = """
import json, sys, time
import autotile
trials, recording, traced = json.loads(sys.argv[1])
begun = [0.0]
def observe(progress):
    if progress.done == 0:
        begun[0] = time.process_time()
options = autotile.TuneOptions(trials=trials, replay=recording, trace="trace.json" if traced else None, finals=0%s)
result = autotile.tune("scale.toml", N=1048576, options=options, observe=observe)
print(json.dumps({"cpu_s": time.process_time() - begun[0], "search_s": result.phases["search"]}))
"""


def main() -> None:
    """Run the two sessions, print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_problem(Path(folder))
        run(Path(folder), arguments.trials)
        found = {"trials": arguments.trials, **run(Path(folder), arguments.trials)}
        found["spans"] = run(Path(folder), arguments.trials, traced=True)["spans"]
    print(f"{found['cpu_ms']:.2f} ms of CPU a trial, {found['wall_ms']:.2f} ms of wall time")
    for name, span in sorted(found["spans"].items(), key=lambda item: -item[1]["ms"]):
        print(f"  {name:<24} {span['ms'] / arguments.trials:8.3f} ms a trial, longest {span['longest_ms']:7.1f} ms")
    if arguments.output:
        arguments.output.write_text(json.dumps({**provenance(), **found}, indent=1) + "\n")


def write_problem(folder: Path) -> None:
    """Write the kernel, its search-space file, and a recording with made-up times."""
    from autotile.core.device import device_profile
    from autotile.core.model import Measurement, Outcome, Trial
    from autotile.cuda.toolchain import nvrtc_version
    from autotile.database.keys import TuningKey, space_hash
    from autotile.exchange.recording import RecordingHeader, write_recording
    from autotile.kernel.library import load_kernel
    from autotile.kernel.problem import resolve_problem

    (folder / "scale.cu").write_text(KERNEL)
    (folder / "scale.toml").write_text(SPEC % "\n".join(f"{name} = {values}" for name, values in VALUES.items()))
    kernel, device = load_kernel(str(folder / "scale.toml")), device_profile("h200")
    problem = resolve_problem(kernel.spec, {"N": 1048576})
    key = TuningKey.for_device(
        problem,
        device,
        template_hash=kernel.source_hash,
        space_hash=space_hash(kernel.spec),
        options=kernel.spec.options,
        nvrtc_version=nvrtc_version(),
        l2_mode="cold",
    )
    configs = [dict(zip(VALUES, values, strict=True)) for values in product(*VALUES.values())]
    times = [made_up_us(config) for config in configs]
    trials = [
        Trial(config, Outcome.OK, "", "measure", measurement=Measurement(t, 0.99 * t, 1.01 * t))
        for config, t in zip(configs, times, strict=True)
    ]
    header = RecordingHeader(key=key, parameters=kernel.spec.parameters, device=device, valid_configs=len(configs))
    write_recording(folder / "scale.npz", header, trials)


def made_up_us(config: dict[str, int]) -> float:
    """Return a time that has interactions, a few good regions, and roughness."""
    a, b, c, d, e, f = (config[name] for name in VALUES)
    rough = (a * 31 + b * 17 + c * 13 + d * 7 + e * 5 + f * 3) % 11
    return 10 + abs(a * b - 512) / 64 + abs(c - 2 * d) + (3 if e == 2 and f > 2 else f / 2) + rough / 5


def run(folder: Path, trials: int, *, traced: bool = False) -> dict[str, Any]:
    """Run a session in a fresh process; return its CPU and wall time per trial, and the spans of its timeline."""
    (folder / "tuning.db").unlink(missing_ok=True)
    trace = folder / "trace.json"
    program = SESSION.replace("%s", ", spend=True" if can_spend() else "")
    words = json.dumps([trials, str(folder / "scale.npz"), traced])
    found = json.loads(python(ROOT, folder, "-c", f"import os; os.chdir({str(folder)!r})\n{program}", words))
    spans: dict[str, dict[str, float]] = {}
    for event in json.loads(trace.read_text())["traceEvents"] if traced else ():
        if event["ph"] == "X" and event["name"] not in ("search", "start", "cached", "compile"):
            span = spans.setdefault(event["name"], {"ms": 0.0, "longest_ms": 0.0})
            span["ms"] += event["dur"] / 1e3
            span["longest_ms"] = max(span["longest_ms"], event["dur"] / 1e3)
    return {"cpu_ms": 1e3 * found["cpu_s"] / trials, "wall_ms": 1e3 * found["search_s"] / trials, "spans": spans}


def can_spend() -> bool:
    """Return whether a session can be told not to stop early."""
    from autotile.tuning.options import TuneOptions

    return "spend" in TuneOptions.__dataclass_fields__


if __name__ == "__main__":
    main()

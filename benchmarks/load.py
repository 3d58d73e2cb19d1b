"""Load of the compilers and the GPU in tuning sessions of five kernels that differ in what binds.

    python benchmarks/load.py [--budget 40] [--before DIR] [--kernels NAME ...] [--traces DIR] [--output load.json]

Each session runs in a fresh process with an empty database and cache, with verification, as `autotile.tune` runs it
with a time budget. The kernels (benchmarks/kernels, and sgemm_2d) range from compilations of a tenth of a second with
launches of microseconds to compilations of seconds. With ``--before``, another checkout runs the same sessions in
alternation. With ``--traces``, a timeline of each session is written to the folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from checkouts import ROOT, in_fresh_folder
from provenance import provenance
from rich.console import Console
from rich.table import Table

KERNELS = Path(__file__).resolve().parent / "kernels"
SESSIONS: dict[str, tuple[str, dict[str, int]]] = {
    "pnpoly": (str(KERNELS / "pnpoly.toml"), {"N": 2_000_000, "V": 128}),
    "nbody": (str(KERNELS / "nbody.toml"), {"N": 16_384}),
    "hotspot": (str(KERNELS / "hotspot.toml"), {"ROWS": 4096, "COLS": 4096}),
    "point_sets": (str(KERNELS / "point_sets.toml"), {"N": 16_384}),
    "sgemm_2d": ("sgemm_2d", {"M": 4096, "N": 4096, "K": 4096}),
}
"""Kernel and sizes of each session."""
SESSION = """
import json, os, sys, time
from dataclasses import fields
import autotile
kernel, sizes, budget_s, trace = json.loads(sys.argv[1])
named = {"budget_s": budget_s, "spend": True, "trace": trace}
options = autotile.TuneOptions(**{f.name: named[f.name] for f in fields(autotile.TuneOptions) if f.name in named})
trials = []
observe = lambda progress: trials.append(progress.last) if progress.last is not None else None
result = autotile.tune(kernel, sizes, options=options, observe=observe)
report = {
    "trials": len(trials),
    "search_s": result.phases["search"],
    "parent_ms": 1e3 * time.process_time() / max(1, len(trials)),
    "time_us": result.winner.time_us,
    **(result.to_json()["load"] or {}),
}
for stage in ("compile", "load", "verify", "measure"):
    report[stage + "_ms"] = 1e3 * sum(t.seconds.get(stage, 0.0) for t in trials) / max(1, len(trials))
print(json.dumps(report))
"""


def main() -> None:
    """Run the sessions, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each session")
    parser.add_argument("--before", type=Path, help="folder of another checkout to compare with")
    parser.add_argument("--kernels", nargs="+", choices=list(SESSIONS), default=list(SESSIONS))
    parser.add_argument("--traces", type=Path, help="folder for a timeline of each session")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.before.resolve()} if arguments.before else {}
    checkouts["after"] = ROOT
    rows = []
    for name in arguments.kernels:
        for side, checkout in checkouts.items():
            trace = str(arguments.traces.resolve() / f"{name}.json") if arguments.traces and side == "after" else None
            row = {"kernel": name, "side": side, **session(checkout, name, arguments.budget, trace)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    show(rows)
    if arguments.output:
        report = {**provenance(), "budget_s": arguments.budget, "sessions": rows}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def session(checkout: Path, name: str, budget_s: float, trace: str | None) -> dict[str, Any]:
    """Tune one kernel in a fresh process of a checkout; return its figures, with trials per second of the search."""
    kernel, sizes = SESSIONS[name]
    found = json.loads(in_fresh_folder(checkout, "-c", SESSION, json.dumps([kernel, sizes, budget_s, trace])))
    return {**found, "trials_per_s": found["trials"] / found["search_s"]}


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line per session."""
    stages = ("compile_ms", "load_ms", "verify_ms", "measure_ms")
    table = Table(
        "kernel", "", "trials", "trials/s", "compilers busy", "GPU busy", "parent CPU ms", *stages, "best time us"
    )
    for row in rows:
        busy = [f"{100 * row[key]:.0f} %" if key in row else "" for key in ("compilers_busy", "gpu_busy")]
        per_trial = [f"{row[key]:.1f}" for key in ("parent_ms", *stages)]
        table.add_row(
            row["kernel"], row["side"], str(row["trials"]), f"{row['trials_per_s']:.1f}", *busy, *per_trial,
            f"{row['time_us']:.1f}",
        )  # fmt: skip
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

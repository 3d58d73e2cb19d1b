"""Record the output of the commands in README.md, so that a test can compare the page with it.

    python benchmarks/console.py --output benchmarks/results/console.json

Runs every line that begins with ``$ autotile`` in a console block of the README, in order, in an empty folder with an
empty database and without a GPU, and stores its output. A page may omit lines (``...``) but not change them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 120


def main() -> None:
    """Run the commands and write their output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    output = parser.parse_args().output
    found = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        printed = {command: run(command, Path(folder)) for command in found}
    output.write_text(json.dumps({**provenance(), "commands": printed}, indent=1, ensure_ascii=False) + "\n")


def commands(page: str) -> list[str]:
    """Return the commands of a page's console blocks, in order."""
    lines = [line for block in BLOCK.findall(page) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ autotile")]


def run(command: str, folder: Path) -> list[str]:
    """Run an autotile command and return its output as lines."""
    _, *words = shlex.split(command)
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    environment = {**os.environ, "AUTOTILE_DB": str(folder / "tuning.db"), "AUTOTILE_CACHE": str(folder / "cache")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(WIDTH)}
    done = subprocess.run(
        [sys.executable, "-m", "autotile", *words], env=environment, capture_output=True, text=True, check=False
    )
    print(f"{command}: exit code {done.returncode}")
    lines = done.stdout.replace(str(ROOT) + "/", "").replace(str(folder), "FOLDER").splitlines()
    return [line.rstrip() for line in lines]


if __name__ == "__main__":
    main()

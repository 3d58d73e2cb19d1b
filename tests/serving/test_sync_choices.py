"""`autotile.torch.sync_choices` among two processes on the host, with Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PROGRAM = """
import os, sys
import torch.distributed as distributed
import autotile
import autotile.torch

path, store, rank, own = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
os.environ["AUTOTILE_DB"] = own
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
kernel = autotile.get_best_kernel(path, n=4096, device="h200")
before = kernel.config["THREADS"]
autotile.torch.sync_choices()
print(before, kernel.config["THREADS"])
distributed.destroy_process_group()
"""


def test_two_processes_serve_the_same(store: Any, tmp_path: Path) -> None:
    store.put(4096, {"THREADS": 256, "WORK": 4})
    databases = [os.environ["AUTOTILE_DB"], str(tmp_path / "other.db")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(store.path), str(tmp_path / "store"), str(rank), own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(databases)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0].split("\n")[0] == "256 256"
    assert outputs[1][0].split("\n")[0] == "128 256"

"""Modules that the first look-up of a process imports, with a ceiling that only falls."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotile.settings import read_settings

ROOT = Path(__file__).parents[2]
CEILING = 33
"""Modules without ``__init__``, which hold a line each. Lower it with the number."""
PROGRAM = """
import sys
from dataclasses import replace
import autotile
from autotile.serving import dispatcher
from autotile.core.device import device_profile
dispatcher.default_dispatcher.current_device = lambda: 0
dispatcher.live_device = lambda _: replace(device_profile("h200"), source="cuda")
kernel = autotile.get_best_kernel(sys.argv[1], n=4096)
assert kernel.tier == sys.argv[2], kernel.tier
found = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(*(name for name, file in found.items() if name.startswith("autotile.") and not file.endswith("__init__.py")))
"""


def modules(path: Path, tier: str) -> set[str]:
    """Modules of the package in a fresh process that looks one kernel up, as on a machine with an H200."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTILE_DB": str(read_settings().database)}
    command = [sys.executable, "-c", PROGRAM, str(path), tier]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_result_of_the_problem_needs_few_modules(store: Any) -> None:
    store.put(4096, {"THREADS": 256, "WORK": 4})
    found = modules(store.path, "exact")
    assert {"autotile.serving.bound", "autotile.serving.selection", "autotile.database.keys"} <= found
    assert len(found) <= CEILING, sorted(found)
    assert len(found) > CEILING - 3, "lower the ceiling"


def test_an_exact_result_loads_neither_comparison_nor_fallback(store: Any) -> None:
    store.put(4096, {"THREADS": 256, "WORK": 4})
    exact = modules(store.path, "exact")
    Path(str(read_settings().database)).unlink()
    store.put(8192, {"THREADS": 256, "WORK": 4})
    comparison = "autotile.families.preference"
    assert (comparison in exact, comparison in modules(store.path, "nearest")) == (False, True)
    later = ("exchange.shipped", "serving.launching", "serving.operations", "serving.pinning")
    assert exact.isdisjoint(f"autotile.{name}" for name in later)

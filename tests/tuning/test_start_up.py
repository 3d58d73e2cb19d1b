"""Modules that a replayed session of a few trials imports, with a ceiling that only falls."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotile.settings import read_settings

ROOT = Path(__file__).parents[2]
CEILING = 62
"""Modules without ``__init__``, which hold a line each. Lower it with the number."""
PROGRAM = """
import sys
import autotile
options = autotile.TuneOptions(trials=12, sampler="feasible", replay=sys.argv[2], workers=1)
result = autotile.tune(sys.argv[1], options=options, progress=False)
assert result.winner is not None
found = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(*(name for name, file in found.items() if name.startswith("autotile.") and not file.endswith("__init__.py")))
"""


def test_a_session_needs_few_modules(bench: Any) -> None:
    command = [sys.executable, "-c", PROGRAM, str(bench.kernel.spec.source), str(bench.record())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTILE_DB": str(read_settings().database)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert {"autotile.tuning.session", "autotile.search.gp_sampler"} <= found
    assert len(found) <= CEILING, sorted(found)
    assert len(found) > CEILING - 3, "lower the ceiling"

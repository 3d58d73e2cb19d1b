"""Python processes that find this checkout."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotile.settings import child_environment


def python(
    *words: str | Path, env: Mapping[str, str] | None = None, timeout: float = 120, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment of a child of autotile's, with further variables, and keep what it prints."""
    if "stdout" not in options:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**child_environment(), **(env or {})},
        text=True,
        timeout=timeout,
        check=check,
        **options,
    )

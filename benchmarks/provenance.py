"""Provenance of benchmark figures, stored in every result file."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotile import __version__
from autotile.cuda.driver import device_count, driver_version, live_device
from autotile.cuda.toolchain import nvrtc_version
from autotile.settings import available_cores

_PACKAGES = (
    "numpy",
    "cupy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "optuna",
    "kernel-tuner",
    "sqlalchemy",
    "torch",
    "nvidia-cublas",
)


def provenance() -> dict[str, Any]:
    """Return the command, date, versions, and the machine of this run."""
    has_gpu = device_count() > 0
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"autotile": __version__, "python": platform.python_version(), "nvrtc": nvrtc_version()}
        | {name: found for name in _PACKAGES if (found := _version(name))}
        | ({"driver": driver_version()} if has_gpu else {}),
        "device": live_device().name if has_gpu else None,
        "cores": available_cores(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

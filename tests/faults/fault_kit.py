"""The fault kit: a kernel with a healthy configuration of each size, and one configuration for each way to fail."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from autotile.core.model import Trial
from autotile.kernel.library import Kernel, load_kernel

_HERE = Path(__file__).parent
_FAULT_VALUES = re.compile(r"^FAULT = \[.*?\]", re.MULTILINE | re.DOTALL)
HEALTHY = "none"


@dataclass(frozen=True, slots=True)
class Fault:
    """What the tuner should make of one way to fail.

    Attributes
    ----------
    outcomes
        Any of these is right.
    stage, reason
        Patterns of the stage that sees it and of what a person is told.
    """

    name: str
    outcomes: tuple[str, ...]
    stage: str
    reason: str

    def complaint(self, trial: Trial | None) -> str:
        """What is not as expected about the faulty configuration's trial; empty where all is."""
        if trial is None:
            return "was never tried"
        told = f"{trial.outcome} in stage {trial.stage}: {trial.reason}"
        right = trial.outcome in self.outcomes and re.fullmatch(self.stage, trial.stage)
        if right and re.search(self.reason, trial.reason, re.DOTALL):
            return ""
        return f"{told}; expected {' or '.join(self.outcomes)} in stage {self.stage}: {self.reason}"


def read_faults() -> tuple[Fault, ...]:
    """Every fault of the kit."""
    expected = tomllib.loads((_HERE / "expected.toml").read_text())
    return tuple(
        Fault(name, tuple(entry["outcomes"]), entry["stage"], entry["reason"]) for name, entry in expected.items()
    )


def fault_kernel(folder: Path, *faults: str) -> Kernel:
    """The kit's kernel with its healthy configurations and some of the faulty ones, copied to a folder.

    Parameters
    ----------
    faults
        Names; none for all, `HEALTHY` for no fault.
    """
    shutil.copy(_HERE / "faults.cu", folder)
    text = (_HERE / "faults.toml").read_text()
    if faults:
        values = ", ".join(f'"{name}"' for name in dict.fromkeys((HEALTHY, *faults)))
        text = _FAULT_VALUES.sub(f"FAULT = [{values}]", text)
    (folder / "faults.toml").write_text(text)
    return load_kernel(str(folder / "faults.toml"))

"""The fault kit: a kernel with healthy configurations, and one configuration for each kind of fault."""

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
    """Expected trial of a configuration with one kind of fault; stage and reason are regular expressions."""

    name: str
    outcomes: tuple[str, ...]
    stage: str
    reason: str

    def complaint(self, trial: Trial | None) -> str:
        """Return the deviation of the faulty configuration's trial from the expected one; empty if there is none."""
        if trial is None:
            return "was never tried"
        found = f"{trial.outcome} in stage {trial.stage}: {trial.reason}"
        matches = trial.outcome in self.outcomes and re.fullmatch(self.stage, trial.stage)
        if matches and re.search(self.reason, trial.reason, re.DOTALL):
            return ""
        return f"{found}; expected {' or '.join(self.outcomes)} in stage {self.stage}: {self.reason}"


def read_faults() -> tuple[Fault, ...]:
    expected = tomllib.loads((_HERE / "expected.toml").read_text())
    return tuple(
        Fault(name, tuple(entry["outcomes"]), entry["stage"], entry["reason"]) for name, entry in expected.items()
    )


def fault_kernel(folder: Path, *faults: str) -> Kernel:
    """Copy the kit's kernel to a folder, with its healthy configurations and some of the faulty ones; load it.

    The faults are all if none is named; `HEALTHY` stands for none.
    """
    shutil.copy(_HERE / "faults.cu", folder)
    text = (_HERE / "faults.toml").read_text()
    if faults:
        values = ", ".join(f'"{name}"' for name in dict.fromkeys((HEALTHY, *faults)))
        text = _FAULT_VALUES.sub(f"FAULT = [{values}]", text)
    (folder / "faults.toml").write_text(text)
    return load_kernel(str(folder / "faults.toml"))

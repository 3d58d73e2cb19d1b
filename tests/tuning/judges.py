"""Trials of the tiny kernel's configurations, observers that end a session, and a fake GPU."""

from collections.abc import Callable
from pathlib import Path

from stored_runs import timed

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Outcome, Trial, config_key
from autotile.exchange.recording import read_recording
from autotile.tuning.progress_state import Progress
from autotile.tuning.replay import ReplayBackend

BEST = {"THREADS": 256, "WORK": 4}
DEFAULT = {"THREADS": 128, "WORK": 1}
FEW, MANY = {"THREADS": 64, "WORK": 1}, BEST
"""Configurations that are best for few elements and for many, by `by_size`."""
FAMILY_SIZES = (1024, 3000, 5000, 16384, 40_001, 65536)


def failed(config: Config, outcome: Outcome, reason: str = "because", stage: str = "verify") -> Trial:
    return Trial(config, outcome, reason, stage)


def by_threads(config: Config, factor: float = 1.0) -> Trial:
    """Return a trial that is faster with more threads and, slightly, with more work: `BEST` wins by 8 %."""
    return timed(config, factor * (1000 / int(config["THREADS"]) + 2 / int(config["WORK"])))


def by_size(n: int) -> Callable[[Config], Trial]:
    """Return a judge to which `FEW` is best up to 10,000 elements, and `MANY` beyond."""
    best = config_key(FEW if n <= 10_000 else MANY)
    return lambda config: timed(
        config, 10.0 if config_key(config) == best else 11.0 + int(config["THREADS"]) / 64 + int(config["WORK"])
    )


def failing_if(is_faulty: Callable[[Config], bool], outcome: Outcome, *told: str) -> Callable[[Config], Trial]:
    """Return `by_threads` but for faulty configurations, which fail with a reason and a stage."""
    return lambda config: failed(config, outcome, *told) if is_faulty(config) else by_threads(config)


def ending_at(
    done: int, phase: str | None = None, error: type[BaseException] = KeyboardInterrupt
) -> Callable[[Progress], None]:
    """Return an observer that raises an error at a number of trials, of any phase or of one."""

    def observe(progress: Progress) -> None:
        if progress.done == done and phase in (None, progress.phase):
            raise error("ended by the test")

    return observe


class FakeGpu(ReplayBackend):
    measures_energy = False
    recorded = None

    def __init__(self, path: Path, device: DeviceProperties) -> None:
        super().__init__(read_recording(path))
        self.device = device

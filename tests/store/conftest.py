from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotile.files.profiles import device_profile
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import (
    Config,
    LaunchGeometry,
    Measurement,
    Occupancy,
    Outcome,
    Problem,
    Resources,
    Trial,
)
from autotile.store.database import Database
from autotile.store.keys import TuningKey


@pytest.fixture
def device() -> DeviceProperties:
    return device_profile("h200")


@pytest.fixture
def key(device: DeviceProperties) -> TuningKey:
    return TuningKey.for_device(
        Problem("sgemm", {"M": 4096, "N": 2048, "K": 1024}, "float32"),
        device,
        template_hash="t" * 64,
        space_hash="s" * 64,
        options=("--use_fast_math",),
        nvrtc_version="13.0",
        l2_mode="cold",
    )


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "tuning.db") as opened:
        yield opened


@pytest.fixture
def measured() -> Callable[..., Trial]:
    """Make a trial that went all the way, with a given time."""

    def make(config: Config, time_us: float) -> Trial:
        return Trial(
            config=config,
            outcome=Outcome.OK,
            stage="measure",
            geometry=LaunchGeometry((32, 64, 1), (16, 16, 1), 49152),
            resources=Resources(96, 0, 0, 0, 16640),
            occupancy=Occupancy(2, 16, 0.25, ("registers",), {"threads": 8, "registers": 2, "shared_memory": 3}),
            measurement=Measurement(time_us, time_us * 0.99, time_us * 1.01, (time_us, time_us * 1.01), "cold"),
            cubin_hash="c" * 64,
            seconds={"compile": 0.25, "measure": 0.05},
            telemetry={"clock_mhz": 1980, "power_w": 512.5, "throttle": "none"},
        )

    return make


@pytest.fixture
def failed() -> Callable[..., Trial]:
    """Make a trial that ended with a given outcome before it was measured."""

    def make(config: Config, outcome: Outcome, reason: str = "why") -> Trial:
        return Trial(config=config, outcome=outcome, reason=reason, stage="compile")

    return make

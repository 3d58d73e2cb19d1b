"""Shared fixtures: a database and caches of the test's own, and a tiny kernel that compiles in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Outcome, Problem, Resources, Trial
from autotile.cuda.driver import device_count
from autotile.database.database import Database
from autotile.database.keys import TuningKey
from autotile.serving.dispatcher import default_dispatcher

SCALE_TEMPLATE = """
extern "C" __global__ void scale(const float* x, float* y, int n, float factor) {
    const int first = (blockIdx.x * THREADS + threadIdx.x) * WORK;
    for (int i = first; i < first + WORK && i < n; ++i) y[i] = factor * x[i];
}
"""

SCALE_SPACE = """
[kernel]
name = "scale"
template = "scale.cu"
entry = "scale"
summary = "y = factor x"

[problem]
sizes = { n = 4096 }
ragged = { n = 1001 }

[parameters]
THREADS = [32, 64, 128, 256]
WORK = [1, 2, 4]

[default]
THREADS = 128
WORK = 1

[rules]
enough_blocks = "n >= THREADS * WORK"

[launch]
block = ["THREADS"]
grid = ["ceil_div(n, THREADS * WORK)"]

[arguments]
x = { buffer = "dtype", shape = ["n"], access = "in" }
y = { buffer = "dtype", shape = ["n"], access = "out" }
n = { scalar = "int32", value = "n" }
factor = { scalar = "float32", value = 2.0, check = -0.5 }

[reference]
outputs = { y = "factor * x" }

[work]
flops = "n"
bytes = "8 * n"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if device_count() > 0:
        return
    skip = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def cubin_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cubin cache for the whole session, so that a kernel is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, cubin_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's database, cache or configuration."""
    monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("AUTOTILE_CACHE", str(cubin_cache_folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("AUTOTILE_KERNELS", raising=False)
    default_dispatcher.clear()
    default_dispatcher.misses.clear()


@pytest.fixture
def scale_toml(tmp_path: Path) -> Path:
    """A kernel of the user's own: ``y = factor x``."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE_TEMPLATE)
    (folder / "scale.toml").write_text(SCALE_SPACE)
    return folder / "scale.toml"


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

"""Shared fixtures: a database and caches of the test's own, and a tiny kernel that compiles in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotile.device.properties import device_count
from autotile.dispatch.counting import misses
from autotile.dispatch.serving import forget_served

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
    forget_served()
    misses.forget()


@pytest.fixture
def scale_toml(tmp_path: Path) -> Path:
    """A kernel of the user's own: ``y = factor x``."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE_TEMPLATE)
    (folder / "scale.toml").write_text(SCALE_SPACE)
    return folder / "scale.toml"

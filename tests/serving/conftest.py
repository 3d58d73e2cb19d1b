"""Fixtures: a small kernel, a database of results that were never measured, and machines with and without a GPU."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from stored_runs import add_trial, start_run, timed

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, Problem, Resources
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import TuningKey, key_of
from autotile.kernel.library import Kernel, load_kernel
from autotile.serving import dispatcher as serving
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher, get_best_kernel
from autotile.settings import read_settings

RESOURCES = Resources(24, 0, 0, 0, 0)


@dataclass
class ResultStore:
    """Stores results of a kernel as tuning does, and serves them."""

    kernel: Kernel
    path: Path
    empty_database: Path

    def put(
        self,
        n: int,
        config: Config,
        *,
        time_us: float = 10.0,
        device: DeviceProperties | None = None,
        resources: Resources | None = RESOURCES,
        finished: bool = True,
        driver: str = "",
        default_ratio: float | None = 2.0,
        **changes: Any,
    ) -> TuningKey:
        """Store a winner for a size, measured with a driver version; ``changes`` are of the key.

        The default is the other finalist, and takes ``default_ratio`` times as long; with None, it was not measured.
        """
        device = device or structs.replace(device_profile("h200"), source="cuda")
        problem = Problem(self.kernel.name, {"n": n}, "float32")
        key = key_of(self.kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
        key = structs.replace(key, **changes)
        location = Path(read_settings().database)
        if not location.exists():
            shutil.copy(self.empty_database, location)
        default, ranked = self.kernel.spec.default, [timed(config, time_us)]
        if default_ratio is not None and config != default:
            ranked.append(timed(default, default_ratio * time_us))
        trials = [replace(one, resources=resources) for one in ranked]
        columns = {"sampler": "random", "driver": driver}
        with Database.open(location) as database:
            if finished:
                database.add_run(key, trials, device=device, phase="final", is_ranked=True, **columns)
            else:
                study = database.study(key, device)
                run = start_run(database, study, **columns)
                add_trial(database, study, run, trials[0], phase="final", rank=1)
        return key

    def ask(self, n: int, device: int | str | None = "h200", **named: Any) -> BoundKernel:
        """Serve a size, with nothing remembered."""
        default_dispatcher.clear()
        return get_best_kernel(str(self.path), n=n, device=device, **named)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A database without results, to be copied: its tables take longer to make."""
    path = tmp_path_factory.mktemp("database") / "empty.db"
    Database.open(path).close()
    return path


@pytest.fixture
def store(scale_toml, empty_database):
    return ResultStore(load_kernel(str(scale_toml)), scale_toml, empty_database)


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def live_gpu(monkeypatch):
    """A machine with an H200, as far as serving queries it; nothing can be launched."""
    monkeypatch.setattr(default_dispatcher, "current_device", lambda: 0)
    monkeypatch.setattr(serving, "live_device", lambda _: structs.replace(device_profile("h200"), source="cuda"))


@pytest.fixture
def uncounted_devices(monkeypatch):
    """The default dispatcher as it is before it has counted the CUDA devices."""
    monkeypatch.setattr(default_dispatcher, "_device_count", 0)
    monkeypatch.setattr(default_dispatcher, "only_device", None)


@pytest.fixture
def no_gpu(uncounted_devices, monkeypatch):
    monkeypatch.setattr(serving, "device_count", lambda: 0)

"""Shared fixtures: a database and caches of the test's own, and a tiny kernel that compiles in milliseconds."""

import fcntl
import gc
import os
import shutil
import signal
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from feature_kernels import FOLDER, copy_kernel
from hypothesis import settings
from postgresql_server import programs_folder, running_server
from stored_runs import Book

import autotile
from autotile.core.device import device_profile
from autotile.core.model import Config, Measurement, Outcome, Problem, Trial
from autotile.cuda.compiler import CubinCache
from autotile.cuda.driver import device_count, live_device
from autotile.cuda.support import SupportKernels
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import TuningKey, key_of
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.serving.dispatcher import default_dispatcher
from autotile.settings import data_folder, read_settings
from autotile.space.search_space import feasible_space


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that pins what the present code does, where a test compares it with what is pinned."""
    parser.addoption("--pin", action="store_true", help="write what tests/pinned holds from the present code")


def pytest_configure() -> None:
    """Let the many processes of the tests read compiled modules, and do linear algebra in one thread each."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings.register_profile("autotile", max_examples=50, deadline=None)  # the machine may be slow
    settings.load_profile("autotile")


FIRST = (
    *("test_cluster", "test_compile_farm", "test_killed", "test_live_page", "test_operation_family"),
    "test_shared_study",
)
"""Starts of the names of modules whose tests take seconds, as they wait for other processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that none is left for a single process at the end; skip those without a GPU."""
    items.sort(key=lambda item: not item.path.name.startswith(FIRST))
    if device_count() > 0:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    """Keep the garbage collector off the tests themselves: a full collection of thousands of them takes 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the limit of time begins
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run one test at a time on the GPU, in whichever process, as load disturbs times; or several that take none."""
    mark = item.get_closest_marker("gpu")
    if mark is None or device_count() == 0:
        return (yield)
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if mark.kwargs.get("shared") else fcntl.LOCK_EX)  # closing the file unlocks it
        return (yield)


@pytest.fixture(scope="session")
def cubin_cache_folder(tmp_path_factory):
    """One cubin cache for the whole session, with all of its processes, so that a kernel is compiled once."""
    folder = tmp_path_factory.getbasetemp()
    cache = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    return cache


@pytest.fixture(scope="session")
def postgresql():
    """A PostgreSQL server of the tests' own, which they may restart."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    programs = programs_folder()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian's package postgresql)")
    with running_server(programs) as server:
        yield server


@pytest.fixture
def server_url(request):
    """URL of the database that AUTOTILE_TEST_POSTGRESQL names, else of an empty one on the tests' own server."""
    given = os.environ.get("AUTOTILE_TEST_POSTGRESQL")
    return given or str(request.getfixturevalue("postgresql").emptied_database())


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, cubin_cache_folder, monkeypatch):
    """No test reads or writes the user's database, cache or configuration."""
    monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("AUTOTILE_CACHE", str(cubin_cache_folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("AUTOTILE_KERNELS", raising=False)
    monkeypatch.delenv("AUTOTILE_OPERATIONS", raising=False)
    monkeypatch.setenv("AUTOTILE_REFRESH", "0")
    default_dispatcher.clear()
    default_dispatcher.misses.clear()
    default_dispatcher.pins.forget()
    default_dispatcher.refresher._kernels.clear()  # those that a failed test keeps alive


@pytest.fixture(scope="session")
def write_scale():
    """Write a kernel of the user's own, ``y = factor x``, to a new folder, and return its search space."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        return copy_kernel(folder, "scale")

    return write


@pytest.fixture
def scale_toml(tmp_path, write_scale):
    return write_scale(tmp_path / "kernels")


@pytest.fixture
def scaling_toml(scale_toml):
    """An operation of the tiny kernel alone."""
    return Path(shutil.copy(FOLDER / "scaling.toml", scale_toml.parent))


@pytest.fixture(scope="session")
def cp():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="session")
def support(tmp_path_factory):
    return SupportKernels(CubinCache(tmp_path_factory.mktemp("support"), 10**8), live_device().architecture)


@pytest.fixture
def little_time():
    """Fail a test that waits for a file, rather than wait with it."""
    signal.alarm(30)
    yield
    signal.alarm(0)


@pytest.fixture
def hopper():
    if live_device().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def only_kernel(tmp_path, monkeypatch):

    def leave(name: str) -> None:
        head, *members = (data_folder("operations") / "matmul.toml").read_text().split("\n[kernels.")
        kept = next((member for member in members if member.startswith(f"{name}]")), f"{name}]\n")
        folder = tmp_path / "operations"
        folder.mkdir()
        (folder / "matmul.toml").write_text(f"{head}\n[kernels.{kept}")
        monkeypatch.setenv("AUTOTILE_OPERATIONS", str(folder))
        default_dispatcher.clear()

    return leave


@pytest.fixture
def device():
    return device_profile("h200")


@pytest.fixture
def key(device):
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
def database(tmp_path):
    with Database.open(tmp_path / "tuning.db") as opened:
        yield opened


@pytest.fixture
def recording(scale_toml, tmp_path):
    """Every configuration of the tiny kernel on an H200, with made-up times; one of them is wrong."""
    kernel = load_kernel(str(scale_toml))
    device = device_profile("h200")
    problem = resolve_problem(kernel.spec, {"n": 1048576})
    space = feasible_space(kernel.spec, problem, device)
    key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    path = tmp_path / "scale.npz"
    header = RecordingHeader(key=key, parameters=kernel.spec.parameters, device=device, valid_configs=len(space))
    write_recording(path, header, [_recorded_trial(space.config(row)) for row in range(len(space))])
    return path


@pytest.fixture
def book(tmp_path, scale_toml):
    """Name a database of results of the tiny kernel that never ran."""
    return lambda name: Book(tmp_path / name, scale_toml)


@pytest.fixture
def own_recordings(recording, monkeypatch):
    """Let the recording of the tiny kernel be the only one."""
    settings = replace(read_settings(), recording_folders=(recording.parent,))
    monkeypatch.setattr("autotile.api.tuning.read_settings", lambda: settings)


@pytest.fixture(scope="session")
def whole_study():
    """The file of a database in which the tiny kernel is tuned, as soon as a test has needed it."""
    return []


@pytest.fixture
def tuned(request, whole_study, scale_toml, tmp_path):
    """The user's database, in which every configuration of the tiny kernel was tried."""
    path = tmp_path / "tuning.db"
    if not whole_study:
        replay = request.getfixturevalue("recording")
        autotile.tune(scale_toml, n=1048576, trials=12, replay=replay, progress=False)
        whole_study.append(path.read_bytes())
    path.write_bytes(whole_study[0])
    return path


def _recorded_trial(config: Config) -> Trial:
    """256 threads are fastest, and more work a thread helps a little; the smallest block gives a wrong result."""
    if config["THREADS"] == 32 and config["WORK"] == 4:
        return Trial(config, Outcome.WRONG_RESULT, "y[3] is 0, expected 1", "verify")
    time_us = 1000 / int(config["THREADS"]) + 2 / int(config["WORK"])
    return Trial(config, Outcome.OK, "", "measure", measurement=Measurement(time_us, 0.99 * time_us, 1.01 * time_us))

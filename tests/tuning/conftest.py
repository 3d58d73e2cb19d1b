"""A tiny kernel with recordings of synthetic times, and sessions that replay them."""

import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from judges import by_threads
from msgspec.structs import replace

from autotile.core.device import DeviceProperties, device_profile
from autotile.core.model import Config, L2Mode, Problem, Trial
from autotile.cuda.compiler import CompileJob
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import TuningKey, key_of
from autotile.exchange.recording import RecordingHeader, write_recording
from autotile.kernel.library import Kernel, load_kernel
from autotile.kernel.operation import load_operation
from autotile.kernel.problem import resolve_problem
from autotile.settings import Settings, read_settings
from autotile.space.search_space import feasible_space
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.result import TuneResult
from autotile.tuning.session import tune
from autotile.workers.compile_pool import CompilePool

SIZE = 4096
Judge = Callable[[Config], Trial]


@dataclasses.dataclass
class Bench:
    """A kernel that can be tuned by replay of recordings of a device."""

    kernel: Kernel
    folder: Path
    device: DeviceProperties

    @property
    def settings(self) -> Settings:
        return dataclasses.replace(read_settings(), recording_folders=(self.folder,))

    def problem(self, n: int = SIZE) -> Problem:
        return resolve_problem(self.kernel.spec, {"n": n})

    def configs(self, n: int = SIZE) -> list[dict[str, Any]]:
        space = feasible_space(self.kernel.spec, self.kernel.spec.at({"n": n}), self.device)
        return [space.config(row) for row in range(len(space))]

    def key(self, n: int = SIZE, l2: L2Mode = "cold", **changes: Any) -> TuningKey:
        """Return the key of the recorded results, with some fields replaced."""
        key = key_of(self.kernel, self.problem(n), self.device, nvrtc_version=nvrtc_version(), l2_mode=l2)
        return replace(key, **changes)

    def record(
        self, judge: Judge = by_threads, configs: Iterable[Config] | None = None, *, n: int = SIZE, **changes: Any
    ) -> Path:
        """Write a recording of all configurations or of ``configs``; ``changes`` replace fields of its key."""
        trials = [judge(config) for config in (configs if configs is not None else self.configs(n))]
        path = self.folder / f"{len(list(self.folder.glob('*.npz')))}.npz"
        header = RecordingHeader(key=self.key(n, **changes), parameters=self.kernel.spec.parameters, device=self.device)
        write_recording(path, header, trials)
        return path

    def tune(
        self,
        replay: Path | None,
        observe: Callable[[Progress], None] = lambda _: None,
        *,
        n: int = SIZE,
        **options: Any,
    ) -> TuneResult:
        chosen = TuneOptions(replay=replay, **{"workers": 1, **options})
        return tune(self.kernel, self.problem(n), read_settings(), chosen, observe)

    def stored(self, phase: Any = "search") -> list[Trial]:
        """Return the trials of all studies in the database, oldest first."""
        with Database.open(read_settings().database) as database:
            studies = [study.study_id for study in database.studies()]
            return [trial for study in studies for trial in database.trials(study, phase=phase)]


@pytest.fixture
def bench(scale_toml, tmp_path):
    return Bench(load_kernel(str(scale_toml)), tmp_path, device_profile("h200"))


@pytest.fixture
def recordings_found(bench, monkeypatch):
    """Let replay by the public functions look for recordings of the tiny kernel."""
    for module in ("plans", "targets", "tuning", "window"):
        monkeypatch.setattr(f"autotile.api.{module}.read_settings", lambda: bench.settings)


@pytest.fixture
def rewrite(scale_toml, tmp_path):
    """Return a function that replaces parts of the tiny kernel's search space or template."""

    def make(changes):
        for file in (scale_toml, scale_toml.with_suffix(".cu")):
            text = file.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            file.write_text(text)
        return Bench(load_kernel(str(scale_toml)), tmp_path, device_profile("h200"))

    return make


@pytest.fixture
def tls(tmp_path, monkeypatch):
    """Variables that name a certificate, which is its own authority, to Dask; this process knows it, too."""
    import dask.config

    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=autotile", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    prefix, roles = "DASK_DISTRIBUTED__COMM__TLS__", ("SCHEDULER", "WORKER", "CLIENT")
    files = {"KEY": str(key), "CERT": str(certificate)}
    variables = {f"{prefix}{role}__{name}": file for role in roles for name, file in files.items()}
    variables[f"{prefix}CA_FILE"] = str(certificate)
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        dask.config.refresh()
        yield variables
    dask.config.refresh()


@pytest.fixture(scope="session")
def scheduler_for_all(tmp_path_factory):
    pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")
    from cluster_kit import running_cluster

    with running_cluster(tmp_path_factory.mktemp("cluster"), host="localhost") as kit:
        yield kit


@pytest.fixture(scope="module")
def cluster(scheduler_for_all):
    """A cluster at the loopback address, without TLS; its workers are those of the module."""
    scheduler_for_all.restore()
    yield scheduler_for_all
    scheduler_for_all.end_workers()


@pytest.fixture
def compiled_once(monkeypatch):
    """Take the first cubin of a source for each of its configurations: for large spaces of recorded times."""
    submit = CompilePool.submit
    first: dict[str, CompileJob] = {}

    def submit_first(self, job):
        return submit(self, first.setdefault(job.source_hash, job))

    monkeypatch.setattr(CompilePool, "submit", submit_first)


@pytest.fixture
def operation_of_copies(scale_toml):
    """Return a function that loads the operation "scaling" of copies of the tiny kernel; `when` has conditions."""

    def load(*names, **when):
        lines = ["[operation]", 'name = "scaling"', "sizes = { n = 4096 }", 'dtypes = ["float32"]']
        for name in names:
            lines += [f"[kernels.{name}]", f'kernel = "./{name}.toml"']
            lines += [f'when = "{when[name]}"'] if name in when else []
            for suffix in (".toml", ".cu"):
                copied = scale_toml.with_suffix(suffix).read_text()
                copied = copied.replace('name = "scale"', f'name = "{name}"').replace("scale.cu", f"{name}.cu")
                scale_toml.with_name(name + suffix).write_text(copied)
        path = scale_toml.with_name("scaling.toml")
        path.write_text("\n".join(lines))
        return load_operation(str(path))

    return load


@pytest.fixture
def record_copies(bench):
    """Return a function that records kernels of an operation, with factors on the times of the tiny kernel."""

    def record(operation, **factors):
        own = bench.kernel
        for name, factor in factors.items():
            bench.kernel = load_kernel(next(member.kernel for member in operation.members if member.name == name))
            bench.record(partial(by_threads, factor=factor))
        bench.kernel = own

    return record

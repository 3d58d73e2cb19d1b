"""The worker's end of a cluster: its GPU worker between sessions, and second inputs that cannot be drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import running_cluster, wait_until

from autotile.errors import WorkerError
from autotile.settings import read_settings
from autotile.tuning.backend import workload_of
from autotile.tuning.options import TuneOptions
from autotile.workers.gpu import Gpu

pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")

from autotile.tuning.cluster import worker as cluster_worker
from autotile.tuning.cluster.worker import GpuPlugin, GpuRequest, OfferedGpu

PRELOAD = """
from pathlib import Path

from autotile.errors import InputError, ToolchainError, WorkerError
from autotile.tuning.replay import ReplayBackend

def checked(backend, job, check=ReplayBackend.check):
    with Path({log!r}).open("a") as file:
        file.write(f"{{job.seed}}\\n")
    if {error!r} and job.seed:
        raise {error}("the second inputs are too large")
    return check(backend, job)

if ReplayBackend.check.__name__ == "check":
    ReplayBackend.check = checked
"""
"""Program that each process of Dask runs first, twice in the same module: Dask imports and then reloads it."""


class Idle:
    """A GPU of a cluster whose worker process needs no GPU.

    Attributes
    ----------
    pids
        Processes that have set up a problem, one an opening.
    """

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self._plugin = GpuPlugin(OfferedGpu("GPU-a", bench.device))
        self.pids: list[int] = []

    def open(self, session: str) -> None:
        """Begin a session."""
        bench = self._bench
        workload = workload_of(bench.kernel, bench.problem(), read_settings(), TuneOptions())
        workload = replace(workload, spec_source="")  # in which this worker reads what goes wrong
        self._plugin.handle(GpuRequest(bench.kernel.name, workload, 5.0, session, "open"), {})
        backend: Any = self._plugin._backend
        self.pids.append(backend._child.pid)

    def close(self, session: str) -> None:
        """End a session."""
        self._plugin.handle(GpuRequest(session=session, op="close"), {})

    def end(self) -> None:
        """End the process of Dask."""
        self._plugin.teardown(None)


@pytest.fixture
def idle(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Idle]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "workers"), prepend=":")
    monkeypatch.setattr(cluster_worker, "Gpu", partial(Gpu, module="bad_worker"))
    made = Idle(bench)
    yield made
    made.end()


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_requests_of_a_session_share_what_was_set_up(idle: Idle) -> None:
    kept = []
    for _ in range(3):
        idle.open("only")
        kept.append(idle._plugin._backend)
    assert kept[0] is kept[1] is kept[2]
    idle.close("only")
    idle.open("another")
    assert idle._plugin._backend is not kept[0]


def timers() -> list[threading.Timer]:
    """Return the timers that were not called off."""
    running = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in running if not timer.finished.is_set()]


def test_the_gpu_worker_of_an_idle_gpu_ends(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_worker, "_IDLE_S", 0.5)
    idle.open("first")
    (pid,) = idle.pids
    assert is_running(pid)
    idle.close("first")
    wait_until(lambda: not is_running(pid))
    idle.open("second")  # with a new one
    assert idle.pids[1] != pid
    assert is_running(idle.pids[1])


def test_the_next_session_takes_it_over_and_keeps_it(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_worker, "_IDLE_S", 1000.0)
    before = timers()
    idle.open("first")
    idle.close("first")
    assert len(timers()) == len(before) + 1
    idle.open("second")
    wait_until(lambda: len(timers()) == len(before))  # what would end it is called off
    idle.close("second")
    idle.open("third")
    assert len({*idle.pids}) == 1
    idle.close("third")
    idle.end()
    wait_until(lambda: not is_running(idle.pids[0]))


@pytest.fixture
def tune_on_cluster(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Tune on a simulated GPU of a cluster whose second inputs end in an error of a kind, or in none."""

    def tune(error: str) -> Any:
        program = tmp_path / "preload.py"
        program.write_text(PRELOAD.format(log=str(tmp_path / "seeds"), error=error))
        monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__PRELOAD", f'["{program}"]')
        recording = bench.record()
        with running_cluster(tmp_path) as kit:
            kit.simulated(recording, 0)
            return bench.tune(recording, sampler="brute-force", scheduler=kit.scheduler)

    return tune


@pytest.mark.parametrize("error", ["InputError", "ToolchainError"])
def test_second_inputs_that_a_machine_cannot_draw(
    bench: Any, tune_on_cluster: Callable[[str], Any], tmp_path: Path, error: str
) -> None:
    result = tune_on_cluster(error)
    assert result.winner.config == {"THREADS": 256, "WORK": 4}
    assert len(result.ties) + len(result.refused) < len(bench.configs())
    assert [one for one in result.notices if "second inputs are too large" in one] == [
        "the finalists were verified with one set of inputs, not two: the second inputs are too large"
    ]
    assert [bool(use.lost) for use in result.gpus] == [False]
    first, *others = (tmp_path / "seeds").read_text().split()
    assert int(first) != 0
    assert set(others) == {"0"}  # what follows is verified with the first inputs


def test_all_are_verified_with_second_inputs(tune_on_cluster: Callable[[str], Any], tmp_path: Path) -> None:
    result = tune_on_cluster("")
    assert result.winner.config == {"THREADS": 256, "WORK": 4}
    assert not any("one set of inputs" in one for one in result.notices)
    assert "0" not in (tmp_path / "seeds").read_text().split()


def test_an_error_that_dask_cannot_send_ends_the_session(tune_on_cluster: Callable[[str], Any]) -> None:
    with pytest.raises(WorkerError, match="RecursionError"):
        tune_on_cluster("(lambda f: f(f))(lambda f: f(f)) or InputError")

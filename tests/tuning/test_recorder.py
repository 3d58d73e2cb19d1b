"""Recording, with a recording in place of the GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotile.core.device import DeviceProperties
from autotile.core.model import Outcome, config_key
from autotile.errors import InputError
from autotile.exchange.recording import read_recording
from autotile.settings import read_settings
from autotile.space.search_space import SearchSpace
from autotile.tuning import session
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.replay import ReplayBackend
from autotile.tuning.result import Recorded
from autotile.tuning.session import record


class FakeGpu(ReplayBackend):
    """A recording that acts as a GPU."""

    source = "cuda"

    def __init__(self, path: Path, device: DeviceProperties) -> None:
        super().__init__(read_recording(path))
        self.device = device

    def available_rows(self, space: SearchSpace) -> None:
        return None


@pytest.fixture
def measure(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorded]:
    """Record as on a GPU."""
    backend = FakeGpu(bench.record(), bench.device)
    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: backend)

    def on_gpu(observe: Callable[[Progress], None] = lambda _: None, **choices: Any) -> Recorded:
        options = TuneOptions(workers=1, seed=choices.pop("seed", 0))
        return record(bench.kernel, bench.problem(), read_settings(), options, observe=observe, **choices)

    return on_gpu


def test_the_whole_space(bench: Any, measure: Callable[..., Recorded], tmp_path: Path) -> None:
    recorded = measure(output=tmp_path)
    assert recorded.path == tmp_path / "scale-nvidia-h200-4096-float32.npz"
    recording = read_recording(recorded.path)
    assert len(recording) == recorded.configurations == 12
    assert recording.ok.all()  # nothing was pruned
    assert recording.header.chosen == "all"
    assert recording.header.valid_configs == 12
    assert bench.tune(recorded.path).winner.config == {"THREADS": 256, "WORK": 4}


def test_a_sample(measure: Callable[..., Recorded], tmp_path: Path) -> None:
    recorded = measure(sample=5, output=tmp_path / "some.npz", seed=3)
    assert recorded.path == tmp_path / "some.npz"
    recording = read_recording(recorded.path)
    assert len(recording) == recorded.configurations == 5
    assert recording.header.chosen == "5 at random"


def test_into_the_current_folder(
    measure: Callable[..., Recorded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = measure(sample=1)
    assert recorded.path is not None
    assert (tmp_path / recorded.path).is_file()


def test_it_goes_on_where_it_was_interrupted(measure: Callable[..., Recorded], tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 4:
            raise KeyboardInterrupt

    first = measure(interrupt, output=tmp_path)
    assert (first.path, first.configurations) == (None, 4)
    done: list[int] = []
    second = measure(lambda progress: done.append(progress.done), output=tmp_path)
    assert second.configurations == 12
    assert max(done) == 8


def test_what_a_search_dropped_early_is_measured(bench: Any, measure: Callable[..., Recorded], tmp_path: Path) -> None:
    assert bench.tune(None).outcomes[Outcome.PRUNED] > 0
    recorded = measure(output=tmp_path)
    assert recorded.path is not None
    assert read_recording(recorded.path).ok.all()


def test_failures_are_recorded(
    bench: Any, measure: Callable[..., Recorded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judges: Any
) -> None:
    def judge(config: Any) -> Any:
        if config["WORK"] == 2:
            return judges["failed"](config, Outcome.CRASHED, "illegal address", "measure")
        return judges["by_threads"](config)

    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: FakeGpu(bench.record(judge), bench.device))
    recorded = measure(output=tmp_path)
    assert recorded.path is not None
    found = read_recording(recorded.path).lookup({"THREADS": 64, "WORK": 2})
    assert found is not None
    assert (found.outcome, found.reason, found.stage) == (Outcome.CRASHED, "illegal address", "measure")
    assert found.resources is not None


def test_a_replay_cannot_be_recorded(bench: Any, tmp_path: Path) -> None:
    options = TuneOptions(replay=bench.record(), workers=1)
    with pytest.raises(InputError, match="measured on a CUDA device, not made from a replay"):
        record(bench.kernel, bench.problem(), read_settings(), options, output=tmp_path)


def test_trials_are_in_the_database_like_any(bench: Any, measure: Callable[..., Recorded], tmp_path: Path) -> None:
    measure(output=tmp_path)
    assert sorted(config_key(t.config) for t in bench.stored()) == sorted(map(config_key, bench.configs()))

"""The choice of a backend, replay of a recording, recordings that are refused, and recording without a GPU."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from faults.traces import no_traces
from gpu_calls import evaluate
from judges import BEST, FakeGpu, ending_at, failing_if
from msgspec import structs

from autotile.core.model import Outcome, config_key
from autotile.errors import InputError, ProblemError, RecordingError, ToolchainError
from autotile.exchange.recording import RecordingHeader, read_recording, write_recording
from autotile.kernel.library import load_kernel
from autotile.kernel.problem import resolve_problem
from autotile.settings import Settings, read_settings
from autotile.tuning import backend as backends
from autotile.tuning import session
from autotile.tuning.backend import choose_backend
from autotile.tuning.options import TuneOptions
from autotile.tuning.replay import ReplayBackend
from autotile.tuning.session import record
from autotile.workers.jobs import Candidate

CANDIDATE = {"THREADS": 64, "WORK": 2}


@pytest.fixture
def choose(bench, monkeypatch):
    monkeypatch.setattr(backends, "device_count", lambda: 0)

    def with_options(folders=(), **options):
        settings: Settings = replace(read_settings(), recording_folders=folders)
        return choose_backend(bench.kernel, bench.problem(), settings, TuneOptions(**options))

    return with_options


def test_a_recording_stands_in_for_a_missing_gpu_or_one_that_is_not_asked_for(bench, choose):
    recording = bench.record()
    chosen = choose((bench.folder,))
    assert (chosen.device.name, chosen.device.source) == ("NVIDIA H200", "replayed")
    assert chosen.notice.startswith("there is no CUDA device here: launches are replayed")
    assert chosen.source == "replayed"
    assert evaluate(chosen, Candidate(CANDIDATE, "")).outcome is Outcome.OK
    assert choose(replay=recording).notice.startswith("replay was asked for")
    imported = choose(replay=bench.record(template_hash=""))  # of another tuner
    assert imported.notice.endswith(", imported: of which version of the kernel is not known")
    assert choose(replay=bench.record(gpu_name="h200")).notice.endswith("recorded on NVIDIA H200")
    assert choose((bench.folder,), replay="auto").notice.startswith("replay was asked for")


def test_a_gpu_is_used_where_there_is_one_and_its_worker_starts_before_the_device_is_read(bench, monkeypatch):
    def choose():
        return choose_backend(bench.kernel, bench.problem(), read_settings(), TuneOptions())

    monkeypatch.setattr(backends, "has_driver", lambda: True)
    monkeypatch.setattr(backends, "device_count", lambda: 1)
    monkeypatch.setattr(backends, "live_device", lambda index: structs.replace(bench.device, source="cuda"))
    with closing(choose()) as chosen:
        assert (chosen.device.source, chosen.source, chosen.notice) == ("cuda", "cuda", "")
        assert chosen.recorded is None
    calls = Mock()
    calls.live_device.side_effect = ToolchainError("no driver")
    monkeypatch.setattr(backends, "Gpu", calls.Gpu)
    monkeypatch.setattr(backends, "live_device", calls.live_device)
    with pytest.raises(ToolchainError, match="no driver"):
        choose()
    assert [name for name, *_ in calls.mock_calls] == ["Gpu", "live_device", "Gpu().close"]


def test_a_driver_without_a_device_leaves_no_worker_behind(bench, tmp_path, monkeypatch):
    bench.record()
    monkeypatch.setattr(backends, "has_driver", lambda: True)
    monkeypatch.setattr(backends, "device_count", lambda: 0)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with no_traces(temporary, monkeypatch):
        found = choose_backend(bench.kernel, bench.problem(), bench.settings, TuneOptions())
        assert found.device.source == "replayed"


@pytest.mark.parametrize(
    ("recorded", "asked", "error", "words"),
    [
        (None, {}, InputError, r"no CUDA device here and no recording of scale n=4096.*nothing is recorded"),
        (None, {"replay": "auto"}, InputError, r"there is no recording of scale"),
        (None, {"replay": Path("nowhere.npz")}, RecordingError, r"nowhere\.npz"),
        ({}, {"sanitize": True}, InputError, "--sanitize runs the finalists on a GPU"),
        ({"n": 8192}, {}, RecordingError, r"is of scale n=8192 float32, expected scale n=4096 float32"),
        ({"template_hash": "0" * 64}, {}, RecordingError, r"another version of the kernel.*autotile export"),
        ({"space_hash": "0" * 64}, {}, RecordingError, r"another version of the kernel.*autotile export"),
        ({"l2": "hot"}, {}, RecordingError, r"with a hot L2 cache, expected cold; replay it with --l2 hot"),
        (
            {},
            {"objectives": ("time", "error", "energy")},
            RecordingError,
            "no error and no energy.*leave that objective out, or tune on a GPU",
        ),
        ({}, {"l2": "hot"}, RecordingError, r"with a cold L2 cache, expected hot; replay it with --l2 cold"),
    ],
)
def test_a_recording_that_does_not_fit_is_refused(bench, choose, *, recorded, asked, error, words):
    replay = {"replay": bench.record(**recorded)} if recorded is not None else {}
    with pytest.raises(error, match=words):
        choose(**asked, **replay)


def test_recordings_of_other_sizes_kernels_and_gpus(bench, choose):
    bench.record(n=8192)
    with pytest.raises(InputError, match=r"recorded are: scale n=8192 float32"):
        choose((bench.folder,))
    assert choose(replay=bench.record(l2="hot"), l2="hot").device.source == "replayed"
    header = RecordingHeader(key=bench.key(gpu_name="Mystery"), parameters=bench.kernel.spec.parameters, device=None)
    write_recording(bench.folder / "mystery.npz", header, [])
    with pytest.raises(RecordingError, match="'Mystery', of which nothing is known"):
        choose(replay=bench.folder / "mystery.npz")
    tiled = load_kernel("matmul_tiled")
    problem = resolve_problem(tiled.spec, {}, defaults=True)
    with pytest.raises(RecordingError, match="'scale'"):
        choose_backend(tiled, problem, read_settings(), TuneOptions(replay=bench.record()))


@pytest.mark.parametrize(
    ("config", "limit_us", "expected"),
    [
        (CANDIDATE, None, (Outcome.OK, "", "measure")),
        (CANDIDATE, 14.0, (Outcome.OK, "", "measure")),
        (CANDIDATE, 13.0, (Outcome.PRUNED, "clearly slower than the best so far (13 us)", "measure")),
        ({"THREADS": 64, "WORK": 4}, None, (Outcome.OUT_OF_BOUNDS, "wrote 3 words", "verify")),
        (
            {"THREADS": 32, "WORK": 1},
            None,
            (Outcome.NOT_AVAILABLE, "the recording does not hold this configuration", "replay"),
        ),
    ],
)
def test_what_was_recorded_is_returned(bench, config, limit_us, expected):
    judge = failing_if(lambda config: config["WORK"] == 4, Outcome.OUT_OF_BOUNDS, "wrote 3 words", "verify")
    configs = [config for config in bench.configs() if config["THREADS"] != 32]
    backend = ReplayBackend(read_recording(bench.record(judge, configs)))
    found = evaluate(backend, Candidate(config, ""), limit_us)
    assert (found.outcome, found.reason, found.stage) == expected
    assert (found.measurement is not None) is found.outcome.has_time
    if found.measurement is not None:
        assert found.measurement.time_us == pytest.approx(1000 / 64 + 1, rel=1e-6)


class TestWithNothingToMeasure:
    """An error of the kernel or the problem is reported before the lack of a GPU."""

    @pytest.mark.parametrize(
        ("is_endless", "said"),
        [
            (False, r'does not compile: scale\.cu\(\d+\): error: identifier "blockIdy"'),
            (True, "does not compile: the compiler was stopped after 1 s"),
        ],
    )
    def test_a_template_that_does_not_compile(self, bench, is_endless, said):
        bomb = ["#define M0 +1", *(f"#define M{n + 1} {10 * f'M{n} '}" for n in range(9)), "int bomb = M9;"]
        source = bench.kernel.source
        text = "\n".join([*bomb, source]) if is_endless else source.replace("blockIdx.x", "blockIdy.x")
        bench.kernel.template_path.write_text(text)
        settings = replace(read_settings(), recording_folders=())
        options = TuneOptions(replay="auto", **({"compile_deadline_s": 1.0} if is_endless else {}))
        with pytest.raises(InputError, match=said):
            choose_backend(load_kernel(bench.kernel.spec.source), bench.problem(), settings, options)

    def test_a_file_of_an_input_that_is_missing(self, bench):
        file = Path(bench.kernel.spec.source)
        file.write_text(file.read_text().replace('access = "in"', 'access = "in", file = "none.npy"', 1))
        with pytest.raises(InputError, match=r"none.npy: No such file or directory; the path of an array is relative"):
            choose_backend(load_kernel(file), bench.problem(), read_settings(), TuneOptions(replay="auto"))

    def test_more_memory_than_a_gpu_has(self):
        kernel = load_kernel("sgemm_2d")
        problem = resolve_problem(kernel.spec, {"M": 10**6, "N": 10**6, "K": 4096})
        with pytest.raises(ProblemError, match=r"needs .* GiB of device memory to tune, but NVIDIA H200 has"):
            choose_backend(kernel, problem, read_settings(), TuneOptions(replay="auto"))


@pytest.fixture
def measure(bench, monkeypatch):
    backend = FakeGpu(bench.record(), bench.device)
    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: backend)

    def on_gpu(observe=lambda _: None, **choices):
        options = TuneOptions(workers=1, seed=choices.pop("seed", 0))
        return record(bench.kernel, bench.problem(), read_settings(), options, observe=observe, **choices)

    return on_gpu


def test_the_whole_space_from_where_it_was_interrupted(bench, measure, tmp_path):
    first = measure(ending_at(4), output=tmp_path)
    assert (first.path, first.configurations) == (None, 4)
    done: list[int] = []
    recorded = measure(lambda progress: done.append(progress.done), output=tmp_path)
    assert max(done) == 8
    assert recorded.path == tmp_path / "scale-nvidia-h200-4096-float32.npz"
    recording = read_recording(recorded.path)
    assert len(recording) == recorded.configurations == recording.header.valid_configs == 12
    assert recording.ok.all()  # nothing was pruned
    assert recording.header.chosen == "all"
    assert sorted(config_key(t.config) for t in bench.stored()) == sorted(map(config_key, bench.configs()))
    assert bench.tune(recorded.path).winner.config == BEST


def test_a_sample_and_where_it_is_written(measure, tmp_path, monkeypatch):
    recorded = measure(sample=5, output=tmp_path / "some.npz", seed=3)
    assert recorded.path == tmp_path / "some.npz"
    recording = read_recording(recorded.path)
    assert len(recording) == recorded.configurations == 5
    assert recording.header.chosen == "5 at random"
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / measure(sample=1).path).is_file()


def test_what_a_search_dropped_early_is_measured_and_failures_are_recorded(bench, measure, tmp_path, monkeypatch):
    judge = failing_if(lambda config: config["WORK"] == 2, Outcome.CRASHED, "illegal address", "verify")
    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: FakeGpu(bench.record(judge), bench.device))
    assert bench.tune(None).outcomes[Outcome.PRUNED] > 0
    recording = read_recording(measure(output=tmp_path).path)
    assert recording.ok.sum() == 8
    found = recording.lookup({"THREADS": 64, "WORK": 2})
    assert (found.outcome, found.reason, found.stage) == (Outcome.CRASHED, "illegal address", "verify")
    assert found.resources is not None


def test_a_replay_cannot_be_recorded(bench, tmp_path):
    options = TuneOptions(replay=bench.record(), workers=1)
    with pytest.raises(InputError, match="measured on a CUDA device, not made from a replay"):
        record(bench.kernel, bench.problem(), read_settings(), options, output=tmp_path)

"""``autotile worker`` and ``autotile tune --scheduler``; tests/tuning/test_cluster.py runs sessions on them."""

import sys

import pytest


@pytest.fixture
def dask() -> None:
    pytest.importorskip("distributed", reason="Dask is not installed (extra `cluster`)")


@pytest.mark.usefixtures("dask")
@pytest.mark.parametrize(
    "words", [["worker", "tcp://node7:8786"], ["tune", "sgemm_2d", "M=1024", "N=1024", "K=1024", "--scheduler"]]
)
def test_what_is_not_encrypted_is_refused(run, words: list[str]) -> None:
    answer = run(*words, *(["tcp://node7:8786"] if words[0] == "tune" else []))
    assert answer.code == 2
    assert "not encrypted" in answer.err


@pytest.mark.usefixtures("dask")
def test_the_time_of_a_simulated_gpu_needs_a_recording(run) -> None:
    answer = run("worker", "tcp://127.0.0.1:8786", "--replay-seconds", "1")
    assert answer.code == 2
    assert "--replay" in answer.err


@pytest.mark.parametrize("choice", [["--devices", "0,1"], ["--device", "1"]])
def test_gpus_of_a_scheduler_are_chosen_by_their_model(run, choice: list[str]) -> None:
    answer = run("tune", "sgemm_2d", "M=64", "N=64", "K=64", "--scheduler", "tcp://127.0.0.1:1", *choice)
    assert answer.code == 2
    assert "to choose a model, name it" in answer.err


def test_without_dask_the_error_names_the_extra(run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("autotile.tuning.cluster.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "distributed", None)
    for words in (["worker"], ["tune", "sgemm_2d", "M=1024", "N=1024", "K=1024", "--scheduler"]):
        answer = run(*words, "tcp://127.0.0.1:8786")
        assert answer.code == 1
        assert "autotile[cluster]" in answer.err


@pytest.mark.usefixtures("dask")
def test_a_machine_offers_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotile.api import devices
    from autotile.errors import InputError, ToolchainError
    from autotile.tuning.cluster import worker as cluster_worker

    offered: list[tuple[int, int]] = []
    said: list[str] = []
    monkeypatch.setattr(
        cluster_worker,
        "offer",
        lambda address, gpus, observe, *, compilers, insecure: offered.append((len(gpus), compilers)),
    )
    monkeypatch.setattr(cluster_worker, "live_gpus", lambda indices: [None for _ in indices])
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "available_cores", lambda: 8)
    monkeypatch.setattr(devices, "resolve_gpus", lambda chosen: (0, 1, 2) if chosen == "all" else (0,))
    for count in (3, 0):
        monkeypatch.setattr(devices, "device_count", lambda n=count: n)
        devices.worker("tcp://127.0.0.1:1", observe=said.append)
    devices.worker("tcp://127.0.0.1:1", devices="0", compilers=2)
    assert offered == [(3, 5), (0, 8), (1, 2)]
    assert said == ["this machine has no CUDA device: its cores are offered"]

    def missing() -> str:
        raise ToolchainError("NVRTC is not installed")

    monkeypatch.setattr(devices, "nvrtc_version", missing)
    with pytest.raises(InputError, match="has no CUDA device, and offers no cores"):
        devices.worker("tcp://127.0.0.1:1", observe=said.append)
    assert said[-1] == "no cores are offered: NVRTC is not installed"

from __future__ import annotations

from dataclasses import replace

import pytest
from stored_rows import CEILINGS

from autotile.api import doctor
from autotile.core.device import device_profile, profile_names
from autotile.database.database import Database
from autotile.database.learned import save_ceilings
from autotile.errors import ToolchainError


@pytest.fixture
def no_gpu(monkeypatch):
    for module in ("targets", "doctor"):
        monkeypatch.setattr(f"autotile.api.{module}.device_count", lambda: 0)


@pytest.mark.usefixtures("no_gpu")
def test_devices_without_a_gpu(run):
    found = run("devices", "--json").document
    assert found["live"] == []
    assert [row["profile"] for row in found["profiles"]] == profile_names()
    h200 = next(row for row in found["profiles"] if row["profile"] == "h200")
    assert h200["peak_fp32_flops_per_s"] == pytest.approx(66.9e12, rel=1e-2)
    answer = run("devices")
    assert "no CUDA device on this machine" in answer.out
    assert "66.9 TFLOP/s" in answer.out
    run("devices", "--measure", "--json").is_refused("no CUDA device")


def test_devices_with_a_gpu_and_its_measured_ceilings(run, tmp_path, monkeypatch):
    monkeypatch.setattr("autotile.api.targets.device_count", lambda: 1)
    monkeypatch.setattr("autotile.api.targets.live_device", lambda index: device_profile("h100"))
    with Database.open(tmp_path / "tuning.db") as database:
        save_ceilings(database, CEILINGS)
    document = run("devices", "--json").document
    assert [(live["index"], live["name"]) for live in document["live"]] == [(0, "NVIDIA H100 80GB HBM3")]
    ceiling = document["ceilings"][0]["ceilings"][0]
    assert (ceiling["name"], ceiling["value"], ceiling["unit"]) == ("dram_read", 4.2e12, "B/s")
    shown = run("devices").out
    assert "DRAM, copy" in shown
    assert "4,000 GB/s" in shown


@pytest.mark.usefixtures("no_gpu")
class TestDoctor:
    @pytest.fixture
    def recordings_in(self, monkeypatch):
        """Let recordings lie in a folder."""
        settings = doctor.read_settings()

        def choose(folder):
            monkeypatch.setattr(doctor, "read_settings", lambda: replace(settings, recording_folders=(folder,)))

        return choose

    def test_replay_is_enough_and_a_damaged_recording_is_told(self, run, recordings_in, recording):
        recordings_in(recording.parent)
        answer = run("doctor", "--json")
        assert (answer.code, answer.document["ok"]) == (0, True)
        assert answer.document["verdict"].startswith("tuning works here by replay")
        status = {row["name"]: row["status"] for row in answer.document["checks"]}
        assert status["GPU"] == "warn"
        assert status["NVRTC"] == status["compiler"] == status["database"] == status["recordings"] == "ok"
        assert "tuning works here by replay, of 1 recorded problem" in run("doctor").out
        recording.with_name("broken.npz").write_bytes(b"broken")
        answer = run("doctor")
        assert answer.code == 0
        assert "broken.npz" in answer.out

    def test_neither_gpu_nor_recording(self, run, recordings_in, tmp_path):
        recordings_in(tmp_path / "none")
        answer = run("doctor", "--json")
        assert (answer.code, answer.document["ok"]) == (1, False)
        assert answer.document["verdict"] == "tuning does not work here: see driver, GPU, recordings"
        status = {row["name"]: row for row in answer.document["checks"]}
        assert status["GPU"]["status"] == "fail"
        assert status["recordings"]["cure"]

    def test_a_missing_compiler_missing_headers_and_a_database_that_cannot_be_read(self, run, monkeypatch, tmp_path):
        def missing() -> str:
            raise ToolchainError("no NVRTC; install the wheels")

        monkeypatch.setattr(doctor, "nvrtc_version", missing)
        monkeypatch.setattr(doctor, "toolkit_headers", lambda: ())
        (tmp_path / "notes.txt").write_text("no database")
        answer = run("doctor", "--db", tmp_path / "notes.txt", "--json")
        assert answer.code == 1
        found = {row["name"]: row for row in answer.document["checks"]}
        assert {name: found[name]["status"] for name in ("NVRTC", "headers", "database")} == {
            "NVRTC": "fail", "headers": "warn", "database": "fail"
        }  # fmt: skip
        assert "install the wheels" in found["NVRTC"]["detail"]
        assert 'pip install -e ".[cuda13]" in a checkout' in found["headers"]["cure"]
        assert 'pip install "autotile[cuda13]" elsewhere' in found["headers"]["cure"]

    def test_a_broken_configuration_file(self, run, tmp_path):
        folder = tmp_path / "config" / "autotile"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text("database = \n")
        answer = run("doctor", "--json")
        assert answer.code == 1
        assert "config.toml" in answer.document["checks"][0]["detail"]

"""Commands that list, serve, check, export and import what is stored."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest
from answers import Run

from autotile.database.database import Database
from autotile.exchange.recording import read_recording_header
from autotile.settings import read_settings


def test_without_a_database_nothing_is_an_answer_the_default_is_served_and_none_is_made(
    run, tmp_path, scale_toml, monkeypatch
):
    assert run("list", "--json").document == []
    assert run("trials", scale_toml, "--json").document == []
    assert "nothing is tuned yet" in run("list").out
    assert run("db", "check", "--json").document["exists"] is False
    run("list", "nosuch").is_refused("nosuch")
    answer = run("best", scale_toml, "n=4096", "--device", "h200", "--json")
    found = answer.document
    assert (answer.code, found["tier"], found["time_us"]) == (0, "default", None)
    assert (found["config"], found["device"]["name"]) == ({"THREADS": 128, "WORK": 1}, "NVIDIA H200")
    assert "Nothing is tuned" in found["explain"]
    assert "tier" in run("best", scale_toml, "n=4096", "--device", "h200").out
    assert run("db", "path").out == f"{tmp_path / 'tuning.db'}\n"
    assert run("db", "path", "--json").document == {"database": str(tmp_path / "tuning.db")}
    assert not (tmp_path / "tuning.db").exists()
    monkeypatch.setenv("AUTOTILE_DB", "postgresql://me:secret@host/tuning")
    assert run("db", "path").out == "postgresql+psycopg://me:***@host/tuning\n"


@pytest.mark.usefixtures("tuned")
class TestWithResults:
    def test_list(self, run):
        (study,) = run("list", "--json").document
        assert (study["kernel"], study["problem"], study["trials"]) == ("scale", {"n": 1048576}, 12)
        assert study["device"] == {"name": "NVIDIA H200", "source": "replayed"}
        assert study["best"]["config"] == {"THREADS": 256, "WORK": 4}
        assert "NVIDIA H200 (replayed)" in run("list", "scale").out
        assert run("list", "sgemm_2d", "--json").document == []
        assert "nothing is tuned yet of sgemm_2d in" in run("list", "sgemm_2d").out

    def test_trials_are_fastest_first_and_of_an_outcome_a_size_and_a_number(self, run):
        rows = run("trials", "scale", "--json").document
        times = [row["time_us"] for row in rows]
        measured = [time for time in times if time is not None]
        assert measured == sorted(measured)
        assert times[len(measured) :] == [None] * (len(times) - len(measured))
        assert all(row["source"] == "replayed" for row in rows)
        (wrong,) = run("trials", "scale", "--outcome", "wrong_result", "--json").document
        assert wrong["reason"] == "y[3] is 0, expected 1"
        assert wrong["config"] == {"THREADS": 32, "WORK": 4}
        assert len(run("trials", "scale", "n=1048576", "--limit", "2", "--json").document) == 2
        assert run("trials", "scale", "n=1", "--json").document == []
        assert "THREADS=32 WORK=4" in run("trials", "scale", "--outcome", "wrong_result").out

    def test_trials_as_csv_where_it_can_be_written(self, run, tmp_path):
        answer = run("trials", "scale", "--csv", "-")
        rows = list(csv.DictReader(io.StringIO(answer.out)))
        listed = run("trials", "scale", "--json").document
        assert [(row["outcome"], row["time_us"]) for row in rows] == [
            (entry["outcome"], "" if entry["time_us"] is None else str(entry["time_us"])) for entry in listed
        ]
        assert {row["param.THREADS"] for row in rows} == {str(entry["config"]["THREADS"]) for entry in listed}
        path = tmp_path / "trials.csv"
        written = run("trials", "scale", "--csv", path)
        assert (written.code, written.out) == (0, "")
        assert f"wrote {len(rows)} trials to {path}" in written.err
        assert path.read_text() == answer.out
        for words, said in (
            (["--csv", "-", "--json"], "both write to standard output"),
            (["--parquet", "-"], "name a file"),
            (["--csv", "/"], "names a folder"),
            (["--csv", "/no/such/folder/x.csv"], "there is no folder '/no/such/folder'"),
        ):
            answer = run("trials", "scale", *words)
            assert answer.code != 0
            assert said in answer.err
            assert answer.err.count("\n") == 1

    def test_trials_as_parquet(self, run, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet", reason="the extra autotile[parquet] is not installed")
        path = tmp_path / "trials.parquet"
        listed = run("trials", "scale", "--parquet", path, "--json").document
        assert parquet.read_table(path)["param.THREADS"].to_pylist() == [e["config"]["THREADS"] for e in listed]

    def test_best_on_the_recorded_gpu_and_on_another_one_which_is_not_called_replayed(self, run, scale_toml):
        found = run("best", scale_toml, "n=1000000", "--device", "h200", "--json").document
        assert (found["tier"], found["config"]) == ("nearest", {"THREADS": 256, "WORK": 4})
        words = ["best", scale_toml, "n=1048576", "--device", "rtx-3090"]
        found = run(*words, "--json").document
        assert (found["tier"], found["tuned_on"]) == ("transferred", "NVIDIA H200")
        lines = run(*words).out.splitlines()
        assert lines[0] == "scale n=1048576 float32 on NVIDIA GeForce RTX 3090"
        (time,) = [line for line in lines if line.startswith("time there")]
        assert "us on NVIDIA H200 (replayed) (95 % interval" in time
        found = run("best", scale_toml, "n=1048576", "--device", "h200", "--json").document
        assert (found["tier"], found["config"]) == ("exact", {"THREADS": 256, "WORK": 4})
        assert found["source"] == "replayed"
        lines = run("best", scale_toml, "n=1048576", "--device", "h200").out.splitlines()
        assert lines[0] == "scale n=1048576 float32 on NVIDIA H200 (replayed)"
        assert all(line == line.rstrip() for line in lines)

    def test_check_finds_lost_rows(self, run, tmp_path):
        answer = run("db", "check", "--json")
        assert (answer.code, answer.document["ok"], answer.document["rows"]["studies"]) == (0, True, 1)
        assert "whole" in run("db", "check").out
        with sqlite3.connect(tmp_path / "tuning.db") as connection:
            connection.execute("PRAGMA foreign_keys=OFF")
            connection.execute("DELETE FROM studies")
        connection.close()
        answer = run("db", "check", "--json")
        assert answer.code == 1
        assert answer.document["problems"]

    def test_another_database(self, run, tmp_path):
        missing = tmp_path / "other.db"
        for words in (["list"], ["list", "--misses"], ["trials", "matmul_naive"], ["db", "check"]):
            run(*words, "--db", missing).is_refused(f"there is no database {missing}; check its path")
        Database.open(missing).close()
        assert run("list", "--db", missing, "--json").document == []


@pytest.mark.usefixtures("tuned")
class TestExchange:
    def test_kernel_tuner_there_and_back_and_nothing_else(self, run, scale_toml, tmp_path):
        path = tmp_path / "cache.json"
        done = run("export", scale_toml, "n=1048576", "--format", "kernel-tuner", "-o", path, "--json").document
        assert done["configurations"] == 12
        assert len(json.loads(path.read_text())["cache"]) == 12
        answer = run("import", path, "n=1048576", "--db", tmp_path / "other.db", "--json")
        assert answer.code == 0
        assert answer.document["configurations"] == 12
        (study,) = run("list", "--db", tmp_path / "other.db", "--json").document
        assert study["best"]["config"] == {"THREADS": 256, "WORK": 4}

        assert run("import", path, "n=1048576", "-o", tmp_path / "made.npz").code == 0
        assert read_recording_header(tmp_path / "made.npz").problem.sizes == {"n": 1048576}
        run("import", path, "n=1", "-o", path).is_refused("it is the file that is imported")
        run("import", path, "n=0").is_refused("size n is 0")
        run("import", path, "n=8", "--dtype", "float31").is_refused("no dtype 'float31'")
        path.write_text("{}")
        run("import", path, "n=1").is_refused("cache file of Kernel Tuner")
        run("import", tmp_path / "missing.json", "n=1").is_refused("missing.json")

    def test_t4_of_one_gpu(self, run, scale_toml, tmp_path):
        path = tmp_path / "t4.json"
        words = ("export", scale_toml, "n=1048576", "-o", path, "--device")
        run(*words, "nosuch").is_refused("no GPU profile is named")
        run(*words, "7").is_refused("no CUDA device 7")
        assert not path.exists()
        assert run(*words, "h200").code == 0
        assert json.loads(path.read_text())["schema_version"] == "1.0.0"

    def test_a_database_is_left_as_it_is_and_a_study_of_optuna_is_added_once(self, run, scale_toml, tmp_path):
        path = Path(read_settings().database)
        before = path.read_bytes()
        for form in ("t4", "kernel-tuner", "optuna"):
            run("export", scale_toml, "n=1048576", "--format", form, "-o", path).is_refused("is a database")
            assert path.read_bytes() == before
        command = ("export", scale_toml, "n=1048576", "--format", "optuna", "-o", tmp_path / "study.db")
        assert run(*command).code == 0
        run(*command).is_refused("holds a study named")


@pytest.mark.usefixtures("tuned")
def test_a_bundle_is_made_and_looked_into(run: Run, scale_toml: Path, tmp_path: Path) -> None:
    path = tmp_path / "app.autotile"
    answer = run("export", "--format", "bundle", scale_toml, "-o", path, "--json")
    assert answer.code == 0
    made = answer.document
    assert (made["file"], made["bytes"]) == (str(path), path.stat().st_size)
    assert made["kernels"] == [{"kernel": "scale", "problems": 1, "cubins": 2, "architectures": ["sm_90"]}]
    assert len(made["digest"]) == 64
    served = run("best", "scale", "n=1048576", "--device", "h200", "--bundle", path, "--json").document
    assert served["config"] == {"THREADS": 256, "WORK": 4}
    assert served["bundle"].startswith(f"{path}, compiled for sm_90 with NVRTC ")
    assert str(path) in run("best", "scale", "n=1048576", "--device", "h200", "--bundle", path).out
    words = ("-o", tmp_path / "x", "--arch", "sm_80", "--arch", "sm_90")
    answer = run("export", "--format", "bundle", scale_toml, "n=1048576", *words)
    assert answer.code == 0
    assert "sm_80 sm_90" in answer.out
    assert "digest" in answer.out


@pytest.mark.usefixtures("tuned")
def test_a_header_is_written_with_its_cubins(run: Run, scale_toml: Path, tmp_path: Path) -> None:
    path = tmp_path / "include" / "scale.hpp"
    made = run("export", scale_toml, "--format", "c-header", "-o", path, "--json").document
    assert (made["namespace"], made["problems"], len(made["cubins"])) == ("autotile::scale", 1, 2)
    text = path.read_text()
    for cubin in made["cubins"]:
        assert (path.parent / cubin).read_bytes()[:4] == b"\x7fELF"
        assert cubin in text
    assert "if (!(sizes.n >= (config.THREADS * config.WORK))) return false;  // enough_blocks" in text
    assert "{{1048576}, " in text
    assert "@@" not in text

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time

import pytest
from interrupts import heeded_interrupts

from autotile.settings import child_environment


class TestSurvey:
    def test_it_shows_resources_and_configurations(self, run, scale_toml):
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "--limit", "3")
        assert answer.code == 0
        for words in ("12 valid, 12 compiled", "registers, a thread", "occupancy, %", "3 configurations of the least"):
            assert words in answer.out
        assert answer.out.count("THREADS=") == 3

    def test_failures_have_the_words_of_the_compiler_and_an_example(self, run, scale_toml):
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text() + "\n#error no configuration compiles\n")
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200")
        assert answer.code == 1
        assert "no configuration compiles" in answer.out
        assert "0 (0.0 %); 12 cannot be launched" in answer.out
        assert answer.out.count("THREADS=") == 1

    def test_json_and_csv_have_every_configuration(self, run, scale_toml, tmp_path):
        path = tmp_path / "survey.csv"
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "--json", "--csv", path)
        document = answer.document
        assert (document["valid"], document["compiled"], document["usable"]) == (12, 12, 12)
        assert document["device"] == {"name": "NVIDIA H200", "source": "profile"}
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        assert [row["registers_per_thread"] for row in rows] == [
            str(entry["registers_per_thread"]) for entry in document["configurations"]
        ]
        assert "wrote 12 configurations to" in answer.err

    def test_a_page_is_written_beside_the_table(self, run, scale_toml, tmp_path):
        pytest.importorskip("plotly", reason="the extra autotile[report] is not installed")
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "-o", tmp_path / "survey.html")
        assert "12 valid" in answer.out
        assert f"wrote {tmp_path / 'survey.html'}" in answer.err
        assert (tmp_path / "survey.html").read_text().startswith("<!DOCTYPE html>")
        assert run("space", "--compile", scale_toml, "-o", "/no/such/folder/survey.html").code == 2

    def test_csv_to_standard_output_is_nothing_else(self, run, scale_toml):
        answer = run("space", "--compile", scale_toml, "n=4096", "--device", "h200", "--sample", "2", "--csv", "-")
        assert len(list(csv.reader(io.StringIO(answer.out)))) == 3

    @pytest.mark.parametrize("words", [["--device", "nosuch"], ["--csv", "-", "--json"], ["--csv", "/"], ["n=0"]])
    def test_bad_input_is_one_line(self, run, scale_toml, words):
        answer = run("space", "--compile", scale_toml, *words)
        assert answer.code == 2
        assert answer.err.startswith("error: ")
        assert answer.err.count("\n") == 1

    def test_ctrl_c_shows_what_there_is(self, scale_toml, tmp_path):
        template = scale_toml.with_suffix(".cu")
        template.write_text(template.read_text() + f"\n// {tmp_path}\n#include <cuda/std/atomic>\n")  # in no cache yet
        words = [sys.executable, "-m", "autotile", "space", "--compile", str(scale_toml), "n=4096", "--device", "h200"]
        environment = {**child_environment(), "AUTOTILE_CACHE": str(tmp_path / "cache")}
        with (
            heeded_interrupts(),
            subprocess.Popen(
                [*words, "--workers", "1"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as command,
        ):
            deadline_s = time.monotonic() + 120
            while not list((tmp_path / "cache").rglob("*.cubin")) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=120)
        assert command.returncode == 130, err
        assert "12 valid" in out
        assert "the same command goes on from there" in err
        assert "Traceback" not in err

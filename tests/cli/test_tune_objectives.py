"""``autotile tune --objective``, by replay."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "words", [["--objective", "registers"], ["--objective", "time,registers"], ["--objective=registers,time"]]
)
def test_the_front_is_in_the_document(tune, words):
    found = tune("--json", *words).document
    assert found["objectives"] == ["time", "registers"]
    assert found["front"][0]["config"] == found["winner"]["config"] == {"THREADS": 256, "WORK": 4}
    assert all(entry.keys() == {"config", "time_us", "registers"} for entry in found["front"])
    registers = [entry["registers"] for entry in found["front"]]
    assert registers == sorted(registers, reverse=True)


def test_a_person_reads_it_as_a_table(tune):
    answer = tune("--objective", "time", "--objective", "registers")
    assert answer.code == 0
    assert "front of time and registers: " in answer.out
    assert any(line.split()[0] == "winner" and "THREADS=256 WORK=4" in line for line in answer.out.splitlines() if line)


def test_time_alone_shows_nothing_of_it(tune):
    assert {"front", "objectives"}.isdisjoint(tune("--json", "--objective", "time").document)
    assert "front of" not in tune().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objective", "register"], "there is no objective 'register'"),
        (["--objective", "registers,"], "there is no objective ''"),
        (["--objective", "energy"], "holds no energy of its configurations"),
        (["--objective", "registers,error"], "holds no error of its configurations"),
        (["--objective", "registers", "--sampler", "cmaes"], "'cmaes' cannot follow several objectives"),
    ],
)
def test_what_cannot_be_is_a_message_and_2(tune, words, said):
    answer = tune(*words)
    assert (answer.code, answer.out) == (2, "")
    assert said in " ".join(answer.err.split())

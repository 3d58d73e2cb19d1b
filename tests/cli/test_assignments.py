from __future__ import annotations

import pytest

from autotile.cli.words import read_assignments, read_sizes, read_values
from autotile.errors import InputError, ProblemError
from autotile.kernel.library import load_kernel


def test_words_are_split_at_the_first_equals_sign():
    assert read_assignments(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}


@pytest.mark.parametrize("word", ["A", "=1", "A=", "1A=2", "A B=1"])
def test_words_that_are_no_assignment(word):
    with pytest.raises(InputError, match="expected NAME=VALUE"):
        read_assignments([word])


@pytest.mark.parametrize("text", ["1.5", "-1", "1e3", "٣", "x", "9" * 19, "9" * 5000])
def test_sizes_are_decimal_integers(text):
    with pytest.raises(ProblemError, match="expected a whole number from 1 to 2147483647"):
        read_sizes([f"M={text}"])
    assert read_sizes(["M=4096", "TRANS_A=0"]) == {"M": 4096, "TRANS_A": 0}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("TILE=16", 16),
        ("TILE=-1", -1),
        ("TILE=big", "big"),
        ("TILE=12345678", "12345678"),
        ("GUARDED=TRUE", True),
        ("GUARDED=0", False),
        ("GUARDED=maybe", "maybe"),
        ("N=512", 512),
        ("UNKNOWN=512", "512"),
    ],
)
def test_values_take_the_type_of_their_parameter(word, value):
    ((name, found),) = read_values(load_kernel("matmul_tiled").spec, [word]).items()
    assert name == word.partition("=")[0]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("command", "word", "meant"),
    [
        ("tune", "trials=8", "--trials 8"),
        ("tune", "budget=30s", "--budget 30s"),
        ("tune", "verify_problem=3", "--verify-problem 3"),
        ("best", "device=h200", "--device h200"),
    ],
)
def test_an_option_that_is_written_as_in_python_is_recognized(run, command, word, meant):
    answer = run(command, "matmul_tiled", "M=2048", word)
    assert answer.code == 2
    assert answer.err.replace("\n", " ").rstrip().endswith(f"; did you mean {meant}?")
    assert "did you mean" not in run(command, "matmul_tiled", "rows=8").err
    assert "did you mean" not in run("best", "matmul_tiled", "trials=8").err, "which has no such option"

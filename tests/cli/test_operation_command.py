"""``autotile tune`` of an operation, by replay."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import Run

import autotile

SIZES = {"M": 2048, "N": 2048, "K": 2048}
FLAGS = {"BATCH": 1, "TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 0}


@pytest.fixture
def tune(run: Run, only_kernel: Callable[[str], None]) -> Callable[..., Any]:
    """Tune a product of which one kernel is recorded."""
    only_kernel("matmul_tiled")
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    return lambda *words: run("tune", "matmul", *sizes, "--replay", "--trials", "3", "--finals", "2", *words)


def arguments_of(line: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the call in a line of Python ``kernel = autotile.get_best_kernel(...)``."""
    (statement,) = ast.parse(line).body
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.Call)
    assert (ast.unparse(statement.targets[0]), ast.unparse(statement.value.func)) == (
        "kernel",
        "autotile.get_best_kernel",
    )
    call = statement.value
    named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return [ast.literal_eval(one) for one in call.args], named


def test_the_line_that_serves_it_serves_the_winner(tune: Run, tmp_path: Path) -> None:
    answer = tune("--dtype", "float32", "--db", tmp_path / "team.db")
    assert answer.code == 0
    (line,) = (
        line.removeprefix("serve it").strip() for line in answer.out.splitlines() if line.startswith("serve it  ")
    )
    given, named = arguments_of(line)
    chosen = {"dtype": "float32", "database": str(tmp_path / "team.db")}
    assert (given, named) == (["matmul"], {**SIZES, **FLAGS, **chosen})
    kernel = autotile.get_best_kernel(*given, **named, device="NVIDIA H200", library=False)
    assert (kernel.kernel, kernel.tier, kernel.source) == ("matmul_tiled", "exact", "replayed")
    assert f"matmul_tiled {' '.join(f'{name}={value}' for name, value in kernel.config.items())}" in answer.out


def test_conditions_are_in_the_line_only_if_they_were_given(tune: Run) -> None:
    document = tune("--dtype", "float32", "EMULATE=0", "--json").document
    given, named = arguments_of(document["call"])
    assert (given, named) == (["matmul"], {**SIZES, **FLAGS, "EMULATE": 0, "dtype": "float32"})
    assert autotile.get_best_kernel(*given, **named, device="NVIDIA H200", library=False).tier == "exact"

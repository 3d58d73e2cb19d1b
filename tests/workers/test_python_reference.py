"""References that are Python functions, called in a child process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from spec_samples import SGEMM

from autotile.errors import InputError
from autotile.kernel.input_files import expected_file
from autotile.kernel.inputs import InputMaker
from autotile.kernel.parser import parse_spec
from autotile.kernel.python_arguments import ReferenceFunction
from autotile.workers.python_reference import ExpectedFolder, InputSet

SPEC = parse_spec(SGEMM.replace('outputs = { C = "alpha * (A @ B) + C" }', 'function = "solve"'), "k.toml")
SIZES = {**SPEC.sizes, "M": 5, "N": 4, "K": 3}
INPUTS = InputSet(SIZES, 0, check=True)


def results(function: Callable[..., Any], *sets: InputSet, limit_s: float = 30.0) -> list[np.ndarray]:
    sets = sets or (INPUTS,)
    with closing(ExpectedFolder(SPEC, "float32", ReferenceFunction(function), sets, limit_s)) as folder:
        found = [np.load(expected_file(folder.path, "C", s.sizes, s.seed, check=s.check)) for s in sets]
    assert not folder.path.exists()
    return found


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    maker = InputMaker(SPEC, SIZES, "float32", seed=seed, check=True)
    return {name: maker.stored(name).astype(np.float64) for name in ("A", "B", "C")}


def by_name(C: np.ndarray, A: np.ndarray, B: np.ndarray, alpha: float, *, N: int) -> np.ndarray:
    assert A.dtype == np.float64
    assert C.shape[1] == N
    return alpha * (A @ B) + C


@pytest.mark.parametrize(
    "function",
    [
        by_name,
        lambda x, y, z: 0.75 * (x @ y) + z,
        lambda *arrays: (0.75 * (arrays[0] @ arrays[1]) + arrays[2],),
        lambda A, B, **others: {"C": others["alpha"] * (A @ B) + others["C"]},
    ],
    ids=["by name", "in order", "all in order", "a mapping"],
)
def test_a_function_gets_what_it_asks_for(function: Callable[..., Any]) -> None:
    given = inputs()
    np.testing.assert_allclose(results(function)[0], 0.75 * (given["A"] @ given["B"]) + given["C"], rtol=1e-12)


def test_every_set_of_inputs_has_its_results() -> None:
    first, second = results(lambda A, B, C: A @ B, INPUTS, INPUTS._replace(seed=1))
    given = inputs(1)
    np.testing.assert_allclose(second, given["A"] @ given["B"], rtol=1e-12)
    assert (first != second).any()


def fails(A: np.ndarray) -> np.ndarray:
    return np.linalg.inv(A)


def hangs(A: np.ndarray) -> None:
    time.sleep(100)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fails, "raises LinAlgError: .*in fails, .*test_python_reference.py, line [0-9]+: return np.linalg.inv"),
        (lambda A: os._exit(7), "ended its process, with status 7"),
        (lambda A: os.kill(os.getpid(), 9), "ended its process, with status -9"),
        (hangs, "did not return within 0.3 s"),
        (lambda A: None, "returns nothing, expected 1: C"),
        (lambda A: (A, A), "returns 2 arrays, expected 1: C"),
        (lambda A: {"D": A}, "a mapping that lacks C; expected C"),
        (lambda A: A, r"returns an array of shape \(5, 3\) and type float64 for C, expected numbers of shape \(5, 4\)"),
        (lambda A, B: "text", "expected numbers of shape"),
        (lambda p, q: p, "it takes p, q; name its arguments after the kernel's"),
    ],
)
def test_faults_are_told(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        results(function, limit_s=0.3 if function is hangs else 30.0)

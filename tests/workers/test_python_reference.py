"""References that are Python functions, called in a child process."""

import atexit
import json
import os
import resource
import signal
import stat
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spec_samples import SGEMM

from autotile.errors import InputError
from autotile.kernel.inputs import expected_file, input_maker
from autotile.kernel.parser import parse_spec
from autotile.workers.python_reference import DrawnInputs, ExpectedFolder

SPEC = parse_spec(SGEMM.replace('outputs = { C = "alpha * (A @ B) + C" }', 'function = "solve"'), "k.toml")
SIZES = {**SPEC.sizes, "M": 5, "N": 4, "K": 3}
INPUTS: DrawnInputs = (SIZES, 0, True)
OTHERS: DrawnInputs = (SIZES, 1, True)


def results(function: Callable[..., Any], *sets: DrawnInputs, limit_s: float = 30.0) -> list[np.ndarray]:
    sets = sets or (INPUTS,)
    with closing(ExpectedFolder(SPEC, "float32", (function, "numpy"), sets, limit_s)) as folder:
        folder.wait()
        found = [np.load(expected_file(folder.path, "C", *at, check=check)) for *at, check in sets]
    assert not folder.path.exists()
    return found


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    maker = input_maker(SPEC, SPEC.at(SIZES), seed=seed, check=True)
    return {name: maker(name).astype(np.float64) for name in ("A", "B", "C")}


def by_name(C: np.ndarray, A: np.ndarray, B: np.ndarray, alpha: float, *, N: int) -> np.ndarray:
    assert A.dtype == np.float64
    assert C.shape[1] == N
    return alpha * (A @ B) + C


@pytest.mark.parametrize(
    "function",
    [
        by_name, lambda x, y, z: 0.75 * (x @ y) + z, lambda *arrays: (0.75 * (arrays[0] @ arrays[1]) + arrays[2],),
        lambda A, B, **others: {"C": others["alpha"] * (A @ B) + others["C"]},
    ], ids=["by name", "in order", "all in order", "a mapping"],
)  # fmt: skip
def test_a_function_gets_what_it_asks_for(function):
    given = inputs()
    np.testing.assert_allclose(results(function)[0], 0.75 * (given["A"] @ given["B"]) + given["C"], rtol=1e-12)


def test_every_set_of_inputs_has_its_results_in_double_precision():
    first, second = results(lambda A, B, C: (A @ B).astype(np.longdouble), INPUTS, OTHERS)
    given = inputs(1)
    np.testing.assert_allclose(second, given["A"] @ given["B"], rtol=1e-12)
    assert first.dtype == second.dtype == np.float64
    assert (first != second).any()


def test_more_than_a_thousand_open_files_are_no_obstacle():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert len(results(lambda A, B: A @ B)) == 1


def test_sets_of_inputs_are_waited_for_by_their_seed_and_the_rest_is_given_up():
    def function(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        if (inputs()["A"] != A).any():
            time.sleep(100)
        return A @ B

    sets = (INPUTS, OTHERS)
    with closing(ExpectedFolder(SPEC, "float32", (function, "numpy"), sets, 60.0)) as folder:
        folder.wait(0)
        assert expected_file(folder.path, "C", SIZES, 0, check=True).exists()
        assert not folder.is_complete
    assert not folder.path.exists()
    for _ in range(2):
        with pytest.raises(InputError, match="was ended"):
            folder.wait()


def fails(A: np.ndarray) -> np.ndarray:
    return np.linalg.inv(A)


def hangs(A: np.ndarray) -> None:
    time.sleep(100)


class UnprintableError(Exception):
    """Its text raises an error, of whatever kind."""

    raised: BaseException = RuntimeError("no text")

    def __str__(self) -> str:
        raise self.raised

    __repr__ = __str__


class ExitingArray:
    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise SystemExit(3)


ExitsError = type("ExitsError", (UnprintableError,), {"raised": SystemExit("out of the text")})
InterruptsError = type("InterruptsError", (UnprintableError,), {"raised": KeyboardInterrupt()})
Base = type("Base", (BaseException,), {})


class Names(dict):
    def __iter__(self) -> Any:
        raise UnprintableError


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    def function(A: np.ndarray) -> None:
        raise error

    return function


def recurses(A: np.ndarray) -> Any:
    return recurses(A)


KNOWN: set[int] = set()
"""Descriptors that were open before the child was forked: pytest-xdist talks to its workers over some of them."""


def writes_half(A: np.ndarray) -> None:
    for descriptor in set(range(3, 64)) - KNOWN:
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b'{"error": "ha')
    os._exit(0)


def leaves_a_process(A: np.ndarray) -> None:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(5)


def leaves_a_thread(A: np.ndarray) -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    atexit.register(time.sleep, 60)
    raise ValueError("with a thread")


def warns(A: np.ndarray) -> None:
    warnings.simplefilter("error")
    warnings.warn("as an error", stacklevel=1)


def damages_warnings(A: np.ndarray) -> None:
    json.dumps = None
    traceback.extract_tb = None
    raise ValueError("gone")


def interrupted(A: np.ndarray) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(60)


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
        (raising(ExitsError), "raises ExitsError: .its text cannot be made."),
        (raising(InterruptsError), "cannot be computed: KeyboardInterrupt"),
        (raising(SystemExit(0)), "raises SystemExit: 0"),
        (raising(KeyboardInterrupt), "KeyboardInterrupt"),
        (raising(Base("based")), "Base: based"),
        (
            raising(ValueError("long " * 40_000)),
            "raises ValueError: long long .* in function, .*line [0-9]+: raise error",
        ),
        (raising(ValueError("\ud800\0\x1b[2J\u202e")), r"raises ValueError: \\ud800\\x00\\x1b\[2J\\u202e"),
        (raising(InputError('"}' * 40_000)), '["}]{1000}'),
        (recurses, "raises RecursionError"),
        (lambda A: ExitingArray(), "raises SystemExit: 3"),
        (lambda A: Names(C=1), "raises UnprintableError: .its text cannot be made."),
        (lambda A: [[1], [1, 2]], "raises ValueError"),
        (lambda A: np.empty((5, 4), object), "type object"),
        (writes_half, "sent a damaged answer"),
        (lambda A: os.closerange(3, 256), "ended its process"),
        (leaves_a_process, "ended its process, with status 5"),
        (leaves_a_thread, "raises ValueError: with a thread"),
        (warns, "raises UserWarning: as an error"),
        (damages_warnings, "cannot be described"),
        (interrupted, "ended its process, with status -10"),
    ],
)
def test_the_child_ends_and_tells_why_whatever_the_function_does(function, said, tmp_path, capfd):
    def handler(*_: object) -> None:
        raise KeyError("a handler of the program")

    program = os.getpid()
    before = signal.signal(signal.SIGUSR1, handler)
    KNOWN.clear()
    KNOWN.update(int(one.name) for one in Path("/proc/self/fd").iterdir() if one.exists())  # not that of the listing
    try:
        with pytest.raises(InputError, match=said) as caught:
            results(function, limit_s=0.3 if function is hangs else 30.0)
    finally:
        if os.getpid() != program:  # the child came back
            os._exit((tmp_path / "returned").write_text("the child returned"))
        signal.signal(signal.SIGUSR1, before)
    assert not (tmp_path / "returned").exists()
    assert len(str(caught.value)) < 5000
    assert str(caught.value).replace("\n", "").isprintable()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_signals_are_as_before_and_what_it_prints_is_seen(capfd):
    def function(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        os.write(1, b"from the function")
        return A @ B

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    results(function)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert "from the function" in capfd.readouterr().out


def test_a_program_that_does_not_wait_for_children():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes them itself
    try:
        (found,) = results(lambda A, B: A @ B)
        with pytest.raises(InputError, match="ended its process"):
            results(lambda A: os._exit(7))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert found.shape == (5, 4)


def test_no_room_for_the_results(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(InputError, match="set TMPDIR"):
        results(lambda A, B: A @ B)

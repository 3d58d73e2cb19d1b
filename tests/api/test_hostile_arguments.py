"""Public functions and options with values of wrong types, out of range, or that name no file: errors with words."""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotile
from autotile import TuneOptions
from autotile.errors import AutotileError, InputError
from autotile.settings import data_folder

VALUES: list[Any] = [
    *(None, -1, 0, 10**30, float("nan"), float("inf"), 1.5, True, "", "x", "\0", "x" * 3000, "/", "\ud800", b"x"),
    *([], ["a"], [1], [None], (), {}, {1: 2}, {"a": []}, {"M": 10**30}, ("sgemm_2d", 1), object(), type),
    *(Path("x"), Path("/"), Path("y" * 3000)),
]
NO_DATABASE = {"database", "a", "b", "sources"}
"""Arguments that are databases, whose locations are looked at elsewhere."""
NOT_HERE = {"watch", "worker", "unpin", "doctor", "measure_device", "survey"}
"""Functions that serve, wait or compile."""
COMPILING = {("space", "compile"), ("space", "sample")}
"""Arguments with which a function compiles a whole space, as `survey` does."""
FEW = {"options": TuneOptions(trials=1)}
"""Arguments with which a call that is valid does not search for minutes."""
FUNCTIONS = sorted(
    name for name in [*autotile.__all__, "list"] if inspect.isfunction(getattr(autotile, name)) and name not in NOT_HERE
)
RECORDING = data_folder("recordings") / "matmul_tiled-nvidia-h200-2048x2048x2048-float32.npz"


def good(folder: Path) -> dict[str, Any]:
    named = {name: str(folder / name) for name in ("output", "a", "b", "file", "path", "candidate", "plan", "folder")}
    return named | {
        "kernel": "sgemm_2d",
        "kernels": "sgemm_2d",
        "like": "sgemm_2d",
        "operation": "matmul",
        "name": "lib",
        "callable": print,
        "threads": 32,
        "sources": [str(folder / "a")],
        "source": "x;",
        "parameters": {},
        "arguments": {},
    }


def calls(function: Any, folder: Path) -> Iterator[tuple[str, Any, list[Any], dict[str, Any]]]:
    """Yield calls with one argument of each value: its name, the value, and all arguments."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [one for one in parameters if one.kind not in variable]
    for changed in named:
        for value in VALUES:
            if value is None and changed.name in FEW:
                continue
            args, kwargs = [], {}
            for one in named:
                default = FEW.get(one.name, one.default)
                given = value if one is changed else good(folder).get(one.name) if default is one.empty else default
                if one.kind is one.POSITIONAL_ONLY:
                    args.append(given)
                elif one is changed or given is not one.default:
                    kwargs[one.name] = given
            yield changed.name, value, args, kwargs


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_answers_or_says_what_is_wrong(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = []
    for argument, value, args, kwargs in calls(getattr(autotile, name), tmp_path):
        if argument in NO_DATABASE or (name, argument) in COMPILING:
            continue
        try:
            getattr(autotile, name)(*args, **kwargs)
        except AutotileError:
            pass
        except Exception as error:  # what is looked for
            faults.append(f"{argument}={ascii(value)[:40]}: {type(error).__name__}: {ascii(str(error))[:80]}")
    assert faults == []


OPTIONS = [*VALUES, 2**31, 2**63, -(10**30), np.float32("nan"), np.int64(-1), ({1: 2},), ({"x": object()},), "cold"]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TuneOptions)])
def test_an_option_is_of_its_type_and_in_its_range_or_is_refused(name):
    for value in OPTIONS:
        said = ""
        try:
            options = TuneOptions(**{name: value})
        except InputError as error:
            said = str(error)
        if said:
            assert name in said
            assert "expected" in said
        else:
            assert options.to_json("")  # it can be stored
            assert type(getattr(options, name)).__module__ != "numpy"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 10**30}, "expected a whole number of at least 0 and at most 9,223,372,036,854,775,807"),
        ({"seed": None}, "seed is None"),
        ({"trials": 2**31}, "at most 2,147,483,647"),
        ({"finals": True}, "finals is True, expected a whole number"),
        ({"budget_s": float("inf")}, "budget_s is inf, expected seconds"),
        ({"sample_limit_s": None}, "sample_limit_s is None, expected seconds"),
        ({"fresh": 1}, "fresh is 1, expected True or False"),
        ({"objectives": "time"}, "objectives is 'time', expected a list, each a text"),
        ({"only": {"TILE": 16}}, "only is {'TILE': 16}, expected a list, each a mapping"),
        ({"devices": (0, "1")}, "devices is"),
        ({"replay": 5}, "replay is 5, expected a text, a path or None"),
        ({"sampler": None}, "sampler is None, expected a text"),
    ],
)
def test_what_is_said(options, said):
    with pytest.raises(InputError) as caught:
        TuneOptions(**options)
    assert said in str(caught.value)


def test_the_session_of_a_users_own_search(tmp_path):
    options = TuneOptions(replay=RECORDING, workers=1)
    sizes = {"M": 2048, "N": 2048, "K": 2048}
    with autotile.session("matmul_tiled", sizes, options=options, database=tmp_path / "s.db") as session:
        for value in VALUES:
            with suppress(InputError):  # an integer that is no value of the parameter is a trial: infeasible
                assert session.evaluate({"TILE": value})[0].outcome != "ok"
            with suppress(InputError):
                session.tell({"TILE": value}, 1.0)
            if not isinstance(value, dict) or value:
                for call in (session.evaluate, lambda configs: session.tell(configs[0], 1.0)):
                    with pytest.raises(InputError):
                        call([value])
            if value not in (None, 1.5, [], (), {}):
                with pytest.raises(InputError):
                    session.evaluate(value)
                with pytest.raises(InputError):
                    session.tell({}, value)
        session.close()


@pytest.mark.parametrize("value", [None, 1, "", "x y", "\0", b"x", [], "cublas", "x" * 5000, object()])
def test_a_library_has_the_name_of_one(value):
    with pytest.raises(InputError):
        autotile.add_library("matmul", value, print) if value != "x" * 5000 else autotile.add_library(value, "x", print)
    with pytest.raises(InputError):
        autotile.add_library("matmul", "mine", value)
    with pytest.raises(InputError):
        autotile.add_library(value, "mine", print)


@pytest.mark.parametrize("option", ["database", "bundle", "library", "numerics", "race", "dtype", "device"])
def test_what_is_served_is_asked_for_in_the_right_types(option):
    for value in ([], {}, {"a": []}, object(), 10**30, b"x", 1.5):
        if option in ("database", "bundle") and value in ([], {}):
            continue  # none, as is ""
        is_place = option in ("database", "bundle")
        with pytest.raises(InputError) if is_place else suppress(AutotileError):
            autotile.get_best_kernel("sgemm_2d", M=64, N=64, K=64, **{option: value})
        if is_place:
            with pytest.raises(InputError, match=f"is not the path of a {option}: expected the path of a file"):
                autotile.Dispatcher(**{option: value})

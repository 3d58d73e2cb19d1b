"""`tune_kernel` from its arguments to its results, with real compilers and a fake GPU worker; needs no GPU."""

import itertools
import json
import math
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from autotile.kernel_tuner.observers.nvml import NVMLObserver
from autotile.kernel_tuner.observers.pmt import PMTObserver
from kernel_tuner.interface import strategy_map
from kernel_tuner.util import read_cache

from autotile.core.device import device_profile
from autotile.errors import InputError
from autotile.kernel_tuner import run_kernel, strategies, tune_cache, tune_kernel
from autotile.kernel_tuner.accuracy import AccuracyObserver, Tunable
from autotile.kernel_tuner.file_utils import store_output_file
from autotile.kernel_tuner.kernelbuilder import PythonKernel
from autotile.kernel_tuner.observers import BenchmarkObserver

ADD = """
#ifndef wrong
#define wrong 0
#endif
__global__ void add(float* c, const float* a, const float* b, int n) {
    int i = blockIdx.x * block_size_x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i] + wrong;
}
"""
N = 1000
SIZES = {"block_size_x": [32, 64, 128]}


@pytest.fixture(autouse=True)
def _fake_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.chdir(tmp_path)
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")])))
    device = device_profile("h200")
    for module in ("kernel_tuner.interface", "tuning.backend"):
        monkeypatch.setattr(import_module(f"autotile.{module}"), "device_count", lambda: 1)
        monkeypatch.setattr(import_module(f"autotile.{module}"), "live_device", lambda _: device)
    monkeypatch.setattr(import_module("autotile.tuning.backend"), "has_driver", lambda: True)
    monkeypatch.setattr("autotile.workers.gpu.Gpu.__init__.__defaults__", ("faults.arithmetic_gpu_worker",))


def arguments() -> list[Any]:
    rng = np.random.default_rng(0)
    a, b = rng.random(N, np.float32), rng.random(N, np.float32)
    return [np.zeros(N, np.float32), a, b, np.int32(N)]


def tuned(given: list[Any] | None = None, params: Any = None, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    return tune_kernel("add", ADD, N, given or arguments(), params or SIZES, **{"quiet": True, **options})


def test_results_environment_and_what_is_printed(capsys):
    metrics = {"rate": lambda p: 1 / p["time"], "double": "rate * 2"}
    results, env = tuned(metrics=metrics, quiet=False, verbose=True)
    times = {result["block_size_x"]: result["time"] for result in results}
    assert times == pytest.approx({32: 31.25, 64: 15.625, 128: 7.8125})
    for result in results:
        assert next(iter(result)) == "block_size_x"
        assert (result["times"], result["double"]) == ([result["time"]] * 2, 2 / result["time"])
        assert result["verification_time"] == 500
        assert {"compile_time", "benchmark_time", "strategy_time", "framework_time", "timestamp"} <= result.keys()
    assert (env["device_name"], env["best_config"]["block_size_x"]) == ("NVIDIA H200", 128)
    assert env["total_verification_time"] == 1500
    assert json.loads(json.dumps((results, env)))
    printed = capsys.readouterr().out
    assert "Using: NVIDIA H200" in printed
    assert "block_size_x=32, time=31.250ms" in printed
    assert "the outputs of add are not verified" in printed
    assert printed.rstrip().endswith("block_size_x=128, time=7.812ms, rate=0.128, double=0.256")


def test_a_function_verifies_each_configuration():
    given = arguments()
    seen = []

    def verify(answer: Any, outputs: Any, atol: float | None = None) -> bool:
        seen.append((atol, [each is None for each in outputs]))
        return bool(np.allclose(answer[0], outputs[0], atol=atol))

    results, _ = tuned(
        given, {**SIZES, "wrong": [0, 1]}, answer=[given[1] + given[2], None, None, None], verify=verify, atol=1e-4
    )
    marks = {(result["block_size_x"], result["wrong"]): repr(result.get("__error__")) for result in results}
    assert {mark for (_, wrong), mark in marks.items() if wrong} == {"InvalidConfig"}
    assert min(results, key=lambda result: float(result["time"]))["wrong"] == 0
    assert all(("time" in result) == (not result["wrong"]) for result in results)
    assert {mark for (_, wrong), mark in marks.items() if not wrong} == {"None"}
    assert seen[0] == (1e-4, [False, True, True, True])


def test_results_are_those_of_the_functions_that_look_at_the_outputs():
    """Results that nothing verified, or another function did, are not taken from the database."""
    given, one = arguments(), {"block_size_x": [64]}
    assert "__error__" not in tuned(given, one)[0][0]
    with pytest.raises(InputError, match="the function verify returned False"):
        tuned(given, one, verify=lambda answer, outputs: False)
    observed = {"answer": [given[1] + given[2], None, None, None], "observers": [AccuracyObserver(key="worst")]}
    assert "worst" in tuned(given, one, **observed)[0][0]


def test_an_answer_may_hold_nans():
    (given := arguments())[1][3] = np.nan
    results, _ = tuned(given, {"block_size_x": [64], "wrong": [0, 1]}, answer=[given[1] + given[2], None, None, None])
    assert {result["wrong"]: "__error__" in result for result in results} == {0: False, 1: True}


def test_observers_of_the_output_add_to_the_results():
    given = arguments()
    answer, observer = [given[1] + given[2], None, None, None], AccuracyObserver("MAE", "mean_error")
    results, _ = tuned(given, {**SIZES, "wrong": [0, 1]}, answer=answer, observers=[observer])
    assert {result["wrong"]: round(result["mean_error"], 6) for result in results} == {0: 0, 1: 1}


class Counter(BenchmarkObserver):
    def __init__(self) -> None:
        self.configurations: list[Any] = []

    def register_configuration(self, params: Any) -> None:
        self.configurations.append(params)

    def after_finish(self) -> None:
        raise AssertionError

    def get_results(self) -> dict[str, Any]:
        return {"count": len(self.configurations)}


def test_other_observers_are_called_where_they_can_be():
    observers = [lambda _: Counter(), NVMLObserver(["gr_voltage"])]
    with (
        pytest.warns(UserWarning, match="after_finish are not called"),
        pytest.warns(UserWarning, match="'gr_voltage' is not read"),
        pytest.warns(UserWarning, match="nvml_gr_clock sets nothing"),
    ):
        results, _ = tuned(params={**SIZES, "nvml_gr_clock": [1000]}, observers=observers)
    assert sorted(result["count"] for result in results) == [1, 2, 3]
    with pytest.raises(InputError, match="PMTObserver reads a power meter"):
        tuned(observers=[PMTObserver("rapl")])


@pytest.mark.parametrize("cut", [False, True])  # as of a call that was killed; else without line breaks
def test_a_cache_is_continued_simulated_and_written_as_t4(tmp_path, cut):
    file = tmp_path / "cache.json"
    tuned(params={"block_size_x": [32, 64]}, cache=str(tmp_path / "cache"))
    first = json.loads(file.read_text())
    assert (first["tune_params_keys"], set(first["cache"])) == (["block_size_x"], {"32", "64"})
    text = file.read_text().replace('"time": 31.25,', '"time": 99.0, "metric": Infinity,')
    file.write_text(text.removesuffix("}\n}") + ',\n"128": {"block_' if cut else json.dumps(json.loads(text)))
    results, _ = tuned(cache=file)
    assert {r["block_size_x"]: r["time"] for r in results} == pytest.approx({32: 99.0, 64: 15.625, 128: 7.8125})
    assert set(json.loads(file.read_text())["cache"]) == {"32", "64", "128"}
    assert len(read_cache(str(file), open_cache=False)["cache"]) == 3  # by Kernel Tuner itself
    if cut:  # the file is the same from here on
        return
    store_output_file(tmp_path / "out", results, SIZES)
    written = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [entry["configuration"] for entry in written] == [{"block_size_x": r["block_size_x"]} for r in results]
    for strategy in (None, "random_sample", strategies.greedy_mls, strategy_map["mls"]):
        simulated, env = tuned(cache=file, simulation_mode=True, strategy=strategy, strategy_options={"max_fevals": 2})
        assert len(simulated) == 2
        assert env["simulation"]
    searched, _ = tune_cache(file, restrictions=["block_size_x > 32"], quiet=True)
    assert {result["block_size_x"] for result in searched} == {64}  # of the values that the file states
    with pytest.raises(InputError, match="there is no folder"):
        tuned(cache="none/cache")
    (tmp_path / "bad.json").write_text(file.read_text().replace('"time": 99.0', '"time": "soon"'))
    with pytest.raises(InputError, match=r"bad\.json: the entry '32': time: expected float, got str"):
        tune_cache(tmp_path / "bad", quiet=True)
    with pytest.raises(InputError, match="has the kernel_name 'add'"):
        tune_kernel("other", ADD, N, arguments(), SIZES, cache=file, simulation_mode=True)


class EverySecond:
    def tune(self, searchspace: Any, runner: Any, tuning_options: Any) -> Any:
        asked = searchspace.sorted_list()[::2]
        found = runner.run(asked, tuning_options)
        assert [result["block_size_x"] for result in found] == [config[0] for config in asked]
        return found


def test_a_strategy_object_and_one_with_options_search():
    results, _ = tuned(params={"block_size_x": [32, 64, 96, 128, 160]}, strategy=EverySecond())
    assert {32, 96, 160} <= {result["block_size_x"] for result in results}
    options = {"max_fevals": 8, "restart": True}
    params = {"block_size_x": list(range(32, 1056, 32))}
    results, env = tuned(params=params, strategy="greedy_ils", strategy_options=options, seed=1)
    assert 1 <= len(results) <= 10
    assert env["best_config"] == min(results, key=lambda result: float(result["time"]))
    with pytest.raises(ValueError, match="no_such_option"):
        tuned(strategy_options={"no_such_option": 1})


def test_a_time_limit_is_used_up_and_holds_the_finals(monkeypatch):
    asked = []

    def opened(kernel: Any, problem: Any, settings: Any, options: Any, *_: Any, **__: Any) -> Any:
        asked.append((options.budget_s, options.spend))
        raise InputError("stopped")

    monkeypatch.setattr("autotile.kernel_tuner.interface.open_session", opened)
    for limits in ({"time_limit": 60}, {"max_fevals": 5}):
        with pytest.raises(InputError, match="stopped"):
            tuned(strategy_options=limits)
    assert asked == [(54.0, True), (None, False)]


@pytest.mark.parametrize("choices", [(0, 1), (0.5, "a b")])
def test_arguments_that_depend_on_a_parameter(choices):
    given = arguments()
    answers = [[given[1] + given[2], None, None, None], [2 * given[1], None, None, None]]
    given[2] = Tunable("which", dict(zip(choices, [given[2], given[1]], strict=True)))
    sizes = [64, 128]
    results, env = tuned(
        given,
        {"block_size_x": sizes, "which": choices},
        answer=Tunable("which", dict(zip(choices, answers, strict=True))),
        verify=lambda a, o: np.allclose(a[0], o[0]),
        defines={"block_size_x": "block_size_x"},
    )
    tried = {(result["block_size_x"], result["which"]) for result in results}
    assert (tried, len(results)) == (set(itertools.product(sizes, choices)), len(tried))
    assert all("__error__" not in result for result in results)
    assert env["best_config"]["block_size_x"] == 128


def test_a_generator_makes_the_source(tmp_path):
    made = []

    def source(params: dict[str, Any]) -> str:
        made.append(params)
        return ADD.replace("block_size_x", str(params["block_size_x"]))

    results, _ = tune_kernel("add", source, N, arguments(), SIZES, lang="CUDA", defines={}, quiet=True)
    assert len(results) == 3
    assert {params["block_size_x"] for params in made} == {32, 64, 128}


def test_one_run_returns_the_arguments_and_a_kernel_is_a_function():
    given = arguments()
    c, a, b, n = run_kernel("add", ADD, N, given, {"block_size_x": 64})
    np.testing.assert_allclose(c, given[1] + given[2])
    assert a is not given[1]
    np.testing.assert_array_equal(b, given[2])
    assert n == N
    with pytest.raises(InputError, match=r"the grid of the configuration block_size_x=\[1, 2\] cannot be computed: "):
        run_kernel("add", ADD, N, given, {"block_size_x": [1, 2]})
    with pytest.raises(InputError, match="does not compile"):
        run_kernel("add", ADD.replace("c[i]", "d[i]"), N, given, {"block_size_x": 64})
    given = arguments()
    add = PythonKernel("add", ADD, N, given, {"block_size_x": 64}, outputs=[True, False, False, False])
    (c,) = add(*given)
    np.testing.assert_allclose(c, given[1] + given[2])


class GpuArray(np.ndarray[Any, Any]):
    """Stand-in for an array of CuPy where there is no GPU."""

    device = nullcontext()

    def get(self) -> Any:
        return np.array(self, subok=False)


GpuArray.__module__ = "cupy.stand_in"


@pytest.fixture
def on_gpu(monkeypatch):
    stand_in = SimpleNamespace(
        asarray=np.asarray, cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None))
    )
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    return [each.view(GpuArray) if isinstance(each, np.ndarray) else each for each in arguments()]


def test_arrays_of_a_gpu_are_used_in_place(on_gpu):
    """The real ones are in `tests/gpu`."""
    c, a, b, n = on_gpu
    add = PythonKernel("add", ADD, N, [np.ones_like(c), a, b, n], {"block_size_x": 64})
    assert add(c, a, b, n) == []
    np.testing.assert_allclose(c.get(), a.get() + b.get())
    c[:] = 0
    (returned,) = add(np.zeros(N, np.float32), a, b, n)
    np.testing.assert_allclose(returned, a.get() + b.get())
    assert not c.any()
    run_kernel("add", ADD, N, on_gpu, {"block_size_x": 64})
    np.testing.assert_allclose(c.get(), a.get() + b.get())


SPACE = {"block_size_x": [32, 64, 96, 128, 160], "unused": [1, 2, 3, 4]}


@pytest.fixture
def cached(tmp_path):
    """A cache file with a time of every configuration."""
    rows = [dict(zip(SPACE, row, strict=True)) for row in itertools.product(*SPACE.values())]
    header = {"device_name": "NVIDIA H200", "kernel_name": "add", "problem_size": N, "objective": "time"}
    times = {
        ",".join(map(str, row.values())): {**row, "compile_time": 400.0, "time": 1000 / row["block_size_x"]}
        for row in rows
    }
    file = tmp_path / "cache.json"
    file.write_text(
        json.dumps({**header, "tune_params_keys": list(SPACE), "tune_params": SPACE, "cache": times}, indent="")
    )
    return file


NOT_HERE = {"skopt": "needs scikit-optimize", "pyatf_strategies": "pyATF builds the space anew"}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(strategy_map))
def test_every_strategy_that_kernel_tuner_lists(cached, name):
    """Either it searches, with options of its own, or it is refused in words; its module and its name stand for it."""
    search = {"params": SPACE, "strategy": name, "cache": cached, "simulation_mode": True}
    with pytest.raises(ValueError, match=r"no_such_option|needs scikit-optimize|pyATF builds"):
        tuned(**search, strategy_options={"no_such_option": 1})
    package, few = NOT_HERE.get(name), {"max_fevals": 8}
    if package and (name != "skopt" or find_spec("skopt") is None):
        with pytest.raises(InputError, match=package):
            tuned(**search, strategy_options=few)
        return
    own = {} if package else getattr(strategy_map[name], "_options", {})
    found, _ = tuned(**search, strategy_options={key: default for key, (_, default) in own.items()} | few, seed=1)
    assert 1 <= len(found) <= 20
    by_name = strategies.choose_strategy(name, few)
    for same in (strategy_map[name], getattr(strategies, name)):
        assert strategies.choose_strategy(same, few) == by_name


@pytest.mark.parametrize("options", [None, {"max_fevals": 8}, {"max_fevals": 8, "popsize": 4}])
@pytest.mark.parametrize("strategy", ["no_such", "HybridVNDX", "nsga4", 5, strategies.no_such, object()])
@pytest.mark.parametrize("simulation_mode", [False, True])
def test_an_unknown_strategy(cached, strategy, options, simulation_mode):
    """Kernel Tuner raises a `ValueError`, too."""
    said = r"no strategy .*expected one of .*nsga3|expected a name, or an object"
    with pytest.raises(ValueError, match=said) as caught:
        tuned(params=SPACE, strategy=strategy, strategy_options=options, cache=cached, simulation_mode=simulation_mode)
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize("strategy", [None, "mls", strategies.mls])
def test_a_simulation_takes_the_times_of_the_cache(cached, strategy):
    found, env = tuned(
        params=SPACE, cache=cached, simulation_mode=True, strategy=strategy, strategy_options={"time_limit": 3}
    )
    assert 1 <= len(found) <= 8
    assert env["simulated_time"] == 400 * len(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy_options": 5}, "strategy_options is 5, expected a mapping by name"),
        ({"strategy_options": "max_fevals=5"}, "strategy_options is 'max_fevals=5', expected a mapping by name"),
        ({"seed": "a"}, "seed is 'a', expected a whole number"),
        ({"device": "0"}, "device is '0', expected a whole number"),
        ({"objective": 5}, "objective is 5, expected a text, a list"),
        ({"observers": 5}, "observers is 5, expected a list or None"),
        ({"compiler_options": "-O3"}, "compiler_options is '-O3', expected a list, each a text, a function"),
        ({"lang": 5}, "lang is 5, expected a text"),
        ({"answer": 5}, "answer is 5, expected a list or None"),
        ({"defines": 5}, "defines is 5, expected a mapping by name"),
        ({"cmem_args": [1]}, r"cmem_args is \[1\], expected a mapping by name"),
        ({"log": "debug"}, "log is 'debug', expected a whole number"),
        ({"device": -1}, "no CUDA device -1 here"),
        ({"strategy_options": {"max_fevals": float("inf")}}, "expected a number of at least 1"),
        ({"strategy_options": {"time_limit": float("nan")}}, "expected a positive number"),
        ({"strategy": "random_sample", "strategy_options": {"fraction": "x"}}, "expected a positive number"),
        ({"strategy": "random_sample", "strategy_options": {"fraction": 2}}, "'fraction'] is 2, .* at most 1"),
        ({"restrictions": lambda p: p["blok"]}, r"^<kernel add>: \[rules\['restriction_1'\]\]: a function raises Key"),
        ({"restrictions": "unused > 4"}, "^no configuration of add meets the restrictions and has at most 1024"),
        ({"restrictions": ["blok > 1"], "simulation_mode": True}, "known are block_size_x, unused$"),
        ({"restrictions": ("unused > 1", ["blok"])}, "'blok', which is no parameter; known are block_size_x, unused$"),
        ({"grid_div_x": ["block_size_x", "unused - unused"]}, r"the grid of .* cannot be computed: .*division by zero"),
        ({"grid_div_y": "unused / 'a'"}, r"the grid of .* cannot be computed: unsupported operand"),
        ({"metrics": {"g": "1 / (time - time)"}, "simulation_mode": True}, "the metric g of .*: .*division by zero"),
        ({"verify": "agreed"}, "verify is 'agreed', expected a function, 'agreement' or None"),
        ({"objective": "tiem"}, "whether a higher tiem is better is not known"),
        ({"observers": [Counter.__base__]}, "an observer is the class BenchmarkObserver .*expected an object of it"),
        ({"compiler_options": lambda p: 5}, "compiler_options is 5, expected a list of texts"),
        ({"cmem_args": {"table": None}}, "has the element type object; expected numbers"),
    ],
)
def test_an_argument_that_cannot_be(cached, given, said):
    with pytest.raises(InputError, match=said):
        tuned(params=SPACE, cache=cached, **given)


def test_a_problem_size_that_is_a_function_is_not_compared_with_that_of_the_cache(cached):
    given = {"arguments": arguments(), "tune_params": SPACE, "cache": cached, "simulation_mode": True, "quiet": True}
    found, _ = tune_kernel("add", ADD, lambda p: N, **given)
    assert len(found) == 20
    with pytest.raises(InputError, match=f"has the problem_size {N}, but this call {2 * N}"):
        tune_kernel("add", ADD, 2 * N, **given)


@pytest.mark.parametrize("simulated", [True, False])
def test_random_sample_tries_a_share_of_the_valid_configurations(cached, simulated):
    given = {"cache": cached, "simulation_mode": True} if simulated else {}
    search = {"strategy": "random_sample", "strategy_options": {"fraction": 0.3}, **given}
    assert len(tuned(params=SPACE, restrictions="block_size_x <= 64", **search)[0]) == 3  # of 8, of 20 combinations


def test_a_strategy_follows_one_objective_and_the_best_is_that_of_its_numbers(cached):
    search = {"strategy": "greedy_mls", "strategy_options": {"max_fevals": 10}, "seed": 1}
    given = {"params": SPACE, "cache": cached, "simulation_mode": True, **search}
    asked = {"metrics": {"slow": lambda p: np.float32(1 / p["time"])}, "objective": "slow"}
    fast, (slow, env) = tuned(**given)[0], tuned(**given, **asked, objective_higher_is_better=False)
    assert sum(each["time"] for each in slow) > sum(each["time"] for each in fast)
    assert env["best_config"]["time"] == max(each["time"] for each in slow) == 31.25
    mixed = {"rate": lambda p: math.nan if p["unused"] == 1 else "?" if p["unused"] == 2 else p["time"]}
    _, env = tuned(**given | {"metrics": mixed, "strategy": None}, objectives={"rate": False, "time": False})
    assert {each["unused"] for each in env["best_config"]} <= {3, 4}


def test_names_that_nothing_has_are_said(cached):
    given = {"objective": "tiem", "objective_higher_is_better": True, "block_size_names": ["blok"]}
    with pytest.warns(UserWarning, match="no result has all objectives"), pytest.warns(UserWarning, match="'blok'"):
        tuned(params=SPACE, cache=cached, simulation_mode=True, strategy_options={"max_fevals": np.int64(2)}, **given)


@pytest.mark.parametrize(("direction", "best"), [(False, 32), ([False], 32), (True, 160), ([True], 160)])
def test_the_direction_of_one_objective_may_be_in_a_list(cached, direction, best):
    named = {"metrics": {"threads": lambda p: p["block_size_x"]}, "objective": "threads"}
    given = {"params": SPACE, "cache": cached, "simulation_mode": True, **named}
    _, env = tuned(objective_higher_is_better=direction, **given)
    assert env["best_config"]["block_size_x"] == best
    with pytest.raises(ValueError, match="objective has 1 name, objective_higher_is_better 2 values"):
        tuned(objective_higher_is_better=[True, False], **given)


@pytest.mark.parametrize(("strategy", "simulation_mode"), [("nsga2", False), ("nsga2", True), ("nsga3", True)])
def test_several_objectives(cached, strategy, simulation_mode):
    results, env = tuned(
        params=SPACE if simulation_mode else {"block_size_x": SPACE["block_size_x"]},
        strategy=strategy,
        strategy_options={"popsize": 4, "max_fevals": 12},
        metrics={"threads": lambda p: p["block_size_x"]},
        objective=["time", "threads"],
        objective_higher_is_better=[False, False],
        seed=1,
        **({"cache": cached, "simulation_mode": True} if simulation_mode else {}),
    )
    assert len(results) >= 4
    assert isinstance(env["best_config"], list)

"""Options of tuning as keyword arguments beside sizes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import autotile
from autotile.api import targets as module
from autotile.cli.derivation import describe

N = 1048576


class TestTune:
    def test_options_stand_beside_sizes(self, scale_toml: Path, recording: Path) -> None:
        result = autotile.tune(scale_toml, n=N, trials=5, budget="30s", finals=0, seed=3, replay=recording)
        assert isinstance(result, autotile.TuneResult)
        assert sum(result.outcomes.values()) == 5
        assert result.problem.sizes == {"n": N}

    def test_they_take_the_place_of_the_options_object(self, scale_toml: Path, recording: Path) -> None:
        given = autotile.TuneOptions(replay=recording, trials=7, finals=0)
        result = autotile.tune(scale_toml, n=N, trials=4, options=given)
        assert sum(result.outcomes.values()) == 4

    def test_a_size_of_the_name_of_an_option_is_the_size(self, scale_toml: Path, recording: Path) -> None:
        text = scale_toml.read_text().replace("n = 4096", "n = 4096, trials = 3").replace("n = 1001", "n = 1001")
        scale_toml.write_text(text.replace("ragged = { n = 1001 }", "ragged = { n = 1001, trials = 3 }"))
        with pytest.raises(autotile.InputError, match="no recording of scale n=1048576 trials=9"):
            autotile.tune(scale_toml, n=N, trials=9, options=autotile.TuneOptions(replay="auto", trials=2))

    @pytest.mark.parametrize(
        ("word", "said"),
        [
            ("trails", "scale has no size 'trails', and no option is named so; did you mean 'trials'"),
            ("max_trials", "did you mean 'trials'"),
            ("bugdet", "did you mean 'budget'"),
            ("N", "did you mean 'n'"),
            ("m", r"\(sizes and flags: n; options: trials, budget, sampler ...\)"),
            ("served", "has no size 'served'"),
        ],
    )
    def test_an_unknown_word(self, scale_toml: Path, word: str, said: str) -> None:
        with pytest.raises(autotile.ProblemError, match=said):
            autotile.tune(scale_toml, n=N, **{word: 3})

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"trials": "fifty"}, "trials is 'fifty', expected a whole number"),
            ({"trials": 0}, "trials is 0"),
            ({"budget": "soon"}, "a budget of 'soon' cannot be read"),
            ({"budget": True}, "a budget of True cannot be read"),
            ({"budget": -1}, "cannot be read"),
            ({"budget": float("nan")}, "cannot be read"),
            ({"until": 2}, "a gain of 2 cannot be used"),
            ({"fresh": "no"}, "fresh is 'no', expected True or False"),
            ({"sampler": 3}, "sampler is 3, expected a text"),
            ({"budget": 5, "budget_s": 5}, "budget_s is given twice"),
            ({"db": "a.db", "database": "b.db"}, "database is given twice"),
            ({"device": 0, "devices": [0, 1]}, "one GPU and --devices several"),
            ({"l2": "warm"}, "l2 is 'warm'"),
        ],
    )
    def test_values_that_cannot_be_read(self, scale_toml: Path, given: dict[str, Any], said: str) -> None:
        with pytest.raises(autotile.InputError, match=said):
            autotile.tune(scale_toml, n=N, **given)

    def test_of_an_operation(self) -> None:
        with pytest.raises(autotile.ProblemError, match=r"matmul has no size 'trails', .* did you mean 'trials'"):
            autotile.tune("matmul", M=8, N=8, K=8, trails=3)

    def test_of_a_kernel_in_python(self, recording: Path) -> None:
        kernel = autotile.kernel(
            'extern "C" __global__ void twice(float* y, int n) { y[threadIdx.x] = BLOCK; }',
            "twice",
            sizes={"n": 64},
            parameters={"BLOCK": [32, 64]},
            arguments={"y": autotile.Buffer("float32", "n", "out"), "n": autotile.Scalar("int32", "n")},
            launch={"block": "BLOCK", "grid": "1"},
        )
        with pytest.raises(autotile.ProblemError, match="twice has no size 'trails'"):
            kernel.tune(trails=3)
        with pytest.raises(autotile.InputError, match="trials is 0"):
            kernel.tune(trials=0)


def test_other_functions_take_them_too(scale_toml: Path, recording: Path) -> None:
    with autotile.session(scale_toml, n=N, replay=recording, discard=False) as session:
        assert session.evaluate({"THREADS": 64, "WORK": 1})
    calls = (
        lambda **named: autotile.record(scale_toml, n=N, **named),
        lambda **named: autotile.verify(scale_toml, n=N, **named),
        lambda **named: autotile.check("new.cu", scale_toml, n=N, **named),
        lambda **named: autotile.tune_family(scale_toml, n="1..8", **named),
        autotile.tune_misses,
        lambda **named: autotile.tune_plan("plan.toml", **named),
    )
    for call in calls:
        with pytest.raises(autotile.InputError, match="workers is 0"):
            call(workers=0)
        with pytest.raises(autotile.ProblemError, match="did you mean 'workers'"):
            call(worker=1)
    with pytest.raises(autotile.InputError, match="points is 0"):
        autotile.tune_family(scale_toml, n="1..8", points=0)


def test_every_option_of_the_command_line_is_a_keyword() -> None:
    _, described = describe("api.tuning.tune")
    own = set(inspect.signature(autotile.tune).parameters)
    options = {one.name for one in described} - own
    assert {"trials", "budget", "verify_problem", "trace"} <= options <= set(module.OPTION_NAMES)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"budget": "5m"}, {"budget_s": 300}),
        ({"budget": 90}, {"budget_s": 90}),
        ({"budget": 0.5}, {"budget_s": 0.5}),
        ({"budget_s": 2.0}, {"budget_s": 2.0}),
        ({"until": "1%"}, {"until": 0.01}),
        ({"until": 0.02}, {"until": 0.02}),
        ({"objective": "registers"}, {"objectives": ("registers",)}),
        ({"objective": ["time", "energy"]}, {"objectives": ("time", "energy")}),
        ({"verify_problem": {"M": 1}}, {"verify_sizes": ({"M": 1},)}),
        ({"verify_problem": [{"M": 1}, {"N": 2}]}, {"verify_sizes": ({"M": 1}, {"N": 2})}),
        ({"replay": True}, {"replay": "auto"}),
        ({"replay": "a.npz"}, {"replay": Path("a.npz")}),
        ({"replay": "auto", "devices": "0,2"}, {"devices": (0, 2)}),
        ({"replay": "auto", "devices": [1, 3]}, {"devices": (1, 3)}),
        ({"db": "x.db"}, {"database": "x.db"}),
        ({"transfer": False, "spend": True, "l2": "hot"}, {"transfer": False, "spend": True, "l2": "hot"}),
    ],
)
def test_values_are_read_as_on_the_command_line(given: dict[str, Any], fields: dict[str, Any]) -> None:
    options = module.session_options(given=given)
    assert {name: getattr(options, name) for name in fields} == fields

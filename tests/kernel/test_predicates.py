"""Rules that are Python functions, and the default that is derived for a file without one."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from feature_kernels import space_text
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import make_spec

from autotile.core.device import device_profile
from autotile.errors import EmptySpaceError, SpecError
from autotile.kernel.expressions import Location, parse_expression
from autotile.kernel.launch import known_names, launch_geometry
from autotile.kernel.parser import parse_spec
from autotile.kernel.problem import derived_default
from autotile.kernel.python_kernel import map_rows, names_read, parse_predicate
from autotile.kernel.spec import ConfigFunction, Parameter, Rule
from autotile.space.limits import check_config
from autotile.space.search_space import enumerate_space, feasible_space

SCALE_SPACE, H200 = space_text("scale"), device_profile("h200")
VALUES = {"A": (1, 2, 3, 4), "B": (8, 16, 32), "C": (False, True), "D": ("float", "double")}

FUNCTIONS = {
    "of arrays": lambda A, B: B % A == 0,
    "of scalars": lambda A, B: B % A == 0 and True,
    "of one mapping": lambda p: p["B"] % p["A"] == 0,
    "of one mapping of scalars": lambda p: p["B"] % p["A"] == 0 if p["A"] in (1, 2, 3, 4) else False,
    "of keywords": lambda **p: p["B"] % p["A"] == 0,
    "with an answer that is no boolean": lambda A, B: int(B % A == 0),
    "of arrays only": lambda A, B: (B % A == 0).astype(bool),
}


def spec_with(**functions):
    text = SCALE_SPACE.partition("[parameters]")[0] + "[parameters]\nA = [1, 2, 3, 4]\nB = [8, 16, 32]\n"
    text += "C = [false, true]\n" + 'D = ["float", "double"]\n' + "[launch]" + SCALE_SPACE.partition("[launch]")[2]
    return parse_spec(text.replace("THREADS * WORK", "B * A").replace('"THREADS"', '"B"'), "x", predicates=functions)


def allowed(condition):
    rows = itertools.product(*VALUES.values())
    return [dict(zip(VALUES, row, strict=True)) for row in rows if condition(**dict(zip(VALUES, row, strict=True)))]


class TestFunctions:
    @pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
    def test_every_form_allows_the_same_rows(self, function):
        spec = spec_with(divides=function)
        space = enumerate_space(spec, spec.at(), H200)
        expected = allowed(lambda A, B, C, D: B % A == 0)
        assert space.configs == expected

    def test_booleans_and_strings_reach_the_function(self):
        spec = spec_with(wide=lambda C, D: (D == "double") & C)
        space = enumerate_space(spec, spec.at(), H200)
        assert len(space) == 12
        assert all(space.config(row)["C"] and space.config(row)["D"] == "double" for row in range(len(space)))

    @pytest.mark.parametrize("copies", [1, 300])
    def test_booleans_add_up_as_those_of_python_do(self, copies):
        both = parse_predicate(lambda C, D, A: (C + D) * A > 2, ["A", "C", "D"], Location("x", "rules.both"))
        rows = np.array([*itertools.product((1, 2, 3), (0, 1), (0, 1))] * copies).T
        holds = both.evaluate({"A": rows[0], "C": rows[1] == 1, "D": rows[2] == 1})
        assert holds.tolist() == [(c + d) * a > 2 for a, c, d in rows.T.tolist()]
        inverted = parse_predicate(lambda C: ~C, ["C"], Location("x", "rules.inverted"))  # no boolean of plain values
        assert inverted.evaluate({"C": np.array([True, False])}).tolist() == [False, True]
        assert inverted.evaluate({"C": True}) is False  # of one configuration

    def test_whole_numbers_are_exact_and_a_division_by_zero_is_an_error(self):
        large = np.array([1 << 32, 1 << 40, 4] * 300)
        rule = parse_predicate(lambda A, B: A * B > 9, ["A", "B"], Location("x", "rules.large"))
        assert rule.evaluate({"A": large, "B": large}).all()
        divides = parse_predicate(lambda A, B: A % B == 0, ["A", "B"], Location("x", "rules.divides"))
        with pytest.raises(SpecError, match=r"rules\.divides.*ZeroDivisionError.*where A = 4, B = 0"):
            divides.evaluate({"A": np.array([4, 4]), "B": np.array([2, 0])})

    def test_a_function_of_arrays_is_called_once_and_a_configuration_that_breaks_it_is_explained(self):
        calls = []

        def divides(A, B):
            calls.append(np.size(A))
            return B % A == 0

        spec = spec_with(divides=divides)
        calls.clear()  # the default was derived
        enumerate_space(spec, spec.at(), H200)
        assert calls == [12]
        config = {"A": 3, "B": 8, "C": True, "D": "float"}
        reason = check_config(spec, config, spec.at(), H200)
        assert reason == "the rule 'divides' is broken: divides(), where A = 3, B = 8"

    def test_errors_name_the_rule_and_the_values(self):
        with pytest.raises(SpecError, match=r"rules.bad.*raises ZeroDivisionError.*where A = 2, B = 16"):
            spec_with(bad=lambda A, B: A // 0 > B)
        with pytest.raises(SpecError, match=r"argument 'AA', which is not a parameter; did you mean 'A'"):
            spec_with(bad=lambda AA, B: AA > B)
        with pytest.raises(SpecError, match=r"TypeError: .*, given a mapping of all parameters as none of them is an"):
            spec_with(bad=lambda AA: AA > 3)

    @pytest.mark.parametrize("answer", [None, "no", [True, True], ...])
    def test_an_answer_that_says_neither_yes_nor_no_is_an_error(self, answer):
        spec = spec_with(bad=lambda A: answer if A == 4 else True)
        said = rf"rules.bad.*returns {re.escape(repr(answer))}, where A = 4; a rule must return True or False"
        with pytest.raises(SpecError, match=said):
            enumerate_space(spec, spec.at(), H200)

    def test_an_argument_with_a_default_is_the_parameter_of_its_name(self):
        spec = spec_with(few=lambda A, B=8, limit=16: limit >= A * B)
        assert enumerate_space(spec, spec.at(), H200).configs == allowed(lambda A, B, C, D: A * B <= 16)

    def test_a_function_that_allows_nothing_is_an_empty_space(self):
        spec = spec_with(some=lambda A: A > 0)
        never = parse_predicate(lambda A: A > 9, list(VALUES), Location("x", "rules.never"))
        with pytest.raises(EmptySpaceError, match="leaves none"):
            enumerate_space(replace(spec, rules=(Rule("never", never),)), spec.at(), H200)


class TestDerivedDefault:
    @given(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=4),
        st.integers(1, 200),
    )
    def test_it_is_valid_exactly_if_some_configuration_is(self, lists, bound):
        parameters = [Parameter(f"P{i}", tuple(values)) for i, values in enumerate(lists)]
        product = " * ".join(parameter.name for parameter in parameters)
        kinds = dict.fromkeys((parameter.name for parameter in parameters), "number")
        rules = [Rule("r", parse_expression(f"{product} <= {bound}", kinds))]
        default = derived_default(parameters, rules, [], {})
        possible = min(np.prod(row) for row in itertools.product(*lists)) <= bound
        assert (default is not None) == possible
        assert default is None or np.prod(list(default.values())) <= bound

    def test_it_is_the_middle_where_that_is_valid_and_its_block_fits_every_device(self):
        parameters = [Parameter("A", (1, 2, 4, 8)), Parameter("B", (16, 32, 64))]
        assert derived_default(parameters, [], [], {}) == {"A": 2, "B": 32}
        parameters = [Parameter("X", (64,)), Parameter("Y", (8, 16, 32))]
        block = [parse_expression(name, {"X": "number", "Y": "number"}) for name in "XY"]
        assert derived_default(parameters, [], [block], {}) == {"X": 64, "Y": 16}
        assert derived_default([parameters[0], Parameter("Y", (16, 32, 64))], [], [block], {}) == {"X": 64, "Y": 16}

    def test_a_file_without_a_default_has_the_derived_one_or_needs_one(self):
        text = SCALE_SPACE.replace("[default]\nTHREADS = 128\nWORK = 1\n", "")
        assert parse_spec(text, "x").default == {"THREADS": 64, "WORK": 2}
        with pytest.raises(SpecError, match=r"no configuration that meets the rules.*relax the rules"):
            parse_spec(text.replace("n >= THREADS", "n < THREADS"), "x")


TEXT = make_spec(
    {"BLOCK": [64, 32, 128], "WORK": [1, 2, 3], "LEFT": [0, 1]},
    launch={"block": ["BLOCK"], "grid": ["computed.grid_x"]},
    sizes={"N": 1000},
    more={"computed": {"grid_x": "number"}},
).text
CONFIG = {"BLOCK": 64, "WORK": 3, "LEFT": 1}


def blocks(config: Mapping[str, Any]) -> float:
    return -(-1000 // (config["BLOCK"] * config["WORK"]))


def test_the_launch_follows_the_function_here_and_the_given_value_in_a_worker():
    here = parse_spec(TEXT, "scale.toml", functions={"grid_x": blocks})
    assert launch_geometry(here, CONFIG, here.at(), H200).grid == (6, 1, 1)
    there = parse_spec(TEXT, "scale.toml")
    sent = {**CONFIG, "computed.grid_x": 6}
    assert launch_geometry(there, sent, there.at(), H200).grid == (6, 1, 1)
    assert check_config(there, sent, there.at(), H200) == ""
    with pytest.raises(SpecError, match="computed by a function, which is not known here"):
        known_names(there, CONFIG, there.at(), H200)


def test_the_limits_see_the_value_of_every_row():
    spec = parse_spec(TEXT, "scale.toml", functions={"grid_x": lambda config: config["WORK"] - 2})
    space = feasible_space(spec, spec.at(), H200)
    assert {space.config(row)["WORK"] for row in range(len(space))} == {3}


@pytest.mark.parametrize("function", [lambda config: config["BLOCK"] / 128, lambda config: config["NONE"]])
def test_a_function_without_a_whole_number_is_named_with_the_configuration(function):
    spec = parse_spec(TEXT, "scale.toml", functions={"grid_x": function})
    with pytest.raises(SpecError, match=r"computed.grid_x raises .* where BLOCK = 64"):
        feasible_space(spec, spec.at(), H200)


def test_a_function_is_called_once_for_each_combination_that_it_reads():
    calls = []

    def counted(config: Mapping[str, Any]) -> int:
        calls.append(dict(config) if isinstance(config, dict) else None)
        return int(config["a"])

    columns = {"a": np.arange(1000) % 3, "b": np.arange(1000)}
    assert map_rows(counted, columns).tolist() == (np.arange(1000) % 3).tolist()
    assert len(calls) <= 4
    assert names_read(lambda config: config["a"] or config["b"], [{"a": 1, "b": 0, "c": 0}]) == {"a"}


def changing(config: Any) -> Any:
    config["sum"] = config["a"] + config["b"]
    return config["sum"]


OF_CONFIGURATIONS: list[ConfigFunction] = [
    lambda p: p["a"] if p["b"] else p["c"],
    lambda p: sum(p.values()),
    lambda p: p.get("c", 0) * p["a"],
    lambda p: {**p}["b"],
    changing,
]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40), st.sampled_from(OF_CONFIGURATIONS))
def test_each_row_has_the_value_that_the_function_gives_it(rows, function):
    columns = dict(zip("abc", np.array(rows).T, strict=True))
    assert map_rows(function, columns).tolist() == [function(dict(zip("abc", row, strict=True))) for row in rows]

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import little_memory
from spec_samples import SGEMM, make_spec

from autotile.core.device import device_profile
from autotile.core.model import Value
from autotile.errors import ProblemError, SpecError
from autotile.kernel.expressions import parse_expression
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import KernelSpec
from autotile.space import enumeration, search_space
from autotile.space.limits import check_config, limits_of
from autotile.space.search_space import SearchSpace, enumerate_space, feasible_space

H200 = device_profile("h200")
SIZES = {"N": 4096}


def enumerated(spec: KernelSpec) -> SearchSpace:
    return enumerate_space(spec, spec.at(SIZES), H200)


def products(spec: KernelSpec) -> list[dict[str, Value]]:
    names = [parameter.name for parameter in spec.parameters]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(p.values for p in spec.parameters))]


def brute_force(spec: KernelSpec, rules: list[str] | None = None) -> list[dict[str, Value]]:
    fixed = {**SIZES, "device.sm_count": H200.sm_count}
    chosen = [rule for rule in spec.rules if rules is None or rule.name in rules]
    return [c for c in products(spec) if all(rule.expression.value({**fixed, **c}) for rule in chosen)]


# --- a space equals the filtered product, in its order

NAMES = ("A", "B", "C", "D")


@st.composite
def spaces(draw: st.DrawFn, most: int = 4) -> KernelSpec:
    numbers = st.lists(st.integers(0, 9), min_size=1, max_size=most, unique=True)
    parameters: dict[str, Any] = {name: draw(numbers) for name in draw(st.permutations(NAMES))}
    parameters |= {"F": draw(st.sampled_from([[False], [True, False]])), "S": ["x", "yy", "zzz"]}
    name = st.sampled_from(NAMES)
    rule = st.one_of(
        st.builds("{} + {} <= {}".format, name, name, st.integers(3, 15)),
        st.builds("{0} != 0 and {1} % {0} == 0".format, name, name),
        st.builds("{} * {} + {} % 3 != 0".format, name, name, name),
        st.builds("F or {} < {}".format, name, name),
        st.builds("S == 'x' if {} > 4 else S != 'zzz'".format, name),
        st.builds("{} in (1, 3, {})".format, name, name),
        st.builds("{} < N // 512".format, name),
        st.sampled_from(["device.sm_count > 100", "N % 4096 == 0", "F or S == 'yy'"]),
    )
    rules = {f"r{number}": text for number, text in enumerate(draw(st.lists(rule, max_size=5)))}
    default = {}
    for values in itertools.product(*parameters.values()):
        env = {**SIZES, **dict(zip(parameters, values, strict=True))}
        if all("device" in text or eval(text, {}, env) for text in rules.values()):
            default = dict(zip(parameters, values, strict=True))
            break
    return make_spec(parameters, rules if default else {}, default=default)


OF_ROWS = st.sampled_from(["A * B + N", "C if F else -C", "S == 'x'", "N + 1", "A + B + C + D", "S"])


@settings(max_examples=60)
@given(spaces(), OF_ROWS)
def test_a_space_is_the_filtered_product(spec, text):
    found, valid = enumerated(spec), brute_force(spec)
    assert found.configs == valid
    assert found.combinations == prod(len(parameter.values) for parameter in spec.parameters)
    assert found.codes.shape == (len(found), len(spec.parameters))
    applied: list[str] = []
    for stage in found.rules:
        applied.append(stage.name)
        assert stage.remaining == len(brute_force(spec, applied))
    assert sorted(applied) == sorted(rule.name for rule in spec.rules)
    assert [found.row_of(dict(reversed(config.items()))) for config in valid] == list(range(len(found)))
    kept = {tuple(config.values()) for config in valid}
    assert all(found.row_of(config) is None for config in products(spec) if tuple(config.values()) not in kept)
    for parameter in spec.parameters:
        assert found.column(parameter.name).tolist() == [config[parameter.name] for config in valid]
    kinds: dict[str, Any] = dict.fromkeys((*NAMES, "N"), "number") | {"F": "boolean", "S": "string"}
    parsed = parse_expression(text, kinds)
    assert found.evaluate(parsed, SIZES).tolist() == [parsed.evaluate({**SIZES, **config}) for config in valid]


@settings(max_examples=40)
@given(spaces(most=3), st.sampled_from([1, 7]), st.sampled_from([0, 8]))
def test_chunks_and_rules_over_large_grids_change_nothing(spec, chunk, grid):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enumeration, "_CHUNK", chunk)
        patch.setattr(enumeration, "MAX_GRID", grid)
        patch.setattr(search_space, "_CHUNK_ROWS", chunk)
        feasible = feasible_space(spec, spec.at(SIZES), H200)
        assert enumerated(spec).configs == feasible.configs == brute_force(spec)
    assert [stage.remaining for stage in feasible.limits] == [len(feasible)] * len(limits_of(spec))


# --- look-up and selection


def test_configurations_outside_of_the_space_have_no_row():
    found = enumerated(make_spec({"A": [1, 2], "B": [4, 8]}, {"r": "A * 4 == B"}))
    assert found.row_of({"A": 2, "B": 8}) == 1
    for config in ({"A": 2, "B": 4}, {"A": 3, "B": 8}, {"A": 2}, {"A": 2, "C": 8}, {"A": 2, "B": 8, "C": 1}, {}):
        assert found.row_of(config) is None
    with pytest.raises(IndexError):
        found.config(2)
    with pytest.raises(KeyError):
        found.column("C")


def test_what_is_pruned_is_valid_all_the_same():
    spec = make_spec({"A": [1, 2, 3], "B": [4, 8]}, {"r": "A != 2"}, {"p": "A * 4 <= B"})
    found = enumerated(spec)
    assert found.configs == [{"A": 1, "B": 4}, {"A": 1, "B": 8}]
    stages = [(stage.name, stage.remaining, stage.is_heuristic) for stage in found.rules]
    assert stages == [("r", 4, False), ("p", 2, True)]
    assert check_config(spec, {"A": 3, "B": 4}, spec.at(SIZES), H200) == ""
    assert "the rule 'r' is broken" in check_config(spec, {"A": 2, "B": 8}, spec.at(SIZES), H200)


def test_rows_can_be_added():
    found = enumerated(make_spec({"A": [1, 2, 3], "B": [4, 8]}, {}, {"p": "A * 4 == B"}))
    more = found.including([{"A": 3, "B": 4}, {"A": 1, "B": 4}, {"A": 1, "B": 8}, {"A": 3, "B": 4}])
    assert more.configs == [{"A": 1, "B": 4}, {"A": 1, "B": 8}, {"A": 2, "B": 8}, {"A": 3, "B": 4}]
    assert [more.row_of(config) for config in more.configs] == [0, 1, 2, 3]
    assert more.rules == found.rules
    assert found.including([{"A": 1, "B": 4}]) is found
    assert len(found) == 2


def test_select_keeps_rows_and_look_ups_and_codes_take_the_smallest_type():
    assert enumerated(make_spec({"A": list(range(256))})).codes.dtype == np.uint8
    assert enumerated(make_spec({"A": list(range(257)), "B": [1]})).codes.dtype == np.uint16
    found = enumerated(make_spec({"A": [1, 2, 3], "B": [4, 8]}))
    stage = enumeration.SpaceStage("mine", 3)
    part = found.select(found.column("B") == 8, (stage,))
    assert part.configs == [{"A": a, "B": 8} for a in (1, 2, 3)]
    assert part.row_of({"A": 3, "B": 8}) == 2
    assert part.row_of({"A": 3, "B": 4}) is None
    assert (part.combinations, part.rules, part.limits) == (6, (), (stage,))
    nothing = found.select(np.zeros(6, bool))
    assert len(nothing) == 0
    assert nothing.row_of({"A": 1, "B": 4}) is None


def test_parameters_are_joined_so_that_rules_bind_early():
    free = {f"F{number}": list(range(1, 11)) for number in range(6)}
    bound = {"U": list(range(100)), "V": list(range(100))}
    rules = {"only_ones": "F0 + F1 + F2 + F3 + F4 + F5 == 6", "diagonal": "U == V"}
    found = enumerated(make_spec({**free, **bound}, rules))
    assert len(found) == 100  # of 10 billion
    assert [stage.remaining for stage in found.rules] == [10_000, 100]


# --- errors


def test_rules_that_leave_nothing_or_divide_by_zero():
    spec = make_spec({"A": [1, 2], "B": [4, 8]}, {"few": "A == 1", "sms": "device.sm_count * A < 100"})
    assert len(enumerate_space(spec, spec.at(SIZES), device_profile("rtx-3060"))) == 2
    with pytest.raises(SpecError) as caught:
        enumerated(spec)
    assert "the rule 'sms' leaves none of the 2 combinations that meet few" in caught.value.problem
    assert (caught.value.source, caught.value.key) == ("sample.toml", "rules.sms")
    assert caught.value.expression == "device.sm_count * A < 100"
    spec = make_spec({"A": [1, 2]}, {"small_device": "device.sm_count < 2"})
    with pytest.raises(SpecError, match="the rule 'small_device' leaves none of 2 combinations"):
        enumerated(spec)
    spec = make_spec({"A": [6, 4], "B": [2, 0]}, {"whole": "A % B == 0"})
    with pytest.raises(SpecError, match="division by zero where A = 6, B = 0") as caught:
        enumerated(spec)
    assert (caught.value.key, caught.value.column) == ("rules.whole", 5)


def test_a_limit_of_the_device_that_leaves_nothing():
    spec = make_spec({"T": [1024, 2048]}, launch={"block": ["T"]})
    assert len(feasible_space(spec, spec.at(SIZES), H200)) == 1
    said = r"the limit threads_per_block of .*8800.* leaves none of the 2 config"
    with pytest.raises(SpecError, match=said) as caught:
        feasible_space(spec, spec.at(SIZES), device_profile("g80"))
    assert caught.value.source == "sample.toml"


def test_tables_beyond_the_bound(monkeypatch):
    numbers = {"A": list(range(20)), "B": list(range(20))}
    monkeypatch.setattr(enumeration, "MAX_ROWS", 399)
    with pytest.raises(SpecError, match="joining B makes a table of at least 400 combinations, at most 399") as caught:
        enumerated(make_spec(numbers))
    assert (caught.value.source, caught.value.key) == ("sample.toml", "parameters.B")
    assert len(enumerated(make_spec(numbers, {"r": "A + B < 38"}))) == 399
    with pytest.raises(SpecError, match="at least 400 combinations"):
        enumerated(make_spec(numbers, {"r": "A + B < 39"}))
    monkeypatch.setattr(enumeration, "MAX_EXAMINED", 399)
    with pytest.raises(SpecError, match="add rules with few parameters"):
        enumerated(make_spec(numbers, {"r": "A + B < 38"}))


def test_parameters_of_one_value_take_no_memory_while_joining():
    free = {"A": list(range(100)), "B": list(range(100)), "C": list(range(100))}
    single = {f"S{number}": [number] for number in range(100)}
    rules = {"low": "A + B + C + S0 < 30 and S1 == 1", "one": "S1 < S2", "last": "S99 > 0"}
    spec = make_spec({**single, **free}, rules)
    with little_memory(50 * 2**20):  # the million combinations before the rule would take twice that
        found = enumerated(spec)
    assert found.configs == [
        {**{name: values[0] for name, values in single.items()}, "A": a, "B": b, "C": c}
        for a, b, c in itertools.product(range(100), repeat=3)
        if a + b + c < 30
    ]


def test_a_table_of_too_many_bytes():
    """Rows are counted with their parameters: 15 million of them with 100 parameters took 14 GB."""
    free = {"A": list(range(250)), "B": list(range(250)), "C": list(range(240))}
    single = {f"S{number}": [number] for number in range(100)}
    said = "15,000,000 combinations of 103 parameters take 1,545,000,000 b"
    with little_memory(2**29), pytest.raises(SpecError, match=said) as caught:
        enumerated(make_spec({**free, **single}))
    assert (caught.value.source, caught.value.key) == ("sample.toml", "parameters")
    values = {f"P{number}": list(range(1000)) for number in range(7)}
    with pytest.raises(SpecError, match=r"1e\+21 combinations"):  # more than a rank holds
        enumerated(make_spec(values))


def test_columns_beyond_the_bound_while_joining(monkeypatch):
    """A table that a later rule would shrink is refused too, before it is made."""
    numbers = {"A": list(range(40)), "B": list(range(40)), "C": list(range(3)), "D": list(range(40))}
    spec = make_spec(numbers, {"r": "A + B >= 0", "s": "(A + B + C + D) % 100 == 0"})
    found = enumerated(spec)
    monkeypatch.setattr(enumeration, "MAX_TABLE_BYTES", found.codes.nbytes)
    with pytest.raises(SpecError, match="4,800 combinations of 4 parameters take 14,400 bytes, at most"):
        enumerated(spec)
    monkeypatch.setattr(enumeration, "MAX_TABLE_BYTES", 14_400)
    assert len(enumerated(spec)) == len(found)


def test_missing_sizes():
    spec = make_spec({"A": [1, 2]})
    for function, *config in ((enumerate_space,), (feasible_space,), (check_config, {"A": 1})):
        with pytest.raises(ProblemError, match="k: the size N is missing"):
            function(spec, *config, spec.at({}), H200)


# --- one configuration and the whole table agree


def test_checking_one_configuration_agrees_with_the_table():
    spec = parse_spec(SGEMM, "sgemm.toml")
    for name in ("h200", "rtx-3060", "g80"):
        device = device_profile(name)
        feasible = feasible_space(spec, spec.at(), device)
        reasons = {str(config): check_config(spec, config, spec.at(), device) for config in products(spec)}
        assert [config for config in products(spec) if not reasons[str(config)]] == feasible.configs
        assert all("\n" not in reason for reason in reasons.values())


SQUARISH = "max(BM, BN) <= 2 * min(BM, BN)"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"BM": 32, "BN": 128}, f"the rule 'squarish' is broken: {SQUARISH}, where BM = 32, BN = 128"),
        ({"TM": 16}, "TM = 16 is not among its values 4, 8"),
        ({"BM": "64"}, "BM = 64 is not among its values 32, 64, 128"),
        ({"TN": 4}, "TN is not a parameter of sgemm; did you mean 'TM'?"),
        ({"STAGED": 1}, ""),
    ],
)
def test_why_a_configuration_is_not_feasible(change, reason):
    spec = parse_spec(SGEMM, "sgemm.toml")
    assert check_config(spec, {**spec.default, **change}, spec.at(), H200) == reason
    assert check_config(spec, {"BM": 64}, spec.at(), H200) == "the parameter BN is missing"

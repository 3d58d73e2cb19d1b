"""The properties of each kind of argument, and the code that an additional kind needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from feature_kernels import SPLIT_SPACE
from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.cuda.packing import pack_arguments
from autotile.database.keys import space_hash
from autotile.errors import SpecError
from autotile.kernel import arguments
from autotile.kernel.arguments import ArgumentKind, ArgumentScope
from autotile.kernel.launch import LaunchData, known_names
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.kernel.table import Table
from autotile.space.search_space import feasible_space

H200 = device_profile("h200")


def test_each_kind_answers() -> None:
    spec = parse_spec(SPLIT_SPACE, "split.toml")
    answers = {
        a.name: (a.is_passed, a.is_given, a.is_operand, getattr(a, "repeats_size", False))
        for a in spec.arguments
        if a.name in ("A", "C", "partials", "M", "batches", "alpha")
    }
    assert answers == {
        "A": (True, True, True, False),
        "C": (True, True, True, False),
        "partials": (True, False, False, False),
        "M": (True, False, True, True),
        "batches": (True, False, True, False),
        "alpha": (True, False, True, False),
    }
    assert [(b.name, b.is_read, b.is_written) for b in spec.buffers] == [
        ("A", True, False),
        ("B", True, False),
        ("C", True, True),
    ]
    assert {s.name: s.default for s in spec.scalars if s.binding is None} == {"alpha": 1.0, "beta": 0.0}


def test_a_tensor_map_and_the_buffer_that_it_describes() -> None:
    spec = load_kernel(str(Path(__file__).parents[2] / "examples" / "transpose_tma" / "transpose_tma.toml")).spec
    a, b, a_map = spec.arguments[:3]
    assert [(x.is_passed, x.is_given, x.is_operand) for x in (a, b, a_map)] == [
        (False, True, True),
        (True, True, False),
        (True, False, False),
    ]
    assert a_map.described_buffer == "A"


@pytest.mark.parametrize(
    ("name", "check", "value"), [("M", False, 7), ("M", True, 7), ("alpha", False, 1.0), ("alpha", True, 0.75)]
)
def test_values_of_scalars(name: str, check: bool, value: float) -> None:
    (scalar,) = (s for s in parse_spec(SGEMM, "sgemm.toml").scalars if s.name == name)
    assert scalar.operand({"M": 7, "N": 8, "K": 9}, check=check) == value


def test_a_table_of_two_kinds_is_refused() -> None:
    text = SGEMM.replace('{ scalar = "int32", value = "M" }', '{ scalar = "int32", buffer = "int32", value = "M" }')
    with pytest.raises(SpecError, match="exactly one of the keys buffer, scalar, workspace, tensor_map"):
        parse_spec(text, "sgemm.toml")


@pytest.mark.parametrize(
    ("old", "new", "key", "meant"),
    [
        ('K"], access = "in" }', 'K"], access = "in", acess = "in" }', "arguments.A.acess", "access"),
        ('init = "uniform"', 'intit = "uniform"', "arguments.B.intit", "init"),
        ("check = 0.75", "chek = 0.75", "arguments.alpha.chek", "check"),
        ('value = "M" }', 'value = "M", valu = "M" }', "arguments.M.valu", "value"),
        ("\nM = {", '\nw = { workspace = "float32", shape = ["M"], shap = ["M"] }\nM = {', "arguments.w.shap", "shape"),
    ],
)
def test_a_misspelt_key_of_an_argument_is_refused_by_the_name_that_was_meant(
    old: str, new: str, key: str, meant: str
) -> None:
    assert old in SGEMM
    with pytest.raises(SpecError, match=f"unknown key '{key.rpartition('.')[2]}'.*did you mean '{meant}'") as caught:
        parse_spec(SGEMM.replace(old, new), "sgemm.toml")
    assert key in str(caught.value)


@dataclass(frozen=True, slots=True)
class SeedArgument(ArgumentKind):
    """``{ seed = 3 }``: a kind defined by this test."""

    name: str
    seed: int

    @classmethod
    def parse(cls, table: Table, name: str, scope: ArgumentScope) -> Self:
        table.allow(("seed",))
        return cls(name, table.whole_number("seed", minimum=0))

    def meaning(self) -> dict[str, Any]:
        return {"seed": self.name, "value": self.seed}


def test_another_kind_needs_no_more_than_its_class_and_the_two_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = parse_spec(SGEMM, "sgemm.toml")
    monkeypatch.setattr(arguments, "_KINDS", {**arguments._KINDS, "seed": SeedArgument})
    first, second = (
        parse_spec(SGEMM.replace("alpha = {", f"seed = {{ seed = {seed} }}\nalpha = {{"), "sgemm.toml")
        for seed in (3, 4)
    )
    assert len({space_hash(spec) for spec in (plain, first, second)}) == 3
    assert len(feasible_space(first, first.sizes, H200)) == len(feasible_space(plain, plain.sizes, H200))
    data = LaunchData.of(first, "float32", known_names(first, first.default, first.sizes, H200))
    assert data == LaunchData((), ())
    with pytest.raises(AssertionError, match=r"SeedArgument\(name='seed', seed=3\)"):
        pack_arguments(first, data, pointers=dict.fromkeys("ABC", 0), scalars={"M": 1, "alpha": 1}, workspaces={})


@pytest.mark.parametrize("value", ["M // (M - 4096)", "M // (M - 389)"], ids=["sizes", "ragged sizes"])
def test_a_value_that_cannot_be_computed_at_the_sizes_of_the_file_is_refused(value: str) -> None:
    given = 'M = { scalar = "int32", value = "M" }'
    assert given in SGEMM
    with pytest.raises(SpecError, match=r"arguments.M.value.*division by zero where M = (4096|389)"):
        parse_spec(SGEMM.replace(given, given.replace('"M" }', f'"{value}" }}')), "sgemm.toml")

"""Errors in [reference] are reported when the file is read."""

from typing import Any

import numpy as np
import pytest
from feature_kernels import SPLIT_SPACE
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import SGEMM

from autotile.errors import SpecError
from autotile.kernel.expressions import ShapeOnly, parse_array_expression
from autotile.kernel.library import kernel_names, load_kernel
from autotile.kernel.parser import parse_spec

TEXTS = (
    "A @ B", "A + B", "2 * A - v", "transpose(A) @ B", "A @ transpose(B)", "sum(A, 1)", "sum(A, -1) + v", "mean(A)",
    "max(B, 0)", "max(B, 2)", "sum(v, -2)", "shift(A, 1, -2)", "shift(A, 1)", "exp(v) / sum(exp(v))", "v @ v", "A @ v",
    "v @ A", "transpose(transpose(A) / sum(A, 1))", "maximum(A, 0) @ minimum(B, v)", "sqrt(abs(S @ A))",
    "S @ transpose(S)",
)  # fmt: skip
SHAPES = st.integers(1, 3)


def reference(text: str) -> str:
    assert "alpha * (A @ B) + C" in SGEMM
    return SGEMM.replace("alpha * (A @ B) + C", text)


@given(st.sampled_from(TEXTS), st.lists(SHAPES, min_size=8, max_size=8))
def test_shapes_are_those_that_numpy_computes(text: str, extents: list[int]) -> None:
    a, b, c, d, e, f, g, h = extents
    shapes = {"A": (a, b), "B": (c, d), "v": (e,), "S": (f, g, h)}
    expression = parse_array_expression(text, shapes)

    def outcome(env: dict[str, Any]) -> tuple[int, ...] | str:
        try:
            return tuple(expression.evaluate(env).shape)
        except SpecError as error:
            return f"column {error.column}"

    arrays = {name: np.ones(shape) for name, shape in shapes.items()}
    assert outcome({name: ShapeOnly(shape) for name, shape in shapes.items()}) == outcome(arrays)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sum(C, 2)", "axis 2 is out of bounds for an array of 2 axes"),
        ("sum(A @ B, 0)", "the result has the shape (4096,), but the buffer C has (4096, 4096), at M=4096"),
        ("transpose(A @ B)", "the result has the shape (277, 389), but the buffer C has (389, 277), at M=389"),
        ("A @ B + C / 0", "the divisor is zero"),
        ("A @ B + C * (1 / 0)", "an operand is inf, so the result is not finite"),
        ("shift(C, 1)", "takes 2 offsets, got 1"),
        ("alpha", "the result has the shape ()"),
    ],
)  # fmt: skip
def test_faults(text: str, said: str) -> None:
    source = reference(text)
    with pytest.raises(SpecError) as caught:
        parse_spec(source, "sgemm.toml")
    assert caught.value.key == "reference.outputs.C"
    assert said in caught.value.problem


def test_each_flag_is_tried_both_ways() -> None:
    spoilt = SPLIT_SPACE.replace("transpose(B) if TRANS_B else B", "B")
    assert spoilt != SPLIT_SPACE
    with pytest.raises(SpecError, match="are not compatible") as caught:
        parse_spec(spoilt, "split.toml")
    assert caught.value.key == "reference.outputs.C"


@pytest.mark.parametrize("text", ["maximum(A @ B, -1e999) + C", "alpha * (A @ B) + C / 2", "C / (C - C) + A @ B"])
def test_what_only_the_device_can_tell_is_left_to_it(text: str) -> None:
    assert parse_spec(reference(text), "sgemm.toml")


def test_every_kernel_passes() -> None:
    assert all(load_kernel(name).spec.reference.outputs for name in kernel_names())


def test_the_largest_array_of_an_expression_is_known() -> None:
    """All pairs of 300 points are 90,000 elements, although 300 go in and 300 come out."""
    expression = parse_array_expression("sum(abs(transpose(X) - X), 0) + 1", {"X"})
    found: object = expression.evaluate({"X": ShapeOnly((1, 300))})
    assert isinstance(found, ShapeOnly)
    assert (found.shape, found.largest) == ((300,), 90_000)

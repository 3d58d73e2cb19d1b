"""Written TOML is read back as the same document."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotile.core.documents import toml_text

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
tables = st.dictionaries(texts, values, max_size=5)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(texts, tables, max_size=5))
def test_a_document_is_read_back(document):
    assert tomllib.loads(toml_text(document)) == document


@settings(max_examples=30, deadline=None)
@given(st.lists(tables, min_size=1, max_size=3))
def test_an_array_of_tables_is_read_back(steps):
    assert tomllib.loads(toml_text({"steps": steps})) == {"steps": steps}


def test_an_entry_has_one_line_and_none_is_left_out():
    text = toml_text({"arguments": {"x": {"buffer": "float32", "shape": ["N"], "init": None}}})
    assert text == '[arguments]\nx = { buffer = "float32", shape = ["N"] }\n'


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_what_toml_cannot_hold_is_refused(value):
    with pytest.raises(TypeError, match="TOML cannot hold"):
        toml_text({"kernel": {"name": value}})

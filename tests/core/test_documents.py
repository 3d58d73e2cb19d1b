"""Schemas: what matches is parsed, what does not is a `DataError` with its field, and nothing else is raised."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from declared import documents_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import altered, as_json

from autotile.core.device import DeviceProperties
from autotile.core.documents import NotJson, canonical_json, convert, decode_json, encode_json, json_cell, to_document
from autotile.core.model import LaunchGeometry, Outcome
from autotile.core.statistics import Interval
from autotile.cuda.compiler import CompileJob
from autotile.database.database import StoredRun, StoredStudy, StoredTrial
from autotile.database.keys import TuningKey
from autotile.database.learned import FamilyState, StoredMiss
from autotile.database.winners import ResultDocument, StoredRuleDocument, WinnerDocument
from autotile.errors import DataError
from autotile.exchange import bundle, kernel_tuner, recording, shipped
from autotile.families import family
from autotile.families.family import Family
from autotile.workers import child, compile_pool, jobs, sanitizer

SCHEMAS = [
    DeviceProperties, TuningKey, StoredRun, StoredStudy, StoredTrial, StoredMiss, FamilyState, ResultDocument,
    StoredRuleDocument, WinnerDocument, CompileJob, family.TreeDocument, family.RuleConfig, family.RulePoint,
    recording.RecordingHeader, recording.LabeledHeader, kernel_tuner.CacheDocument, kernel_tuner.MeasuredEntry,
    bundle.BundleManifest, bundle.BundledDocument, shipped.WinnersFile, shipped.RulesFile,
    jobs.Reading, jobs.Workload, sanitizer.SanitizerRequest, jobs.Candidate, jobs.Race, child.Answer,
    compile_pool.CompiledCubin, child.ErrorReply,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_what_matches_is_parsed_and_what_does_not_is_one_kind_of_error(
    schema: Any, data: st.DataObject, seed: int
) -> None:
    document = data.draw(documents_of(schema))
    parsed = decode_json(json.dumps(document), schema)
    assert msgspec.to_builtins(convert(document, schema)) == msgspec.to_builtins(parsed)
    random = Random(seed)
    for _ in range(8):
        changed = altered(document, random)
        with suppress(DataError):
            decode_json(as_json(changed), schema)
        with suppress(DataError):
            convert(changed, schema)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_altered_rule(seed: int) -> None:
    parts = {"M": [[1, 8]], "N": [[4, 4], [9, 16]]}
    leaf = {"serve": [0, 1]}
    split = {"if": {"feature": "waves", "config": 1}, "at_most": 0.75, "then": leaf, "else": {"serve": [1, 0]}}
    point = {"sizes": {"M": 1, "N": 4}, "times_us": [[3.0, 2.9, 3.1], None], "best_us": 3.0, "loss": 0.0}
    valid = {
        "format": 1,
        "family": parts,
        "configs": [{"config": {"BM": n}, "resources": None, "blocks_per_sm": 2} for n in (1, 2)],
        "tree": split,
        "points": [{**point, "held_out": None}],
    }
    assert json.loads(encode_json(family.FamilyRule.from_json(valid).to_json())) == valid
    random = Random(seed)
    for _ in range(4):
        changed = altered(valid, random)
        try:
            found = family.FamilyRule.from_json(changed)
        except DataError:
            continue
        assert list(found.lines())
        assert math.isfinite(found.mean_loss)
        assert found.family.largest in found.family


@pytest.mark.parametrize(
    ("text", "schema", "field", "fault"),
    [
        ('{"config": {"BM": [1]}}', ResultDocument, "config[...]", "expected bool | int | float | str, got array"),
        ("{}", ResultDocument, "", "object missing required field config"),
        ('[{"a": NaN}]', list[Any], "", "JSON is malformed"),
        ("1e400", float, "", "number out of range"),
        ("[" * 100_000, Any, "", "nested too deeply"),
        (b'"\xff"', str, "", "it is not UTF-8 text"),
        ('"\\ud800"', str, "", ""),
        (str(2**70), jobs.Count, "", "expected int <= 2147483647"),
        ("true", jobs.Count, "", "expected int, got bool"),
    ],
)
def test_the_error_names_field_and_fault(text: str | bytes, schema: Any, field: str, fault: str) -> None:
    with pytest.raises(DataError) as caught:
        decode_json(text, schema)
    assert caught.value.field == field
    assert fault.lower() in caught.value.fault.lower()


@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_json_has_no_nan_and_no_infinity(value: Any) -> None:
    json.loads(encode_json(value), parse_constant=pytest.fail)


def test_json_is_written_as_before() -> None:
    value = {"b": [1, True], "a": "\u202e\n"}
    assert encode_json(value) == json.dumps(value)
    assert encode_json(value, compact=True) == '{"b":[1,true],"a":"\\u202e\\n"}'
    assert encode_json([math.nan, {"x": -math.inf}, (1.5,)]) == '[null, {"x": null}, [1.5]]'
    assert canonical_json(value) == '{"a":"\u202e\\n","b":[1,true]}'


@pytest.mark.parametrize("cell", ["{", "NaN", '"\\ud800"', "[" * 100_000, b"\xff", 3, 2.5])
def test_a_cell_that_is_not_json_matches_no_schema(cell: Any) -> None:
    found = json_cell(cell)
    if isinstance(cell, int | float):
        assert isinstance(found, NotJson)
    with pytest.raises(DataError):
        convert({"plan": found}, FamilyState)
    assert json_cell(None) is None


def test_parts_of_a_family_are_in_order() -> None:
    with pytest.raises(DataError, match="M: expected parts in ascending order"):
        Family.from_json({"M": [[2, 1]]})


def test_a_document_holds_the_values_of_what_is_nested() -> None:
    interval = Interval(1.0, 0.5, 2.0)
    nested = {
        "outcome": Outcome.OK,
        "ties": (MappingProxyType({"BM": 1}),),
        "ratio": interval,
        "path": Path("a"),
        3: None,
    }
    expected = {"outcome": "ok", "ties": [{"BM": 1}], "ratio": interval.to_json(), "path": "a", "3": None}
    assert to_document(nested) == expected
    assert to_document(LaunchGeometry((1, 2, 3), (32, 1, 1), 0)) == {
        "grid": [1, 2, 3],
        "block": [32, 1, 1],
        "dynamic_smem_bytes": 0,
    }
    assert to_document([np.float64(0.5), np.int64(2), datetime(2026, 1, 2, tzinfo=UTC)]) == [
        0.5,
        2,
        "2026-01-02T00:00:00+00:00",
    ]

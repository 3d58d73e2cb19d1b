"""Schemas, JSON, TOML and files that are read, names of files, the timeline, and TOML that is written and read back."""

import itertools
import json
import math
import os
import socket
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from child_python import python
from declared import documents_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import altered, as_json

from autotile.core.device import DeviceProperties
from autotile.core.documents import (
    MAX_KEY_PARTS,
    NotRegularError,
    canonical_json,
    convert,
    decode_json,
    encode_json,
    json_cell,
    open_regular,
    parse_toml,
    read_regular,
    to_document,
    to_fields,
    toml_text,
)
from autotile.core.model import LaunchGeometry, Outcome
from autotile.core.statistics import Interval
from autotile.core.text import file_name
from autotile.core.timeline import Timeline
from autotile.cuda.compiler import CompileJob
from autotile.database.database import StoredRun, StoredStudy, StoredTrial
from autotile.database.keys import TuningKey
from autotile.database.learned import FamilyState, StoredMiss
from autotile.database.winners import StoredRuleDocument, WinnerDocument
from autotile.errors import DataError
from autotile.exchange import bundle, kernel_tuner, recording, shipped
from autotile.families import family
from autotile.workers import child, compile_pool, jobs

SCHEMAS = [
    DeviceProperties, TuningKey, StoredRun, StoredStudy, StoredTrial, StoredMiss, FamilyState,
    StoredRuleDocument, WinnerDocument, CompileJob, family.TreeDocument, family.RuleConfig, family.RulePoint,
    recording.RecordingHeader, recording.RecordingLabels, kernel_tuner.CacheDocument, kernel_tuner.T4Result,
    kernel_tuner.MeasuredEntry,
    bundle.BundleManifest, bundle.BundledDocument, shipped.WinnersFile, shipped.RulesFile,
    jobs.Reading, jobs.Workload, jobs.Candidate, jobs.Race, child.Message,
    compile_pool.Compiled,
]  # fmt: skip


class TestSchemas:
    @pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), seed=st.integers(0, 2**32))
    def test_what_matches_is_parsed_and_what_does_not_is_one_kind_of_error(self, schema, data, seed):
        document = data.draw(documents_of(schema))
        parsed = decode_json(json.dumps(document), schema)
        assert to_fields(convert(document, schema)) == to_fields(parsed)
        random = Random(seed)
        for _ in range(8):
            changed = altered(document, random)
            with suppress(DataError):
                decode_json(as_json(changed), schema)
            with suppress(DataError):
                convert(changed, schema)

    @settings(max_examples=100)
    @given(seed=st.integers(0, 2**32))
    def test_an_altered_rule(self, seed):
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
            ('{"config": {"BM": [1]}}', WinnerDocument, "config[...]", "expected bool | int | float | str, got array"),
            ("{}", WinnerDocument, "", "object missing required field key"),
            ('[{"a": NaN}]', list[Any], "", "JSON is malformed"),
            ("1e400", float, "", "number out of range"),
            ("[" * 100_000, Any, "", "nested too deeply"),
            (b'"\xff"', str, "", "it is not UTF-8 text"),
            ('"\\ud800"', str, "", ""),
            (str(2**70), jobs.Count, "", "expected int <= 2147483647"),
            ("true", jobs.Count, "", "expected int, got bool"),
        ],
    )
    def test_the_error_names_field_and_fault(self, text, schema, field, fault):
        with pytest.raises(DataError) as caught:
            decode_json(text, schema)
        assert caught.value.field == field
        assert fault.lower() in caught.value.fault.lower()

    @given(
        st.recursive(
            st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
        )
    )
    def test_json_has_no_nan_and_no_infinity(self, value):
        json.loads(encode_json(value), parse_constant=pytest.fail)

    def test_json_is_written_as_before(self):
        value = {"b": [1, True], "a": "\u202e\n"}
        assert encode_json(value) == json.dumps(value)
        assert encode_json(value, compact=True) == '{"b":[1,true],"a":"\\u202e\\n"}'
        assert encode_json([math.nan, {"x": -math.inf}, (1.5,)]) == '[null, {"x": null}, [1.5]]'
        assert canonical_json(value) == '{"a":"\u202e\\n","b":[1,true]}'

    @pytest.mark.parametrize("cell", ["{", "NaN", '"\\ud800"', "[" * 100_000, b"\xff", 3, 2.5])
    def test_a_cell_that_is_not_json_matches_no_schema(self, cell):
        found = json_cell(cell)
        if isinstance(cell, int | float):
            assert found is ...
        with pytest.raises(DataError):
            convert({"plan": found}, FamilyState)
        assert json_cell(None) is None

    def test_a_document_holds_the_values_of_what_is_nested(self):
        interval = Interval(1.0, 0.5, 2.0)
        ties = (MappingProxyType({"BM": 1}),)
        nested = {"outcome": Outcome.OK, "ties": ties, "ratio": interval, "path": Path("a"), 3: None}
        expected = {"outcome": "ok", "ties": [{"BM": 1}], "ratio": interval.to_json(), "path": "a", "3": None}
        assert to_document(nested) == expected
        geometry = to_document(LaunchGeometry((1, 2, 3), (32, 1, 1), 0))
        assert geometry == {"grid": [1, 2, 3], "block": [32, 1, 1], "dynamic_smem_bytes": 0}
        numbers = to_document([np.float64(0.5), np.int64(2), datetime(2026, 1, 2, tzinfo=UTC)])
        assert numbers == [0.5, 2, "2026-01-02T00:00:00+00:00"]


DEEP = ".".join("a" * 40_000)
"""A dotted key of 80 kB, for which tomllib takes the better part of a minute and some gigabytes."""


def special_files(folder: Path) -> list[tuple[Path, str]]:
    pipe, link, name = folder / "pipe", folder / "link", folder / "socket"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener, chdir(folder):  # its path has 107 characters at most
        listener.bind(name.name)
    return [(pipe, "named pipe"), (link, "device"), (Path("/dev/zero"), "device"), (name, "socket")]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
tables = st.dictionaries(texts, values, max_size=5)


@pytest.mark.usefixtures("little_time")
class TestReading:
    @pytest.mark.parametrize(
        "text",
        [
            f"{DEEP} = 1", f"[{DEEP}]", f"[[{DEEP}]]", f"[ {DEEP} ]\n" + "b.c = 1\n", f"x = {{ {DEEP} = 1 }}",
            f"x = [1, {{ y = {{ z = 1, {DEEP} = 1 }} }}]", DEEP.replace(".", " . ") + " = 1",
            DEEP.replace(".", "\t.") + " = 1", DEEP.replace("a", '"a.b"') + " = 1", DEEP.replace("a", "'a'") + " = 1",
            DEEP.replace("a", '""') + " = 1", DEEP.replace("a", "1") + " = 1", f'# "\n{DEEP} = 1',
            f'x = """\n# \\"""""\n{DEEP} = 1', f"x = '''\n# \\'''''\n{DEEP} = 1", f'x = """a""\\""""\r\n{DEEP} = 1',
            f'x = "\\"" # \'\ny = \'\\\'\nz = ""\n{DEEP} = 1', f'x = "#"\ny = [\n  1, # [\n]\nz = 1.5\n{DEEP} = 1',
        ],
    )  # fmt: skip
    def test_a_key_of_many_parts_is_refused_at_once(self, text):
        with pytest.raises(
            ValueError, match=rf"dotted key has more than {MAX_KEY_PARTS} parts \(at line \d+, column \d+\)$"
        ):
            parse_toml(text)

    @pytest.mark.parametrize(
        "text",
        [
            f"# {DEEP}\nx = 1", f"x = '{DEEP}'", f'x = "{DEEP}"', f"x = '''\n{DEEP}\n'' '''",
            f'x = """\n{DEEP}\n"" \\""""', f'"{DEEP}" = 1', "x = [" + "1.5, " * 100 + "]",
            "x = [" + "1979-05-27T07:32:00.999, " * 30 + "]", "x = 1.5\r\n" * 1 + "y = " + "'......................'",
            ".".join("a" * MAX_KEY_PARTS) + " = 1", "[" + ".".join(["a", "'.'"] * (MAX_KEY_PARTS // 2)) + "]\nx.y = 1",
        ],
    )  # fmt: skip
    def test_dots_elsewhere_are_read_and_a_key_has_its_line_and_column(self, text):
        assert parse_toml(text) == tomllib.loads(text)
        with pytest.raises(ValueError, match=r"\(at line 3, column 2\)"):
            parse_toml(f"x = 1\n\n[{DEEP}]\ny = 1")

    @pytest.mark.parametrize(
        "text",
        [
            "." * 2**18, '"' * 2**18, "'" * 2**18, 'x = """' + '\\"""' * 2**16 + "." * 20, "a. " * 2**16,
            "\"'." * 2**16, "a " * 2**17,
        ],
    )  # fmt: skip
    def test_what_is_not_toml_is_refused_before_the_limit(self, text):
        with pytest.raises(ValueError):  # noqa: PT011 - which fault is found first does not matter
            parse_toml(text)

    @given(st.text(alphabet="a1.\"'\\#= \n[]{},", max_size=60))
    def test_other_texts_are_parsed_as_tomllib_does(self, text):
        def result(parse: Callable[[str], object]) -> object:
            try:
                return parse(text)
            except ValueError as error:
                return str(error)

        found = result(parse_toml)
        assert found == result(tomllib.loads) or "dotted key" in str(found)

    def test_only_regular_files_are_opened(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for path, kind in special_files(tmp_path):
            with pytest.raises(NotRegularError, match=f"it is a {kind}, expected a regular file"), open_regular(path):
                pass
        for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "missing", FileNotFoundError)):
            with pytest.raises(error), open_regular(path):
                pass

    def test_a_file_that_becomes_a_pipe_is_not_awaited(self, tmp_path, monkeypatch):
        pipe, regular = tmp_path / "pipe", tmp_path / "regular"
        os.mkfifo(pipe)
        regular.write_text("")
        before, descriptors = regular.stat(), len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(Path, "stat", lambda self: before)
        with pytest.raises(NotRegularError), open_regular(pipe):
            pass
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors

    def test_the_size_is_bounded(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"12345")
        assert read_regular(path, 5) == b"12345"
        with pytest.raises(OSError, match="more than 4 bytes"):
            read_regular(path, 4)

    @settings(max_examples=30)
    @given(st.dictionaries(texts, tables | st.lists(tables, min_size=1, max_size=3), max_size=5))
    def test_a_document_is_read_back(self, document):
        assert tomllib.loads(toml_text(document)) == document

    def test_an_entry_has_one_line_none_is_left_out_and_infinite_numbers_are_read_back(self):
        text = toml_text({"arguments": {"x": {"buffer": "float32", "shape": ["N"], "init": None}}})
        assert text == '[arguments]\nx = { buffer = "float32", shape = ["N"] }\n'
        for value in (math.inf, -math.inf, math.nan):
            assert repr(tomllib.loads(toml_text({"kernel": {"name": value}}))["kernel"]["name"]) == repr(value)
        for value in (object(), 1j, {1, 2}):
            with pytest.raises(TypeError, match="TOML cannot hold"):
                toml_text({"kernel": {"name": value}})


HOSTILE = [
    "../x", "../../x", "/abs", "a/b", "..", ".", "", " ", "\0", "a\0b", "a\nb", "x" * 5000, "é" * 300, "\ud800", "-rf",
    ".hidden", "a\\b", "~root", "$(x)", "CON", "\u202egpj",
]  # fmt: skip


class TestFileNames:
    @pytest.mark.parametrize(("separator", "suffix"), [("-", ".npz"), (".", ".json")])
    @pytest.mark.parametrize("name", HOSTILE)
    def test_a_hostile_name_stays_in_its_folder(self, tmp_path, name, separator, suffix):
        for words in ((name,), (name, name), ("matmul", name, "float32")):
            file = file_name(*words, separator=separator, suffix=suffix)
            assert file.endswith(suffix)
            assert file.isascii()
            assert file.isprintable()
            assert not set("/\\ $~") & set(file)
            assert file[0] not in ".-"
            assert len(file) < 255
            (tmp_path / file).write_text("x")
            assert [path.name for path in tmp_path.iterdir()] == [file]
            (tmp_path / file).unlink()

    def test_different_names_give_different_files(self):
        names = [*HOSTILE, "x", "abs", "a-b", "x" * 100, "x" * 101, "x" * 4999]
        found = {file_name(name) for name in names}
        assert len(found) == len(names)
        assert len({file_name("a", name, "b") for name in names}) == len(names)
        long = ["a" * length for length in (60, 61, 62)]
        assert len({file_name(*words) for words in itertools.product(long, repeat=4)}) == 81

    def test_plain_names_are_kept(self):
        named = file_name("nvidia h200", "matmul", "float32", separator=".", suffix=".json")
        assert named == "nvidia-h200.matmul.float32.json"
        assert file_name("sgemm_2d", "nvidia-a100-sxm4-40gb", "4096x1") == "sgemm_2d-nvidia-a100-sxm4-40gb-4096x1"


class TestTimeline:
    def test_a_span_has_its_track_start_duration_and_arguments_and_a_counter_its_values(self):
        timeline = Timeline()
        timeline.add("compiler 1", "compile", 10.0, 10.25, options="-DBM=64")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda n: timeline.add(f"compiler {n}", "compile", n, n + 1), range(2, 5)))
        timeline.count("candidates", waiting=3, compiling=2)
        document = json.loads(json.dumps(timeline.to_json()))
        name, order, *_, span, second, third, fourth, count = document["traceEvents"]
        assert (name["ph"], name["name"], name["args"]) == ("M", "thread_name", {"name": "compiler 1"})
        assert (order["name"], order["args"]) == ("thread_sort_index", {"sort_index": 0})
        assert (span["ph"], span["name"], span["tid"], span["dur"]) == ("X", "compile", name["tid"], 250_000.0)
        assert span["args"] == {"options": "-DBM=64"}
        assert len({each["tid"] for each in (span, second, third, fourth)}) == 4
        assert (count["ph"], count["name"], count["args"]) == ("C", "candidates", {"waiting": 3, "compiling": 2})
        assert document["displayTimeUnit"] == "ms"

    def test_spans_of_a_with_statement_nest_and_are_recorded_where_the_body_fails(self):
        timeline = Timeline()
        with pytest.raises(KeyError), timeline.span("session", "search"), timeline.span("session", "propose"):
            raise KeyError
        inner, outer = (event for event in timeline.to_json()["traceEvents"] if event["ph"] == "X")
        assert (inner["name"], outer["name"]) == ("propose", "search")
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.2

    def test_nothing_is_recorded_where_it_is_not_wanted(self):
        timeline = Timeline(is_recording=False)
        with timeline.span("session", "search"):
            timeline.add("compiler 1", "compile", 0.0, 1.0)
            timeline.count("candidates", waiting=1)
        assert timeline.to_json()["traceEvents"] == []


_FIRST_USES = """
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from sys import setswitchinterval
from autotile.core.documents import convert, decode_json, encode_json
setswitchinterval(1e-6)
whole = {"one": (part := {f"a{i}": i for i in range(30)}), "more": [part]}
readers = (lambda schema: convert(whole, schema), lambda schema: decode_json(encode_json(whole), schema)) * 2
with ThreadPoolExecutor(4) as threads:
    for number in range(300):
        inner = make_dataclass(f"Inner{number}", [(name, int) for name in part])
        outer = make_dataclass(f"Outer{number}", [("one", inner), ("more", list[inner])])
        assert [found.more[0].a29 for found in threads.map(lambda read: read(outer), readers)] == [29] * 4
"""


def test_threads_may_use_a_schema_for_the_first_time_together():
    """In a process of its own, which crashed."""
    python("-c", _FIRST_USES, check=True)

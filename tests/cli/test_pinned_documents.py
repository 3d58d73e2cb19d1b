"""The JSON document of every command: its keys and the kinds of its values, on one small study.

`tests/pinned/documents.json` holds them; with ``--pin``, this file writes those of the present code.
A key may be added; one that is there neither goes nor changes its kind.
"""

import html
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from stored_runs import record_miss

from autotile.cli import commands
from autotile.core.model import Problem
from autotile.core.text import Part, ResultTable
from autotile.database.database import Database
from autotile.settings import read_settings

FILE = Path(__file__).parents[1] / "pinned" / "documents.json"

COMMANDS = {
    "misses": "list --misses",
    "tune-misses": "tune --misses --trials 3 --replay=RECORDING",
    "tune": "tune KERNEL n=1048576 --replay=RECORDING",
    "tune --try": "tune KERNEL n=1048576 --replay=RECORDING --try THREADS=64,WORK=2",
    "tune --objective": "tune KERNEL n=1048576 --replay=RECORDING --sampler nsga2 --objective time,registers",
    "tune-family": "tune KERNEL n=1000..2000000 --replay",
    "tune --plan": "tune --plan OUT/plan.toml --replay",
    "best": "best KERNEL n=1048576 --device h200",
    "best, nearest": "best KERNEL n=1000000 --device h200",
    "best, default": "best matmul_tiled M=512 N=512 K=512 --device h200",
    "best of an operation": "best matmul M=512 N=512 K=512 --device h200",
    "space": "space KERNEL",
    "survey": "space --compile KERNEL --device h200 --sample 3",
    "explain": "explain KERNEL THREADS=64 --device h200",
    "occupancy": "explain --threads 256 --registers 32 --device h200",
    "devices": "devices",
    "doctor": "doctor",
    "list": "list",
    "list --families": "list --families",
    "list --recordings": "list --recordings",
    "trials": "trials KERNEL",
    "report": "report KERNEL -o OUT/page.html",
    "report A B": "report DATABASE OTHER -o OUT/comparison.html",
    "export": "export KERNEL n=1048576 -o OUT/t4.json",
    "export --format kernel-tuner": "export KERNEL n=1048576 --format kernel-tuner -o OUT/cache.json",
    "export --format c-header": "export KERNEL --format c-header -o OUT/scale.h",
    "export --format optuna": "export KERNEL n=1048576 --format optuna -o OUT/study.db",
    "import": "import OUT/cache.json --db OUT/imported.db",
    "bundle": "export --format bundle KERNEL n=1048576 -o OUT/scale.zip",
    "diff": "db diff DATABASE OTHER",
    "merge": "db merge DATABASE OTHER -o OUT/merged.db",
    "clean": "db clean --stale --dry-run",
    "db check": "db check",
    "db path": "db path",
    "new": "new mine --in OUT",
    "an error": "best no_such_kernel n=1",
}
"""Commands, each by a name, in the order in which they run on one database."""


def shape(value: Any) -> Any:
    """Return the keys and the kinds of values of a document; entries of a list count as one, with all their keys."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [merged([shape(one) for one in value])] if value else []
    return "truth" if isinstance(value, bool) else {str: "text", int: "number", float: "number"}.get(type(value))


def merged(shapes: list[Any]) -> Any:
    """Return one shape for entries that may differ: all their keys, and every kind of a value."""
    if all(isinstance(one, dict) for one in shapes):
        keys = sorted({key for one in shapes for key in one})
        return {key: merged([one[key] for one in shapes if key in one]) for key in keys}
    if all(isinstance(one, list) for one in shapes):
        entries = [entry for one in shapes for entry in one]
        return [merged(entries)] if entries else []
    distinct = {json.dumps(one, sort_keys=True): one for one in shapes}
    kinds = [distinct[key] for key in sorted(distinct)]
    return kinds[0] if len(kinds) == 1 else {"any of": kinds}


def texts(part: Part) -> list[str]:
    """Return the lines of a paragraph, of facts, or of the first rows of a table, with single spaces."""
    if isinstance(part, ResultTable):
        found = [part.caption, *(cell for row in part.rows[:100] for cell in row)]
    else:
        facts = [("", part)] if isinstance(part, str) else part
        found = ["\n".join([text] if isinstance(text, str) else text) for _, text in facts]
    return [" ".join(line.split()) for text in found for line in text.split("\n")]


def missing(pinned: Any, found: Any, at: str = "") -> list[str]:
    """Return what a pinned shape has that is not found, or is of another kind."""
    if isinstance(pinned, dict) and isinstance(found, dict) and "any of" not in pinned:
        return [
            line
            for key, one in pinned.items()
            for line in (missing(one, found[key], f"{at}.{key}") if key in found else [f"{at}.{key} is gone"])
        ]
    if isinstance(pinned, list) and isinstance(found, list):
        return missing(pinned[0], found[0], f"{at}[]") if pinned and found else []
    return [] if pinned == found else [f"{at} is {found}, not {pinned}"]


@pytest.mark.usefixtures("own_recordings")
def test_keys_and_kinds_stay(run, written, scale_toml, tmp_path, request):
    """Each result is one line, too, and HTML with all that its command shows; and it can be pickled."""
    monkeypatch, show, results = request.getfixturevalue("monkeypatch"), commands.show, list[Any]()
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    monkeypatch.setattr(commands, "show", lambda result, **how: [results.append(result), show(result, **how)])
    text = f'[[tune]]\nkernel = "{scale_toml}"\nproblems = [{{ n = 1048576 }}]\ntrials = 4\n'
    (tmp_path / "plan.toml").write_text(text)
    run(*written("tune KERNEL n=1048576 --replay=RECORDING --db OTHER --trials 5"))
    with Database.open(read_settings().database) as database:
        record_miss(database, Problem("scale", {"n": 1048576}, "float32"), "NVIDIA H200", "default", 3)
    found = {}
    for name, line in COMMANDS.items():
        answer = run(*written(line), "--json")
        assert answer.out, (name, answer.err)
        found[name] = {"code": answer.code, "document": shape(answer.document)}
    if request.config.getoption("--pin"):
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert len(results) > 25
    for result in results:
        assert repr(result).startswith(f"<{type(result).__name__}: ")
        assert repr(pickle.loads(pickle.dumps(result))) == repr(result)
        page = " ".join(html.unescape(re.sub("<[^>]*>", " ", result._repr_html_())).split())
        assert [line for part in result._parts() for line in texts(part) if line not in page] == []
    pinned = json.loads(FILE.read_text())
    assert found.keys() == pinned.keys()
    lost = {name: missing(pinned[name], found[name]) for name in pinned}
    assert {name: lines for name, lines in lost.items() if lines} == {}


def test_what_is_missed():
    """The comparison notices a key that went, a value of another kind and another code."""
    pinned = {"code": 0, "document": {"a": shape([{"x": 1}, {"x": None, "y": "t"}]), "b": shape(True)}}
    assert missing(pinned, pinned) == []
    assert missing(pinned, {**pinned, "code": 1}) == [".code is 1, not 0"]
    assert missing(pinned, {"code": 0, "document": {"a": pinned["document"]["a"]}}) == [".document.b is gone"]
    changed = {"code": 0, "document": {"a": shape([{"x": 1, "y": "t"}]), "b": shape(True), "new": None}}
    assert [line.split(" is ")[0] for line in missing(pinned, changed)] == [".document.a[].x"]

"""How results that are stored or exchanged display themselves; the commands test their values."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs
from stored_runs import DEFAULT, FAST, SLOW, begin, change_file, end_run, failed, record_miss

import autotile
from autotile.api import databases, results
from autotile.api.results import FamilyList
from autotile.core.documents import convert
from autotile.core.model import Outcome, Problem
from autotile.core.text import Result, bytes_text
from autotile.database.database import Database
from autotile.database.winners import StoredRuleDocument
from autotile.errors import DataWarning, InputError
from autotile.settings import data_folder


@pytest.fixture
def mine(book):
    return book("tuning.db")


@pytest.fixture
def sides(book):
    """Two databases with replayed results of one problem."""
    a, b = book("a.db"), book("b.db")
    a.put(1024, FAST, 10.0, source="replayed")
    b.put(1024, SLOW, 12.0, source="replayed")
    return a.path, b.path


def shows(result: Result, line: str, *cells: str) -> None:
    """Assert what the repr of a result is, and what its HTML holds."""
    assert repr(result) == line
    assert [cell for cell in cells if cell not in result._repr_html_()] == []


def test_best(mine, scale_toml):
    for n, device, source, served in (
        (4096, "H200", "", "default, THREADS=128 WORK=1"),
        (4096, "H200", "cuda", "exact, THREADS=256 WORK=4, 10.00 us"),
        (8192, "GeForce RTX 3090", "replayed", "transferred, THREADS=256 WORK=4, 10.00 us on NVIDIA H200 (replayed)"),
    ):
        if source:
            mine.put(n, FAST, 10.0, source=source)
        found = results.best(scale_toml, {"n": n}, device=f"NVIDIA {device}")
        shows(found, f"<BestResult: scale n={n} float32 on NVIDIA {device}: {served}>")
    with pytest.raises(InputError, match="no CUDA device 99"):
        results.best(scale_toml, device=99)


def test_lists(mine, scale_toml, monkeypatch):
    empty = results.list(), results.list(families=True), results.list(misses=True)
    assert (empty[0].studies, empty[1].families, empty[2].misses, databases.db_check().exists) == ((), (), (), False)
    assert "does not exist yet" in repr(databases.db_check())
    mine.put(8192, SLOW, 20.0)
    mine.rank(4096, (FAST, 10.0), (DEFAULT, 20.0), source="replayed")
    found = results.list(scale_toml)
    assert results.list("scale").studies == found.studies
    shows(found, f"<StudyList: 2 studies, 1 (replayed) in {mine.path}>")
    with Database.open(mine.path) as database:
        wrong = failed({"THREADS": 32, "WORK": 1}, Outcome.WRONG_RESULT, "y[3] is <0>")
        database.add_run(mine.key(4096, source="replayed"), [wrong], sampler="random")
    trials = results.trials(scale_toml, n=4096)
    shows(trials, "<TrialList: 3 trials (replayed) of scale, fastest 10.00 us>", "y[3] is &lt;0&gt;")
    for sizes, limit, said in (({}, 0, "limit is 0, expected at least 1"), ({"n": 1}, None, "n is given twice")):
        with pytest.raises(InputError, match=said):
            results.trials(scale_toml, sizes, n=1, limit=limit)
    shows(databases.db_check(), f"<DatabaseCheck: {mine.path}: whole>", "studies 2, ")
    assert databases.db_path(mine.path) == str(mine.path)

    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    mine.rank(512, (FAST, 10.0), (DEFAULT, 20.0))
    with Database.open(mine.path) as database:
        for kernel, count in (("scale", 1000), ("gone", 5)):
            record_miss(database, Problem(kernel, {"n": 512}, "float32"), "NVIDIA H200", "default", count)
    shows(results.list(misses=True), "<MissList: 2 misses with 1,005 calls, which may have cost 10 ms>")


def test_recordings_and_families():
    found = results.list("sgemm_2d", recordings=True)
    assert {header.key.kernel for _, header in found.recordings if not isinstance(header, str)} == {"sgemm_2d"}
    assert str(len(found.recordings)) in repr(found)
    assert len(results.list(recordings=True).recordings) > len(found.recordings)
    file = data_folder("tuned") / "families" / "nvidia-h200.sgemm.json"
    rule = convert(json.loads(file.read_text())["rules"][0], StoredRuleDocument).stored_rule()
    replayed = structs.replace(rule, key=structs.replace(rule.key, source="replayed"))
    shows(
        FamilyList(((replayed, True),), "t.db"),
        "<FamilyList: 1 family (replayed) in t.db>",
        f"<td>sgemm {rule.rule.family} float32</td></tr><tr><th>device</th><td>NVIDIA H200 (replayed)</td>",
    )


def test_diff(book, sides, monkeypatch):
    a, b = sides
    book("a.db").put(2048, FAST, 10.0)
    counts = "0 same, 1 different, 1 only in A, 0 only in B"
    shows(databases.db_diff(a, b), f"<DatabaseDiff: A {a}, B {b}: 2 problems, 1 (replayed): {counts}>")
    monkeypatch.setattr(databases, "open_existing", lambda place: Database.open(a))
    found = databases.db_diff(a, "postgresql://me:secret@host/tuning")
    assert "secret" not in repr(found) + found.b
    assert "me:***@host" in found.b


def test_merge_and_clean(sides, tmp_path):
    out = tmp_path / "out.db"
    found = databases.db_merge(sides, out)
    assert [rows["trials"] for _, rows in found.copied] == [2, 2]
    shows(found, f"<MergeResult: 4 new trials in {out}, 1 study (replayed) with several winners>")
    for nothing in ([], [tmp_path / "none.db"]):
        with pytest.raises(InputError, match=r"nothing to merge into .*none\.db; name one other database or more"):
            databases.db_merge(nothing, tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    path, tomorrow = sides[0], datetime.now(UTC) + timedelta(days=1)
    for dry_run, done in ((True, "would be deleted"), (False, "deleted")):
        found = databases.db_clean("scale", before=tomorrow, dry_run=dry_run, database=path)
        assert (found.deleted, found.studies[0].total, found.studies[0].emptied) == (1, 2, False)
        line = f"<CleanResult: 1 trial of 1 study (replayed) {done} in {path}>"
        shows(found, line, "<td>1</td><td>2</td><td>old</td>")
    assert databases.db_clean(before=tomorrow, database=path).deleted == 0
    with pytest.raises(InputError, match="pass before, keep_gpus or stale"):
        databases.db_clean(database=path)
    change_file(path, "UPDATE studies SET kernel = x'ff', gpu_name = x'ff'")
    with pytest.raises(InputError, match="the database holds results of no GPU"):
        databases.db_clean(keep_gpus=["nothing"], database=path)
    with pytest.warns(DataWarning, match="kernel: expected str, got bytes"):
        assert databases.db_clean(stale=True, database=path).deleted == 0


N = 1048576


@pytest.fixture
def scale(tuned, scale_toml):
    """The tiny kernel, tuned by replay of an H200."""
    return scale_toml


def test_trials_and_a_header_are_exported(scale, tmp_path):
    assert autotile.export(scale, {"n": N}, output=tmp_path / "x", device="h200").document["configurations"] == 12
    made = autotile.export(scale, n=N, output=tmp_path / "results.json")
    assert (made.document["device"], made.document["format"]) == ("NVIDIA H200 (replayed)", "t4")
    done = f"12 configurations exported, {tmp_path / 'results.json'} (t4)"
    shows(made, f"<Written: scale n=1048576 float32 on NVIDIA H200 (replayed): {done}>", "<th>study</th>")
    header = tmp_path / "include" / "scale.hpp"
    made = autotile.export(scale, output=str(header), format="c-header")
    shows(made, f"<Written: autotile::scale: 1 tuned problem, 2 cubins, {header}>", "2 cubins beside the header")
    assert {(header.parent / cubin).read_bytes()[:4] for cubin in made.document["cubins"]} == {b"\x7fELF"}
    rule, text = "if (!(sizes.n >= (config.THREADS * config.WORK))) return false;  // enough_blocks", header.read_text()
    assert [words for words in (*made.document["cubins"], rule, "{{1048576}, ") if words not in text] == []
    assert "@@" not in text
    for kernel, file_format, said in (
        (scale, "csv", "there is no format 'csv'; expected one of t4,"),
        ([scale], "t4", "give each with its own"),
    ):
        with pytest.raises(autotile.InputError, match=said):
            autotile.export(kernel, n=N, output=tmp_path / "none", format=file_format)  # type: ignore[arg-type]
    with pytest.raises(autotile.InputError, match="format is 'csv', expected 'kernel-tuner' or 't4' or None"):
        autotile.import_(tmp_path / "results.json", format="csv")  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


def test_a_bundle_is_of_a_kernel_or_several_or_one_problem(scale, tmp_path):
    for number, kernels in enumerate([scale, [str(scale)], [(scale, {"n": N})], [(scale, None)]]):
        made = autotile.bundle(kernels, output=tmp_path / f"{number}.autotile")  # type: ignore[arg-type]
        held = {"kernel": "scale", "problems": 1, "cubins": 2, "architectures": ["sm_90"]}
        assert made.document["kernels"] == [held]
        kernel = autotile.get_best_kernel("scale", n=N, device="h200", bundle=made.file)
        assert kernel.config == {"THREADS": 256, "WORK": 4}
    shows(made, f"<Written: {made.file} ({bytes_text(made.document['bytes'])}): scale>")
    for nothing, said in (
        ([], "no kernel is named"),
        ([3], "3 is no kernel; expected a name"),
        ([("scale",)], "is no kernel; expected a name"),
    ):
        with pytest.raises(autotile.InputError, match=said):
            autotile.bundle(nothing, output=tmp_path / "x")  # type: ignore[arg-type]


def test_a_page_shows_an_end_that_only_a_later_version_knows_as_it_is_stored(mine, scale_toml, tmp_path):
    mine.put(1024, FAST, 10.0)
    with Database.open(mine.path) as database:
        end_run(database, begin(database, mine.key(1024))[1], {"stopped": {"rule": "stalled<1>"}})
    page = results.report(scale_toml, output=tmp_path / "page.html").file.read_text()
    assert "<td>stalled&lt;1&gt;</td>" in page

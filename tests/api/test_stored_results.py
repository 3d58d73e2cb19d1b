"""The public functions that read stored results and databases: their values, and how these display themselves."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace
from stored_runs import add_trial, end_run, record_miss, start_run

from autotile.api import databases, results
from autotile.api.results import FamilyList, TunedFamily
from autotile.core.device import device_profile
from autotile.core.documents import convert
from autotile.core.model import Config, Measurement, Outcome, Problem, Trial
from autotile.core.text import Result
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.database.winners import StoredRuleDocument
from autotile.errors import InputError, ProblemError, UnknownKernelError
from autotile.kernel.library import load_kernel
from autotile.settings import data_folder, read_settings

FAST: Config = {"THREADS": 256, "WORK": 4}
SLOW: Config = {"THREADS": 64, "WORK": 2}


@pytest.fixture
def stored(scale_toml: Path, tmp_path: Path) -> Any:
    """Store a study: its winner first, then slower configurations; return the path of the database."""
    kernel = load_kernel(str(scale_toml))

    def put(
        n: int,
        *configs: Config,
        time_us: float = 10.0,
        source: Any = "cuda",
        failed: Config | None = None,
        name: str = "tuning.db",
        searched: bool = False,
    ) -> Path:
        device = replace(device_profile("h200"), source=source)
        problem = Problem("scale", {"n": n}, "float32")
        key = key_of(kernel, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
        with Database.open(tmp_path / name) as database:
            study = database.study(key, device)
            run = start_run(database, study, sampler="random")
            for place, config in enumerate(configs, start=1):
                measured = Measurement(time_us * place, 0.99 * time_us * place, 1.01 * time_us * place)
                trial = Trial(config, Outcome.OK, "", "finals", measurement=measured, source=source)
                if searched:
                    add_trial(database, study, run, trial)
                add_trial(database, study, run, trial, phase="final", rank=place)
            if failed is not None:
                add_trial(database, study, run, Trial(failed, Outcome.WRONG_RESULT, "y[3] is <0>", "verify"))
            end_run(database, run)
        return tmp_path / name

    return put


@pytest.fixture
def sides(stored: Any) -> tuple[Path, Path]:
    """Two databases with replayed results of one problem."""
    a, b = (
        stored(1024, config, time_us=time_us, source="replayed", name=name, searched=True)
        for name, config, time_us in (("a.db", FAST, 10.0), ("b.db", SLOW, 12.0))
    )
    return a, b


def html(shown: Result) -> str:
    """The HTML of a result, whose repr must be a single line."""
    assert "\n" not in repr(shown)
    return shown._repr_html_()


class TestBest:
    def test_an_exact_result_and_before_it_the_default(self, stored: Any, scale_toml: Path) -> None:
        before = results.best(scale_toml, n=4096, device="h200")
        assert (before.tier, before.time_us, before.measurement) == ("default", None, None)
        assert repr(before) == "<BestResult: scale n=4096 float32 on NVIDIA H200: default, THREADS=128 WORK=1>"
        stored(4096, FAST, SLOW)
        found = results.best(scale_toml, n=4096, device="h200", database=read_settings().database)
        assert (found.tier, found.config, found.time_us, found.source) == ("exact", FAST, 10.0, "cuda")
        assert repr(found) == "<BestResult: scale n=4096 float32 on NVIDIA H200: exact, THREADS=256 WORK=4, 10.00 us>"
        assert found.explanation in html(found).replace("&#x27;", "'")

    def test_a_replayed_time_is_marked(self, stored: Any, scale_toml: Path) -> None:
        stored(4096, FAST, source="replayed")
        found = results.best(scale_toml, {"n": 4096}, device="rtx-3090")
        assert found.device_label == "NVIDIA GeForce RTX 3090"
        assert repr(found).endswith("transferred, THREADS=256 WORK=4, 10.00 us on NVIDIA H200 (replayed)>")

    def test_an_unreadable_database_and_an_unknown_device_are_errors(self, scale_toml: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.db").write_text("not a database")
        with pytest.raises(InputError, match="is not a database"):
            results.best(scale_toml, n=4096, device="h200", database=tmp_path / "notes.db")
        with pytest.raises(InputError, match="there is no database"):
            results.best(scale_toml, n=4096, device="h200", database=tmp_path / "missing.db")
        for device in (99, "99", "no-such-gpu"):
            with pytest.raises(InputError, match=str(device)):
                results.best(scale_toml, n=4096, device=device)


class TestLists:
    def test_studies(self, stored: Any, scale_toml: Path) -> None:
        stored(4096, FAST, source="replayed")
        stored(8192, SLOW)
        found = results.list(scale_toml)
        assert [study.key.sizes["n"] for study in found.studies] == [4096, 8192]
        assert repr(found) == f"<StudyList: 2 studies, 1 (replayed) in {read_settings().database}>"
        assert (
            "<td>NVIDIA H200 (replayed)</td><td>1</td><td>1</td><td>10.00 us</td><td>THREADS=256 WORK=4</td>"
            in html(found)
        )
        assert results.list("scale").studies == found.studies

    def test_nothing_is_stored(self) -> None:
        assert results.list().studies == ()
        assert results.list(families=True).families == ()
        assert results.list(misses=True).misses == ()
        assert databases.db_check().check is None
        assert "does not exist yet" in repr(databases.db_check())

    def test_recordings(self) -> None:
        found = results.list("sgemm_2d", recordings=True)
        assert {one.header.key.kernel for one in found.recordings if one.header is not None} == {"sgemm_2d"}
        assert str(len(found.recordings)) in repr(found)
        assert "<td>sgemm_2d</td>" in html(found)
        assert len(results.list(recordings=True).recordings) > len(found.recordings)

    def test_families(self) -> None:
        file = data_folder("tuned") / "families" / "nvidia-h200.sgemm.json"
        rule = convert(json.loads(file.read_text())["rules"][0], StoredRuleDocument).stored_rule()
        replayed = structs.replace(rule, key=structs.replace(rule.key, source="replayed"))
        found = FamilyList((TunedFamily(replayed, in_force=True),), "t.db")
        assert repr(found) == "<FamilyList: 1 family (replayed) in t.db>"
        assert (
            f"<td>sgemm {rule.rule.family} float32</td></tr><tr><th>device</th><td>NVIDIA H200 (replayed)</td>"
            in html(found)
        )

    def test_trials(self, stored: Any, scale_toml: Path) -> None:
        stored(4096, FAST, SLOW, source="replayed", failed={"THREADS": 32, "WORK": 1})
        found = results.trials(scale_toml, n=4096)
        assert [entry.stored.trial.time_us for entry in found.trials] == [10.0, 20.0, None]
        assert repr(found) == "<TrialList: 3 trials (replayed) of scale, fastest 10.00 us>"
        assert "y[3] is &lt;0&gt;" in html(found)
        assert len(results.trials(scale_toml, limit=1).trials) == 1
        (wrong,) = results.trials("scale", outcome="wrong_result").trials
        assert wrong.stored.trial.outcome is Outcome.WRONG_RESULT

    def test_refusals(self, stored: Any, scale_toml: Path) -> None:
        with pytest.raises(UnknownKernelError):
            results.trials("no-such-kernel")
        stored(4096, FAST)
        with pytest.raises(ProblemError, match="no size 'm'; its sizes are n"):
            results.trials(scale_toml, m=1)
        with pytest.raises(InputError, match="no outcome is named 'splendid'; expected one of ok"):
            results.trials(scale_toml, outcome="splendid")
        with pytest.raises(InputError, match="limit is 0, expected at least 1"):
            results.trials(scale_toml, limit=0)
        with pytest.raises(InputError, match="n is given twice"):
            results.trials(scale_toml, {"n": 1}, n=1)

    def test_misses(self, stored: Any, scale_toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
        stored(4096, FAST, {"THREADS": 128, "WORK": 1})
        with Database.open(read_settings().database) as database:
            for kernel, count in (("scale", 1000), ("gone", 5)):
                record_miss(database, Problem(kernel, {"n": 4096}, "float32"), "NVIDIA H200", "default", count)
        found = results.list(misses=True)
        assert [(miss.problem.kernel, miss.lost_s, miss.tuned) for miss in found.misses] == [
            ("scale", pytest.approx(1000 * 10e-6), True),
            ("gone", None, False),
        ]
        assert repr(found) == "<MissList: 2 misses with 1,005 calls, which may have cost 10 ms>"
        assert "<td>scale</td><td>n=4096 float32</td>" in html(found)


def test_check_and_path(stored: Any, tmp_path: Path) -> None:
    stored(4096, FAST)
    found = databases.db_check()
    assert found.whole
    assert repr(found) == f"<CheckResult: {read_settings().database}: whole>"
    assert "studies 1, " in html(found)
    assert databases.db_path(tmp_path / "other.db") == str(tmp_path / "other.db")


def test_diff(stored: Any, sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = sides
    stored(2048, FAST, name="a.db")
    found = databases.db_diff(a, b)
    (pair,) = found.both
    assert (pair.verdict, pair.same_config) == ("A is faster", False)
    assert pair.ratio.value == pytest.approx(1.2)
    assert [dict(one.key.sizes) for one, _ in found.only_a] == [{"n": 2048}]
    counts = "0 same, 1 different, 1 only in A, 0 only in B"
    assert repr(found) == f"<DatabaseDiff: A {a}, B {b}: 2 problems, 1 (replayed): {counts}>"
    assert "<td>A is faster</td>" in found._repr_html_()
    monkeypatch.setattr(databases, "open_existing", lambda place: Database.open(a))
    found = databases.db_diff(a, "postgresql://me:secret@host/tuning")
    assert "secret" not in repr(found) + found.b
    assert "me:***@host" in found.b


def test_merge_and_clean(sides: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    found = databases.db_merge(sides, out)
    (study,) = found.studies
    assert (study.decision, study.served.config) == ("taken", FAST)
    assert [rows.trials for _, rows in found.copied] == [2, 2]
    assert repr(found) == f"<MergeResult: 4 new trials in {out}, 1 study (replayed) with several winners>"
    assert "<td>THREADS=64 WORK=2</td><td>12.00 us</td><td>taken</td>" in found._repr_html_()
    path, tomorrow = sides[0], datetime.now(UTC) + timedelta(days=1)
    for dry_run, done in ((True, "would be deleted"), (False, "deleted")):
        found = databases.db_clean("scale", before=tomorrow, dry_run=dry_run, database=path)
        assert (found.deleted, found.studies[0].total, found.studies[0].emptied) == (1, 2, False)
        assert repr(found) == f"<CleanResult: 1 trial of 1 study (replayed) {done} in {path}>"
        assert "<td>1</td><td>2</td><td>old</td>" in found._repr_html_()
    assert databases.db_clean(before=tomorrow, database=path).deleted == 0
    with pytest.raises(InputError, match="pass before, keep_gpus or stale"):
        databases.db_clean(database=path)

"""The public functions on several databases: their values, and how these display themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from stored_runs import add_trial, end_run, start_run

from autotile.api import databases
from autotile.core.device import device_profile
from autotile.core.model import Config, Measurement, Outcome, Problem, Trial
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.errors import InputError
from autotile.kernel.library import load_kernel

FAST: Config = {"THREADS": 256, "WORK": 4}
SLOW: Config = {"THREADS": 64, "WORK": 2}


@pytest.fixture
def store(tmp_path: Path, scale_toml: Path) -> Callable[..., Path]:
    """Store the winner of a session in a database, and return the database's path."""
    kernel = load_kernel(str(scale_toml))

    def put(name: str, n: int, config: Config, time_us: float, source: Any = "cuda") -> Path:
        device = replace(device_profile("h200"), source=source)
        problem = Problem("scale", {"n": n}, "float32")
        key = key_of(kernel, problem, device, nvrtc_version="13.0", l2_mode="cold")
        measured = Measurement(time_us, 0.99 * time_us, 1.01 * time_us)
        with Database.open(tmp_path / name) as database:
            study = database.study(key, device)
            run = start_run(database, study, sampler="random")
            trial = Trial(config, Outcome.OK, "", "finals", measurement=measured, source=source)
            add_trial(database, study, run, trial)
            add_trial(database, study, run, trial, phase="final", rank=1)
            end_run(database, run)
        return tmp_path / name

    return put


def test_diff(store: Callable[..., Path]) -> None:
    a, b = store("a.db", 1024, FAST, 10.0, "replayed"), store("b.db", 1024, SLOW, 12.0, "replayed")
    store("a.db", 2048, FAST, 10.0)
    found = databases.db_diff(a, b)
    (pair,) = found.both
    assert (pair.verdict, pair.same_config) == ("A is faster", False)
    assert pair.ratio is not None
    assert pair.ratio.value == pytest.approx(1.2)
    assert [dict(one.winner.key.sizes) for one in found.only_a] == [{"n": 2048}]
    counts = "0 same, 1 different, 1 only in A, 0 only in B"
    assert repr(found) == f"<DatabaseDiff: A {a}, B {b}: 2 problems, 1 (replayed): {counts}>"
    assert "<td>A is faster</td>" in found._repr_html_()


def test_a_password_is_not_shown(store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a = store("a.db", 1024, FAST, 10.0)
    monkeypatch.setattr(databases, "open_existing", lambda place: Database.open(a))
    found = databases.db_diff(a, "postgresql://me:secret@host/tuning")
    assert "secret" not in repr(found) + found.b
    assert "me:***@host" in found.b


def test_merge(store: Callable[..., Path], tmp_path: Path) -> None:
    a, b = store("a.db", 1024, FAST, 10.0, "replayed"), store("b.db", 1024, SLOW, 12.0, "replayed")
    found = databases.db_merge([a, b], tmp_path / "out.db")
    (study,) = found.studies
    assert (study.decision, study.served.config) == ("taken", FAST)
    assert [rows.trials for _, rows in found.copied] == [2, 2]
    out = tmp_path / "out.db"
    assert repr(found) == f"<MergeResult: 4 new trials in {out}, 1 study (replayed) with several winners>"
    assert "<td>THREADS=64 WORK=2</td><td>12.00 us</td><td>taken</td>" in found._repr_html_()


def test_clean(store: Callable[..., Path]) -> None:
    path = store("a.db", 1024, FAST, 10.0, "replayed")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    for dry_run, done in ((True, "would be deleted"), (False, "deleted")):
        found = databases.db_clean("scale", before=tomorrow, dry_run=dry_run, database=path)
        assert (found.deleted, found.studies[0].total, found.studies[0].emptied) == (1, 2, False)
        assert repr(found) == f"<CleanResult: 1 trial of 1 study (replayed) {done} in {path}>"
        assert "<td>1</td><td>2</td><td>old</td>" in found._repr_html_()
    assert databases.db_clean(before=tomorrow, database=path).deleted == 0


def test_clean_needs_a_criterion(store: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="pass before, keep_gpus or stale"):
        databases.db_clean(database=store("a.db", 1024, FAST, 10.0))

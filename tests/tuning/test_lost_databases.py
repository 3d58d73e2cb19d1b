"""Databases that are deleted, moved, overwritten or full while a session runs: no trial is lost without an error."""

import random
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from stored_runs import change_file
from typer.testing import CliRunner

from autotile.api.databases import db_merge as merge
from autotile.cli.application import app
from autotile.cli.progress import TuneProgress
from autotile.core.model import config_key
from autotile.database import engine, runs
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.errors import DatabaseError, InputError, RescuedRunError
from autotile.settings import read_settings
from autotile.tuning.options import TuneOptions
from autotile.tuning.progress_state import Progress
from autotile.tuning.session import open_session

TRIALS = 12
"""Number of trials; after the last one only the finals are left."""


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(random.Random(0).randbytes(path.stat().st_size))


def other_database(path: Path) -> Path:
    other = path.with_name("other.db")
    Database.open(other).close()
    return other


def replace_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.write_text("a file")


Harm = Callable[[Path], object]
DELETED: dict[str, Harm] = {
    "deleted": lambda path: path.unlink(),
    "deleted with its log": lambda path: [path.with_name(path.name + end).unlink() for end in ("", "-wal", "-shm")],
    "moved": lambda path: path.rename(path.with_name("moved.db")),
    "folder deleted": lambda path: shutil.rmtree(path.parent),
}
"""Accidents after which the database never holds the session, but can be read as long as it is open."""
LOST: dict[str, Harm] = DELETED | {
    "replaced": lambda path: other_database(path).rename(path),
    "folder replaced": replace_folder,
    "table dropped": lambda path: change_file(path, "DROP VIEW best", "DROP TABLE trials"),
    "row deleted": lambda path: change_file(path, "DELETE FROM trials WHERE id = (SELECT max(id) FROM trials)"),
}
"""Accidents after which the database never holds the session."""
ENDANGERED: dict[str, Harm] = {
    "truncated": truncate,
    "overwritten": overwrite,
    "content replaced": lambda path: shutil.copyfile(other_database(path), path),
    "log deleted": lambda path: log_of(path).unlink(),
    "log overwritten": lambda path: overwrite(log_of(path)),
    "log truncated": lambda path: truncate(log_of(path)),
}
"""Accidents that SQLite can survive: what is left to write may replace all that was damaged."""


class Loss:
    """Observer of a session to whose database something happens after so many trials."""

    def __init__(self, harm: Harm, after: int) -> None:
        self._harm = harm
        self._after = after
        self.seen: list[str] = []
        self.done = False

    def __call__(self, progress: Progress) -> None:
        if progress.last is not None:
            self.seen.append(config_key(progress.last.config))
        if len(self.seen) == self._after and not self.done:
            self.done = True
            self._harm(Path(read_settings().database))


def searched(path: str | Path) -> list[str]:
    """The configurations that a database holds for problems of the default size, in order."""
    opened = Database.open_readonly(path)
    with opened:
        assert check_database(opened).ok
        (study,) = [one for one in opened.studies() if one.key.sizes == {"n": 4096}]
        return [config_key(trial.config) for trial in opened.trials(study.study_id, phase="search")]


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    """A folder of the database's own, and one for rescue files if that one is gone."""
    (tmp_path / "store").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "store" / "tuning.db"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def tune(bench, state):
    """Tune with a database that is new, or in use: it holds an earlier study, in the file itself."""
    if state == "in use":
        bench.tune(bench.record(n=2048), n=2048)
    return lambda loss: bench.tune(bench.record(), loss, sampler="random", discard=False)


class TestAccidents:
    @pytest.mark.parametrize(("state", "after"), [("new", 1), ("in use", TRIALS)])
    @pytest.mark.parametrize("harm", LOST)
    def test_a_lost_run_is_rescued(self, tune, tmp_path, harm, state, after):
        loss = Loss(LOST[harm], after)
        with pytest.raises(RescuedRunError) as raised:
            tune(loss)
        assert loss.done
        rescued = Path(raised.value.rescued)
        assert searched(rescued)[: len(loss.seen)] == loss.seen
        assert rescued.parent == tmp_path / ("temporary" if harm.startswith("folder") else "store")
        assert f"this session are kept in {rescued}" in str(raised.value)
        assert after < TRIALS or "THREADS=256 WORK=4" in str(raised.value)  # the winner is told, too
        if state == "in use" and harm in DELETED:
            with Database.open(rescued) as opened:
                assert {study.key.sizes["n"]: study.ok for study in opened.studies()}[2048] > 0

    @pytest.mark.parametrize("state", ["new", "in use"])
    @pytest.mark.parametrize("after", [1, TRIALS])
    @pytest.mark.parametrize("harm", ENDANGERED)
    def test_an_endangered_run_is_held_by_the_database_or_rescued(self, tune, harm, after, state):
        loss = Loss(ENDANGERED[harm], after)
        location, said = read_settings().database, ""
        try:
            tune(loss)
        except RescuedRunError as error:
            location, said = error.rescued, str(error)
        assert loss.done
        assert searched(location)[: len(loss.seen)] == loss.seen
        if (harm, after, state) == ("overwritten", TRIALS, "in use"):  # is found although nothing fails
            assert re.search(r"damaged|malformed|not a database|does not hold", said)

    @pytest.mark.parametrize("is_committed", [False, True])
    def test_ctrl_c_while_a_trial_is_stored_loses_nothing(self, bench, monkeypatch, is_committed):
        insert, begun, stored = runs.insert_trials, Database.writing, list[Any]()

        @contextmanager
        def writing(database, *given):
            before = len(stored)
            with begun(database, *given) as connection:
                yield connection
            if is_committed and before < len(stored) == 5:
                raise KeyboardInterrupt

        def insert_trials(connection, rows):
            stored.append(rows)
            if not is_committed and len(stored) == 5:
                raise KeyboardInterrupt
            insert(connection, rows)

        monkeypatch.setattr(Database, "writing", writing)
        monkeypatch.setattr(runs, "insert_trials", insert_trials)
        result = bench.tune(bench.record())
        assert result.interrupted
        assert len(searched(read_settings().database)) == 4 + is_committed


class TestRescueFile:
    def test_it_merges_and_the_same_command_resumes(self, bench, tmp_path):
        recording = bench.record()
        with pytest.raises(RescuedRunError) as raised:
            bench.tune(recording, Loss(LOST["deleted with its log"], 5))
        location = read_settings().database
        assert f"autotile db merge {raised.value.rescued} -o {location}" in str(raised.value)
        merge([raised.value.rescued], location)
        assert bench.tune(recording).resumed == len(searched(raised.value.rescued))

    def test_merging_doubles_no_trial_that_the_database_holds(self, bench):
        with pytest.raises(RescuedRunError, match="no such table") as raised:
            bench.tune(bench.record(), Loss(LOST["table dropped"], 5))

        def counts():
            with Database.open(raised.value.rescued) as rescued:
                return len(rescued.runs(1)), len(rescued.trials(1))

        before, copy = counts(), f"{raised.value.rescued}.copy.db"
        shutil.copyfile(raised.value.rescued, copy)
        merge([copy], raised.value.rescued)
        assert counts() == before

    def test_no_folder_takes_it(self, bench, monkeypatch):
        recording = bench.record()
        monkeypatch.setattr(runs.RunRecord, "_write_run", Mock(side_effect=DatabaseError("no room")))
        with pytest.raises(RescuedRunError, match=r"trials of this session are lost: .* cannot be written") as raised:
            bench.tune(recording, Loss(Path.unlink, 3))
        assert raised.value.rescued == ""
        folders = (Path(read_settings().database).parent, Path(tempfile.gettempdir()))
        assert not [file for folder in folders for file in folder.glob("*rescued*")]

    @pytest.mark.parametrize(("done", "then"), [(0, "deleted or moved.*had measured nothing"), (3, "was deleted")])
    def test_another_error_keeps_its_message_and_what_was_measured(self, bench, done, then):
        def fail(progress):
            if progress.done == done:
                Path(read_settings().database).unlink()
                raise InputError("no device")

        with pytest.raises(RescuedRunError, match=f"no device; and the database .* {then}") as raised:
            bench.tune(bench.record(), fail)
        assert len(searched(raised.value.rescued)) == done if done else raised.value.rescued == ""

    def test_a_session_of_the_callers_own_writes_one(self, bench):
        options = TuneOptions(replay=bench.record(), workers=1)
        with open_session(bench.kernel, bench.problem(), read_settings(), options) as session:
            session.begin()
            tried = session.evaluate(bench.configs())
            with pytest.raises(RescuedRunError) as raised:
                [Path(read_settings().database).unlink(missing_ok=True) for _ in tried]
            session.abort()
        folder = Path(raised.value.rescued).parent
        assert [str(file) for file in folder.glob("*rescued*")] == [raised.value.rescued]
        with Database.open(raised.value.rescued) as rescued:
            assert [run.ended_at is None for run in rescued.runs(1)] == [False]

    def test_an_undisturbed_run_leaves_none(self, bench, tmp_path):
        bench.tune(bench.record())
        assert sorted(file.name for file in (tmp_path / "store").iterdir()) == ["tuning.db"]
        assert not list((tmp_path / "temporary").glob("*rescued*"))


class TestErrorsOfTheDatabase:
    def test_a_lock_that_is_not_released(self, bench, monkeypatch):
        recording = bench.record()
        Database.open(read_settings().database).close()
        monkeypatch.setattr(engine, "LOCK_TIMEOUT_S", 0.2)
        with closing(sqlite3.connect(read_settings().database, isolation_level=None)) as holder:
            with pytest.raises(RescuedRunError, match="database is locked: another process has held it") as raised:
                bench.tune(recording, Loss(lambda _: holder.execute("BEGIN IMMEDIATE"), 4))
            holder.execute("ROLLBACK")
        assert len(searched(raised.value.rescued)) == 4  # the fifth could not be claimed
        assert len(searched(read_settings().database)) == 4

    def test_the_command_line_exits_with_1(self, bench, scale_toml, monkeypatch):
        show, loss = TuneProgress.__call__, Loss(Path.unlink, 3)
        monkeypatch.setattr(TuneProgress, "__call__", lambda *given: [show(*given), loss(given[1])])
        words = ["tune", str(scale_toml), "n=4096", f"--replay={bench.record()}", "--workers", "1", "--json"]
        answer = CliRunner().invoke(app, words)
        assert (answer.exit_code, type(answer.exception)) == (1, SystemExit)
        (message,) = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
        assert "was deleted or moved during the run" in message
        (rescued,) = re.findall(r'"rescued": "(.*)"', answer.stdout)
        assert rescued in message
        assert len(searched(rescued)) == 4

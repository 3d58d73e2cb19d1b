"""Files at the path of the database: missing, foreign, damaged, unwritable or of another version."""

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_runs import add_trials, begin, measured

from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.engine import ServerLocation, parse_location
from autotile.database.keys import TuningKey
from autotile.database.paths import network_file_system
from autotile.database.winners import SCHEMA_REVISION
from autotile.errors import DatabaseError


def test_the_folder_is_made(tmp_path: Path) -> None:
    with Database.open(tmp_path / "a" / "b" / "tuning.db") as database:
        assert database.notices == ()
        assert database.studies() == []
    with Database.open(f"sqlite:///{tmp_path}/a/b/tuning.db") as again:
        assert check_database(again).ok


@pytest.mark.parametrize("content", [None, b""])
def test_reading_what_is_not_there_gives_none_and_makes_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tuning.db"
    if content is not None:
        path.write_bytes(content)
    assert Database.open_readonly(path) is None
    assert Database.open_readonly(tmp_path / "nowhere" / "tuning.db") is None
    assert sorted(tmp_path.iterdir()) == ([path] if content is not None else [])


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "tuning.db").touch()
    with Database.open(tmp_path / "tuning.db") as database:
        assert check_database(database).ok


@pytest.mark.parametrize("opening", [Database.open, Database.open_readonly])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path, opening: Callable[..., object]) -> None:
    path = tmp_path / "space.toml"
    path.write_text("[kernel]\nname = 'sgemm'\n")
    with pytest.raises(DatabaseError, match=r"space\.toml is not a database.*name another"):
        opening(path)
    with pytest.raises(DatabaseError, match=r"is a folder; expected the path of a database file"):
        opening(tmp_path)
    assert path.read_text() == "[kernel]\nname = 'sgemm'\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["space.toml"]


@pytest.mark.parametrize("opening", [Database.open, Database.open_readonly])
def test_another_programs_database_is_refused(tmp_path: Path, opening: Callable[..., object]) -> None:
    connection = sqlite3.connect(tmp_path / "places.db")
    connection.execute("CREATE TABLE moz_places (id INTEGER)")
    connection.close()
    with pytest.raises(DatabaseError, match=r"belongs to another program .*'moz_places'"):
        opening(tmp_path / "places.db")


@pytest.mark.parametrize("opening", [Database.open, Database.open_readonly])
def test_a_newer_schema_is_refused(tmp_path: Path, opening: Callable[..., object]) -> None:
    path = tmp_path / "tuning.db"
    Database.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE autotile_schema SET version_num = '0099'")
    connection.commit()
    connection.close()
    with pytest.raises(
        DatabaseError, match=rf"newer autotile \(schema 0099; this version knows {SCHEMA_REVISION}\): pip install"
    ):
        opening(path)


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="cannot create the folder"):
        Database.open(tmp_path / "file" / "tuning.db")
    with pytest.raises(DatabaseError, match="cannot create the folder"):
        Database.open("/proc/tuning/autotile.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("closed", ["", "tuning.db"])
def test_a_folder_or_file_without_permission_says_so(tmp_path: Path, closed: str) -> None:
    (tmp_path / "tuning.db").touch()
    (tmp_path / closed).chmod(0o500)
    with pytest.raises(DatabaseError, match=r"cannot write .*change its permissions"):
        Database.open(tmp_path / "tuning.db")
    (tmp_path / closed).chmod(0o700)


def test_what_the_system_calls_unwritable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(DatabaseError, match=rf"cannot write {re.escape(str(tmp_path))}: change its permissions"):
        Database.open(tmp_path / "tuning.db")


def test_a_database_on_a_read_only_medium_can_be_read(
    tmp_path: Path, key: TuningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        database.study(key, None)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    reader = Database.open_readonly(path)
    assert reader is not None
    with reader:
        assert reader.find_study(key) == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.db"]


@pytest.mark.parametrize(
    "url", ["postgresql://me:secret@host/name", "postgresql://me@host/name?password=secret&application_name=x"]
)
def test_a_password_is_used_but_never_shown(url: str) -> None:
    place = parse_location(url)
    assert isinstance(place, ServerLocation)
    assert place.reveal().translate_connect_args()["password"] == "secret"
    assert "secret" not in str(place)
    assert str(place).startswith("postgresql+psycopg://me:***@host/name")
    assert "application_name" in str(place) or "?" not in url


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("mysql://user:secret@host/name", "kind 'mysql' is not supported; expected the path"),
        ("postgresql+nosuchdriver://user:secret@host/name", "nosuchdriver"),
        ("postgresql://user:secret@host:port/name", "is not a database URL"),
    ],
)
def test_a_url_that_cannot_be_used_says_so_without_the_password(location: str, message: str) -> None:
    with pytest.raises(DatabaseError, match=message) as caught:
        Database.open(location)
    assert "secret" not in str(caught.value)


def test_a_missing_driver_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseError, match=r"user:\*\*\*@host/name needs .*pip install 'psycopg\[binary\]'"):
        Database.open("postgresql://user:secret@host/name")


def _filled(path: Path, key: TuningKey, count: int = 300) -> None:
    with Database.open(path) as database:
        study, run = begin(database, key)
        add_trials(database, study, run, [measured({"BM": number}, 1.0 + number) for number in range(count)])


def _damage_start(data: bytearray) -> None:
    data[100:4096] = b"\xff" * 3996


def _damage_middle(data: bytearray) -> None:
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 8192] = b"\xa5" * 8192


def _cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


@pytest.mark.parametrize("damage", [_damage_start, _damage_middle, _cut])
def test_a_damaged_file_is_kept_aside_and_a_new_one_begun(
    tmp_path: Path, key: TuningKey, damage: Callable[[bytearray], None]
) -> None:
    path = tmp_path / "tuning.db"
    _filled(path, key)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    with Database.open(path) as database:
        assert database.studies() == []
        (notice,) = database.notices
    (kept,) = tmp_path.glob("tuning.db.corrupt-*")
    assert str(kept) in notice
    assert kept.read_bytes() == bytes(data)
    with Database.open(path) as again:
        assert again.notices == ()


def test_damage_found_while_reading_says_what_to_do(tmp_path: Path, key: TuningKey) -> None:
    path = tmp_path / "tuning.db"
    _filled(path, key)
    data = bytearray(path.read_bytes())
    _damage_middle(data)
    path.write_bytes(data)
    reader = Database.open_readonly(path)
    assert reader is not None
    with reader:
        with pytest.raises(DatabaseError, match="damaged; `autotile db check` says where"):
            reader.trials(1)
        report = check_database(reader)
    assert not report.ok
    assert path.read_bytes() == bytes(data)


def test_a_lock_that_is_never_released_is_explained(
    tmp_path: Path, key: TuningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotile.database.engine.LOCK_TIMEOUT_S", 0.05)
    with Database.open(tmp_path / "tuning.db") as database:
        holder = sqlite3.connect(tmp_path / "tuning.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="another process has held it"):
            database.study(key, None)
        holder.close()
        assert database.study(key, None) == 1


def test_network_file_systems_are_told_from_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = (f"server:/home {tmp_path} nfs4", f"map {tmp_path}/scratch nfs", f"/dev/b {tmp_path}/scratch ext4")
    mounts = "".join(f"{place} rw 0 0\n" for place in ("/dev/a / ext4", *places))
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    assert network_file_system(tmp_path / "tuning.db") == "nfs4"
    assert network_file_system(tmp_path / "scratch" / "tuning.db") == ""
    assert network_file_system(Path("/tuning.db")) == ""


def test_on_a_network_file_system_the_log_is_not_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotile.database.engine.network_file_system", lambda path: "nfs4")
    with Database.open(tmp_path / "tuning.db") as database:
        assert check_database(database).ok
        assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.db"]


def test_keys_alone_do_not_load_sqlalchemy() -> None:
    code = "import sys, autotile.database.keys; sys.exit('sqlalchemy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_up_to_date_database_opens_without_alembic(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    Database.open(path).close()
    code = (
        "import sys; from autotile.database.database import Database\n"
        "Database.open(sys.argv[1]).close(); Database.open_readonly(sys.argv[1]).close()\n"
        "sys.exit('alembic' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)

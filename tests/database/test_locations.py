"""Locations of databases: which are accepted, and that none shows its secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from autotile.database.engine import Location, ServerLocation, open_engine, parse_location, translated_errors
from autotile.database.paths import masked_message
from autotile.errors import DatabaseError
from autotile.tuning.options import TuneOptions

SECRET = "s3cr3t"

SERVERS = {
    f"postgresql://u:{SECRET}@h/d": "postgresql+psycopg://u:***@h/d",
    f"postgres+psycopg2://u:{SECRET}@h/d": "postgresql+psycopg2://u:***@h/d",
    f"postgresql://u@h/d?password={SECRET}": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?p%61ssword={SECRET}": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?PassWord={SECRET}": "postgresql+psycopg://u@h/d?PassWord=***",
    f"postgresql://u@h/d?sslpassword={SECRET}": "postgresql+psycopg://u@h/d?sslpassword=***",
    f"postgresql://u@h/d?SSLPASSWORD={SECRET}&sslpassword=a": "postgresql+psycopg://u@h/d?SSLPASSWORD=***&sslpassword=***",
    f"postgresql://u@h/d?conninfo=password%3D{SECRET}": "postgresql+psycopg://u@h/d?conninfo=***",
    f"postgresql://u:a%40{SECRET}@h/d": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u:a/{SECRET}?&@h/d": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?sslmod={SECRET}": "postgresql+psycopg://u@h/d?sslmod=***",
    f"postgresql://u@h/d?pass%77ord={SECRET}": "postgresql+psycopg://u:***@h/d",
    f"postgresql://u@h/d?options=password%3D{SECRET}": "postgresql+psycopg://u@h/d?options=***",
    f"postgresql://u@h/d?options=-cx%3D{SECRET}": f"postgresql+psycopg://u@h/d?options=-cx%3D{SECRET}",
    f"postgresql://u@h/d?dbname=postgresql://u:{SECRET}@h": "postgresql+psycopg://u@h/d?dbname=***",
    f"postgresql://u%40team:{SECRET}@[::1]:5432/d": "postgresql+psycopg://u%40team:***@[::1]:5432/d",
    "postgresql://u@h/d?passfile=/home/me/.pgpass": "postgresql+psycopg://u@h/d?passfile=%2Fhome%2Fme%2F.pgpass",
}

REFUSED = [
    f"postgresql:/u:{SECRET}@h",
    f"postgresql:/u:{SECRET}",
    f"postgresql:u:{SECRET}@h/d",
    f"postgres//u:{SECRET}@h/d",
    f"postgres:{SECRET}@h/d",
    f"postgresql+nosuch://u:{SECRET}@h/d",
    f"postgresql+asyncpg://u:{SECRET}@h/d?sslpassword={SECRET}",
    f"postgresql://u:{SECRET}",
    f"postgresql://u:{SECRET}@h:port/d",
    f"postgresql://u:a@{SECRET}@h/d",
    f"postgresql://h/u:{SECRET}@h/d",
    f"POSTGRESQL://u:{SECRET}@h/d",
    f"mysql://u:{SECRET}@h/d",
    f"jdbc:postgresql://u:{SECRET}@h/d",
    f" postgresql://u:{SECRET}@h/d",
    f"//u:{SECRET}@h/d",
    f"u:{SECRET}@h/d",
    f"u:a/{SECRET}@h/d",
    f"h/d?PASSWORD={SECRET}",
    f"h/d?ssl%70assword={SECRET}",
    f"host=h password={SECRET}",
    f"host=h password = 'a {SECRET}'",
    f"sqlite://u:{SECRET}@h/team.db",
    f"postgresql://u@h/d;password={SECRET}",
    f"postgresql://u@h/d;pass%77ord={SECRET}",
    f"postgresql://u@h/d%3Bpassword%3D{SECRET}",
    f"postgresql://u@h/d#password={SECRET}",
    f"postgresql://u@h/d?sslmode=disable;password={SECRET}",
    f"postgresql://u@h/d?sslmode=disable#{SECRET}",
    f"postgresql://u;password={SECRET}@h/d",
    f"postgresql://u%3A{SECRET}@h/d",
    f"postgresql://u@h;password={SECRET}/d",
    f"postgresql://u@h:5432;password={SECRET}/d",
    f"postgresql://u@{SECRET}:x@h/d",
    f"postgresql://u@h/d?a b{SECRET}=1",
    f"postgresql%3A%2F%2Fu%3A{SECRET}%40h",
    f"jdbc:postgresql://h/d;password={SECRET}",
    f"Server=h;User Id=u;Password={SECRET}",
    f"Server=h;User Id=u;Pwd={SECRET}",
    f"Server=h;User Id=u;Pass%77ord={SECRET}",
    f"d;pass%2577ord={SECRET}",
    f"/data/d;password={SECRET}",
    f"./d#password={SECRET}",
    f"@:{SECRET}@h",
    f":{SECRET}@h",
    f"@{SECRET}:@h",
    f"sqlite:///team.db;password={SECRET}",
    f"sqlite://:{SECRET}@/team.db",
    "sqlite:team.db",
    "sqlite:/team.db",
    "sqlite://team.db",
    "sqlite://",
    "",
    " ",
    "a\0b",
    "~no-such-user/team.db",
    "sqlite:///~no-such-user/team.db",
]


@pytest.mark.parametrize(("location", "shown"), SERVERS.items())
def test_the_text_of_a_server_masks_its_secrets(location: str, shown: str) -> None:
    found = parse_location(location)
    assert isinstance(found, ServerLocation)
    assert str(found) == shown
    assert repr(found) == f"ServerLocation({shown!r})"
    assert f"{[found]}" == f"[ServerLocation({shown!r})]"
    assert found == parse_location(location)
    assert SECRET in found.reveal().render_as_string(hide_password=False) or "passfile" in location


@pytest.mark.parametrize("location", REFUSED)
def test_what_is_neither_a_path_nor_a_url_is_refused_in_one_line(location: str) -> None:
    with pytest.raises(DatabaseError, match=r"expected the path|give the whole path") as caught:
        parse_location(location)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("location", [f"postgresql:/u:{SECRET}@h", f"postgresql://u:{SECRET}@h/d"])
def test_a_url_in_a_path_object_is_refused(location: str) -> None:
    with pytest.raises(DatabaseError, match=r"'postgresql:\.\.\.' \(2\d characters\) is not a database URL"):
        parse_location(Path(location))


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("team.db", "team.db"),
        ("./a:b@c.db", "a:b@c.db"),
        ("/data/secret=1/team.db", "/data/secret=1/team.db"),
        ("results/passes=3.db", "results/passes=3.db"),
        ("me@host.db", "me@host.db"),
        ("results//team.db", "results/team.db"),
        ("postgres/team.db", "postgres/team.db"),
        ("sqlite:///team.db", "team.db"),
        ("sqlite:////data/team.db", "/data/team.db"),
        (Path("postgresql"), "postgresql"),
    ],
)
def test_a_path_stays_a_path(location: str | Path, path: str) -> None:
    assert parse_location(location) == Path(path)


class TestErrors:
    @pytest.mark.parametrize(
        "location",
        [
            f"postgresql://u:{SECRET}@h/d",
            f"postgresql://u:%73{SECRET[1:]}@h/d",
            f"postgresql://u@h/d?sslpassword={SECRET}",
            f"postgresql://u@h/d?conninfo={SECRET}",
        ],
    )
    @pytest.mark.parametrize("text", ["{}: refused", 'invalid option "{}"', "postgresql://u:{}@h/d", "SSLpassword={}"])
    def test_of_the_driver_are_masked_also_in_a_traceback(self, location: str, text: str) -> None:
        found = parse_location(location)
        for error in (
            OperationalError("connect", None, ValueError(text.format(SECRET))),
            SQLAlchemyError(text.format(SECRET)),
        ):
            with pytest.raises(DatabaseError, match=r"\*\*\*") as caught, translated_errors(found):
                raise error
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__

    def test_a_percent_encoded_password_is_masked_in_both_forms(self) -> None:
        found = parse_location("postgresql://u:p%2Fw@h/d")
        assert _shown(found, "p/w and p%2Fw") == "database postgresql+psycopg://u:***@h/d: *** and ***"

    def test_words_that_hold_a_short_password_stay(self) -> None:
        found = parse_location("postgresql://u:a@h/d")
        assert _shown(found, "a database") == "database postgresql+psycopg://u:***@h/d: *** database"

    def test_a_parameter_that_the_driver_does_not_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise TypeError(f"no parameter PASSWORD={SECRET}")

        monkeypatch.setattr("autotile.database.engine.create_engine", refuse)
        found = parse_location(f"postgresql://u@h/d?PASSWORD={SECRET}")
        assert isinstance(found, ServerLocation)
        with pytest.raises(DatabaseError, match=r"PASSWORD=\*\*\*$") as caught:
            open_engine(found)
        assert SECRET not in str(caught.value)


def _shown(location: Location, reason: str) -> str:
    with pytest.raises(DatabaseError) as caught, translated_errors(location):
        raise OperationalError("connect", None, ValueError(reason))
    return str(caught.value)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no kernel 'postgresql://u:s3cr3t@h/d'; try x@y", "no kernel 'postgresql://u:***@h/d'; try x@y"),
        ("no kernel 'postgres:s3cr3t@h'", "no kernel 'postgres:***@h'"),
        ("no kernel '@:s3cr3t@h'", "no kernel '@:***@h'"),
        ("no kernel 'Server=h;User Id=u;Password=s3cr3t'", "no kernel 'Server=h;User Id=u;Password=***'"),
        ("no kernel 'd#pass%77ord=s;3cr3t'", "no kernel 'd#pass%77ord=***'"),
        ("no size 'h/d?sslPassword=s3cr3t'", "no size 'h/d?sslPassword=***'"),
        ("no kernel 'postgresql://u:s3cr3t'", "no kernel 'postgresql://u:***'"),
        ("no answer of http://localhost:8080: refused", "no answer of http://localhost:8080: refused"),
        ("no size PASSES=3, TOKENS=4 at a.toml:3", "no size PASSES=3, TOKENS=4 at a.toml:3"),
        (
            "expected postgresql+psycopg://user:password@host/name",
            "expected postgresql+psycopg://user:password@host/name",
        ),
        ("postgresql+psycopg://u:***@h:5432/d: refused", "postgresql+psycopg://u:***@h:5432/d: refused"),
    ],
)
def test_a_url_in_any_message_is_masked(message: str, shown: str) -> None:
    assert masked_message(message) == shown


def test_options_do_not_show_the_location() -> None:
    assert SECRET not in repr(TuneOptions(database=f"postgresql://u:{SECRET}@h/d"))

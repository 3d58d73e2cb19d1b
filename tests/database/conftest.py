"""Databases of both kinds for the tests of this folder."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from autotile.database.database import Database


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request, tmp_path):
    """Location of a database, a new file and the server in turn."""
    return str(request.getfixturevalue("server_url")) if request.param == "postgresql" else str(tmp_path / "team.db")


@pytest.fixture
def shared(location):
    """The database at `location`, open for writing."""
    with Database.open(location) as database:
        yield database


@pytest.fixture
def tuning_db(tmp_path):
    Database.open(tmp_path / "tuning.db").close()
    return tmp_path / "tuning.db"


@pytest.fixture
def study_db(tuning_db, key):
    """File of a database with a study of `key`, which has no run."""
    with Database.open(tuning_db) as database:
        database.study(key, None)
    return tuning_db


@pytest.fixture
def fresh_key(key):
    """A key that no other test has stored on the server."""
    return replace(key, template_hash=os.urandom(8).hex())

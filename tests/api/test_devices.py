"""Lists of devices with their measured ceilings; measuring one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored_rows import CEILINGS

import autotile
from autotile.api import targets
from autotile.core.device import profile_names
from autotile.database.database import Database
from autotile.database.learned import save_ceilings
from autotile.errors import DatabaseError, InputError


def test_profiles_and_gpus_are_listed() -> None:
    found = autotile.devices()
    assert list(found.profiles) == profile_names()
    assert len(found.gpus) == targets.device_count()
    assert found.ceilings == ()


def test_stored_ceilings_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with Database.open(path) as database:
        save_ceilings(database, CEILINGS)
    found = autotile.devices(database=path)
    assert found.ceilings == (CEILINGS,)
    assert "<td>DRAM, read</td><td>4,200 GB/s</td>" in found._repr_html_()
    with pytest.raises(DatabaseError, match="there is no database"):
        autotile.devices(database=tmp_path / "other.db")


def test_a_gpu_that_is_not_there_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "device_count", lambda: 0)
    with pytest.raises(InputError):
        autotile.measure_device(7, database=tmp_path / "tuning.db")
    assert not (tmp_path / "tuning.db").exists()

"""Models of operations in the database: newest wins, also in a merge, and fast reads agree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from autotile.core.device import DeviceProperties
from autotile.database.care import copy_missing_rows
from autotile.database.database import Database
from autotile.database.learned import read_models, save_model
from autotile.database.winners import CHANGES, MODEL, read_file


def found(database: Database, **chosen: Any) -> list[tuple[str, str, str, Any]]:
    return [(one.operation, one.dtype, one.gpu_name, one.model) for one in read_models(database, **chosen)]


def test_a_model_replaces_the_older_one_of_its_gpu(database: Database, device: DeviceProperties) -> None:
    other = replace(device, name="Other")
    save_model(database, "matmul", "float32", device, {"format": 1, "number": 1})
    save_model(database, "matmul", "float32", other, {"format": 1, "number": 2})
    save_model(database, "matmul", "float32", device, {"format": 1, "number": 3})
    assert found(database) == [
        ("matmul", "float32", device.name, {"format": 1, "number": 3}),
        ("matmul", "float32", "Other", {"format": 1, "number": 2}),
    ]
    assert [one[3]["number"] for one in found(database, gpu_name="Other")] == [2]
    assert found(database, dtype="float16") == []


def test_a_fast_read_finds_it_and_notices_a_new_one(database: Database, device: DeviceProperties) -> None:
    location = str(database.path)
    of = {"operation": "matmul", "dtype": "float32", "gpu_name": device.name}
    assert read_file(location, MODEL, **of) == []
    before = read_file(location, CHANGES)
    save_model(database, "matmul", "float32", device, {"format": 1})
    assert read_file(location, MODEL, **of) == [{"format": 1}]
    assert read_file(location, CHANGES) != before


def test_a_merge_keeps_the_newer_model(database: Database, device: DeviceProperties, tmp_path: Path) -> None:
    save_model(database, "matmul", "float32", device, {"format": 1, "number": 1})
    with Database.open(tmp_path / "other.db") as other:
        save_model(other, "matmul", "float32", device, {"format": 1, "number": 2})
        copy_missing_rows(database, other)
        assert [one.model["number"] for one in read_models(other)] == [2]
        copy_missing_rows(other, database)
    assert [one.model["number"] for one in read_models(database)] == [2]

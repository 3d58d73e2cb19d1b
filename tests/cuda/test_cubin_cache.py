import multiprocessing
import os
from pathlib import Path

import pytest

from autotile.core.model import Resources
from autotile.cuda.compiler import Compilation, CubinCache
from autotile.errors import InputError

RESOURCES = Resources(32, 0, 0, 0, 1024)


def compilation(fill: int, size: int = 1000) -> Compilation:
    return Compilation(bytes([fill]) * size, RESOURCES)


def test_what_was_put_is_found(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, 10**6)
    assert cache.get("key") is None
    put = cache.put("key", compilation(1))
    assert cache.get("key") == put
    assert put.path.read_bytes() == bytes([1]) * 1000
    assert put.resources == RESOURCES


def test_a_damaged_cubin_is_a_miss(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, 10**6)
    cache.put("key", compilation(1)).path.write_bytes(b"half")
    assert cache.get("key") is None


def test_a_damaged_description_is_a_miss(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, 10**6)
    cache.put("key", compilation(1)).path.with_suffix(".json").write_text("[]")
    assert cache.get("key") is None


def test_equal_code_has_an_equal_hash(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, 10**6)
    assert cache.put("a", compilation(1)).cubin_hash == cache.put("b", compilation(1)).cubin_hash
    assert cache.put("c", compilation(2)).cubin_hash != cache.put("b", compilation(1)).cubin_hash


def test_trimming_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, 5_000)
    for index in range(8):
        path = cache.put(f"key{index}", compilation(index)).path
        for file in (path, path.with_suffix(".json")):
            os.utime(file, (index, index))
    cache.get("key0")
    cache.trim()
    assert cache.size_bytes() <= 5_000
    assert cache.get("key0") is not None
    assert cache.get("key1") is None
    assert cache.get("key7") is not None


def test_many_writes_stay_within_the_limit(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, 20_000)
    for index in range(200):
        cache.put(f"key{index}", compilation(index % 256))
    assert cache.size_bytes() <= 20_000 + 32 * 1_300


def _hammer(folder: Path, fill: int) -> None:
    cache = CubinCache(folder, 10**6)
    for _ in range(50):
        cache.put("shared", compilation(7))
        cache.put(f"own{fill}", compilation(fill))
        found = cache.get("shared")
        assert found is not None
        assert found.path.read_bytes() == bytes([7]) * 1000


def test_processes_share_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_hammer, args=(tmp_path, fill)) for fill in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert not list(tmp_path.rglob(".writing-*"))


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="AUTOTILE_CACHE"):
        CubinCache(tmp_path / "file", 10**6)

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotile.core.model import Resources
from autotile.cuda.compiler import Compilation, CompiledFunction, CubinCache
from autotile.errors import InputError

RESOURCES = Resources(32, 0, 0, 0, 1024)


def compilation(fill: int, size: int = 1000) -> Compilation:
    return Compilation(bytes([fill]) * size, {"f": CompiledFunction("_Z1fv", RESOURCES)})


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path, 10**6)


def test_what_was_put_is_found(cache: CubinCache) -> None:
    assert cache.get("key") is None
    put = cache.put("key", compilation(1))
    assert cache.get("key") == put
    assert put.path.read_bytes() == bytes([1]) * 1000
    assert put.resources == RESOURCES
    assert put.symbols == {"f": "_Z1fv"}
    other, changed = cache.put("other", compilation(1)), cache.put("changed", compilation(2))
    assert changed.cubin_hash != other.cubin_hash == put.cubin_hash


def other_resources(document: dict[str, Any]) -> None:
    document["functions"]["f"]["resources"]["registers"] += 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda cubin: cubin.write_bytes(b"half"),
        lambda cubin: cubin.with_suffix(".json").write_text("[]"),
        lambda cubin: change(cubin, other_resources),
        lambda cubin: change(cubin, lambda document: document.pop("entry_hash")),  # as earlier versions wrote it
    ],
    ids=["cubin", "description", "resources", "without hash"],
)
def test_what_was_damaged_is_a_miss(cache: CubinCache, damage: Callable[[Path], object]) -> None:
    damage(cache.put("key", compilation(1)).path)
    assert cache.get("key") is None


def change(cubin: Path, make: Callable[[dict[str, Any]], object]) -> None:
    description = cubin.with_suffix(".json")
    document = json.loads(description.read_text())
    make(document)
    description.write_text(json.dumps(document))


def test_a_file_of_another_key_is_a_miss(cache: CubinCache) -> None:
    """Cubins may be exchanged with each other only together with their keys."""
    own, other = cache.put("own", compilation(1)).path, cache.put("other", compilation(2)).path
    for suffix in (".json", ".cubin"):
        shutil.copy(other.with_suffix(suffix), own.with_suffix(suffix))
    assert cache.get("own") is None
    assert cache.get("other") is not None
    cache.put("own", compilation(1))
    assert cache.get("own") is not None


def test_a_cubin_is_checked_in_little_time(cache: CubinCache) -> None:
    cache.put("key", compilation(1, 100_000))
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        assert cache.get("key") is not None
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 2e-3


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o277])
def test_its_folders_are_for_the_user_alone(tmp_path: Path, mask: int) -> None:
    previous = os.umask(mask)
    try:
        cache = CubinCache(tmp_path / "new" / "cache", 10**6)
    finally:
        os.umask(previous)
    path = cache.put("key", compilation(1)).path
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert CubinCache(tmp_path / "new" / "cache", 10**6).get("key") is not None


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o702, 0o777])
@pytest.mark.parametrize("name", [".", "cubins"])
def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, name: str, mode: int) -> None:
    CubinCache(tmp_path, 10**6).put("key", compilation(1))
    (tmp_path / name).chmod(mode)
    with pytest.raises(InputError, match=f"can be written by other users.*AUTOTILE_CACHE.*chmod go-w {tmp_path}"):
        CubinCache(tmp_path, 10**6)
    (tmp_path / name).chmod(mode & ~0o022)
    assert CubinCache(tmp_path, 10**6).get("key") is not None


def test_a_folder_beside_those_of_others_is_used_and_one_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    """As below /tmp, where only the owner of an entry may replace it."""
    tmp_path.chmod(0o1777)
    cache = CubinCache(tmp_path, 10**6)
    (cache.put("key", compilation(1)).path.parent).chmod(0o1777)
    with pytest.raises(InputError, match="can be written by other users"):
        CubinCache(tmp_path, 10**6)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="AUTOTILE_CACHE"):
        CubinCache(tmp_path / "file", 10**6)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("name", [".", "cubins"])
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, name: str) -> None:
    CubinCache(tmp_path, 10**6)
    os.chown(tmp_path / name, 12345, -1)
    with pytest.raises(InputError, match=r"belongs to another user.*AUTOTILE_CACHE"):
        CubinCache(tmp_path, 10**6)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_link_that_another_user_made_is_not_used(tmp_path: Path) -> None:
    """It would make autotile fill, and trim, another folder of the user."""
    (tmp_path / "documents").mkdir(mode=0o700)
    tmp_path.chmod(0o1777)
    (tmp_path / "cubins").symlink_to("documents")
    CubinCache(tmp_path, 10**6)
    os.chown(tmp_path / "cubins", 12345, -1, follow_symlinks=False)
    with pytest.raises(InputError, match="belongs to another user"):
        CubinCache(tmp_path, 10**6)


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

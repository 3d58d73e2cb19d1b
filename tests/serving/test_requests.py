"""Requests of kernels: relative paths after a change of the working directory, kinds of numbers, memory, pickling."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotile.database.database import Database
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.serving import refresh as miss_counter
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import Dispatcher, default_dispatcher, find_best_kernel, get_best_kernel
from autotile.serving.selection import RecentCache
from autotile.settings import child_environment, read_settings

BEST = {"THREADS": 256, "WORK": 4}


@pytest.fixture
def folders(scale_toml: Path, tmp_path: Path) -> list[Path]:
    """Two folders with kernels of the same file name, whose defaults differ."""
    made = []
    for name, work in (("first", 1), ("second", 2)):
        folder = tmp_path / name
        shutil.copytree(scale_toml.parent, folder)
        text = (folder / "scale.toml").read_text()
        (folder / "scale.toml").write_text(text.replace("WORK = 1\n", f"WORK = {work}\n"))
        made.append(folder)
    return made


class TestWorkingDirectory:
    @pytest.mark.parametrize("name", ["./scale.toml", "scale.toml", Path("scale.toml")])
    def test_a_relative_path_is_that_of_the_call(
        self, folders: list[Path], monkeypatch: pytest.MonkeyPatch, name: str | Path
    ) -> None:
        for _ in range(2):
            for folder, work in zip(folders, (1, 2), strict=True):
                monkeypatch.chdir(folder)
                kernel = get_best_kernel(name, n=4096, device="h200")
                assert kernel.config["WORK"] == work
                assert kernel is get_best_kernel(folder / "scale.toml", n=4096, device="h200")
                assert kernel.definition.template_path == folder / "scale.cu"

    def test_a_template_is_found_after_a_change(self, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folders[0])
        kernel = load_kernel("./scale.toml")
        monkeypatch.chdir(folders[1])
        assert kernel.template_path == folders[0] / "scale.cu"
        assert load_kernel("./scale.toml").template_path == folders[1] / "scale.cu"

    @pytest.mark.parametrize("form", [str, Path, "sqlite:///{}".format])
    def test_a_relative_database(
        self, store: Any, folders: list[Path], monkeypatch: pytest.MonkeyPatch, form: Any
    ) -> None:
        store.put(4096, BEST)
        shutil.copy(read_settings().database, folders[1] / "mine.db")
        for folder, tier in zip(folders, ("default", "exact"), strict=True):
            monkeypatch.chdir(folder)
            assert get_best_kernel(store.path, n=4096, device="h200", database=form("mine.db")).tier == tier

    def test_a_dispatcher_keeps_the_database_that_it_was_made_with(
        self, store: Any, folders: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put(4096, BEST)
        shutil.copy(read_settings().database, folders[1] / "mine.db")
        monkeypatch.chdir(folders[1])
        dispatcher = Dispatcher(database="mine.db")
        monkeypatch.chdir(folders[0])
        assert dispatcher.get_best_kernel(store.path, n=4096, device="h200").tier == "exact"

    def test_an_open_database(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        with Database.open("here.db") as database:
            monkeypatch.chdir(tmp_path / "elsewhere")
            database.close()  # the next connection is a new one
            assert database.studies() == []
            database.check_in_place()
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_settings_are_below_the_folder_of_the_first_use(self, folders: list[Path], tmp_path: Path) -> None:
        code = (
            "import os, autotile\n"
            "from autotile.settings import read_settings\n"
            f"os.chdir({str(tmp_path)!r})\n"
            "found = read_settings()\n"
            "print(found.database, found.cache, found.kernel_folders[0])\n"
            "print(autotile.get_best_kernel('scale', n=4096, device='h200').config['WORK'])\n"
        )
        relative = {"AUTOTILE_DB": "own.db", "AUTOTILE_CACHE": "cubins", "AUTOTILE_KERNELS": "."}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**child_environment(), **relative},
            cwd=folders[1],
            capture_output=True,
            text=True,
            check=True,
        )
        place = folders[1]
        assert done.stdout.splitlines() == [f"{place}/own.db {place}/cubins {place}", "2"]

    def test_a_deleted_one_concerns_relative_paths_only(self, store: Any, tmp_path: Path) -> None:
        (tmp_path / "gone").mkdir()
        code = (
            "import os, sys\n"
            "os.rmdir(os.getcwd())\n"
            "import autotile\n"
            f"print(autotile.get_best_kernel({str(store.path)!r}, n=4096, device='h200').tier)\n"
            "for given in ({'name': './mine.toml'}, {'database': 'mine.db'}, {'bundle': 'mine.bundle'}):\n"
            f"    named = {{'name': {str(store.path)!r}, **given}}\n"
            "    try:\n"
            "        autotile.get_best_kernel(named.pop('name'), n=4096, device='h200', **named)\n"
            "    except autotile.InputError as error:\n"
            "        print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=child_environment(),
            cwd=tmp_path / "gone",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        tier, *errors = done.stdout.splitlines()
        assert tier == "default"
        assert len(errors) == 3
        assert all("is relative, and the working directory was deleted" in error for error in errors)


class TestKindsOfValues:
    @pytest.mark.parametrize(
        "size", [4096, 4096.0, np.int32(4096), np.float32(4096), Decimal(4096), Fraction(4096), 4096 + 0j]
    )
    @pytest.mark.parametrize("before", [False, True])
    def test_whole_numbers_of_every_kind_are_one_size(self, store: Any, size: Any, before: bool) -> None:
        default_dispatcher.clear()
        if before:
            get_best_kernel(store.path, n=4096, device="h200")
        kernel = get_best_kernel(store.path, n=size, device="h200")
        assert kernel.problem.sizes == {"n": 4096}
        assert type(kernel.problem.sizes["n"]) is int
        assert kernel is get_best_kernel(store.path, n=4096, device="h200")

    @pytest.mark.parametrize("size", [4096.5, float("nan"), float("inf"), [4096], {}, None, "4096", np.zeros(3)])
    def test_others_are_refused(self, store: Any, size: Any) -> None:
        get_best_kernel(store.path, n=4096, device="h200")
        with pytest.raises(InputError, match=r"size n is .*, expected a whole number"):
            get_best_kernel(store.path, n=size, device="h200")

    @pytest.mark.parametrize("dtype", ["float32", np.dtype("float32"), np.float32, "f4", "<f4", "single"])
    def test_what_numpy_takes_for_a_dtype(self, store: Any, dtype: Any) -> None:
        kernel = get_best_kernel(store.path, n=4096, dtype=dtype, device="h200")
        assert kernel.problem.dtype == "float32"
        assert kernel is get_best_kernel(store.path, n=4096, dtype="float32", device="h200")

    def test_a_dtype_of_torch(self, store: Any) -> None:
        torch = pytest.importorskip("torch")
        assert get_best_kernel(store.path, n=4096, dtype=torch.float32, device="h200").problem.dtype == "float32"

    @pytest.mark.parametrize("dtype", ["float33", ">f4", np.float64, float, "U5", [1], object()])
    def test_other_dtypes_are_refused(self, store: Any, dtype: Any) -> None:
        with pytest.raises(InputError, match="does not support dtype"):
            get_best_kernel(store.path, n=4096, dtype=dtype, device="h200")

    @pytest.mark.parametrize("device", [[0], 0.5, {}])
    def test_other_devices_are_refused(self, store: Any, device: Any) -> None:
        with pytest.raises(InputError, match="expected a CUDA index"):
            get_best_kernel(store.path, n=4096, device=device)


class TestMemory:
    def test_the_cache_is_bounded_and_keeps_what_is_used(self) -> None:
        cache: RecentCache[int, list[int]] = RecentCache(100)
        used = cache.keep(-1, [-1])
        for number in range(1000):
            cache.keep(number, [number])
            assert (cache.get(-1) or cache.recall(-1)) is used
            assert len(cache) + len(cache._older) <= 100
        assert cache.recall(0) is None
        assert cache.recall(999) == [999]
        cache.clear()
        assert cache.recall(999) is None

    def test_an_entry_is_not_replaced(self) -> None:
        cache: RecentCache[int, str] = RecentCache(4)
        assert cache.keep(1, "first") == cache.keep(1, "second") == "first"

    @pytest.mark.usefixtures("live_gpu")
    def test_the_counter_of_misses_is_bounded(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(miss_counter, "_MAX_WATCHED", 8)
        store.put(2048, BEST)
        kernels = [get_best_kernel(store.path, n=n) for n in range(4096, 4126)]
        assert len(default_dispatcher.misses.kernels) <= 8
        kernels[0].calls = 7
        kernels[0]._report_calls()
        assert kernels[0] in default_dispatcher.misses.kernels
        default_dispatcher.misses.flush()
        with Database.open(read_settings().database) as database:
            counts = {miss.problem.sizes["n"]: miss.count for miss in database.misses()}
        assert counts == {4096: 7, **dict.fromkeys(range(4097, 4126), 1)}


def _describe(kernel: BoundKernel) -> tuple[str, str, dict[str, Any]]:
    return str(kernel.problem), kernel.tier, dict(kernel.config)


class TestPickling:
    def test_the_same_process_gets_the_same_kernel(self, store: Any) -> None:
        kernel = get_best_kernel(store.path, n=4096, device="h200")
        assert pickle.loads(pickle.dumps(kernel)) is kernel
        assert copy.deepcopy(kernel) is kernel

    def test_a_relative_request_is_resolved(
        self, store: Any, folders: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put(4096, BEST)
        shutil.copy(read_settings().database, folders[1] / "mine.db")
        monkeypatch.chdir(folders[1])
        pickled = pickle.dumps(get_best_kernel("./scale.toml", n=4096, device="h200", database="mine.db"))
        monkeypatch.chdir(folders[0])
        default_dispatcher.clear()
        kernel = pickle.loads(pickled)
        assert (kernel.tier, kernel.definition.template_path) == ("exact", folders[1] / "scale.cu")

    def test_another_process_serves_it_anew(self, store: Any) -> None:
        store.put(4096, BEST)
        kernel = get_best_kernel(store.path, n=4096, device="h200", dtype=np.float32)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(_describe, (kernel,)) == _describe(kernel)

    def test_the_database_of_a_dispatcher_goes_along(self, store: Any, tmp_path: Path) -> None:
        store.put(4096, BEST)
        os.rename(read_settings().database, tmp_path / "team.db")  # noqa: PTH104
        kernel = Dispatcher(database=tmp_path / "team.db").get_best_kernel(store.path, n=4096, device="h200")
        assert pickle.loads(pickle.dumps(kernel)).tier == kernel.tier == "exact"

    def test_one_that_was_not_requested_is_refused(self, store: Any) -> None:
        kernel = find_best_kernel(str(store.path), None, "h200", read_settings().database, {"n": 4096})
        with pytest.raises(TypeError, match="was not returned by get_best_kernel"):
            pickle.dumps(kernel)

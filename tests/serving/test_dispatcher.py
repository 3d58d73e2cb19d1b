"""`get_best_kernel`: look-ups, devices by name, bad databases, misses, threads, requests of every form, few modules."""

import copy
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from child_python import imported, needed, python
from made_models import ON_AN_H200, written_misses
from msgspec import structs

from autotile.core.device import device_profile
from autotile.core.model import LaunchGeometry, Resources
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.errors import ArgumentError, DatabaseError, InputError, NotTunedError, ToolchainError
from autotile.serving import dispatcher as serving
from autotile.serving import refresh as miss_counter
from autotile.serving.bound import BoundKernel
from autotile.serving.choice import RecentCache
from autotile.serving.dispatcher import Dispatcher, default_dispatcher, get_best_kernel
from autotile.settings import read_settings

BEST, OTHER = {"THREADS": 256, "WORK": 4}, {"THREADS": 64, "WORK": 1}
GPU_FIELDS = {"gpu_name", "compute_capability", "sm_count", "smem_per_block_optin_bytes"}


def misses() -> list[tuple[int, str, str, int]]:
    default_dispatcher.misses.flush()
    return written_misses()


class TestLookUp:
    @pytest.mark.usefixtures("uncounted_devices")
    def test_the_only_device_is_the_same_named_or_not(self, store, monkeypatch):
        """Also in the first call of a process, which counts the devices."""
        monkeypatch.setattr(serving, "device_count", lambda: 1)
        runtime = SimpleNamespace(getDevice=lambda: 0)
        monkeypatch.setattr(serving, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        monkeypatch.setattr(serving, "live_device", lambda _: structs.replace(device_profile("h200"), source="cuda"))
        store.put(4096, BEST)
        kernels = [get_best_kernel(str(store.path), n=4096, device=device) for device in (None, None, 0)]
        assert len(set(map(id, kernels))) == 1

    @pytest.mark.usefixtures("live_gpu")
    def test_dispatchers_share_nothing(self, store, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setenv("AUTOTILE_DB", str(tmp_path / "team.db"))
            store.put(4096, BEST)
        own = Dispatcher(database=tmp_path / "team.db")
        monkeypatch.setattr(own, "current_device", lambda: 0)
        kernels = [get_best_kernel(store.path, n=n) for n in (4096, 8192)]
        own_kernels = [own.get_best_kernel(store.path, n=n) for n in (4096, 8192)]
        assert [kernel.tier for kernel in kernels] == ["default", "default"]
        assert [kernel.tier for kernel in own_kernels] == ["exact", "nearest"]
        assert (default_dispatcher.misses.kernels, own.misses.kernels) == (tuple(kernels), (own_kernels[1],))
        own.clear()
        assert get_best_kernel(store.path, n=4096) is kernels[0]
        assert own.get_best_kernel(store.path, n=4096) is not own_kernels[0]

    def test_a_second_call_reads_nothing_and_kernel_and_database_may_be_paths(self, store, tmp_path, monkeypatch):
        store.put(4096, BEST)
        database = Path(read_settings().database)
        kernels = [
            get_best_kernel(str(store.path), n=4096, device="h200"),
            get_best_kernel(store.path, n=4096, device="h200", database=database),
        ]
        assert [(kernel.tier, kernel.config) for kernel in kernels] == [("exact", BEST)] * 2
        for change in ({"n": 8192}, {"device": "a100"}, {"dtype": "float32"}, {"database": str(tmp_path / "x")}):
            kernels.append(get_best_kernel(**{"name": str(store.path), "n": 4096, "device": "h200", **change}))
        assert len(set(map(id, kernels))) == 6  # what is asked otherwise is another
        with pytest.raises(NotTunedError, match="sizes: tuned n=4096, requested n=8192"):
            get_best_kernel(store.path, n=8192, device="h200", database=database, strict=True)
        monkeypatch.setattr(serving, "load_kernel", lambda _: pytest.fail("read again"))
        assert get_best_kernel(str(store.path), n=4096, device="h200") is kernels[0]
        assert get_best_kernel(store.path, n=4096, device="h200", database=database, strict=True) is kernels[1]

    @pytest.mark.usefixtures("live_gpu")
    def test_threads_that_ask_together_are_served_the_same(self, store):
        store.put(8192, BEST)
        barrier = threading.Barrier(8)

        def ask(_: int) -> BoundKernel:
            barrier.wait()
            return get_best_kernel(str(store.path), n=4096)

        with ThreadPoolExecutor(8) as threads:
            kernels = list(threads.map(ask, range(8)))
        assert len(set(map(id, kernels))) == 1
        assert misses() == [(4096, "NVIDIA H200", "nearest", 1)]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "needs the size n"),
        ({"n": 0}, "expected 1 to"),
        ({"n": 1, "m": 2}, "has no size 'm'"),
        ({"n": 1, "dtype": "float64"}, "does not support dtype 'float64'"),
        ({"n": 1, "name": "sgemm_3d"}, r"did you mean .*sgemm_2d"),
        *(({"n": 1, "numerics": word}, "numerics is .*, expected 'any' or 'same'") for word in ("exact", ["any"])),
        ({"n": 1, "device": "voodoo"}, "no GPU profile is named 'voodoo'"),
        *(({"n": 1, "device": device}, "expected a CUDA index") for device in ([0], 0.5, {})),
        *(({"n": 4096, name: 1}, f"{name} is 1, expected") for name in ("strict", "library", "race", "wait")),
        *(
            ({"n": size}, r"size n is .*, expected a whole number")
            for size in (4096.5, float("nan"), float("inf"), [4096], {}, None, "4096", np.zeros(3), np.zeros(()))
        ),
        *(
            ({"n": 1, "dtype": dtype}, "does not support dtype")
            for dtype in ("float33", ">f4", np.float64, float, "U5", [1], object())
        ),
    ],
)
def test_bad_requests(store, asked, said):
    get_best_kernel(store.path, n=4096, device="h200")
    with pytest.raises(InputError, match=said):
        get_best_kernel(**{"name": str(store.path), "device": "h200", **asked})


class TestDevices:
    def test_any_spelling_of_a_profile_and_a_device_that_only_the_database_knows(self, store):
        store.put(4096, BEST)
        for name in ("h200", "H200", "NVIDIA H200", "nvidia h200"):
            assert store.ask(4096, device=name).tier == "exact"
        device = structs.replace(device_profile("h200"), name="NVIDIA GH200 480GB", source="cuda")
        store.put(4096, BEST, device=device)
        kernel = store.ask(4096, device="NVIDIA GH200 480GB")
        assert (kernel.tier, kernel.device) == ("exact", device)

    @pytest.mark.usefixtures("no_gpu")
    def test_without_a_gpu_the_one_that_was_tuned_last_which_cannot_be_launched(self, store):
        """Whether it was measured or replayed; an imported result does not choose the GPU."""
        assert store.ask(4096, device=None).device.name == "NVIDIA H200"
        for profile, source in (("h200", "replayed"), ("rtx-4090", "cuda")):
            device = structs.replace(device_profile(profile), source=source)
            store.put(4096, BEST, device=device)
            store.put(7, BEST, template_hash="", space_hash="")
            for name in (None, device.name):
                kernel = store.ask(4096, device=name, strict=True)
                assert (kernel.device.name, kernel.tier) == (device.name, "exact")
                with pytest.raises(ToolchainError, match=f"for {device.name}, not for a CUDA device of this machine"):
                    kernel(np.zeros(4096, np.float32))


class TestDatabases:
    """Serving never fails because of a database."""

    def test_missing_or_a_folder(self, store, tmp_path):
        for database in (str(tmp_path / "nowhere" / "tuning.db"), None, "mysql://host/name"):
            assert store.ask(4096, database=database).tier == "default"
        assert not (tmp_path / "nowhere").exists()
        assert not Path(read_settings().database).exists()
        served = store.ask(4096, database=str(tmp_path))
        assert served.tier == "default"
        assert f"Your own results could not be read: {tmp_path} is a folder" in served.explain()

    def test_no_database_and_one_that_is_damaged_behind_its_first_pages(self, store, tmp_path):
        store.put(4096, BEST)
        path = Path(read_settings().database)
        with Database.open(path) as database:  # everything in the one file
            assert check_database(database).ok
        data = path.read_bytes()
        damaged = data[:4096] + b"\xa5" * (len(data) - 4096)
        for number, content in enumerate((b"", b"no database " * 100, b"SQLite format 3\0" + b"\xff" * 5000, damaged)):
            path = tmp_path / f"bad {number}.db"
            path.write_bytes(content)
            served = store.ask(4096, database=str(path))
            assert served.tier == "default"
            assert content == damaged or ("own results could not be read" in served.explain()) == bool(content)
            assert path.read_bytes() == content

    @pytest.mark.usefixtures("live_gpu")
    def test_an_exact_result_is_read_without_the_others_and_the_default_where_none_can_be(self, store, monkeypatch):
        store.put(4096, BEST)
        with monkeypatch.context() as patch:
            patch.delattr("autotile.serving.selection.WINNERS")
            assert (store.ask(4096, device=None).tier, store.ask(4096, device=None).config) == ("exact", BEST)
        assert store.ask(8192, device=None).tier == "nearest"

        def fail(*_: Any, **__: Any) -> None:
            raise DatabaseError("the disk refused")

        for method in ("add_misses", "open"):
            monkeypatch.setattr(Database, method, fail)
            assert store.ask(8192, device=None).tier == "nearest"
        monkeypatch.setattr("autotile.serving.selection.read_file", lambda *_, **__: None)
        monkeypatch.setattr(Database, "reading", fail)
        assert store.ask(4096).tier == "default"


class TestStrict:
    def test_what_is_not_tuned_or_cannot_run_here_is_refused(self, store):
        for said in ("nothing is tuned for scale; run `autotile tune`", "breaks a rule or a limit here"):
            store.ask(64)  # also where it was served before
            with pytest.raises(NotTunedError, match=said) as caught:
                get_best_kernel(store.path, n=64, device="h200", strict=True)
            assert caught.value.differences == ()
            store.put(64, BEST)  # a block of 1024 elements

    @pytest.mark.parametrize(
        ("changes", "fields"),
        [
            ({"n": 4096}, set()),
            ({"n": 8192}, {"sizes"}),
            ({"n": 4096, "nvrtc_version": "12.0"}, {"nvrtc_version"}),
            ({"n": 4096, "l2_mode": "hot"}, {"l2_mode"}),
            ({"n": 4096, "template_hash": "0" * 64}, {"template_hash"}),
            ({"n": 64, "space_hash": "0" * 64, "options": ("--use_fast_math",)}, {"sizes", "space_hash", "options"}),
            ({"n": 4096, "device": device_profile("a100")}, GPU_FIELDS),
        ],
    )
    def test_every_field_that_differs_is_named(self, store, changes, fields):
        store.put(config=BEST, **changes)
        if not fields:
            assert store.ask(4096, strict=True).tier == "exact"
            return
        with pytest.raises(NotTunedError) as caught:
            store.ask(4096, strict=True)
        assert {name for name, _, _ in caught.value.differences} == fields
        assert all(name in str(caught.value) for name in fields)


def test_another_driver_is_told_and_served(store, monkeypatch):
    monkeypatch.setattr(default_dispatcher, "current_device", lambda: 0)
    now = structs.replace(device_profile("h200"), source="cuda", driver="13.0")
    monkeypatch.setattr(serving, "live_device", lambda _: now)
    store.put(4096, BEST, device=structs.replace(now, driver="12.4"))
    kernel = store.ask(4096, device=None)
    assert (kernel.tier, kernel.choice.aged) == ("exact", ("driver 12.4, now 13.0",))
    assert "It has aged (driver 12.4, now 13.0); `autotile verify scale` measures it again." in kernel.explain()
    assert kernel.to_json()["aged"] == ["driver 12.4, now 13.0"]
    store.put(4096, BEST, device=now, driver="13.0")
    assert store.ask(4096, device=None).choice.aged == ()
    assert store.ask(4096).choice.aged == ()  # of a device that is only known


@pytest.mark.usefixtures("live_gpu")
class TestMisses:
    def test_what_is_exact_or_only_looked_at_is_not_counted(self, store, monkeypatch):
        store.put(4096, BEST)
        assert (store.ask(4096, device=None).tier, store.ask(8192, device="h200").tier) == ("exact", "nearest")
        looked = serving.find_best_kernel(str(store.path), None, None, read_settings().database, {"n": 8192})
        assert (looked.tier, looked.device.source) == ("nearest", "cuda")
        with monkeypatch.context() as patch:
            patch.setattr(default_dispatcher, "current_device", lambda: None)
            assert store.ask(8192, device=None).tier == "nearest"
        assert misses() == []
        assert get_best_kernel(str(store.path), n=8192) is not looked
        store.ask(500, device=0)
        assert sorted(misses()) == [(500, "NVIDIA H200", "default", 1), (8192, "NVIDIA H200", "nearest", 1)]


class TestDocument:
    def test_of_an_exact_hit(self, store):
        store.put(4096, BEST)
        store.put(8192, OTHER)
        kernel = store.ask(4096)
        assert repr(kernel) == "<BoundKernel scale n=4096 float32 on NVIDIA H200: exact, THREADS=256 WORK=4>"
        assert kernel.geometry == LaunchGeometry((4, 1, 1), (256, 1, 1), 0)
        assert abs(datetime.now(UTC) - kernel.tuned_at) < timedelta(minutes=1)
        assert json.loads(json.dumps(kernel.to_json())) == {
            "kernel": "scale",
            "problem": {"n": 4096},
            "dtype": "float32",
            "tier": "exact",
            "config": BEST,
            "time_us": 10.0,
            "interval_us": [9.9, 10.1],
            "device": {"name": "NVIDIA H200", "source": "cuda"},
            "source": "cuda",
            "tuned_on": "NVIDIA H200",
            "tuned_at": kernel.tuned_at.isoformat(),
            "contenders": [],
            "differences": [],
            "aged": [],
            "shipped": False,
            "bundle": None,
            "pinned": None,
            "estimated": None,
            "resources": {
                "registers": 24,
                "spill_bytes": 0,
                "static_smem_bytes": 0,
                "dynamic_smem_bytes": 0,
                "threads": 256,
                "blocks_per_sm": 8,
                "occupancy": 1.0,
                "limited_by": ["threads"],
            },
            "explain": (
                "scale n=4096 float32 on NVIDIA H200 is served THREADS=256 WORK=4. "
                "It was tuned for exactly this problem on this GPU. "
                "It took 10.00 us (95 % interval 9.900 to 10.10, cold L2) when tuned today."
            ),
        }
        assert kernel.explain() == kernel.to_json()["explain"]

    def test_of_a_fallback_whose_resources_are_unknown_without_a_compiler(self, store, monkeypatch):
        def missing(*_: Any) -> None:
            raise ToolchainError("no NVRTC")

        with monkeypatch.context() as patch:
            patch.setattr("autotile.cuda.compiler.compile_job", missing)
            kernel = store.ask(4096)
            assert (kernel.resources, kernel.occupancy, kernel.to_json()["resources"]) == (None, None, None)
        document = store.ask(4096).to_json()
        assert (document["tier"], document["time_us"], document["tuned_at"]) == ("default", None, None)
        assert document["resources"]["registers"] > 0  # compiled now
        store.put(4096, BEST)
        assert store.ask(8192).to_json()["differences"] == [["sizes", "n=4096", "n=8192"]]

    def test_resources_of_another_gpu_are_not_passed_off(self, store):
        """The number of registers depends on the compiler target."""
        a100 = structs.replace(device_profile("a100"), source="cuda")
        store.put(4096, BEST, device=a100, resources=Resources(99, 0, 0, 0, 0))
        kernel = store.ask(4096)
        assert kernel.tier == "transferred"
        assert kernel.resources.registers != 99
        assert kernel.occupancy.blocks_per_sm == 8


def test_a_size_that_its_scalar_cannot_hold(store):
    text = store.path.read_text().replace('n = { scalar = "int32"', 'n = { scalar = "int16"')
    store.path.write_text(text)
    assert store.ask(32767).tier == "default"
    with pytest.raises(ArgumentError, match="scalar n is 32768, which does not fit in int16"):
        store.ask(32768)


@pytest.fixture
def folders(scale_toml, tmp_path):
    """Two folders with kernels of the same file name, whose defaults differ."""
    made = []
    for name, work in (("first", 1), ("second", 2)):
        folder = tmp_path / name
        shutil.copytree(scale_toml.parent, folder)
        text = (folder / "scale.toml").read_text()
        (folder / "scale.toml").write_text(text.replace("WORK = 1\n", f"WORK = {work}\n"))
        made.append(folder)
    return made


@pytest.fixture
def in_second(store, folders, monkeypatch):
    """The folders; the working directory is the second, with a database ``mine.db`` of an exact result."""
    store.put(4096, BEST)
    shutil.copy(read_settings().database, folders[1] / "mine.db")
    monkeypatch.chdir(folders[1])
    return folders


class TestWorkingDirectory:
    @pytest.mark.parametrize("name", ["./scale.toml", "scale.toml", Path("scale.toml")])
    def test_a_relative_path_is_that_of_the_call(self, folders, monkeypatch, name):
        for _ in range(2):
            for folder, work in zip(folders, (1, 2), strict=True):
                monkeypatch.chdir(folder)
                kernel = get_best_kernel(name, n=4096, device="h200")
                assert kernel.config["WORK"] == work
                assert kernel is get_best_kernel(folder / "scale.toml", n=4096, device="h200")
                assert kernel.definition.template_path == folder / "scale.cu"

    @pytest.mark.parametrize("form", [str, Path, "sqlite:///{}".format])
    def test_a_relative_database(self, store, in_second, monkeypatch, form):
        dispatcher = Dispatcher(database=form("mine.db"))
        for folder, tier in zip(in_second, ("default", "exact"), strict=True):
            monkeypatch.chdir(folder)
            assert get_best_kernel(store.path, n=4096, device="h200", database=form("mine.db")).tier == tier
            assert dispatcher.get_best_kernel(store.path, n=4096, device="h200").tier == "exact"

    def test_an_open_database(self, tmp_path, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        with Database.open("here.db") as database:
            monkeypatch.chdir(tmp_path / "elsewhere")
            database.close()  # the next connection is a new one
            assert database.studies() == []
            database.check_in_place()
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_settings_are_below_the_folder_of_the_first_use(self, folders, tmp_path):
        code = (
            "import os, autotile\n"
            "from autotile.settings import read_settings\n"
            f"os.chdir({str(tmp_path)!r})\n"
            "found = read_settings()\n"
            "print(found.database, found.cache, found.kernel_folders[0])\n"
            "print(autotile.get_best_kernel('scale', n=4096, device='h200').config['WORK'])\n"
        )
        relative = {"AUTOTILE_DB": "own.db", "AUTOTILE_CACHE": "cubins", "AUTOTILE_KERNELS": "."}
        place = folders[1]
        printed = python("-c", code, cwd=place, env=relative, check=True).stdout.splitlines()
        assert printed == [f"{place}/own.db {place}/cubins {place}", "2"]

    def test_a_deleted_one_concerns_relative_paths_only(self, store, tmp_path):
        (tmp_path / "gone").mkdir()
        code = (
            "import os, sys\n"
            "import numpy\n"  # which Python 3.13.0 cannot import in such a directory
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
        tier, *errors = python("-c", code, cwd=tmp_path / "gone", check=True).stdout.splitlines()
        assert tier == "default"
        assert len(errors) == 3
        assert all("is relative, and the working directory was deleted" in error for error in errors)


class TestKindsOfValues:
    @pytest.mark.parametrize(
        "size", [4096.0, 4096 + 0j, *(kind(4096) for kind in (int, np.int32, np.float32, np.array, Decimal, Fraction))]
    )
    def test_whole_numbers_of_every_kind_are_one_size(self, store, size):
        default_dispatcher.clear()
        kernel = get_best_kernel(store.path, n=size, device="h200")
        assert kernel.problem.sizes == {"n": 4096}
        assert type(kernel.problem.sizes["n"]) is int
        for again in (4096, size):
            assert kernel is get_best_kernel(store.path, n=again, device="h200")

    @pytest.mark.parametrize("dtype", ["float32", np.dtype("float32"), np.float32, "f4", "<f4", "single", "torch"])
    def test_what_numpy_takes_for_a_dtype_and_one_of_torch(self, store, dtype):
        dtype = pytest.importorskip("torch").float32 if dtype == "torch" else dtype
        kernel = get_best_kernel(store.path, n=4096, dtype=dtype, device="h200")
        assert kernel.problem.dtype == "float32"
        assert kernel is get_best_kernel(store.path, n=4096, dtype="float32", device="h200")


class TestMemory:
    def test_the_cache_is_bounded_and_keeps_what_is_used(self):
        cache: RecentCache[int, list[int]] = RecentCache(100)
        used = cache.keep(-1, [-1])
        for number in range(1000):
            cache.keep(number, [number])
            assert (cache.get(-1) or cache.recall(-1)) is used
            assert len(cache) + len(cache._older) <= 100
        assert cache.recall(0) is None
        assert cache.recall(999) == [999]
        assert cache.keep(999, []) == [999]  # an entry is not replaced
        cache.clear()
        assert cache.recall(999) is None

    @pytest.mark.usefixtures("live_gpu")
    def test_the_counter_of_misses_is_bounded(self, store, monkeypatch):
        monkeypatch.setattr(miss_counter, "_MAX_WATCHED", 8)
        store.put(2048, BEST)
        kernels = [get_best_kernel(store.path, n=n) for n in range(4096, 4126)]
        assert len(default_dispatcher.misses.kernels) <= 8
        kernels[0].calls = 7
        kernels[0]._report_calls()
        assert kernels[0] in default_dispatcher.misses.kernels
        assert {n: count for n, _, _, count in misses()} == {4096: 7, **dict.fromkeys(range(4097, 4126), 1)}


def _describe(kernel: BoundKernel) -> tuple[str, str, dict[str, Any]]:
    return str(kernel.problem), kernel.tier, dict(kernel.config)


class TestPickling:
    def test_the_same_process_gets_the_same_kernel_and_a_relative_request_is_resolved(self, in_second, monkeypatch):
        kernel = get_best_kernel("./scale.toml", n=4096, device="h200", database="mine.db")
        pickled = pickle.dumps(kernel)
        assert pickle.loads(pickled) is kernel
        assert copy.deepcopy(kernel) is kernel
        monkeypatch.chdir(in_second[0])
        default_dispatcher.clear()
        kernel = pickle.loads(pickled)
        assert (kernel.tier, kernel.definition.template_path) == ("exact", in_second[1] / "scale.cu")

    def test_another_process_serves_it_anew_from_the_database_of_the_dispatcher(self, store, tmp_path):
        store.put(4096, BEST)
        os.rename(read_settings().database, tmp_path / "team.db")  # noqa: PTH104
        team = Dispatcher(database=tmp_path / "team.db")
        kernel = team.get_best_kernel(store.path, n=4096, device="h200", dtype=np.float32)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(_describe, (kernel,)) == _describe(kernel) == ("scale n=4096 float32", "exact", BEST)


PROGRAM = f"""{ON_AN_H200}
kernel = serving.get_best_kernel(sys.argv[1], n=4096)
assert kernel.tier == sys.argv[2], kernel.tier
"""


def test_a_first_look_up_of_a_result_of_the_problem_needs_few_modules(store):
    """As on a machine with an H200."""
    store.put(4096, BEST)
    found = needed(PROGRAM, str(store.path), "exact", ceiling=33)
    assert {"autotile.serving.bound", "autotile.serving.selection", "autotile.database.keys"} <= found
    later = ("exchange.shipped", "serving.launching", "serving.operations", "serving.pinning")
    assert found.isdisjoint(f"autotile.{name}" for name in later)
    Path(str(read_settings().database)).unlink()
    store.put(8192, BEST)
    comparison = "autotile.families.preference"
    assert comparison not in found
    assert comparison in imported(PROGRAM, words=[str(store.path), "nearest"])[0]

"""`get_best_kernel`: look-ups, devices by name, bad databases, misses, threads."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotile.core.device import device_profile
from autotile.core.model import Resources
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.errors import ArgumentError, DatabaseError, InputError, NotTunedError, ToolchainError
from autotile.serving import dispatcher as serving
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import Dispatcher, default_dispatcher, get_best_kernel
from autotile.settings import read_settings

BEST = {"THREADS": 256, "WORK": 4}


def misses() -> list[tuple[int, str, str, int]]:
    default_dispatcher.misses.flush()
    with Database.open(read_settings().database) as database:
        return [(m.problem.sizes["n"], m.gpu_name, m.tier, m.count) for m in database.misses()]


class TestLookUp:
    def test_a_second_call_reads_nothing(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        kernel = store.ask(4096)
        monkeypatch.setattr(serving, "load_kernel", lambda _: pytest.fail("read again"))
        assert get_best_kernel(str(store.path), n=4096, device="h200") is kernel

    @pytest.mark.usefixtures("uncounted_devices")
    def test_the_only_device_is_the_same_named_or_not(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also in the first call of a process, which counts the devices."""
        monkeypatch.setattr(serving, "device_count", lambda: 1)
        runtime = SimpleNamespace(getDevice=lambda: 0)
        monkeypatch.setattr(serving, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        monkeypatch.setattr(serving, "live_device", lambda _: replace(device_profile("h200"), source="cuda"))
        store.put(4096, BEST)
        kernels = [get_best_kernel(str(store.path), n=4096, device=device) for device in (None, None, 0)]
        assert len(set(map(id, kernels))) == 1

    @pytest.mark.usefixtures("live_gpu")
    def test_dispatchers_share_nothing(self, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_whatever_was_asked_otherwise_is_another(self, store: Any, tmp_path: Path) -> None:
        ask = {"name": str(store.path), "n": 4096, "device": "h200"}
        kernels = [
            get_best_kernel(**{**ask, **change})
            for change in ({}, {"n": 8192}, {"device": "a100"}, {"dtype": "float32"}, {"database": str(tmp_path / "x")})
        ]
        assert len(set(map(id, kernels))) == 5

    def test_kernel_and_database_may_be_paths(self, store: Any) -> None:
        store.put(4096, BEST)
        database = Path(read_settings().database)
        kernel = get_best_kernel(store.path, n=4096, device="h200", database=database)
        assert (kernel.tier, kernel.config) == ("exact", BEST)
        assert get_best_kernel(store.path, n=4096, device="h200", database=database, strict=True) is kernel
        with pytest.raises(NotTunedError, match="sizes: tuned n=4096, requested n=8192"):
            get_best_kernel(store.path, n=8192, device="h200", database=database, strict=True)

    def test_forgetting_sees_new_results(self, store: Any) -> None:
        assert get_best_kernel(str(store.path), n=4096, device="h200").tier == "default"
        store.put(4096, BEST)
        assert get_best_kernel(str(store.path), n=4096, device="h200").tier == "default"
        serving.forget_served()
        assert get_best_kernel(str(store.path), n=4096, device="h200").tier == "exact"

    @pytest.mark.usefixtures("live_gpu")
    def test_threads_that_ask_together_are_served_the_same(self, store: Any) -> None:
        store.put(8192, BEST)
        barrier = threading.Barrier(8)

        def ask(_: int) -> BoundKernel:
            barrier.wait()
            return get_best_kernel(str(store.path), n=4096)

        with ThreadPoolExecutor(8) as threads:
            kernels = list(threads.map(ask, range(8)))
        assert len(set(map(id, kernels))) == 1
        assert misses() == [(4096, "NVIDIA H200", "nearest", 1)]


class TestInput:
    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            ({}, "needs the size n"),
            ({"n": 0}, "expected 1 to"),
            ({"n": 4096.5}, "expected a whole number"),
            ({"n": "4096"}, "expected a whole number"),
            ({"n": 1, "m": 2}, "has no size 'm'"),
            ({"n": 1, "dtype": "float64"}, "does not support dtype 'float64'"),
        ],
    )
    def test_bad_problems(self, store: Any, sizes: dict[str, Any], said: str) -> None:
        with pytest.raises(InputError, match=said):
            get_best_kernel(str(store.path), device="h200", **sizes)

    def test_an_unknown_kernel(self) -> None:
        with pytest.raises(InputError, match=r"did you mean .*sgemm_2d"):
            get_best_kernel("sgemm_3d", device="h200", n=1)

    def test_an_unknown_device(self, store: Any) -> None:
        with pytest.raises(InputError, match="no GPU profile is named 'voodoo'"):
            store.ask(4096, device="voodoo")


class TestDevices:
    def test_any_spelling_of_a_profile(self, store: Any) -> None:
        store.put(4096, BEST)
        for name in ("h200", "H200", "NVIDIA H200", "nvidia h200"):
            assert store.ask(4096, device=name).tier == "exact"

    def test_a_device_that_only_the_database_knows(self, store: Any) -> None:
        device = replace(device_profile("h200"), name="NVIDIA GH200 480GB", source="cuda")
        store.put(4096, BEST, device=device)
        kernel = store.ask(4096, device="NVIDIA GH200 480GB")
        assert (kernel.tier, kernel.device) == ("exact", device)

    @pytest.mark.usefixtures("no_gpu")
    def test_without_a_gpu_the_one_that_was_tuned_last(self, store: Any) -> None:
        assert store.ask(4096, device=None).device.name == "NVIDIA H200"
        store.put(4096, BEST, device=replace(device_profile("rtx-4090"), source="cuda"))
        kernel = store.ask(4096, device=None)
        assert (kernel.device.name, kernel.tier) == ("NVIDIA GeForce RTX 4090", "exact")

    @pytest.mark.usefixtures("no_gpu")
    @pytest.mark.parametrize("device", [None, "h200"])
    @pytest.mark.parametrize("source", ["cuda", "replayed"])
    def test_it_cannot_be_launched_there(self, store: Any, device: str | None, source: Any) -> None:
        """Not even if the result was measured on a real device of another machine."""
        store.put(4096, BEST, device=replace(device_profile("h200"), source=source))
        kernel = store.ask(4096, device=device)
        with pytest.raises(ToolchainError, match="for NVIDIA H200, not for a CUDA device of this machine"):
            kernel(np.zeros(4096, np.float32))


class TestDatabases:
    """Serving never fails because of a database."""

    def test_missing(self, store: Any, tmp_path: Path) -> None:
        assert store.ask(4096, database=str(tmp_path / "nowhere" / "tuning.db")).tier == "default"
        assert not (tmp_path / "nowhere").exists()
        assert store.ask(4096).tier == "default"
        assert not Path(read_settings().database).exists()

    @pytest.mark.parametrize(
        "content", [b"", b"no database at all, but quite some text" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
    )
    def test_no_database(self, store: Any, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "bad.db"
        path.write_bytes(content)
        served = store.ask(4096, database=str(path))
        assert served.tier == "default"
        assert ("Your own results could not be read" in served.explain()) == bool(content)
        assert path.read_bytes() == content

    def test_a_folder(self, store: Any, tmp_path: Path) -> None:
        served = store.ask(4096, database=str(tmp_path))
        assert served.tier == "default"
        assert f"Your own results could not be read: {tmp_path} is a folder" in served.explain()

    def test_an_unknown_kind(self, store: Any) -> None:
        assert store.ask(4096, database="mysql://host/name").tier == "default"

    def test_damaged_behind_its_first_pages(self, store: Any) -> None:
        store.put(4096, BEST)
        path = Path(read_settings().database)
        with Database.open(path) as database:  # everything in the one file
            assert check_database(database).ok
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xa5" * (len(data) - 4096)
        path.write_bytes(data)
        assert store.ask(4096).tier == "default"

    @pytest.mark.usefixtures("live_gpu")
    def test_an_exact_result_is_read_without_the_others(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        with monkeypatch.context() as patch:
            patch.delattr("autotile.serving.selection.WINNERS")
            assert (store.ask(4096, device=None).tier, store.ask(4096, device=None).config) == ("exact", BEST)
        assert store.ask(8192, device=None).tier == "nearest"

    def test_one_that_fails_only_when_it_is_read(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise DatabaseError("the disk refused")

        store.put(4096, BEST)
        monkeypatch.setattr("autotile.serving.selection.read_file", lambda *_, **__: None)
        monkeypatch.setattr(Database, "reading", fail)
        assert store.ask(4096).tier == "default"

    @pytest.mark.usefixtures("live_gpu")
    def test_one_that_cannot_be_written(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise DatabaseError("read-only")

        store.put(4096, BEST)
        monkeypatch.setattr(Database, "add_misses", fail)
        assert store.ask(8192, device=None).tier == "nearest"
        monkeypatch.setattr(Database, "open", fail)
        assert store.ask(8192, device=None).tier == "nearest"

    def test_another_one_by_name(self, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("AUTOTILE_DB", str(tmp_path / "team.db"))
            store.put(4096, BEST)
        assert store.ask(4096).tier == "default"
        assert store.ask(4096, database=str(tmp_path / "team.db")).tier == "exact"


class TestStrict:
    """Strict serving raises instead of serving a fallback, with the fields of the key that differ."""

    def test_what_is_exact_is_served(self, store: Any) -> None:
        store.put(4096, BEST)
        assert store.ask(4096, strict=True).tier == "exact"

    @pytest.mark.parametrize(
        ("changes", "fields"),
        [
            ({"n": 8192}, {"sizes"}),
            ({"n": 4096, "nvrtc_version": "12.0"}, {"nvrtc_version"}),
            ({"n": 4096, "l2_mode": "hot"}, {"l2_mode"}),
            ({"n": 4096, "template_hash": "0" * 64}, {"template_hash"}),
            ({"n": 64, "space_hash": "0" * 64, "options": ("--use_fast_math",)}, {"sizes", "space_hash", "options"}),
        ],
    )
    def test_every_field_that_differs_is_named(self, store: Any, changes: dict[str, Any], fields: set[str]) -> None:
        store.put(config=BEST, **changes)
        with pytest.raises(NotTunedError) as caught:
            store.ask(4096, strict=True)
        assert {name for name, _, _ in caught.value.differences} == fields
        assert all(name in str(caught.value) for name in fields)

    def test_another_gpu(self, store: Any) -> None:
        store.put(4096, BEST, device=replace(device_profile("a100"), source="cuda"))
        with pytest.raises(
            NotTunedError, match="gpu_name: tuned NVIDIA A100-SXM4-80GB, requested NVIDIA H200"
        ) as caught:
            store.ask(4096, strict=True)
        assert {"gpu_name", "compute_capability", "sm_count"} <= {name for name, _, _ in caught.value.differences}

    def test_nothing_is_tuned(self, store: Any) -> None:
        with pytest.raises(NotTunedError, match="nothing is tuned for scale; run `autotile tune`") as caught:
            store.ask(4096, strict=True)
        assert caught.value.differences == ()

    def test_what_was_tuned_for_it_does_not_fit(self, store: Any) -> None:
        store.put(64, BEST)  # a block of 1024 elements
        with pytest.raises(NotTunedError, match="breaks a rule or a limit here"):
            store.ask(64, strict=True)

    def test_an_object_that_was_served_before_is_refused_too(self, store: Any) -> None:
        store.put(4096, BEST)
        assert get_best_kernel(str(store.path), n=8192, device="h200").tier == "nearest"
        with pytest.raises(NotTunedError):
            get_best_kernel(str(store.path), n=8192, device="h200", strict=True)


class TestAge:
    def test_another_driver_is_told_and_served(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(default_dispatcher, "current_device", lambda: 0)
        now = replace(device_profile("h200"), source="cuda", driver="13.0")
        monkeypatch.setattr(serving, "live_device", lambda _: now)
        store.put(4096, BEST, device=replace(now, driver="12.4"))
        kernel = store.ask(4096, device=None)
        assert (kernel.tier, kernel.choice.aged) == ("exact", ("driver 12.4, now 13.0",))
        assert "It has aged (driver 12.4, now 13.0); `autotile verify scale` measures it again." in kernel.explain()
        assert kernel.to_json()["aged"] == ["driver 12.4, now 13.0"]
        store.put(4096, BEST, device=now, driver="13.0")
        assert store.ask(4096, device=None).choice.aged == ()

    def test_a_device_that_is_only_known_has_no_age(self, store: Any) -> None:
        store.put(4096, BEST)
        assert store.ask(4096).choice.aged == ()


@pytest.mark.usefixtures("live_gpu")
class TestMisses:
    @pytest.mark.parametrize("device", [None, 0])
    def test_what_is_not_exact_is_counted_once_a_process(self, store: Any, device: int | None) -> None:
        store.put(4096, BEST)
        store.ask(8192, device)
        get_best_kernel(str(store.path), n=8192, device=device)
        store.ask(500, device)
        assert sorted(misses()) == [(500, "NVIDIA H200", "default", 1), (8192, "NVIDIA H200", "nearest", 1)]

    def test_an_exact_hit_is_not(self, store: Any) -> None:
        store.put(4096, BEST)
        assert store.ask(4096, device=None).tier == "exact"
        assert misses() == []

    def test_what_can_only_be_looked_at_is_not(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put(4096, BEST)
        assert store.ask(8192, device="h200").tier == "nearest"
        monkeypatch.setattr(default_dispatcher, "current_device", lambda: None)
        assert store.ask(8192, device=None).tier == "nearest"
        assert misses() == []

    def test_a_look_is_neither_counted_nor_remembered(self, store: Any) -> None:
        store.put(4096, BEST)
        looked = serving.find_best_kernel(str(store.path), None, None, read_settings().database, {"n": 8192})
        assert (looked.tier, looked.device.source) == ("nearest", "cuda")
        assert misses() == []
        assert get_best_kernel(str(store.path), n=8192) is not looked


class TestDocument:
    def test_of_an_exact_hit(self, store: Any) -> None:
        store.put(4096, BEST)
        kernel = store.ask(4096)
        document = json.loads(json.dumps(kernel.to_json()))
        assert document == {
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
            "explain": kernel.explain(),
        }

    def test_of_the_default(self, store: Any) -> None:
        document = store.ask(4096).to_json()
        assert (document["tier"], document["time_us"], document["tuned_at"]) == ("default", None, None)
        assert document["resources"]["registers"] > 0  # compiled now

    def test_differences(self, store: Any) -> None:
        store.put(4096, BEST)
        assert store.ask(8192).to_json()["differences"] == [["sizes", "n=4096", "n=8192"]]

    def test_resources_of_another_gpu_are_not_passed_off(self, store: Any) -> None:
        """The number of registers depends on the compiler target."""
        store.put(
            4096, BEST, device=replace(device_profile("a100"), source="cuda"), resources=Resources(99, 0, 0, 0, 0)
        )
        kernel = store.ask(4096)
        assert kernel.tier == "transferred"
        assert kernel.resources.registers != 99
        assert kernel.occupancy.blocks_per_sm == 8

    def test_without_a_compiler_resources_are_unknown(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(*_: Any) -> None:
            raise ToolchainError("no NVRTC")

        monkeypatch.setattr("autotile.cuda.compiler.compile_job", missing)
        kernel = store.ask(4096)
        assert (kernel.resources, kernel.occupancy, kernel.to_json()["resources"]) == (None, None, None)

    def test_how_it_prints(self, store: Any) -> None:
        store.put(4096, BEST)
        assert repr(store.ask(4096)) == "<BoundKernel scale n=4096 float32 on NVIDIA H200: exact, THREADS=256 WORK=4>"

    def test_geometry(self, store: Any) -> None:
        store.put(4096, BEST)
        geometry = store.ask(4096).geometry
        assert (geometry.grid, geometry.block, geometry.dynamic_smem_bytes) == ((4, 1, 1), (256, 1, 1), 0)


class TestScalars:
    def test_a_size_that_its_scalar_cannot_hold(self, store: Any) -> None:
        text = store.path.read_text().replace('n = { scalar = "int32"', 'n = { scalar = "int16"')
        store.path.write_text(text)
        assert store.ask(32767).tier == "default"
        with pytest.raises(ArgumentError, match="scalar n is 32768, which does not fit in int16"):
            store.ask(32768)

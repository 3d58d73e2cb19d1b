"""Files with altered entries are read, or refused as a `DataError`; what is read can be used."""

from __future__ import annotations

import hashlib
import json
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import altered, as_json
from stored_rows import DEVICE, KERNEL, SIZES, make_database

from autotile.api.results import RecordingList
from autotile.core.documents import encode_json
from autotile.core.model import Resources
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.winners import Winner
from autotile.errors import BundleError, DataError, InputError, RecordingError
from autotile.exchange.bundle import MANIFEST, Bundle, BundledCubin, BundledKernel, cubin_member, write_bundle
from autotile.exchange.kernel_tuner import import_into_database, import_into_recording, read_cache
from autotile.exchange.recording import list_recordings, read_recording
from autotile.exchange.shipped import read_rules, read_winners, write_winners
from autotile.kernel.library import load_kernel
from autotile.serving.selection import choose_bundled
from autotile.settings import data_folder, read_settings

SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("altered")


@pytest.fixture(scope="module")
def winners(folder: Path) -> list[Winner]:
    with Database.open(make_database(folder / "stored.db")) as database:
        return [best.winner for best in database.best()]


def alter_text(source: Path, target: Path, seed: int) -> Path:
    target.write_text(as_json(altered(json.loads(source.read_text()), Random(seed))))
    return target


def test_winners(folder: Path, winners: list[Winner]) -> None:
    source = folder / "winners.json"
    write_winners(source, [replace(winner, device=DEVICE) for winner in winners])

    @FEW
    @given(seed=SEEDS)
    def read(seed: int) -> None:
        with suppress(DataError, InputError):
            encode_json([winner.to_json() for winner in read_winners(alter_text(source, folder / "w.json", seed))])

    assert read_winners(source)
    read()


def test_rules(folder: Path) -> None:
    source = next((data_folder("tuned") / "families").glob("*.json"))
    spec = load_kernel(source.stem.partition(".")[2]).spec

    @FEW
    @given(seed=SEEDS)
    def read(seed: int) -> None:
        read_rules.cache_clear()
        with suppress(DataError):
            for stored in read_rules(alter_text(source, folder / "r.json", seed)):
                assert list(stored.rule.lines())
                if stored.rule.family.extents.keys() == spec.sizes.keys():
                    stored.rule.nearest_point(0, stored.rule.family.largest)

    read()


def test_bundles(folder: Path, winners: list[Winner]) -> None:
    kernel = load_kernel(KERNEL)
    image = b"a cubin"
    config = dict(winners[0].config)
    cubin = BundledCubin("sm_90", "float32", {}, config, Resources(64, 0, 0, 0, 8192), cubin_member(image))
    source = folder / "source.bundle"
    write_bundle(source, [BundledKernel(kernel, "13.0", winners, [cubin])], {cubin.member: image}, "0.1.0")
    problem = replace(winners[0].key.problem, sizes=SIZES)

    def use(path: Path) -> None:
        bundle = Bundle(path)
        for name in bundle.kernels:
            choose_bundled(bundle, bundle.kernel(name), problem, DEVICE)

    @FEW
    @given(seed=SEEDS)
    def read(seed: int) -> None:
        with suppress(BundleError):
            use(_forged(source, folder / "forged.bundle", Random(seed)))

    use(source)
    read()


def _forged(source: Path, target: Path, random: Random) -> Path:
    """Alter a document of a bundle, or its manifest, and correct the hashes."""
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members.pop(MANIFEST))
    if random.random() < 0.7:
        name = next(name for name in members if name.endswith(".json"))
        members[name] = as_json(altered(json.loads(members[name]), random)).encode()
        manifest["members"][name] = {"bytes": len(members[name]), "sha256": hashlib.sha256(members[name]).hexdigest()}
    else:
        manifest = altered(manifest, random)
    if isinstance(manifest, dict):
        stated = {name: entry for name, entry in manifest.items() if name != "digest"}
        text = json.dumps(stated, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        manifest["digest"] = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(MANIFEST, as_json(manifest))
        for name, data in members.items():
            archive.writestr(name, data)
    return target


def test_recordings(folder: Path) -> None:
    source = next(data_folder("recordings").glob("*sgemm_2d*.npz"), None) or next(
        data_folder("recordings").glob("*.npz")
    )
    with np.load(source) as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    stored = {name: column if name == "header" else column[:40] for name, column in stored.items()}
    header = json.loads(stored["header"].tobytes())
    one = folder / "recordings"
    one.mkdir()

    @FEW
    @given(seed=SEEDS)
    def read(seed: int) -> None:
        random, changed = Random(seed), dict(stored)
        if random.random() < 0.6:
            text = as_json(altered(header, random)).encode()
            changed["header"] = np.frombuffer(text, np.uint8)
        else:
            name = random.choice([name for name in stored if name != "header"])
            column = changed[name] = stored[name].copy()
            extremes = (np.nan, np.inf, -1.0, 1e30) if column.dtype.kind == "f" else (0, np.iinfo(column.dtype).max)
            column.flat[random.randrange(column.size)] = random.choice(extremes)
        np.savez(one / "altered.npz", allow_pickle=False, **changed)  # type: ignore[arg-type]
        encode_json(RecordingList(tuple(list_recordings([one]))).to_json())
        with suppress(RecordingError):
            recording = read_recording(one / "altered.npz")
            for row in range(len(recording)):
                result = recording.result(row)
                json.dumps([recording.config(row), result.occupancy, result.seconds], allow_nan=False)
                assert result.measurement is None or 0 < result.measurement.time_us < float("inf")

    read()


def test_caches_of_kernel_tuner(folder: Path) -> None:
    entry = {"BM": 32, "FAST": True, "time": 0.5, "times": [0.4, 0.5], "compile_time": 3.0, "GFLOP/s": 12.5}
    failed = {"BM": 64, "FAST": False, "time": "RuntimeFailedConfig"}
    source = folder / "cache-source.json"
    document = {
        "device_name": "NVIDIA H200",
        "kernel_name": "add",
        "problem_size": [4096, 2],
        "tune_params_keys": ["BM", "FAST"],
        "tune_params": {"BM": [32, 64], "FAST": [True, False]},
        "cache": {"32,True": entry, "64,False": failed},
    }
    source.write_text(json.dumps(document))

    def use(path: Path) -> int:
        cache = read_cache(path)
        key = cache.key({"N": 4096})
        import_into_recording(folder / "imported.npz", cache, key)
        read_recording(folder / "imported.npz")
        (folder / "imported.db").unlink(missing_ok=True)
        with Database.open(folder / "imported.db") as database:
            import_into_database(database, cache, key)
            assert check_database(database).bad_rows == ()
            return len(database.trials(1))

    @FEW
    @given(seed=SEEDS)
    def read(seed: int) -> None:
        with suppress(DataError):
            use(alter_text(source, folder / "cache.json", seed))

    assert use(source) == 2
    read()


@pytest.mark.parametrize(
    "text",
    ["database = 1", "cache_limit_mib = -1", "cache_limit_mib = 0", f"cache_limit_mib = {2**70}", "graphs = true"],
)
def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "autotile").mkdir()
    (tmp_path / "autotile" / "config.toml").write_text(text)
    with pytest.raises(InputError):
        read_settings()

"""Altered and hostile files are read, or refused as a `DataError`, and neither block nor exhaust the memory."""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import little_memory
from msgspec import structs
from mutations import altered, as_json
from stored_rows import DEVICE, KERNEL, SIZES, make_database

from autotile.api.results import RecordingList
from autotile.core.documents import canonical_json, encode_json, to_document
from autotile.core.model import Resources
from autotile.database.care import check_database
from autotile.database.database import Database
from autotile.database.paths import check_readable
from autotile.database.winners import StoredRule
from autotile.errors import BundleError, DataError, InputError, RecordingError
from autotile.exchange import bundle as bundles
from autotile.exchange.bundle import MANIFEST, Bundle, manifest_digest, write_bundle
from autotile.exchange.kernel_tuner import import_into_database, import_into_recording, read_results
from autotile.exchange.recording import list_recordings, read_recording, read_recording_header
from autotile.exchange.shipped import read_rules, read_winners, write_winners
from autotile.kernel.library import load_kernel
from autotile.serving.selection import choose_bundled
from autotile.settings import data_folder, read_settings

pytestmark = pytest.mark.usefixtures("little_time")


def with_many_seeds(read: Callable[[int], None]) -> None:
    """Call a function that alters a file at random and reads it."""
    checked = settings(max_examples=60, suppress_health_check=list(HealthCheck))
    checked(given(seed=st.integers(0, 2**32))(read))()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("altered")


@pytest.fixture(scope="module")
def winners(folder):
    with Database.open(make_database(folder / "stored.db")) as database:
        return [best.winner for best in database.best()]


def alter_text(source: Path, target: Path, seed: int) -> Path:
    target.write_text(as_json(altered(json.loads(source.read_text()), Random(seed))))
    return target


@pytest.mark.parametrize("read", [read_winners, read_rules])
def test_winners_and_rules(folder, winners, read):
    source = folder / f"{read.__name__}.json"
    if read is read_winners:
        write_winners(source, [structs.replace(winner, device=DEVICE) for winner in winners])
    else:
        source = next((data_folder("tuned") / "families").glob("*.json"))

    def read_altered(seed: int) -> None:
        read_rules.cache_clear()
        with suppress(DataError):
            for one in read(alter_text(source, folder / "altered.json", seed)):
                encode_json(one.to_json())
                if isinstance(one, StoredRule):
                    assert list(one.rule.lines())
                    one.rule.nearest_point(0, one.rule.points[0].sizes)

    assert read(source)
    with_many_seeds(read_altered)


def test_bundles(folder, winners):
    kernel = load_kernel(KERNEL)
    image = b"a cubin"
    config = dict(winners[0].config)
    cubin = bundles.BundledCubin(
        "sm_90", "float32", {}, config, Resources(64, 0, 0, 0, 8192), bundles.cubin_member(image)
    )
    source = folder / "source.bundle"
    write_bundle(source, [bundles.BundledKernel(kernel, "13.0", winners, [cubin])], {cubin.member: image}, "0.1.0")
    problem = replace(winners[0].key.problem, sizes=SIZES)

    def use(path: Path) -> None:
        bundle = Bundle(path)
        for name in bundle.kernels:
            choose_bundled(bundle, bundle.kernel(name), problem, DEVICE)

    def read(seed: int) -> None:
        with suppress(BundleError):
            use(_forged(source, folder / "forged.bundle", Random(seed)))

    use(source)
    with_many_seeds(read)


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


def test_recordings(folder):
    source = next(data_folder("recordings").glob("*sgemm_2d*.npz"))
    with np.load(source) as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    stored = {name: column if name == "header" else column[:40] for name, column in stored.items()}
    header = json.loads(stored["header"].tobytes())
    one = folder / "recordings"
    one.mkdir()

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
                result = recording.trial(row)
                json.dumps(to_document([result.config, result.occupancy, result.seconds]), allow_nan=False)
                assert result.measurement is None or 0 < result.measurement.time_us < float("inf")

    with_many_seeds(read)


def test_caches_of_kernel_tuner(folder):
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
        cache = read_results(path)
        key = cache.key({"N": 4096, "M": 2})
        import_into_recording(folder / "imported.npz", cache, key)
        read_recording(folder / "imported.npz")
        (folder / "imported.db").unlink(missing_ok=True)
        with Database.open(folder / "imported.db") as database:
            import_into_database(database, cache, key)
            assert check_database(database).bad_rows == ()
            return len(database.trials(1))

    def read(seed: int) -> None:
        with suppress(DataError):
            use(alter_text(source, folder / "cache.json", seed))

    assert use(source) == 2
    with_many_seeds(read)


MIB = 2**20


# --- what is no regular file

READERS: dict[str, Callable[[Path], object]] = {
    "search-space file": lambda path: load_kernel(str(path)),
    "recording": read_recording,
    "header of a recording": read_recording_header,
    "bundle": Bundle,
    "cache of Kernel Tuner": read_results,
    "winners": read_winners,
    "rules": read_rules,
    "database": Database.open,
    "check of a database": check_readable,
}


SPECIAL: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("what", READERS)
def test_a_pipe_or_device_is_refused_at_once(tmp_path, what, kind):
    path = tmp_path / "given.toml"
    SPECIAL[kind](path)
    with little_memory(50 * MIB), pytest.raises(InputError) as caught:
        READERS[what](path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_template_and_an_included_file(scale_toml, kind):
    template = scale_toml.with_suffix(".cu")
    template.write_text('#include "own.h"\n' + template.read_text())
    SPECIAL[kind](template.with_name("own.h"))
    with pytest.raises(InputError, match=r"scale\.cu:1: 'own\.h' is a pipe, a device or another special file"):
        load_kernel(str(scale_toml))
    template.unlink()
    SPECIAL[kind](template)
    with pytest.raises(InputError, match="there is no template"):
        load_kernel(str(scale_toml))


def test_config_toml(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "autotile").mkdir()
    path = tmp_path / "autotile" / "config.toml"
    refused = r"config\.toml: it is a .*, expected a regular file; correct it or delete it"
    for make in SPECIAL.values():
        make(path)
        with pytest.raises(InputError, match=refused):
            read_settings()
        path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"config\.toml: Is a directory"):
        read_settings()
    path.rmdir()
    path.write_text("# " * 2**16)
    with pytest.raises(InputError, match="it has more than 65,536 bytes"):
        read_settings()


# --- archives that unpack to much more than they are


def write_zip(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def declare_size(path: Path, size: int, declared: int, members: int = 1) -> None:
    """Replace the decompressed size of members in their own headers and in the directory."""
    old, new = size.to_bytes(4, "little"), declared.to_bytes(4, "little")
    data = path.read_bytes()
    assert data.count(old) == 2 * members
    path.write_bytes(data.replace(old, new))


def manifest_of(members: dict[str, bytes]) -> bytes:
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()}
    manifest = {"format": bundles.BUNDLE_FORMAT, "autotile": "1", "kernels": ["k"], "members": entries}
    return canonical_json({**manifest, "digest": manifest_digest(manifest)}).encode()


class TestBundles:
    def test_many_members_of_zeros(self, tmp_path):
        """They unpack to half a gigabyte, each within its bound."""
        path = tmp_path / "b"
        write_zip(path, {MANIFEST: manifest_of({})} | dict.fromkeys(map(str, range(33)), bytes(12_345)))
        declare_size(path, 12_345, 16 * MIB, members=33)
        with little_memory(10 * MIB), pytest.raises(BundleError, match=r"it declares 553,648,.* bytes, but at most"):
            Bundle(path)

    @pytest.mark.parametrize("member", [MANIFEST, "kernels/k.json", "cubins/c"])
    def test_one_member_of_zeros(self, tmp_path, member):
        path = tmp_path / "b"
        write_zip(path, {MANIFEST: manifest_of({member: bytes(65 * MIB)}), member: bytes(12_345)})
        declare_size(path, 12_345, 65 * MIB)
        with little_memory(10 * MIB), pytest.raises(BundleError, match=f"{member} is longer than expected"):
            Bundle(path).read(member)

    def test_what_would_not_be_read_is_not_written(self, tmp_path, monkeypatch):
        path = tmp_path / "b"
        write_bundle(path, [], {"cubins/a": bytes(500), "cubins/b": bytes(500)}, "1")
        before = path.read_bytes()
        for name, limit, problem in (
            ("MAX_BYTES", 999, r"it would have 1,\d+ bytes, at most 999"),
            ("_MAX_MEMBER_BYTES", 499, r"its member cubins/. would have 500 bytes, at most 499"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(bundles, name, limit)
                with pytest.raises(BundleError, match=problem):
                    write_bundle(path, [], {"cubins/a": bytes(500), "cubins/b": bytes(500)}, "2")
        assert path.read_bytes() == before
        assert json.loads(zipfile.ZipFile(path).read(MANIFEST))["autotile"] == "1"


def an_array(size: int) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.zeros(size, np.uint8))
    return content.getvalue()


ARCHIVES: dict[str, tuple[str, Callable[[int], bytes], Callable[[Path], object], type[InputError], str]] = {
    "bundle": (MANIFEST, bytes, Bundle, BundleError, "damaged, changed or not a bundle"),
    "recording": ("header.npy", an_array, read_recording, RecordingError, "'header' cannot be read"),
}
"""The member of each kind of archive that is read first, its content of a size, its reader, and what that raises."""


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize(
    ("compression", "declared"),
    [(zipfile.ZIP_DEFLATED, 1), (zipfile.ZIP_DEFLATED, 10_000), (zipfile.ZIP_BZIP2, 1000), (zipfile.ZIP_LZMA, 1000)],
)
def test_a_member_that_declares_less_than_it_unpacks_to(tmp_path, kind, compression, declared):
    name, content_of, reader, error, message = ARCHIVES[kind]
    content = content_of(20 * MIB + 12_345)
    write_zip(tmp_path / "file", {name: content}, compression)
    declare_size(tmp_path / "file", len(content), declared)
    if compression != zipfile.ZIP_DEFLATED:  # one without a bound is not unpacked at all
        message = "a compression other than deflate"
    with little_memory(10 * MIB), pytest.raises(error, match=message):
        reader(tmp_path / "file")

"""Bundles: written, served without a compiler or a database, and refused if damaged."""

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from child_python import python
from feature_kernels import copy_kernel
from made_models import rule_of
from msgspec import structs
from stored_runs import FAST, SLOW, Book

from autotile.api import exchange
from autotile.cli.derivation import read_selections
from autotile.core.device import device_profile
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.learned import FamilyState, save_family_state, save_rule
from autotile.database.winners import StoredRule
from autotile.errors import BundleError, InputError, NotTunedError
from autotile.exchange import bundle as bundles
from autotile.exchange import shipped as shipped_file
from autotile.exchange.bundle import MANIFEST, Bundle
from autotile.exchange.shipped import write_rules
from autotile.families.family import Extent, Family, Split
from autotile.families.features import Feature
from autotile.kernel.problem import runs_on
from autotile.serving import dispatcher as serving
from autotile.serving.dispatcher import Dispatcher, get_best_kernel
from autotile.settings import read_settings

_made: list[bytes] = []
"""The bundle of the first test, of which the others get a copy."""


@pytest.fixture
def bundle(store, tmp_path):
    """A bundle of two problems that were tuned on an H200."""
    store.put(4096, FAST)
    store.put(65536, SLOW, time_us=20.0)
    path = tmp_path / "app.autotile"
    if not _made:
        exchange.bundle(store.path, output=path)
        _made.append(path.read_bytes())
    path.write_bytes(_made[0])
    return path


def ask(bundle: Path, n: int, device: str = "h200", **named: Any) -> Any:
    serving.forget_served()
    return get_best_kernel("scale", n=n, device=device, bundle=bundle, **named)


Change = Callable[[dict[str, bytes]], object]
"""A change of the members of an archive."""


def rewrite(path: Path, change: Change) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def edit(members: dict[str, bytes], name: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(members[name])
    change(document)
    members[name] = json.dumps(document).encode()


def spaced(name: str) -> Change:
    return lambda members: members.update({name: members[name] + b" "})


def as_long(name: str) -> Change:
    return lambda members: members.update({name: members[name].swapcase()})


def replaced(text: bytes) -> Change:
    return lambda members: members.update({MANIFEST: text})


class TestServing:
    def test_as_from_the_database_and_what_it_does_not_hold_is_an_error(self, bundle):
        for n, tier, config in ((4096, "exact", FAST), (65536, "exact", SLOW), (128, "nearest", SLOW)):
            kernel = ask(bundle, n)
            assert (kernel.tier, list(kernel.config.items())) == (tier, list(config.items()))
            assert kernel.resources.registers > 0
            assert f"It comes from the bundle {bundle}, compiled for sm_90" in kernel.explain()
        with pytest.raises(BundleError, match="no configuration of scale that is valid for scale n=32"):
            ask(bundle, 32)
        with pytest.raises(BundleError, match="does not contain the kernel 'sgemm_2d', only scale"):
            get_best_kernel("sgemm_2d", M=1, N=1, K=1, device="h200", bundle=bundle)
        other_gpu = r"scale for sm_90, which does not run on NVIDIA A100.*--arch sm_80"
        with pytest.raises(BundleError, match=other_gpu) as caught:
            ask(bundle, 4096, device="a100")
        assert "from the database and the compiler of this machine" in str(caught.value)

    def test_without_compiler_database_and_template(self, bundle, store):
        """In a process that can import neither NVRTC nor SQLAlchemy, with the kernel's own files gone."""
        for path in store.path.parent.iterdir():
            path.unlink()
        code = (
            "import sys\n"
            "for name in ('cuda', 'cuda.bindings', 'cuda.pathfinder', 'sqlalchemy', 'alembic'):\n"
            "    sys.modules[name] = None\n"
            "import autotile\n"
            f"kernel = autotile.get_best_kernel('scale', n=4096, device='h200', bundle={str(bundle)!r})\n"
            "image = kernel._code.packed.read()\n"
            "print(kernel.tier, dict(kernel.config), kernel.resources.registers > 0, image[:4])\n"
        )
        done = python("-c", code, env={"AUTOTILE_DB": "/nowhere/at/all.db"})
        assert (done.stderr, done.stdout) == ("", f"exact {FAST} True b'\\x7fELF'\n")

    def test_a_kernel_whose_input_is_a_file_that_is_not_there(self, tmp_path):
        (folder := tmp_path / "own").mkdir()
        path = copy_kernel(folder, "scale", {'access = "in"': 'access = "in", file = "x.npy"'})
        np.save(folder / "x.npy", np.ones(4096, np.float32))
        Book(read_settings().database, path).put(4096, FAST, 5.0)
        exchange.bundle(path, output=(packed := tmp_path / "file.autotile"))
        shutil.rmtree(folder)
        assert ask(packed, 4096).tier == "exact"

    @pytest.mark.parametrize("came_along", [False, True])
    def test_by_a_familys_rule(self, store, tmp_path, monkeypatch, came_along):
        """Its configurations are packed as well, and it chooses if nothing is exact; a user's rule or a shipped one."""
        key = store.put(4096, FAST)
        other = {"THREADS": 32, "WORK": 1}
        family = Family({"n": Extent(((1, 100_000),))})
        rule = rule_of(family, (FAST, other), Split(Feature("size", "n"), 5000.0, (1, 0), (0, 1)))
        of_family, device = structs.replace(key, sizes={}), structs.replace(device_profile("h200"), source="cuda")
        if came_along:
            (tmp_path / "families").mkdir()
            stored = StoredRule(of_family, device, rule, datetime(2026, 1, 1, tzinfo=UTC))
            write_rules(tmp_path / "families" / "h200.scale.json", [stored])
            monkeypatch.setattr(shipped_file, "data_folder", lambda _: tmp_path)
        else:
            with Database.open(read_settings().database) as database:
                save_family_state(database, of_family, family, device, FamilyState({}))
                save_rule(database, of_family, device, rule)
        exchange.bundle(store.path, output=tmp_path / "x")
        served = {n: ask(tmp_path / "x", n) for n in (4096, 4000, 8000, 200_000)}
        tiers = {n: kernel.tier for n, kernel in served.items()}
        assert tiers == {4096: "exact", 4000: "family", 8000: "family", 200_000: "nearest"}
        assert (served[4000].config, served[8000].config) == (other, FAST)

    @pytest.mark.parametrize("of_dispatcher", [False, True])
    def test_strict(self, bundle, store, of_dispatcher):
        """A dispatcher may serve from it; otherwise it is named in the call. A kernel is named by its file, too."""
        serve = Dispatcher(bundle=bundle).get_best_kernel if of_dispatcher else partial(get_best_kernel, bundle=bundle)
        assert serve(store.path, n=4096, device="h200", strict=True).kernel == "scale"
        kernel = serve("scale", n=4096, device="h200", strict=True)
        assert f"It comes from the bundle {bundle}" in kernel.explain()
        assert serve("scale", n=4096, device="h200") is kernel
        with pytest.raises(NotTunedError, match="sizes: tuned n=65536, requested n=70000") as caught:
            serve("scale", n=70000, device="h200", strict=True)
        assert caught.value.differences == (("sizes", "n=65536", "n=70000"),)

    def test_members_are_read_when_they_are_needed(self, bundle):
        """A damaged cubin is detected when it would be served, before any launch, and does not affect the others."""
        needed = ask(bundle, 4096)
        kernel = Bundle(bundle).kernel("scale")
        (other,) = [c.member for c in kernel.cubins if c.config == SLOW]
        rewrite(bundle, lambda members: members.update({other: b"\x7fELF and then nothing"}))
        assert (needed._code.packed.read()[:4], ask(bundle, 4096).tier) == (b"\x7fELF", "exact")
        with pytest.raises(BundleError, match="was changed"):
            ask(bundle, 65536)


class TestArchitectures:
    @pytest.mark.parametrize(
        ("target", "capability", "runs"),
        [
            ("sm_90", "9.0", True), ("sm_80", "8.6", True), ("sm_86", "8.0", False), ("sm_80", "9.0", False),
            ("sm_90a", "9.0", True), ("sm_100a", "10.3", False), ("sm_100", "10.3", True), ("sm_80", "8.7", False),
            ("sm_87", "8.9", False), ("sm_87", "8.7", True),
        ],
    )  # fmt: skip
    def test_which_cubins_run_where(self, target, capability, runs):
        assert runs_on(target, capability) is runs

    def test_several(self, store, tmp_path):
        store.put(4096, FAST)
        path = tmp_path / "both.autotile"
        with pytest.raises(InputError, match="'sm_9' is no architecture"):
            exchange.bundle(store.path, output=path, architectures=["sm_9"])
        written = exchange.bundle(store.path, output=path, architectures=["sm_90", "sm_80", "sm_86"])
        assert written.document["kernels"][0]["architectures"] == ["sm_90", "sm_80", "sm_86"]
        assert ask(path, 4096).tier == "exact"
        for device, target in (("a100", "sm_80"), ("rtx-3090", "sm_86"), ("rtx-4090", "sm_86")):
            kernel = ask(path, 4096, device=device)
            assert (kernel.tier, kernel.config) == ("transferred", FAST)
            assert f"compiled for {target}" in kernel.explain()
        store.put(4096, FAST, device=structs.replace(device_profile("a100"), source="cuda"))
        exchange.bundle(store.path, output=tmp_path / "of both")
        assert ask(tmp_path / "of both", 4096, device="a100").tier == "exact"

    def test_what_is_not_tuned_can_be_bundled_for_a_named_one(self, store, tmp_path):
        for put in (lambda: None, lambda: store.put(4096, FAST, template_hash="0" * 64)):  # of another version
            put()
            with pytest.raises(InputError, match=r"nothing is tuned of scale.*--arch"):
                exchange.bundle(store.path, output=tmp_path / "x")
        exchange.bundle(store.path, output=tmp_path / "x", architectures=["sm_90"])
        assert ask(tmp_path / "x", 4096).tier == "default"


class TestMaking:
    def test_equal_contents_make_equal_files_and_one_may_be_alone(self, bundle, store, tmp_path):
        for name in ("first", "again"):
            exchange.bundle(store.path, output=tmp_path / name)
        assert (tmp_path / "again").read_bytes() == (tmp_path / "first").read_bytes()
        exchange.bundle([(store.path, {"n": 65536})], output=tmp_path / "one")
        with pytest.raises(InputError, match="scale n=5000 is not tuned; tuned is n=65536; n=4096"):
            exchange.bundle([(store.path, {"n": 5000})], output=tmp_path / "two")
        held = Bundle(tmp_path / "one").kernel("scale")
        assert [dict(w.key.sizes) for w in held.winners] == [{"n": 65536}]
        assert {json.dumps(c.config) for c in held.cubins} == {json.dumps(SLOW), '{"THREADS": 128, "WORK": 1}'}

    def test_words(self):
        found = read_selections(["a", "M=1", "N=2", "b", "a", "M=3"])
        assert found == [("a", {"M": 1, "N": 2}), ("b", None), ("a", {"M": 3})]
        with pytest.raises(InputError, match="stands before any kernel"):
            read_selections(["M=1", "a"])


class TestRefusals:
    """Nothing is served from a bundle that was changed, and every refusal is a `BundleError`."""

    def test_missing_folder_and_other_files(self, tmp_path):
        for path in (tmp_path / "nothing", tmp_path):
            with pytest.raises(BundleError, match="cannot read the bundle"):
                ask(path, 4096)
        (tmp_path / "text").write_text("no archive")
        with pytest.raises(BundleError, match="damaged, changed or not a bundle"):
            ask(tmp_path / "text", 4096)
        with pytest.raises(BundleError, match="cannot read the bundle"):  # which is read before the device is
            get_best_kernel("matmul", M=64, N=64, K=64, device="none", bundle=tmp_path / "nothing")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda members: members.update({"extra": b"x"}), "its members are not those of its manifest"),
            (lambda members: members.pop(min(members)), "its members are not those of its manifest"),  # a cubin
            (spaced("kernels/scale.toml"), r"kernels/scale\.toml is"),
            (spaced("kernels/scale.json"), r"kernels/scale\.json is"),
            (as_long("kernels/scale.toml"), r"kernels/scale\.toml was changed"),
            (
                lambda members: edit(members, MANIFEST, lambda found: found["kernels"].append("other")),
                "its manifest was changed",
            ),
            *((replaced(text), "its manifest") for text in (b"", b"[]", b"\xff", b'{"format": 1}', b"[" * 100_000)),
            (
                replaced(b'{"format": 2, "other": "things"}'),
                "is a bundle of format 2, this version of autotile reads 1: upgrade autotile",
            ),
        ],
    )
    def test_a_changed_member(self, bundle, change, said):
        rewrite(bundle, change)
        with pytest.raises(BundleError, match=said):
            ask(bundle, 4096)


class TestOperations:
    SIZES: ClassVar = {"M": 1000, "N": 1000, "K": 1000, "BATCH": 1, "TRANS_A": 0, "TRANS_B": 0, "OUT_FP32": 0}

    def ask(self, bundle: Path, **named: Any) -> Any:
        serving.forget_served()
        return get_best_kernel("matmul", bundle=bundle, **{**self.SIZES, "dtype": "float32", "device": "h200", **named})

    def test_it_serves_what_the_model_expects_among_what_it_holds(self, tmp_path, monkeypatch):
        device = device_profile("h200")
        whole = shipped_file.shipped_model("matmul", "float32", device)
        own = (one for one in whole.candidates if one.kernel == "sgemm")
        few = sorted(own, key=lambda one: one.config["BM"] * one.config["BN"] * one.config["BK"])[:2]  # soon compiled
        model = replace(whole, candidates=tuple(few), ranges={**whole.ranges, "TRANS_A": (0, 0), "TRANS_B": (0, 0)})
        (winner,) = shipped_file.shipped_winners("sgemm", "float32")[:1]
        winner = structs.replace(winner, key=structs.replace(winner.key, nvrtc_version=nvrtc_version()))
        monkeypatch.setattr(bundles, "shipped_models", lambda operation, dtype: [(model, device)])
        monkeypatch.setattr(bundles, "shipped_winners", lambda kernel, dtype: [winner])
        monkeypatch.setattr(bundles, "shipped_rules", lambda kernel, dtype: [])
        path = tmp_path / "matmul.autotile"
        made = exchange.export("matmul", output=path, format="bundle", dtype="float32")
        (entry,) = made.document["kernels"]
        assert (entry["kernel"], entry["architectures"]) == ("sgemm", ["sm_90"])
        held = [cubin.config for cubin in Bundle(path).kernel("sgemm").cubins]
        assert all(one.config in held for one in (*few, winner))
        kernel, any_of_them = (self.ask(path, library=library) for library in (False, True))
        assert (kernel.tier, kernel.kernel) == ("model", "sgemm")
        assert kernel.config in held
        assert kernel._code.packed.read()[:4] == b"\x7fELF"
        assert f"It comes from the bundle {path}, compiled for sm_90" in kernel.explain()
        assert any_of_them.tier == "model"
        measured = self.ask(path, **{name: winner.key.sizes.get(name, size) for name, size in self.SIZES.items()})
        assert (measured.tier, measured.operation.kernel) == ("exact", "matmul")
        assert self.ask(path, TRANS_A=1).is_library  # it holds nothing for transposed factors
        with pytest.raises(NotTunedError, match="nothing is tuned for matmul; run"):
            self.ask(path, TRANS_A=1, strict=True)
        with pytest.raises(InputError, match=r"no kernel computes .* compiled for float32 TRANS_A=0"):
            self.ask(path, TRANS_A=1, library=False)

    def test_an_operation_is_bundled_whole_and_needs_a_model(self, tmp_path, monkeypatch):
        with pytest.raises(InputError, match="for all sizes"):
            exchange.export("matmul", {"M": 64}, output=tmp_path / "m", format="bundle")
        monkeypatch.setattr(bundles, "shipped_models", lambda operation, dtype: [])
        with pytest.raises(InputError, match="no model of times of matmul to ship for; name its kernels: gemm_wgmma"):
            exchange.bundle("matmul", output=tmp_path / "m")


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_bundle_of_the_setting_takes_the_place_of_the_compiler(bundle, store, is_changed, tmp_path, monkeypatch):
    if is_changed:  # another version of the kernel, which compiles to other code
        store.path.write_text(store.path.read_text() + "# changed\n")
    monkeypatch.setenv("AUTOTILE_CACHE", str(tmp_path / "cache"))
    serving.forget_served()
    kernel = get_best_kernel(store.path, n=70001, device="h200")
    assert kernel._code.packed is None
    assert kernel._code.needs_compiler()
    monkeypatch.setenv("AUTOTILE_BUNDLE", str(bundle))
    assert kernel._code.needs_compiler() is is_changed
    assert is_changed or kernel._code.packed.read()[:4] == b"\x7fELF"
    monkeypatch.setenv("AUTOTILE_BUNDLE", str(tmp_path / "none.autotile"))
    with pytest.raises(BundleError, match="cannot read the bundle"):
        get_best_kernel(store.path, n=70002, device="h200")._code.needs_compiler()

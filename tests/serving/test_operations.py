"""Choice between the kernels of an operation and libraries, from made-up measurements and models, without a device."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from made_models import Model, expect
from msgspec.structs import replace
from stored_runs import store_default, store_winner

import autotile
from autotile.api.exchange import export_models
from autotile.api.inspection import OperationExplanation
from autotile.core.device import device_profile
from autotile.core.model import L2Mode, Outcome, Trial
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of, library_key
from autotile.database.learned import save_model
from autotile.errors import InputError
from autotile.exchange.shipped import shipped_model
from autotile.kernel.library import load_kernel
from autotile.kernel.operation import load_operation
from autotile.kernel.problem import resolve_problem
from autotile.serving import operations
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import default_dispatcher, get_best_kernel
from autotile.serving.selection import model_of
from autotile.settings import data_folder, read_settings

DEVICE = replace(device_profile("h200"), source="cuda")
SIZES = {"M": 1000, "N": 1000, "K": 1000}


@pytest.fixture
def model(_nothing_else_is_known, monkeypatch):
    """A model for the H200, which expects nothing yet."""
    made = Model()
    monkeypatch.setattr(operations, "model_of", lambda *_: made)
    return made


@pytest.fixture(autouse=True)
def _nothing_else_is_known(monkeypatch):
    """No model but that of a test, and no library of another test."""
    monkeypatch.setattr(operations, "model_of", lambda *_: None)
    yield
    operations._added.clear()


def serve(dtype: str = "float32", **options: Any) -> BoundKernel:
    default_dispatcher.clear()
    return get_best_kernel("matmul", dtype=dtype, device="h200", **{**SIZES, **options})


def choice(**options: Any) -> tuple[str, str]:
    found = serve(**options)
    return found.kernel, found.tier


def store_kernel(name: str, time_us: float, **sizes: int) -> None:
    store_default(name, {**SIZES, **sizes}, "float32", time_us)


def store_library(time_us: float, version: str = "", l2: L2Mode = "cold", **sizes: int) -> None:
    operation = load_operation("matmul")
    problem = operation.resolve({**SIZES, **sizes}, "float32")
    version = version or operations.libraries_for(operation, is_present=False)[0].version
    key = library_key(operation, problem, DEVICE, "cublas", version, nvrtc_version=nvrtc_version(), l2_mode=l2)
    store_winner(key, {}, time_us, DEVICE)


class TestMeasured:
    def test_times_with_the_cache_in_the_other_state_come_last(self, model, monkeypatch):
        store_library(2.0, l2="hot")
        assert choice(EMULATE=0) == ("cublas", "nearest")
        assert "L2 mode hot instead of cold" in serve(EMULATE=0).explain()
        store_kernel("sgemm", 3.0)
        assert choice(EMULATE=0) == ("sgemm", "exact")
        monkeypatch.setenv("AUTOTILE_L2", "hot")
        assert choice(EMULATE=0) == ("cublas", "exact")
        monkeypatch.setenv("AUTOTILE_DEPLOYMENT", "eager")
        assert choice(EMULATE=0) == ("cublas", "nearest")
        store_library(14.0, l2="eager")
        assert choice(EMULATE=0) == ("cublas", "exact")
        model.expected = [expect("sgemm_ws", 0.1, 0.01)]  # it displaces nothing that the host launches
        assert choice(EMULATE=0) == ("cublas", "exact")
        monkeypatch.delenv("AUTOTILE_DEPLOYMENT")
        assert choice(EMULATE=0) == ("sgemm_ws", "model")

    def test_version_conditions_and_flags_of_the_library_time(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(operations, "cublas_version", lambda: "13.0.0")
            for version, tier in (("12.0.0", "library"), ("13.0.0", "exact")):
                store_library(2.0, version=version, TRANS_A=1)
                assert serve(TRANS_A=1).tier == tier
        assert serve(TRANS_B=1).tier == "library"
        store_library(2.0, TRANS_B=1)
        assert serve(TRANS_B=1, ALIGNED=0, EMULATE=0).tier == "exact"
        assert serve(TRANS_B=0).tier == "library"
        store_kernel("sgemm", 3.0)
        assert serve().kernel == "sgemm"


class TestExpected:
    def test_the_first_is_served_also_if_it_is_a_library_and_the_others_are_stated(self, model):
        model.expected = [expect("sgemm_ws", 5.0), expect("cublas", 6.0), expect("sgemm", 7.0, 0.2)]
        found = serve(EMULATE=0, TRANS_A=0)
        assert (found.kernel, found.tier) == ("sgemm_ws", "model")
        assert [(one.kernel, one.time_us, one.doubt, one.is_library) for one in found.contenders] == [
            ("sgemm_ws", 5.0, 0.05, False),
            ("cublas", 6.0, 0.05, True),
            ("sgemm", 7.0, 0.2, False),
        ]
        assert "sgemm_ws 5.000 us expected (+-5 %)" in found.explain()
        sizes, kernels, asked = model.asked[0]
        assert sizes["M"] == 1000
        assert kernels == {"sgemm", "sgemm_ws", "gemm_small"} & kernels
        assert "sgemm_bf16x6" not in kernels
        assert asked == ["cublas"]

        model.expected = [expect("cublas", 6.0), expect("sgemm", 5.9)]
        assert (choice(), serve(library=False).kernel) == (("cublas", "model"), "sgemm")

    @pytest.mark.parametrize(("time_us", "doubt", "served"), [(4.5, 0.1, "sgemm"), (3.0, 0.1, "sgemm_ws")])
    def test_it_displaces_a_measurement_if_clearly_faster(self, model, time_us, doubt, served):
        store_kernel("sgemm", 5.0)
        model.expected = [expect("sgemm_ws", time_us, doubt)]
        assert serve(EMULATE=0).kernel == served

    def test_what_was_found_to_be_wrong_is_left_out(self, model):
        kernel = load_kernel("sgemm_ws")
        problem = resolve_problem(kernel.spec, SIZES, "float32")
        key = key_of(kernel, problem, DEVICE, nvrtc_version=nvrtc_version(), l2_mode="cold")
        with Database.open(read_settings().database) as database:
            wrong = Trial(kernel.spec.default, Outcome.WRONG_RESULT, "differs", "verify")
            database.add_run(key, [wrong], sampler="random", driver="", device=DEVICE, phase="final")
        model.expected = [expect("sgemm_ws", 1.0), expect("sgemm", 2.0)]
        assert serve().kernel == "sgemm"


class TestLearned:
    """Models that were learned here take the place of the one that ships."""

    @pytest.fixture(autouse=True)
    def _as_it_is(self, _nothing_else_is_known, monkeypatch):
        monkeypatch.setattr(operations, "model_of", model_of)

    def learn(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = data_folder("tuned") / "models" / "nvidia-h200.matmul.float32.json"
        document = json.loads(path.read_text())
        change(document)
        with Database.open(read_settings().database) as database:
            save_model(database, "matmul", "float32", DEVICE, document)

    def test_a_learned_one_is_asked_unless_it_is_damaged_or_of_an_earlier_version(self, tmp_path):
        """The configurations of the latter were not verified at ragged sizes."""
        shipped = serve()
        assert shipped.tier == "model"
        for change, is_asked in (
            (lambda document: None, True),
            (lambda document: document.update(candidates=[]), False),
            (lambda document: document.pop("verified"), False),
        ):
            self.learn(change)
            found = model_of(read_settings().database, "matmul", "float32", DEVICE)
            assert (found is not shipped_model("matmul", "float32", DEVICE)) == is_asked
            assert serve().choice == shipped.choice
        with pytest.raises(InputError, match="was learned by an earlier version"):
            export_models(load_operation("matmul"), tmp_path / "models")

    def test_that_of_a_gpu_with_the_same_sms_serves_and_that_of_bfloat16_serves_float16(self):
        own, other = (get_best_kernel("matmul", dtype="float32", device=name, **SIZES) for name in ("h200", "h100"))
        assert (other.tier, other.kernel, other.config) == ("model", own.kernel, own.config)
        assert (own.tuned_on, other.tuned_on) == ("", "NVIDIA H200")
        assert "measured on NVIDIA H200, which has the same SMs, expects" in other.explain()
        assert serve(dtype="float16").tier == "model"
        assert serve(dtype="float16", library=False).kernel in {"gemm_wgmma", "gemm_mma", "gemm_small"}
        for device in ("a100", "rtx-4090"):  # for which there is none, and kernels that must be measured come last
            find = partial(get_best_kernel, "matmul", dtype="float32", device=device, **SIZES)
            assert (find().kernel, find().tier) == ("cublas", "library")
            assert find(library=False).kernel not in {"sgemm_bf16x6", "sgemm_bf16x6_ws"}


class TestUnknown:
    def test_a_library_is_served_where_nothing_is_known(self):
        found = serve()
        assert (found.kernel, found.tier, found.config) == ("cublas", "library", {})
        assert found.resources is None
        assert found.to_json()["resources"] is None
        asked = {"dtype": "float32", "device": "h200"}
        assert get_best_kernel("matmul", **asked, **SIZES) is found
        assert get_best_kernel("matmul", **asked, library=False, **SIZES) is not found
        found = autotile.best("matmul", SIZES, **asked)
        assert (found.kernel, found.tier, found.geometry) == ("cublas", "library", None)
        assert autotile.best("matmul", SIZES, **asked, library=False).geometry is not None
        store_kernel("sgemm_ws", 900.0, M=1100)  # else the nearest that was measured
        found = serve(library=False, EMULATE=0)
        assert (found.kernel, found.tier) == ("sgemm_ws", "nearest")

    def test_what_no_kernel_computes(self, only_kernel):
        only_kernel("sgemm")
        with pytest.raises(InputError, match=r"no kernel computes .*: none is written for it"):
            serve(OUT_FP32=1)


def test_a_kernel_of_the_same_name_comes_first(scale_toml, monkeypatch):
    for path in scale_toml.parent.iterdir():
        text = path.read_text().replace('name = "scale"', 'name = "matmul"')
        (path.parent / path.name.replace("scale.toml", "matmul.toml")).write_text(text)
    monkeypatch.setenv("AUTOTILE_KERNELS", str(scale_toml.parent))
    default_dispatcher.clear()
    assert get_best_kernel("matmul", n=100, device="h200").definition.spec.entries == ("scale",)
    found = default_dispatcher.serve_product(SIZES, "float32", operations.MatmulOptions(), "h200")
    assert found.kernel == "cublas"


def test_a_look_at_an_operation_reads_its_files_again(scaling_toml):
    kernel = scaling_toml.with_name("scale.toml")
    for threads in (128, 64):
        kernel.write_text(kernel.read_text().replace("\nTHREADS = 128", f"\nTHREADS = {threads}"))
        assert autotile.best(scaling_toml, n=1000, device="h200").config["THREADS"] == threads
    scaling_toml.write_text(scaling_toml.read_text().replace("[kernels", "conditions = { QUICK = 1 }\n\n[kernels", 1))
    assert autotile.best(scaling_toml, n=1000, device="h200", QUICK=0).kernel == "scale"
    assert "QUICK=1" in str(autotile.explain(scaling_toml, n=1000, device="h200"))


def test_a_library_is_added_to_ones_own_operation_from_python(scaling_toml):
    path = str(scaling_toml)
    found = get_best_kernel(path, n=1000, device="h200")
    assert (found.kernel, found.tier) == ("scale", "default")
    autotile.add_library(path, "doubling", lambda x, y: None)
    found = get_best_kernel(path, n=1000, device="h200")
    assert (found.kernel, found.is_library, found.shapes) == ("doubling", True, {"x": (1000,), "y": (1000,)})
    assert get_best_kernel(path, n=1000, device="h200", library=False).kernel == "scale"
    with pytest.raises(InputError, match="other than 'cublas'"):
        autotile.add_library(path, "cublas", print)


def test_look_ups_of_further_sizes_read_no_kernel_again_but_an_edited_operation(scaling_toml):
    """Reading the five kernels of ``matmul`` takes 4 ms."""
    find = default_dispatcher.get_best_kernel
    first = find(str(scaling_toml), n=1000, device="h200")
    kernel, away = scaling_toml.with_name("scale.toml"), scaling_toml.with_name("away")
    kernel.rename(away)
    assert find(str(scaling_toml), n=4000, device="h200").problem.sizes["n"] == 4000
    away.rename(kernel)
    text = scaling_toml.read_text()
    scaling_toml.write_text(text.replace("[kernels", "conditions = { QUICK = 1 }\n\n[kernels", 1))
    assert find(str(scaling_toml), n=2000, QUICK=0, device="h200").operation.sizes["QUICK"] == 0
    scaling_toml.write_text("changed")
    assert find(str(scaling_toml), n=1000, device="h200") is first
    with pytest.raises(InputError, match=r"scaling\.toml"):
        find(str(scaling_toml), n=3000, device="h200")


def test_an_explanation_on_the_command_line_and_in_python(model):
    from typer.testing import CliRunner

    from autotile.cli.application import app

    model.expected = [expect("sgemm_ws", 5.0), expect("cublas", 6.0, 0.3)]
    words = ["explain", "matmul", "M=1000", "N=1000", "K=1000", "--dtype", "float32", "--device", "h200", "--json"]
    default_dispatcher.clear()
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert (found["served"], found["tier"], found["library"]) == ("sgemm_ws", "model", False)
    assert found["problem"]["EMULATE"] == 1
    assert [(one["kernel"], one["doubt"]) for one in found["contenders"]] == [("sgemm_ws", 0.05), ("cublas", 0.3)]
    shown = CliRunner().invoke(app, words[:-1]).stdout
    assert "model, +-30 %" in shown
    explained = autotile.explain("matmul", SIZES, dtype="float32", device="h200")
    assert isinstance(explained, OperationExplanation)
    assert "sgemm_ws, model" in repr(explained)
    assert "cublas" in explained._repr_html_()


def test_keys_are_kept_as_plain_tuples_which_the_collector_does_not_visit():
    asked = (operations.MatmulOptions(emulate=False), (3,)), "float32"
    kept = operations._untracked(asked)
    assert (kept, hash(kept), type(kept[0][0])) == (asked, hash(asked), tuple)

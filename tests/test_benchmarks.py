"""The parts of benchmarks/gemm.py and benchmarks/any_size.py that need no GPU, and the record of the search."""

import importlib
import json
import math
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_runs import store_winner

from autotile.core.model import config_key
from autotile.core.statistics import Interval, paired_ratio
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.database.winners import Winner
from autotile.kernel.operation import load_operation
from autotile.serving.dispatcher import find_best_kernel
from autotile.settings import read_settings
from autotile.workers.child import WorkerPool

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import any_size  # noqa: E402
import any_size_draw as drawing  # noqa: E402
import any_size_report as report  # noqa: E402
import figures  # noqa: E402
import search_methods  # noqa: E402
from gemm_plan import Found, leaders, share_out, worth_tuning  # noqa: E402
from gemm_product import Product, emulating_kernels, fitting_kernels  # noqa: E402
from gemm_row import CuBlas, Row, Runner, headings, summary  # noqa: E402
from gemm_seeds import Seed, read_seeds, seeds_of  # noqa: E402
from gemm_tuning import Tuned, tune_product  # noqa: E402

KERNELS = sorted(member.name for member in load_operation("matmul").members)
LARGE = Product(4096, 4096, 4096)
EMULATED_PEAK = 2.0 * 2048 * 132 * 1980e6 / 6
"""Peak fp32 operations per second of an H200 by six bf16 products each, at the maximum clock."""


class MadeUpSessions:
    """Simulated sessions on a simulated clock; a kernel without a time does not run."""

    def __init__(self, times_us: dict[str, float], start_s: float = 1.5, finals_s: float = 2.0, **tried: int) -> None:
        self.times_us, self.tried = times_us, tried  # a kernel has 12 configurations after its probe unless given
        self.start_s, self.finals_s, self.now_s = start_s, finals_s, 100.0
        self.held: list[tuple[str, float, bool]] = []

    def __call__(self, kernel: str, search_s: float, *, finals: bool) -> Found | None:
        self.held.append((kernel, search_s, finals))
        self.now_s += max(self.start_s, search_s) + (self.finals_s if finals else 0.0)
        found = self.times_us.get(kernel)
        return Found(found, self.finals_s, self.tried.get(kernel, 12)) if found is not None else None

    def clock(self) -> float:
        return self.now_s


class TestWorthTuning:
    @pytest.mark.parametrize(
        ("product", "expected"),
        [
            (LARGE, {"sgemm", "sgemm_ws", *emulating_kernels()}),
            (replace(LARGE, emulate=False), {"sgemm", "sgemm_ws"}),
            (replace(LARGE, m=128), {"sgemm", "sgemm_ws", *emulating_kernels()}),
            (Product(256, 256, 256), {"sgemm", "sgemm_ws", *emulating_kernels()}),
            (replace(LARGE, n=16), {"gemm_small", "sgemm", "sgemm_ws", *emulating_kernels()}),
            (replace(LARGE, m=1), {"gemm_small"}),
            (replace(LARGE, dtype="bfloat16"), {"gemm_wgmma"}),
            (replace(LARGE, dtype="bfloat16", m=64), {"gemm_wgmma", "gemm_mma"}),
            (Product(1024, 1024, 1024, dtype="float16"), {"gemm_wgmma", "gemm_mma"}),
        ],
    )
    def test_shapes(self, product, expected):
        assert set(worth_tuning(product, fitting_kernels(product))) == expected

    def test_a_kernel_gives_way_only_to_one_that_fits(self):
        assert worth_tuning(LARGE, ["sgemm", "gemm_mma"]) == ["sgemm", "gemm_mma"]

    @given(st.sets(st.sampled_from(KERNELS), min_size=1), st.integers(1, 9000), st.integers(1, 9000))
    def test_something_is_tuned_wherever_a_kernel_for_tiles_fits(self, fitting, m, n):
        found = worth_tuning(Product(m, n, 64), fitting)
        assert set(found) <= fitting
        assert found or fitting == {"gemm_small"}


@pytest.mark.parametrize(
    ("times_us", "expected"),
    [
        # the CUDA cores alone have a leader of their own
        ({"sgemm": 500.0, "sgemm_ws": 300.0, "sgemm_bf16x6": 200.0}, ["sgemm_bf16x6", "sgemm_ws"]),
        # a runner-up that is near leads too
        ({"gemm_mma": 110.0, "gemm_wgmma": 100.0}, ["gemm_wgmma", "gemm_mma"]),
        ({"gemm_mma": 150.0, "gemm_wgmma": 100.0}, ["gemm_wgmma"]),
        ({"sgemm_bf16x6": 90.0, "sgemm_ws": 50.0}, ["sgemm_ws"]),  # emulation that is slower is left aside
        ({}, []),
    ],
)
def test_leaders(times_us, expected):
    assert leaders(times_us) == expected


class TestShareOut:
    def test_probes_come_first_and_leaders_share_the_rest(self):
        sessions = MadeUpSessions({"sgemm": 500.0, "sgemm_ws": 300.0, "sgemm_bf16x6": 200.0})
        share_out(["sgemm", "sgemm_ws", "sgemm_bf16x6"], 60.0, sessions, sessions.clock)
        probes, rest = sessions.held[:3], sessions.held[3:]
        assert [(name, finals) for name, _, finals in probes] == [(name, False) for name in sessions.times_us]
        assert [(name, finals) for name, _, finals in rest] == [("sgemm_bf16x6", True), ("sgemm_ws", True)]
        assert rest[0][1] == pytest.approx(rest[1][1]) == pytest.approx((60.0 - 3 * 6.0) / 2 - 2.0)

    @given(
        st.dictionaries(st.sampled_from(KERNELS), st.floats(1.0, 1000.0), min_size=1),
        st.floats(60.0, 300.0),
        st.floats(0.0, 6.0),
    )
    def test_the_budget_is_used_and_kept(self, times_us, budget_s, finals_s):
        """Exactly, if each leader can hold a session."""
        sessions = MadeUpSessions(times_us, start_s=1.0, finals_s=finals_s)
        share_out(list(times_us), budget_s, sessions, sessions.clock)
        assert sessions.now_s - 100.0 <= budget_s + 1e-6
        if 0.6 * budget_s >= len(times_us) * (1.0 + finals_s):
            assert sessions.now_s - 100.0 == pytest.approx(budget_s)

    def test_a_budget_too_small_for_finals_is_spent_on_probes_and_without_kernels_on_nothing(self):
        sessions = MadeUpSessions({"sgemm_ws": 300.0, "sgemm_bf16x6": 200.0}, start_s=1.5, finals_s=2.0)
        share_out([], 60.0, sessions, sessions.clock)
        assert (sessions.held, sessions.now_s) == ([], 100.0)
        share_out(["sgemm_ws", "sgemm_bf16x6"], 4.0, sessions, sessions.clock)
        assert [finals for _, _, finals in sessions.held] == [False, False]
        assert sessions.now_s - 100.0 <= 4.0

    def test_a_kernel_with_few_trials_is_not_ranked(self):
        sessions = MadeUpSessions({"gemm_small": 900.0, "sgemm": 500.0, "sgemm_bf16x6": 200.0}, gemm_small=1)
        share_out(list(sessions.times_us), 60.0, sessions, sessions.clock)
        assert [name for name, _, finals in sessions.held if finals] == ["sgemm_bf16x6", "sgemm", "gemm_small"]

    def test_a_kernel_that_does_not_run_leaves_its_time_to_others(self):
        sessions = MadeUpSessions({"sgemm_ws": 300.0})
        share_out(["sgemm_ws", "sgemm_bf16x6"], 60.0, sessions, sessions.clock)
        assert sessions.held[-1] == ("sgemm_ws", pytest.approx(60.0 - 12.0 - 2.0), True)


def test_a_second_search_of_a_product_goes_on_and_nothing_is_measured_twice(monkeypatch, only_kernel):
    monkeypatch.setattr(importlib.import_module("autotile.tuning.backend"), "has_driver", lambda: False)
    only_kernel("matmul_tiled")
    with WorkerPool() as worker_pool:
        tuned = tune_product(Product(2048, 2048, 2048), 60.0, None, worker_pool)
    with Database.open(read_settings().database) as database:
        (study,) = database.studies()
        tried = [config_key(trial.config) for trial in database.trials(study.study_id, phase="search")]
        (best,) = database.best()
        runs = database.runs(study.study_id)
    assert len(tried) == len(set(tried)) == tuned.tried["matmul_tiled"]
    assert len(runs) == 3  # a probe, a search, the finals
    assert (best.confirmed, best.run) == (True, runs[-1])


class TestSeeds:
    SIZES: ClassVar = {"M": 999, "N": 1024, "K": 512}

    @pytest.fixture
    def served(self):
        return find_best_kernel("sgemm_2d", "float32", "h200", read_settings().database, self.SIZES)

    def test_those_of_the_nearest_sizes_come_first_and_each_once(self, served, tmp_path):
        default = dict(served.definition.spec.default)
        near, far = {**default, "BK": 16}, {**default, "PAD": 0}
        entries = [
            {"kernel": "sgemm_2d", "shape": [8192, 8192, 8192], "config": far},
            {"kernel": "sgemm_2d", "shape": [1024, 1024, 512], "config": near},
            {"kernel": "sgemm_2d", "shape": [999, 1024, 512], "config": default},
            {"kernel": "sgemm_2d", "shape": [999, 1024, 512], "config": {**default, "BM": 17}},
            {"kernel": "sgemm_ws", "shape": [999, 1024, 512], "config": {**default, "STAGES": 1}},
        ]
        file = tmp_path / "seeds.json"
        file.write_text(json.dumps({"float32": entries, "bfloat16": entries}))
        assert seeds_of(served, read_seeds(file), None) == [default, near, far]

    def test_a_winner_of_an_older_kernel_has_new_parameters_at_their_defaults(self, served):
        default = served.definition.spec.default
        old = {name: value for name, value in default.items() if name != "BK"} | {"PAD": 0, "GONE": 1}
        found = seeds_of(served, [Seed("sgemm_2d", "float32", self.SIZES, old)], None)
        assert found == [default, {**default, "PAD": 0}]

    def test_what_was_tuned_at_another_size_is_tried(self, served):
        spec = served.definition.spec
        winner = {**spec.default, "LANES_X": 4}
        problem = replace(served.problem, sizes={"M": 512, "N": 512, "K": 512})
        key = key_of(served.definition, problem, served.device, nvrtc_version="13.0", l2_mode="cold")
        store_winner(key, winner, 9.0, served.device)
        assert seeds_of(served, [], None) == [spec.default, winner]

    def test_what_is_shipped_is_tried(self, served, monkeypatch):
        shipped = {**served.definition.spec.default, "MIN_BLOCKS": 1}
        key = key_of(served.definition, served.problem, served.device, nvrtc_version="", l2_mode="cold")
        winner = Winner(key, served.device, shipped, None, None, datetime.now(UTC), shipped=True)
        monkeypatch.setattr("gemm_seeds.shipped_winners", lambda kernel, dtype: [winner])
        assert shipped in seeds_of(served, [], None)

    @pytest.mark.parametrize("text", ["", "[]", '{"float32": [{"kernel": "sgemm"}]}', '{"float32": 1}'])
    def test_a_file_that_is_none_is_refused(self, tmp_path, text):
        (file := tmp_path / "seeds.json").write_text(text)
        with pytest.raises(SystemExit, match=r"seeds\.json: expected lists"):
            read_seeds(file)


class TestRows:
    def row(self, product: Product, **times_us: float) -> Row:
        """Return the row of kernels with these times for a product that cuBLAS computes in 100 us."""

        def runner(name: str, time_us: float) -> Runner:
            sizes = fitting_kernels(product)[name]
            kernel = find_best_kernel(name, product.dtype, "h200", "none.db", sizes)
            ratio = 100.0 / time_us
            return Runner(kernel, Interval(time_us, time_us, time_us), Interval(ratio, ratio, ratio), 1e-7, True)

        runners = tuple(runner(name, time_us) for name, time_us in times_us.items())
        return Row(product, runners, CuBlas(Interval(100.0, 99.0, 101.0), "torch", 2e-7), 1e-5, Tuned(59.8, {"a": 7}))

    @pytest.mark.parametrize(("dtype", "kernel"), [("float32", "sgemm_ws"), ("bfloat16", "gemm_wgmma")])
    def test_a_cell_for_each_heading(self, dtype, kernel):
        row = self.row(replace(LARGE, dtype=dtype), **{kernel: 90.0})
        assert len(row.cells()) == len(headings(dtype))
        assert dict(zip(headings(dtype), row.cells(), strict=True))["tuned"] == "59.8 s"

    def test_both_results_of_float32_are_reported(self):
        row = self.row(LARGE, sgemm_bf16x6=50.0, sgemm_ws=125.0)
        assert dict(zip(headings("float32"), row.cells(), strict=True))["CUDA cores alone"].endswith("(0.800)")
        document = row.to_json()
        assert (document["kernel"], document["cuda_cores"]["kernel"]) == ("sgemm_bf16x6", "sgemm_ws")
        assert (document["ratio"], document["cuda_cores"]["ratio"]) == (2.0, 0.8)
        assert document["cublas_error_over_rms"] == 2e-7
        assert document["share_of_peak"] * EMULATED_PEAK == pytest.approx(1e12 * document["tflops_per_s"])

    def test_means_of_both_and_a_kernel_of_the_cuda_cores_that_leads_is_both(self):
        alone = self.row(LARGE, sgemm_ws=200.0)
        assert alone.best is alone.cuda_cores
        found = summary([self.row(LARGE, sgemm_bf16x6=50.0, sgemm_ws=100.0), alone])
        assert (found["geometric_mean"], found["least"]) == (pytest.approx(1.0), 0.5)
        assert found["cuda_cores"] == {"geometric_mean": pytest.approx(0.5**0.5), "least": 0.5}
        assert found["right"]
        assert "cuda_cores" not in summary([self.row(replace(LARGE, dtype="float16"), gemm_wgmma=100.0)])

    def test_one_wrong_result_is_reported(self):
        row = self.row(LARGE, sgemm_bf16x6=50.0, sgemm_ws=100.0)
        wrong = replace(row, runners=(row.runners[0], replace(row.runners[1], error=1e-3)))
        assert wrong.cells()[headings("float32").index("right")] == "NO"
        assert not summary([wrong])["right"]


# --- sizes that no one has tuned

PRODUCT = {"M": 64, "N": 64, "K": 131072, "TRANS_A": 0, "TRANS_B": 1}


def test_a_benchmark_does_not_take_the_place_of_the_tests_of_its_name():
    """Both folders are searched here; `benchmarks/faults.py` imports the package of tests."""
    import faults

    assert Path(faults.__file__).parent == Path(__file__).parent / "faults"


def drawn(seed: int, count: int = 200) -> list[dict[str, int]]:
    return drawing.draw(drawing.MATMUL_RANGES, drawing.MATMUL_FLAGS, count, seed, fits=drawing.matmul_fits)


def row(ratio: float | None = 1.0, **others: Any) -> report.Row:
    known = {"class": "bfloat16", "dtype": "bfloat16", "sizes": PRODUCT, "error": 1e-3, "tolerance": 1e-2, "fault": ""}
    known |= {"ratio": ratio, "served_us": 10.0 / ratio if ratio else None, "library_us": 10.0}
    known |= {"kernel": "gemm_mma", "config": {"BM": 64}, "tier": "nearest", "grid": [4, 2, 1], "waves": 0.5}
    return dict.fromkeys(report.ROW_KEYS) | known | others


class TestDraw:
    @given(st.integers(0, 2**31), st.integers(1, 60))
    def test_products_are_in_their_ranges_and_differ(self, seed, count):
        found = drawn(seed, count)
        assert len({tuple(sizes.values()) for sizes in found}) == count
        for sizes in found:
            assert all(low <= sizes[name] <= high for name, (low, high) in drawing.MATMUL_RANGES.items())
            assert {sizes[flag] for flag in drawing.MATMUL_FLAGS} <= {0, 1}
            assert drawing.matmul_flops(sizes) <= drawing.MAX_FLOPS

    @given(st.integers(0, 2**31))
    def test_a_quarter_is_odd_and_half_are_multiples_of_8(self, seed):
        found = drawn(seed, 40)
        sizes_of = [[sizes[name] for name in drawing.MATMUL_RANGES] for sizes in found]
        assert all(size % 2 for sizes in sizes_of[::4] for size in sizes)
        assert all(size % 2 == 0 or size < 2 for sizes in sizes_of[1::4] for size in sizes)
        assert all(size % 8 == 0 or size < 8 for sizes in sizes_of[2::4] + sizes_of[3::4] for size in sizes)

    def test_sizes_are_spread_over_all_octaves_and_layouts(self):
        found = drawn(0)
        for name, (low, high) in drawing.MATMUL_RANGES.items():
            octaves = {int(math.log2(sizes[name])) for sizes in found}
            assert octaves >= set(range(int(math.log2(low)), int(math.log2(high))))
        assert {drawing.layout_of(sizes) for sizes in found} == {"NN", "NT", "TN", "TT"}

    def test_the_seed_decides_more_begin_with_fewer_and_too_few_are_refused(self):
        assert drawn(3) == drawn(3)
        assert drawn(3) != drawn(4)
        assert drawn(3, 50) == drawn(3)[:50]
        with pytest.raises(SystemExit, match="only 2 of 3"):
            drawing.draw({"N": (1, 2)}, (), 3, 0)

    @given(st.integers(1, 10**6), st.integers(1, 10**6))
    def test_any_range(self, a, b):
        low, high = sorted((a, b))
        for sizes in drawing.draw({"N": (low, high)}, ("FLAG", "OTHER"), 4, 0):
            assert low <= sizes["N"] <= high


class TestGivenShapes:
    def test_a_shape_may_have_a_layout(self):
        assert drawing.parse_shape("64,64,131072,nt") == PRODUCT
        assert drawing.parse_shape("35, 8457, 2560") == {"M": 35, "N": 8457, "K": 2560, "TRANS_A": 0, "TRANS_B": 0}
        for text in ("", "64", "64,64", "64,64,0", "64,64,64,XY", "64,64,64,NT,1", "a,b,c"):
            with pytest.raises(SystemExit, match="is no shape"):
                drawing.parse_shape(text)

    def test_a_file_of_shapes(self, tmp_path):
        path = tmp_path / "shapes.json"
        path.write_text('[[64, 64, 131072, "NT"], [1, 2, 3]]')
        assert drawing.read_shapes(path) == [PRODUCT, drawing.parse_shape("1,2,3")]
        assert len(drawing.read_shapes(BENCHMARKS / "gemm_shapes.json")) == 24
        for text in ("{}", "[1]", "[[1, 2, null]]", "not JSON"):
            path.write_text(text)
            with pytest.raises(SystemExit):
                drawing.read_shapes(path)

    def test_ranges_and_text(self):
        assert (drawing.text_of(PRODUCT), drawing.text_of({"ROWS": 3, "N": 5})) == ("64 x 64 x 131072 NT", "ROWS=3 N=5")
        assert drawing.parse_ranges(["M=1..64", "N=35"]) == {"M": (1, 64), "N": (35, 35)}
        for word in ("M", "M=", "M=0..3", "M=5..3", "=3", "M=1.."):
            with pytest.raises(SystemExit, match="no range"):
                drawing.parse_ranges([word])


class TestCommandLine:
    def test_problems_are_drawn_in_ranges_or_given(self):
        assert any_size.problems(any_size.parsed([]), None) == drawn(0)
        found = any_size.problems(any_size.parsed(["M=1..4", "--count", "20", "--seed", "7"]), None)
        assert len(found) == 20
        assert max(sizes["M"] for sizes in found) <= 4
        assert any_size.problems(any_size.parsed(["--shape", "64,64,131072,NT"]), None) == [PRODUCT]

    @pytest.mark.parametrize(
        "words", [["--count", "0"], ["--operation", "x.toml"], ["--operation", "x.toml", "N=1..2", "--shape", "1,2,3"]]
    )
    def test_what_contradicts_itself_and_an_unknown_size_are_refused(self, words):
        with pytest.raises(SystemExit):
            any_size.parsed(words)
        with pytest.raises(SystemExit, match="no size X"):
            any_size.problems(any_size.parsed(["X=1..4"]), None)


class TestSummary:
    def test_figures_of_each_class(self):
        rows = [row(0.5), row(2.0), row(1.0, **{"class": "float16"})]
        found = report.summary(rows)
        assert (list(found), found["bfloat16"]["geometric_mean"]) == (["bfloat16", "float16"], pytest.approx(1.0))
        assert (found["bfloat16"]["worst"], found["float16"]["percentile_1"]) == (0.5, 1.0)

    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=300))
    def test_the_worst_the_percentile_and_the_mean_are_ordered(self, ratios):
        found = report.summary([row(ratio) for ratio in ratios])["bfloat16"]
        assert found["worst"] == min(ratios)
        assert found["worst"] <= found["percentile_1"] <= max(ratios)
        assert min(ratios) * 0.999 <= found["geometric_mean"] <= max(ratios) * 1.001

    def test_a_row_that_failed_or_is_wrong_is_counted_and_never_meets_a_target(self):
        good = [row(1.5)] * 10
        assert report.meets("bfloat16", report.summary(good)["bfloat16"]) is True
        for bad in (row(None, fault="it crashed"), row(1.5, error=0.5), row(1.5, error=None)):
            found = report.summary([*good, bad])["bfloat16"]
            assert found["failed"] + found["out_of_tolerance"] == 1
            assert report.meets("bfloat16", found) is False

    @pytest.mark.parametrize(
        ("name", "ratios", "met"),
        [
            ("bfloat16", [1.03] * 200, True),
            ("bfloat16", [1.01] * 200, False),
            ("bfloat16", [1.03] * 199 + [0.89], False),
            ("bfloat16", [1.03] * 199 + [0.91], True),
            ("bfloat16", [1.03] * 190 + [0.94] * 10, False),
            ("float32", [1.41] * 200, True),
            ("float32_cuda_cores", [1.05] * 200, True),
            ("bfloat16_no_library", [0.98] * 198 + [0.61] * 2, True),
            ("bfloat16_no_library", [0.98] * 199 + [0.59], False),
            ("own", [0.1], None),
        ],
    )
    def test_targets(self, name, ratios, met):
        found = report.summary([row(ratio, **{"class": name}) for ratio in ratios])[name]
        assert report.meets(name, found) is met

    def test_loss_against_tuning_and_nothing_measured(self):
        rows = [row(1.0, loss=0.02), row(1.0, loss=0.10), row(1.0)]
        expected = {"mean": pytest.approx(0.06), "worst": 0.10, "count": 2}
        assert report.summary(rows)["bfloat16"]["loss_against_tuning"] == expected
        assert report.summary([row(None)])["bfloat16"]["geometric_mean"] is None
        assert report.summary([]) == {}


class TestRecord:
    def test_it_is_read_as_it_was_written(self, tmp_path):
        rows = [row(0.5), row(None, grid=None, fault='a "reason"')]
        record = report.document({"command": "x", "options": {"seed": 0}}, rows, {"new": 80.0, "known": 0.9})
        path = tmp_path / "h200" / "any_size.json"
        report.write(path, record)
        assert report.read(path) == json.loads(json.dumps(record))
        assert path.read_text().count("\n  {") == len(rows)  # one line for each
        assert list(path.parent.iterdir()) == [path]
        assert {"summary", "rows", "look_up_us", "keys", "options"} <= set(report.read(path))
        assert set(report.read(path)["rows"][0]) == set(report.ROW_KEYS)
        report.write(path, report.document({}, [], {}))
        assert report.read(path)["rows"] == []
        path.write_text("[]")
        for none in (path, tmp_path / "missing.json"):
            with pytest.raises(SystemExit):
                report.read(none)

    @pytest.mark.parametrize(
        ("gpu", "folder"),
        [
            ("NVIDIA H200", "h200"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA A100-SXM4-40GB", "a100"),
            ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
            ("Tesla T4", "t4"),
        ],
    )
    def test_the_folder_is_named_after_the_gpu(self, gpu, folder):
        assert report.folder_name(gpu) == folder

    def test_the_tables_show_figures_targets_and_the_worst(self, tmp_path, monkeypatch, capsys):
        found = {"kernel": "gemm_wgmma", "config": {"BN": 128}, "tier": "exact", "grid": [9, 9, 9], "waves": 1.0}
        rows = [
            row(0.25, tuned=found, tuned_us=12.5, tuned_ratio=0.8, loss=2.2),
            row(3.5, tuned=found, tuned_us=2.0, tuned_ratio=4.5, loss=0.2),
            row(None, grid=None, waves=None, fault="did not compile"),
        ]
        path = tmp_path / "any_size.json"
        report.write(path, report.document({"device": "NVIDIA H200"}, rows, {"new": 80.0, "known": 2.0}))
        monkeypatch.setattr(sys, "argv", ["any_size.py", "--read", str(path), "--worst", "2"])
        any_size.main()
        shown = capsys.readouterr().out
        assert "64 x 64 x 131072 NT" in shown
        for text in (">= 1.02", "NO", "gemm_mma: BM=64", "4 x 2 x 1", "did not compile", "80 us"):
            assert text in shown
        worst, beaten = shown.split("what tuning found")
        assert "gemm_wgmma: BN=128" not in worst
        assert "gemm_wgmma: BN=128" in beaten
        assert "4.5" not in shown  # neither among the two worst nor slower than the library


def test_the_figure_of_the_guide_has_a_row_for_each_gpu_and_class(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.any_size() == "There is no record yet."
    head = {"command": "python benchmarks/any_size.py", "date": "2026-11-23"}
    rows = [row(0.5), row(2.0), row(1.5, **{"class": "float32_cuda_cores"})]
    report.write(tmp_path / "h100" / "any_size.json", report.document(head, rows, {}))
    shown = figures.any_size()
    assert "| H100 | bf16 | 2 | 1.00 | 0.52 | 0.50 |" in shown
    assert "| H100 | fp32, `emulate=False` | 1 | 1.50 | 1.50 | 1.50 |" in shown
    assert "(../benchmarks/results/h100/any_size.json)" in shown


# --- the record of the search


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("search", {"measured:feasible", "session:feasible"}),
        ("search_estimates", {"measured:feasible", "measured-estimated:feasible", "session-estimated:feasible"}),
    ],
)
def test_the_record_is_of_the_present_proposals(name, methods):
    record = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert record["proposals"] == search_methods.proposals_digest(), (
        f"the default sampler proposes other configurations than when benchmarks/results/{name}.json was recorded: "
        "record it again as its command says"
    )
    assert methods <= record["methods"].keys()


def test_estimates_save_more_than_half_of_the_first_trials():
    """Of the record: ten trials with estimates are worth what 25 are without, within 0.02."""
    methods = json.loads((BENCHMARKS / "results" / "search_estimates.json").read_text(encoding="utf-8"))["methods"]
    for kind in ("measured", "session"):
        plain, estimated = methods[f"{kind}:feasible"], methods[f"{kind}-estimated:feasible"]
        own = [name for name in plain["spaces"] if "h200" in name]
        assert min(estimated["spaces"][name]["10"] for name in own) > 0.85
        assert estimated["mean"]["10"][0] > plain["mean"]["25"][0] - 0.02


class TestModels:
    """benchmarks/models.py on the CPU, where PyTorch is installed."""

    @pytest.fixture
    def models(self):
        pytest.importorskip("torch")
        return importlib.import_module("models")

    def test_a_run_writes_a_record(self, models, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("AUTOTILE_DB", str(tmp_path / "autotile.db"))
        monkeypatch.setenv("AUTOTILE_WAIT", "on")
        output = tmp_path / "models.json"
        command = "models.py --device cpu --width 128 --layers 1 --rounds 6 --turn-ms 1 --modes eager --same"
        wanted = f"--models llama mixtral mlp --cells 16 --output {output}"
        monkeypatch.setattr(sys, "argv", [*command.split(), *wanted.split()])
        with pytest.raises(SystemExit) as ended:
            models.main()
        assert not ended.value.code
        rows = json.loads(output.read_text())["rows"]
        assert {row["model"] for row in rows} == {"llama", "mixtral", "mlp"}
        for row in rows:
            assert 0.0 < row["autotile"]["error"] == row["torch"]["error"] < 0.1
            assert row["ratio"][1] <= row["ratio"][0] <= row["ratio"][2]
        assert "decode 16" in capsys.readouterr().out

    def test_every_model_has_essential_cells_and_no_cell_appears_twice(self, models):
        cells = list(models.cells_of(4096, 4))
        assert len({(cell.model, cell.name) for cell in cells}) == len(cells)
        assert {cell.model for cell in cells} == {cell.model for cell in cells if cell.essential}

    def test_a_decoding_step_computes_the_last_token_of_a_prompt(self, models):
        torch = importlib.import_module("torch")
        torch.manual_seed(0)
        model = models.Llama(1024, 8, 300, 1, vocabulary=50, cache=2).double()
        ids = torch.randint(50, (2, models.CONTEXT))
        (attention,) = model.attention
        with torch.no_grad():
            x = model.norms[0](model.embed(ids))
            for kind, cache in (("k", attention.keys), ("v", attention.values)):
                cache.copy_(getattr(attention, kind)(x).unflatten(-1, (-1, 128)).transpose(1, 2))
            turned = (model.cos[: models.CONTEXT], model.sin[: models.CONTEXT])
            attention.keys.copy_(models.rotated(attention.keys, *turned))
            expected = model(ids)
            attention.keys[:, :, -1] = attention.values[:, :, -1] = 0.0  # written by the step
            found = model(ids[:, -1:], torch.tensor([models.CONTEXT - 1]))
        torch.testing.assert_close(found, expected)

    def test_tokens_go_to_the_experts_of_largest_weight(self, models):
        torch = importlib.import_module("torch")
        torch.manual_seed(0)
        model = models.Mixtral(32, 48).double()
        x = torch.randn(9, 32, dtype=torch.float64)
        with torch.no_grad():
            weights = model.router(x).softmax(-1)
            weights *= weights >= weights.topk(2).values[:, 1:]
            made = torch.stack([expert(x) for expert in model.experts], 1)
            torch.testing.assert_close(model(x), (made * (weights / weights.sum(1, keepdim=True))[..., None]).sum(1))

    @pytest.mark.parametrize(
        ("times", "error", "expected"),
        [
            ((1.0, 1.0), 1.0, "ok"),
            ((1.0, 1.1), 1.0, "miss"),
            ((1.1, 1.0), 1.6, "wrong"),
            ((1.1, 1.0), math.nan, "wrong"),
        ],
    )
    def test_verdicts(self, models, times, error, expected):
        ratio = paired_ratio([times[1]] * 9, [times[0]] * 9)
        assert models.verdict(ratio, 0.99, 1.0, error) == expected


class TestFiguresOfPrograms:
    """Tables of host costs, first calls and whole models, from the records that exist."""

    @pytest.fixture(autouse=True)
    def _records(self, tmp_path, monkeypatch):
        monkeypatch.setattr(figures, "RESULTS", tmp_path)
        self.folder = tmp_path / "h100"
        self.folder.mkdir()

    def write(self, name: str, **content: Any) -> None:
        head = {"command": f"python benchmarks/{name}.py", "date": "2026-11-27", "device": "NVIDIA H100"}
        (self.folder / f"{name}.json").write_text(json.dumps({**head, **content}))

    def test_without_records(self):
        self.write("dispatch", calls_us={})  # of a version that measured no products
        for figure in (figures.host_cost, figures.stutter, figures.models):
            assert figure() == "There is no record yet."

    def test_host_costs(self):
        calls = {"torch.mm": 10.0, "autotile.torch.matmul": 8.0, "F.linear": 10.0, "autotile.torch.linear": 12.5}
        self.write("dispatch", products_us={"float32 1 x 2 x 3, sgemm": calls})
        shown = figures.host_cost()
        assert "| float32 1 x 2 x 3, sgemm | F.linear | 10.0 | autotile.torch.linear | 12.5 | 1.25 |" in shown
        assert "NVIDIA H100" in shown
        assert "(../benchmarks/results/h100/dispatch.json)" in shown

    def test_first_calls(self):
        times = {"median": 0.1, "p99": 0.25, "worst": 3.0}
        states = (f"{state} {call}" for state in ("cold", "warm") for call in ("first", "second"))
        phases = {name: {"torch": times, "autotile": {**times, "median": 0.2}} for name in states}
        self.write("stutter", sizes=1000, ms={"float32": phases})
        both = "0.10 / 0.25 / 3.00 | 0.20 / 0.25 / 3.00"
        assert f"| float32 | cold | {both} | {both} |" in figures.stutter()

    def test_modes_of_several_records_are_columns(self):
        row = {"model": "llama", "cell": "decode 1", "dtype": "bfloat16", "verdict": "ok", "ratio": [1.25, 1.2, 1.3]}
        times = {"torch": {"wall_ms": 2.0}, "autotile": {"wall_ms": 1.6}}
        self.write("models", rows=[{**row, **times, "mode": "eager"}, {"mode": "eager", "error": "failed"}])
        self.write("models_tuned", rows=[{**row, **times, "mode": "max-autotune", "verdict": "miss"}])
        shown = figures.models()
        assert "| model | size | dtype | eager | max-autotune |" in shown
        assert "| llama | decode 1 | bfloat16 | 1.25 (2 -> 1.6) | 1.25 (2 -> 1.6), miss |" in shown

"""The parts of benchmarks/gemm.py that need no GPU: choice of kernels, budget, seeds, and report."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_runs import add_trial, end_run, start_run

from autotile.core.model import Measurement, Outcome, Trial, config_key
from autotile.core.statistics import Interval
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.database.winners import Winner
from autotile.kernel.operation import load_operation
from autotile.serving.bound import BoundKernel
from autotile.serving.dispatcher import find_best_kernel
from autotile.settings import read_settings
from autotile.workers.child import WorkerPool

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

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
    """Simulated sessions of kernels with known times, on a simulated clock.

    Parameters
    ----------
    times_us
        Time of each kernel; a missing kernel does not run.
    start_s, finals_s
        Minimum time of a session, and its time beyond the search.
    tried
        Configurations of a kernel after its probe; 12 if it is missing.
    """

    def __init__(
        self,
        times_us: dict[str, float],
        start_s: float = 1.5,
        finals_s: float = 2.0,
        tried: dict[str, int] | None = None,
    ) -> None:
        self.times_us = times_us
        self.tried = tried or {}
        self.start_s = start_s
        self.finals_s = finals_s
        self.now_s = 100.0
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
    def test_shapes(self, product: Product, expected: set[str]) -> None:
        assert set(worth_tuning(product, fitting_kernels(product))) == expected

    def test_a_kernel_gives_way_only_to_one_that_fits(self) -> None:
        assert worth_tuning(LARGE, ["sgemm", "gemm_mma"]) == ["sgemm", "gemm_mma"]

    @given(st.sets(st.sampled_from(KERNELS), min_size=1), st.integers(1, 9000), st.integers(1, 9000))
    def test_something_is_tuned_wherever_a_kernel_for_tiles_fits(self, fitting: set[str], m: int, n: int) -> None:
        found = worth_tuning(Product(m, n, 64), fitting)
        assert set(found) <= fitting
        assert found or fitting == {"gemm_small"}


class TestLeaders:
    def test_the_cuda_cores_alone_have_a_leader_of_their_own(self) -> None:
        assert leaders({"sgemm": 500.0, "sgemm_ws": 300.0, "sgemm_bf16x6": 200.0}) == ["sgemm_bf16x6", "sgemm_ws"]

    def test_a_runner_up_that_is_near_leads_too(self) -> None:
        assert leaders({"gemm_mma": 110.0, "gemm_wgmma": 100.0}) == ["gemm_wgmma", "gemm_mma"]
        assert leaders({"gemm_mma": 150.0, "gemm_wgmma": 100.0}) == ["gemm_wgmma"]

    def test_emulation_that_is_slower_is_left_aside(self) -> None:
        assert leaders({"sgemm_bf16x6": 90.0, "sgemm_ws": 50.0}) == ["sgemm_ws"]

    def test_of_nothing(self) -> None:
        assert leaders({}) == []


class TestShareOut:
    def test_probes_come_first_and_leaders_share_the_rest(self) -> None:
        sessions = MadeUpSessions({"sgemm": 500.0, "sgemm_ws": 300.0, "sgemm_bf16x6": 200.0})
        share_out(["sgemm", "sgemm_ws", "sgemm_bf16x6"], 60.0, sessions, sessions.clock)
        probes, rest = sessions.held[:3], sessions.held[3:]
        assert [(name, finals) for name, _, finals in probes] == [
            ("sgemm", False),
            ("sgemm_ws", False),
            ("sgemm_bf16x6", False),
        ]
        assert [(name, finals) for name, _, finals in rest] == [("sgemm_bf16x6", True), ("sgemm_ws", True)]
        assert rest[0][1] == pytest.approx(rest[1][1]) == pytest.approx((60.0 - 3 * 6.0) / 2 - 2.0)

    @given(
        st.dictionaries(st.sampled_from(KERNELS), st.floats(1.0, 1000.0), min_size=1),
        st.floats(60.0, 300.0),
        st.floats(0.0, 6.0),
    )
    def test_the_budget_is_used_and_kept(self, times_us: dict[str, float], budget_s: float, finals_s: float) -> None:
        """Exactly, if each leader can hold a session."""
        sessions = MadeUpSessions(times_us, start_s=1.0, finals_s=finals_s)
        share_out(list(times_us), budget_s, sessions, sessions.clock)
        assert sessions.now_s - 100.0 <= budget_s + 1e-6
        if 0.6 * budget_s >= len(times_us) * (1.0 + finals_s):
            assert sessions.now_s - 100.0 == pytest.approx(budget_s)

    def test_a_budget_too_small_for_finals_is_spent_on_probes(self) -> None:
        sessions = MadeUpSessions({"sgemm_ws": 300.0, "sgemm_bf16x6": 200.0}, start_s=1.5, finals_s=2.0)
        share_out(["sgemm_ws", "sgemm_bf16x6"], 4.0, sessions, sessions.clock)
        assert [finals for _, _, finals in sessions.held] == [False, False]
        assert sessions.now_s - 100.0 <= 4.0

    def test_a_kernel_with_few_trials_is_not_ranked(self) -> None:
        sessions = MadeUpSessions({"gemm_small": 900.0, "sgemm": 500.0, "sgemm_bf16x6": 200.0}, tried={"gemm_small": 1})
        share_out(list(sessions.times_us), 60.0, sessions, sessions.clock)
        assert [name for name, _, finals in sessions.held if finals] == ["sgemm_bf16x6", "sgemm", "gemm_small"]

    def test_a_kernel_that_does_not_run_leaves_its_time_to_others(self) -> None:
        sessions = MadeUpSessions({"sgemm_ws": 300.0})
        share_out(["sgemm_ws", "sgemm_bf16x6"], 60.0, sessions, sessions.clock)
        assert sessions.held[-1] == ("sgemm_ws", pytest.approx(60.0 - 12.0 - 2.0), True)

    def test_without_kernels_nothing_happens(self) -> None:
        sessions = MadeUpSessions({"sgemm": 500.0})
        before_s = sessions.clock()
        share_out([], 60.0, sessions, sessions.clock)
        assert sessions.held == []
        assert sessions.clock() == before_s


class TestTuneProduct:
    """Replay of recorded kernels."""

    @pytest.fixture(autouse=True)
    def _replay(self, monkeypatch: pytest.MonkeyPatch, only_kernel: Callable[[str], None]) -> None:
        monkeypatch.setattr("autotile.tuning.backend.has_driver", lambda: False)
        only_kernel("matmul_tiled")

    def test_a_second_search_goes_on_and_nothing_is_measured_twice(self) -> None:
        with WorkerPool() as worker_pool:
            tuned = tune_product(Product(2048, 2048, 2048), 8.0, None, worker_pool)
        with Database.open(read_settings().database) as database:
            (study,) = database.studies()
            tried = [config_key(trial.config) for trial in database.trials(study.study_id, phase="search")]
            (best,) = database.best()
            runs = database.runs(study.study_id)
        assert len(tried) == len(set(tried)) == tuned.tried["matmul_tiled"]
        assert len(runs) == 3  # a probe, a search, the finals
        assert best.confirmed
        assert best.run == runs[-1]
        assert tuned.seconds < 9.0


class TestSeeds:
    SIZES: ClassVar = {"M": 999, "N": 1024, "K": 512}

    @pytest.fixture
    def served(self) -> BoundKernel:
        return find_best_kernel("sgemm_2d", "float32", "h200", read_settings().database, self.SIZES)

    def test_those_of_the_nearest_sizes_come_first_and_each_once(self, served: BoundKernel, tmp_path: Path) -> None:
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

    def test_a_winner_of_an_older_kernel_has_new_parameters_at_their_defaults(self, served: BoundKernel) -> None:
        default = served.definition.spec.default
        old = {name: value for name, value in default.items() if name != "BK"} | {"PAD": 0, "GONE": 1}
        found = seeds_of(served, [Seed("sgemm_2d", "float32", self.SIZES, old)], None)
        assert found == [default, {**default, "PAD": 0}]

    def test_what_was_tuned_at_another_size_is_tried(self, served: BoundKernel) -> None:
        spec = served.definition.spec
        winner = {**spec.default, "LANES_X": 4}
        problem = replace(served.problem, sizes={"M": 512, "N": 512, "K": 512})
        with Database.open(read_settings().database) as database:
            key = key_of(served.definition, problem, served.device, nvrtc_version="13.0", l2_mode="cold")
            study = database.study(key, served.device)
            run = start_run(database, study, sampler="random")
            add_trial(database, study, run, Trial(winner, Outcome.OK, measurement=Measurement(9.0, 8.9, 9.1)))
            end_run(database, run)
        assert seeds_of(served, [], None) == [spec.default, winner]

    def test_what_is_shipped_is_tried(self, served: BoundKernel, monkeypatch: pytest.MonkeyPatch) -> None:
        shipped = {**served.definition.spec.default, "MIN_BLOCKS": 1}
        key = key_of(served.definition, served.problem, served.device, nvrtc_version="", l2_mode="cold")
        winner = Winner(key, served.device, shipped, None, None, datetime.now(UTC), shipped=True)
        monkeypatch.setattr("gemm_seeds.shipped_winners", lambda kernel, dtype: [winner])
        assert shipped in seeds_of(served, [], None)

    @pytest.mark.parametrize("text", ["", "[]", '{"float32": [{"kernel": "sgemm"}]}', '{"float32": 1}'])
    def test_a_file_that_is_none_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "seeds.json"
        file.write_text(text)
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
    def test_a_cell_for_each_heading(self, dtype: str, kernel: str) -> None:
        row = self.row(replace(LARGE, dtype=dtype), **{kernel: 90.0})
        assert len(row.cells()) == len(headings(dtype))
        assert dict(zip(headings(dtype), row.cells(), strict=True))["tuned"] == "59.8 s"

    def test_both_results_of_float32_are_reported(self) -> None:
        row = self.row(LARGE, sgemm_bf16x6=50.0, sgemm_ws=125.0)
        assert dict(zip(headings("float32"), row.cells(), strict=True))["CUDA cores alone"].endswith("(0.800)")
        document = row.to_json()
        assert (document["kernel"], document["cuda_cores"]["kernel"]) == ("sgemm_bf16x6", "sgemm_ws")
        assert (document["ratio"], document["cuda_cores"]["ratio"]) == (2.0, 0.8)
        assert document["cublas_error_over_rms"] == 2e-7
        assert document["share_of_peak"] * EMULATED_PEAK == pytest.approx(1e12 * document["tflops_per_s"])

    def test_a_kernel_of_the_cuda_cores_that_leads_is_both(self) -> None:
        row = self.row(LARGE, sgemm_ws=80.0)
        assert row.best is row.cuda_cores

    def test_means_of_both(self) -> None:
        found = summary([self.row(LARGE, sgemm_bf16x6=50.0, sgemm_ws=100.0), self.row(LARGE, sgemm_ws=200.0)])
        assert found["geometric_mean"] == pytest.approx(1.0)
        assert found["least"] == 0.5
        assert found["cuda_cores"] == {"geometric_mean": pytest.approx(0.5**0.5), "least": 0.5}
        assert found["right"]
        assert "cuda_cores" not in summary([self.row(replace(LARGE, dtype="float16"), gemm_wgmma=100.0)])

    def test_one_wrong_result_is_reported(self) -> None:
        row = self.row(LARGE, sgemm_bf16x6=50.0, sgemm_ws=100.0)
        wrong = replace(row, runners=(row.runners[0], replace(row.runners[1], error=1e-3)))
        assert wrong.cells()[headings("float32").index("right")] == "NO"
        assert not summary([wrong])["right"]

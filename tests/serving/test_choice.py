"""Choice of the configuration: exact, nearest, transferred or default, and results that are never served."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Problem, Resources
from autotile.database.database import Database
from autotile.database.engine import RUNS, TRIALS
from autotile.errors import InputError
from autotile.kernel.library import load_kernel
from autotile.serving.choice import Choice, explain
from autotile.serving.dispatcher import get_best_kernel
from autotile.settings import read_settings

SMALL, LARGE = {"THREADS": 64, "WORK": 1}, {"THREADS": 256, "WORK": 4}
DEFAULT = {"THREADS": 128, "WORK": 1}


class TestTiers:
    def test_exact(self, store: Any) -> None:
        store.put(4096, LARGE)
        store.put(8192, SMALL)
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.config, kernel.source) == ("exact", LARGE, "cuda")
        assert kernel.measurement.time_us == 10.0
        assert abs(datetime.now(UTC) - kernel.tuned_at) < timedelta(minutes=1)
        assert kernel.explain() == (
            "scale n=4096 float32 on NVIDIA H200 is served THREADS=256 WORK=4. "
            "It was tuned for exactly this problem on this GPU. "
            "It took 10 us (95 % interval 9.9 to 10.1, cold L2) when tuned today."
        )

    def test_nearest_by_doublings(self, store: Any) -> None:
        store.put(1024, SMALL)
        store.put(65536, LARGE)
        assert store.ask(4096).config == SMALL
        assert store.ask(16384).config == LARGE
        kernel = store.ask(4096)
        assert kernel.tier == "nearest"
        assert "nearest that was tuned on this GPU: sizes n=1024 instead of n=4096" in kernel.explain()

    def test_transferred(self, store: Any) -> None:
        store.put(4096, LARGE, device=replace(device_profile("a100"), source="cuda"))
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.config) == ("transferred", LARGE)
        assert "tuned elsewhere: GPU NVIDIA A100" in kernel.explain()
        assert "instead of NVIDIA H200" in kernel.explain()
        assert "number of SMs 108 instead of 132" in kernel.explain()

    def test_of_other_gpus_the_same_architecture_comes_before_a_nearer_size(self, store: Any) -> None:
        store.put(4096, LARGE, device=replace(device_profile("a100"), source="cuda"))
        store.put(65536, SMALL, device=replace(device_profile("h100"), source="cuda"))
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.config, kernel.tuned_on) == ("transferred", SMALL, "NVIDIA H100 80GB HBM3")

    @pytest.mark.usefixtures("no_gpu")
    def test_default(self, store: Any) -> None:
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.config, kernel.source) == ("default", DEFAULT, "")
        assert (kernel.measurement, kernel.tuned_at) == (None, None)
        assert "the default configuration; run `autotile tune`" in kernel.explain()

    def test_a_nearer_tier_comes_before_a_nearer_size(self, store: Any) -> None:
        store.put(4096, LARGE, device=replace(device_profile("a100"), source="cuda"))
        assert store.ask(4096).tier == "transferred"
        store.put(16384, SMALL)
        assert (store.ask(4096).tier, store.ask(4096).config) == ("nearest", SMALL)
        store.put(4096, DEFAULT)
        assert (store.ask(4096).tier, store.ask(4096).config) == ("exact", DEFAULT)

    def test_of_equally_near_ones_the_fewest_differences_then_the_newest(self, store: Any) -> None:
        store.put(2048, LARGE, nvrtc_version="12.9")
        store.put(8192, SMALL)
        assert store.ask(4096).config == SMALL
        newest = {"THREADS": 64, "WORK": 2}
        store.put(2048, newest)
        assert store.ask(4096).config == newest

    @pytest.mark.parametrize("date", ["1970-01-01T00:00:00.000000+00:00", "2140-01-01T00:00:00.000000+00:00"])
    def test_the_clock_does_not_decide_which_is_newest(self, store: Any, date: str) -> None:
        def redate() -> None:
            with Database.open(read_settings().database) as database, database.writing() as connection:
                connection.execute(update(RUNS).values(ended_at=date))
                connection.execute(update(TRIALS).values(created_at=date))

        store.put(2048, LARGE)
        redate()
        store.put(8192, SMALL)
        assert store.ask(4096).config == SMALL
        store.put(4096, LARGE)
        redate()
        store.put(4096, SMALL)
        assert store.ask(4096).config == SMALL

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"nvrtc_version": "1.0"}, "NVRTC version 1.0 instead of"),
            ({"l2_mode": "hot"}, "L2 mode hot instead of cold"),
        ],
    )
    def test_other_circumstances_are_not_exact_and_are_told(
        self, store: Any, changes: dict[str, str], said: str
    ) -> None:
        store.put(4096, LARGE, **changes)
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.config) == ("nearest", LARGE)
        assert said in kernel.explain()

    def test_the_fastest_of_a_search_that_has_not_finished(self, store: Any) -> None:
        store.put(4096, LARGE, finished=False)
        assert store.ask(4096).config == LARGE


class TestReplayed:
    """Replayed results are served if nothing was measured, and are named as such."""

    def test_a_replayed_result_is_told(self, store: Any) -> None:
        store.put(4096, LARGE, device=replace(device_profile("h200"), source="replayed"))
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.source, kernel.device.source) == ("exact", "replayed", "replayed")
        assert "replayed from a recording, not measured on this machine" in kernel.explain()

    def test_on_another_gpu_it_is_tuned_elsewhere_and_nothing_is_said_in_terms_of_the_key(self, store: Any) -> None:
        store.put(4096, LARGE, time_us=12345.6, device=replace(device_profile("h200"), source="replayed"))
        kernel = store.ask(4096, device="rtx-3090")
        assert (kernel.tier, kernel.tuned_on) == ("transferred", "NVIDIA H200")
        assert kernel.explain() == (
            "scale n=4096 float32 on NVIDIA GeForce RTX 3090 is served THREADS=256 WORK=4. It was tuned elsewhere: "
            "GPU NVIDIA H200 instead of NVIDIA GeForce RTX 3090; number of SMs 132 instead of 82. Rules and limits "
            "hold here too. By the measurements there, it is expected to take 0.50 times as long here as what an empty "
            "database serves (default), 0.45 to 0.56 times. There it took 12346 us (95 % interval 12222 to 12469, cold "
            "L2) when tuned today. The time was replayed from a recording, not measured on this machine."
        )

    @pytest.mark.usefixtures("live_gpu")
    def test_on_the_recorded_gpu_itself_it_is_said_to_come_from_a_recording(self, store: Any) -> None:
        store.put(4096, LARGE, device=replace(device_profile("h200"), source="replayed"))
        kernel = store.ask(4096, device=None)
        assert kernel.tier == "transferred"
        assert "It was tuned from a recording of this GPU, not on the GPU itself. There it took" in kernel.explain()

    def test_a_measured_one_comes_first_however_old(self, store: Any) -> None:
        store.put(4096, SMALL)
        store.put(4096, LARGE, device=replace(device_profile("h200"), source="replayed"))
        kernel = store.ask(4096)
        assert (kernel.tier, kernel.source, kernel.config) == ("exact", "cuda", SMALL)


class TestNeverServed:
    def test_what_breaks_a_rule_at_these_sizes(self, store: Any) -> None:
        store.put(4096, LARGE)
        kernel = store.ask(500)  # THREADS * WORK is 1,024
        assert (kernel.tier, kernel.config) == ("default", DEFAULT)
        store.put(1024, SMALL)
        assert (store.ask(500).tier, store.ask(500).config) == ("nearest", SMALL)

    def test_an_unguarded_tile_for_sizes_that_it_does_not_divide(self, store: Any) -> None:
        kernel = load_kernel("matmul_tiled")
        tiled = type(store)(kernel, Path("matmul_tiled"))
        unguarded = {"TILE": 32, "PAD": 0, "UNROLL": 32, "GUARDED": False}
        sizes = {"M": 2048, "N": 2048, "K": 2048}
        tiled.put(0, unguarded, sizes=sizes)
        asked = {"name": "matmul_tiled", "device": "h200"}
        assert get_best_kernel(**asked, **sizes).config == unguarded
        assert get_best_kernel(**asked, **sizes | {"K": 4096}).config == unguarded
        assert get_best_kernel(**asked, **sizes | {"K": 2047}).tier == "default"

    @pytest.mark.parametrize(
        "changes",
        [
            {"template_hash": "0" * 64},
            {"space_hash": "0" * 64},
            {"options": ("--use_fast_math",)},
            {"dtype": "float64"},
            {"kernel": "other"},
        ],
    )
    def test_results_of_another_version(self, store: Any, changes: dict[str, Any]) -> None:
        store.put(4096, LARGE, **changes)
        assert store.ask(4096).tier == "default"

    def test_a_changed_template_forgets_and_a_changed_comment_does_not(self, store: Any) -> None:
        store.put(4096, LARGE)
        template = store.path.with_suffix(".cu")
        template.write_text("// The same kernel.\n" + template.read_text())
        assert store.ask(4096).tier == "exact"
        template.write_text(template.read_text().replace("factor * x[i]", "x[i] * factor"))
        assert store.ask(4096).tier == "default"

    def test_a_value_that_the_space_no_longer_has(self, store: Any) -> None:
        store.put(4096, LARGE)
        store.path.write_text(store.path.read_text().replace("WORK = [1, 2, 4]", "WORK = [1, 2]"))
        assert store.ask(4096).tier == "default"

    def test_what_exceeds_the_devices_limits(self, store: Any) -> None:
        text = store.path.read_text()
        store.path.write_text(
            text.replace('block = ["THREADS"]', 'block = ["THREADS"]\ndynamic_smem_bytes = "256 * THREADS * WORK"')
        )
        other = type(store)(load_kernel(str(store.path)), store.path)
        other.put(1 << 20, {"THREADS": 256, "WORK": 2})  # 128 KiB
        assert other.ask(1 << 20).tier == "exact"
        assert other.ask(1 << 20, device="t4").tier == "default"  # 64 KiB

    def test_what_with_its_registers_does_not_fit(self, store: Any) -> None:
        """512 threads of 200 registers are more than an SM has."""
        text = store.path.read_text().replace("THREADS = [32, 64, 128, 256]", "THREADS = [32, 64, 128, 256, 512]")
        store.path.write_text(text)
        store.put(4096, {"THREADS": 512, "WORK": 1}, resources=Resources(200, 0, 0, 0, 0))
        assert store.ask(4096).tier == "default"

    def test_what_spills_more_than_the_author_now_accepts(self, store: Any) -> None:
        store.put(4096, LARGE, resources=Resources(24, 8, 8, 16, 0))
        assert store.ask(4096).tier == "exact"
        store.path.write_text(store.path.read_text() + "\n[limits]\nmax_spill_bytes = 0\n")
        assert store.ask(4096).tier == "default"


class TestDefault:
    def test_where_it_breaks_a_rule_another_valid_one_serves(self, store: Any) -> None:
        kernel = store.ask(100)
        assert (kernel.tier, kernel.config) == ("default", {"THREADS": 32, "WORK": 1})

    def test_where_nothing_is_valid_it_is_an_error(self, store: Any) -> None:
        with pytest.raises(InputError, match="enough_blocks"):
            store.ask(8)


@pytest.mark.parametrize(
    ("age", "said"),
    [
        (timedelta(hours=1), "when tuned today."),
        (timedelta(days=1, hours=1), "when tuned yesterday."),
        (timedelta(days=40, hours=1), "when tuned 40 days ago."),
        (
            datetime.now(UTC) - datetime(2140, 5, 1, 12, tzinfo=UTC),
            "when tuned, on 2140-05-01 by a clock ahead of this one.",
        ),
    ],
)
def test_the_age_is_told(age: timedelta, said: str) -> None:
    measurement = Measurement(10.0, 9.0, 11.0)
    choice = Choice("exact", SMALL, measurement, source="cuda", tuned_at=datetime.now(UTC) - age)
    assert explain(Problem("scale", {"n": 1}, "float32"), device_profile("h200"), choice).endswith(said)

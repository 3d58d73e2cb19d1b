"""Results of other sizes: served only where they are expected to be faster than what an empty database serves."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_runs import add_trial, end_run, start_run

from autotile.core.device import device_profile
from autotile.core.model import Config, Problem, Trial, config_key
from autotile.cuda.toolchain import nvrtc_version
from autotile.database.database import Database
from autotile.database.keys import key_of
from autotile.exchange.recording import Recording, read_recording
from autotile.families.preference import Tuned, prefer
from autotile.kernel.library import load_kernel
from autotile.kernel.parser import parse_spec
from autotile.serving.dispatcher import Dispatcher
from autotile.serving.selection import KernelRequest, Shelf, untuned_config
from autotile.space.time_estimate import estimate_configs

KERNEL = load_kernel("sgemm_2d")
H200 = device_profile("h200")
SMALL, LARGE = {"THREADS": 64, "WORK": 1}, {"THREADS": 256, "WORK": 4}


def sizes_of(text: str) -> dict[str, int]:
    return dict(zip("MNK", map(int, text.split("x")), strict=True))


RECORDINGS = {
    text: read_recording(
        Path(__file__).parents[2] / "recordings" / f"sgemm_2d-nvidia-h200-{text}-float32.npz", kernel="sgemm_2d"
    )
    for text in ("1024x1024x1024", "128x4096x4096", "2000x3000x1000", "2048x2048x2048", "4096x4096x4096")
}


def time_us(text: str, config: Config) -> float:
    """Return the recorded time; infinite if the configuration was not recorded or failed."""
    recorded = RECORDINGS[text].lookup(config)
    return recorded.measurement.time_us if recorded is not None and recorded.measurement is not None else np.inf


def tune(path: Path, text: str, seed: int, trials: int = 200) -> dict[str, Any]:
    """Store a random search of a recorded problem with its finals, and return the winner's configuration."""
    recording = RECORDINGS[text]
    device = replace(H200, source="cuda")
    problem = Problem("sgemm_2d", sizes_of(text), "float32")
    key = key_of(KERNEL, problem, device, nvrtc_version=nvrtc_version(), l2_mode="cold")
    rows = np.random.default_rng(seed).choice(len(recording), trials, replace=False).tolist()
    ran = sorted((row for row in rows if recording.ok[row]), key=lambda row: recording.columns["time_us"][row])
    default = recording.row_of(KERNEL.spec.default)
    assert default is not None
    with Database.open(path) as database:
        study = database.study(key, device)
        run = start_run(database, study, sampler="random", driver="")
        for row in rows:
            add_trial(database, study, run, trial_of(recording, row), phase="search")
        finalists = sorted({*ran[:12], default}, key=lambda row: recording.columns["time_us"][row])
        for rank, row in enumerate(finalists):
            add_trial(database, study, run, trial_of(recording, row), phase="final", rank=rank + 1)
        end_run(database, run)
    return recording.config(finalists[0])


def trial_of(recording: Recording, row: int) -> Trial:
    found = recording.result(row)
    return Trial(
        recording.config(row),
        found.outcome,
        found.reason,
        found.stage,
        resources=found.resources,
        measurement=found.measurement,
    )


def serve(path: Path, text: str) -> Any:
    return Dispatcher(database=path).get_best_kernel("sgemm_2d", device="h200", **sizes_of(text))


def times_elsewhere(path: Path, seed: int, tuned: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """Return the time of what is served at the other problems, of the nearest winner, and without a database.

    Where an empty database serves a configuration that was not recorded, nothing else may be served.
    """
    winners = {text: tune(path, text, seed) for text in tuned}
    found = {}
    for text in RECORDINGS.keys() - set(tuned):
        kernel = serve(path, text)
        empty, _ = untuned_config(KernelRequest(KERNEL, kernel.problem, H200, "", Shelf()))
        if np.isinf(time_us(text, empty)):
            assert kernel.config == empty
            continue
        near = min(winners, key=lambda one: sum(abs(np.log2(a / b)) for a, b in zip(*pair(one, text), strict=True)))
        found[text] = time_us(text, kernel.config), time_us(text, winners[near]), time_us(text, empty)
    return found


def pair(one: str, other: str) -> tuple[list[int], list[int]]:
    return [*sizes_of(one).values()], [*sizes_of(other).values()]


class TestRecorded:
    @pytest.mark.parametrize("seed", [11, 12])
    @pytest.mark.parametrize("tuned", [*([text] for text in RECORDINGS), ["1024x1024x1024", "4096x4096x4096"]])
    def test_no_other_size_gets_slower_than_without_a_database(
        self, tuned: list[str], seed: int, tmp_path: Path
    ) -> None:
        for text, (served, _, empty) in times_elsewhere(tmp_path / "t.db", seed, tuned).items():
            assert served <= 1.01 * empty, text

    def test_on_average_it_is_faster_than_always_the_nearest_and_than_no_database(self, tmp_path: Path) -> None:
        found = [times for text in RECORDINGS for times in times_elsewhere(tmp_path / f"{text}.db", 3, [text]).values()]
        served, nearest, empty = np.exp(np.log(found).mean(axis=0))
        assert served < 0.95 * min(nearest, empty)

    def test_a_neighbours_tile_that_is_slower_gives_way_and_the_reason_is_said(self, tmp_path: Path) -> None:
        winner = tune(tmp_path / "t.db", "4096x4096x4096", 0)
        exact, near = (serve(tmp_path / "t.db", text) for text in ("4096x4096x4096", "2000x3000x1000"))
        assert (exact.tier, exact.config, exact.choice.compared) == ("exact", winner, None)
        assert (near.tier, near.config) == ("default", KERNEL.spec.default)
        compared = near.choice.compared
        assert not compared.serves
        assert compared.interval[0] < compared.ratio < compared.interval[1]
        assert compared.tuned_sizes == sizes_of("4096x4096x4096")
        assert (
            "The result for M=4096 N=4096 K=4096 on NVIDIA H200 is not served: it is expected to take "
            f"{compared.ratio:.2f} times as long here as what an empty database serves (default), "
            f"{compared.interval[0]:.2f} to {compared.interval[1]:.2f} times"
        ) in near.explain()
        assert near.to_json()["compared"] == compared.to_json()

    def test_a_finalist_serves_where_the_winner_would_be_slow(self, tmp_path: Path) -> None:
        winner = tune(tmp_path / "t.db", "4096x4096x4096", 0)
        kernel = serve(tmp_path / "t.db", "1024x1024x1024")
        assert kernel.tier == "nearest"
        assert kernel.config != winner
        served = time_us("1024x1024x1024", kernel.config)
        assert served < 0.6 * time_us("1024x1024x1024", KERNEL.spec.default)
        assert served < 0.6 * time_us("1024x1024x1024", winner)
        assert "It was among the fastest at other sizes: sizes M=4096 N=4096 K=4096 instead of" in kernel.explain()
        assert "it is expected to take 0." in kernel.explain()


class TestTiers:
    """What is preferred when several results apply, with a kernel of one size."""

    def test_a_result_near_the_size_displaces_the_default_by_what_it_gained_there(self, store: Any) -> None:
        store.put(4096, SMALL, default_ratio=1.5)
        kernel = store.ask(4000)
        assert (kernel.tier, kernel.config) == ("nearest", SMALL)
        assert kernel.choice.compared.ratio == pytest.approx(1 / 1.5, rel=0.02)
        assert "It is the nearest that was tuned on this GPU" in kernel.explain()
        assert "expected to take 0.67 times as long here as what an empty database serves (default)" in kernel.explain()

    def test_a_gain_within_the_doubt_does_not(self, store: Any) -> None:
        store.put(4096, SMALL, default_ratio=1.05)
        assert (store.ask(8192).tier, store.ask(8192).config) == ("default", store.kernel.spec.default)
        assert store.ask(4096).tier == "exact"

    def test_where_the_default_won_it_is_the_nearest_result(self, store: Any) -> None:
        store.put(4096, store.kernel.spec.default)
        kernel = store.ask(8192)
        assert (kernel.tier, kernel.config, kernel.choice.compared) == ("nearest", store.kernel.spec.default, None)

    def test_far_away_where_latencies_are_no_longer_hidden_the_default_serves(self, store: Any) -> None:
        store.put(1 << 22, LARGE, default_ratio=1.3)
        assert store.ask(1 << 21).config == LARGE
        assert store.ask(2048).tier == "default"

    def test_of_several_results_a_far_better_one_is_preferred_to_a_nearer_one(self, store: Any) -> None:
        store.put(4096, SMALL, default_ratio=1.2)
        store.put(16384, LARGE, default_ratio=3.0)
        kernel = store.ask(5000)
        assert (kernel.tier, kernel.config) == ("nearest", LARGE)
        assert "It was among the fastest at other sizes: sizes n=16384 instead of n=5000" in kernel.explain()

    def test_a_result_of_this_gpu_comes_before_a_better_one_of_another(self, store: Any) -> None:
        store.put(4096, LARGE, default_ratio=9.0, device=replace(device_profile("a100"), source="cuda"))
        assert store.ask(4096).tier == "transferred"
        store.put(8192, SMALL, default_ratio=1.5)
        assert (store.ask(4096).tier, store.ask(4096).config) == ("nearest", SMALL)
        store.put(8192, SMALL, default_ratio=1.01)  # not surely faster, so the other GPU's is asked
        assert (store.ask(4096).tier, store.ask(4096).config) == ("transferred", LARGE)

    def test_results_of_another_element_type_are_not_compared(self, store: Any) -> None:
        store.put(4096, SMALL, dtype="float64")
        assert (store.ask(4100).tier, store.ask(4100).choice.compared) == ("default", None)

    def test_without_the_defaults_time_only_what_is_usual_is_assumed(self, store: Any) -> None:
        store.put(4096, SMALL, default_ratio=None)
        kernel = store.ask(4100)
        assert kernel.tier == "nearest"
        assert kernel.choice.compared.ratio == pytest.approx(0.887, abs=0.01)


COMPUTED = """
[kernel]
name = "opaque"
template = "opaque.cu"
entry = "opaque"
summary = "a launch that a function computes"

[problem]
sizes = { n = 4096 }

[parameters]
THREADS = [64, 128, 256]

[default]
THREADS = 128

[computed]
blocks = "number"

[launch]
block = ["THREADS"]
grid = ["computed.blocks"]

[arguments]
x = { buffer = "float32", shape = ["n"], access = "inout" }

[reference.outputs]
x = "2 * x"
"""


class TestWithoutEstimates:
    """A kernel whose launch cannot be estimated, so that only the blocks are counted."""

    def expectation(self, n: int, at: int, default_us: float | None) -> Any:
        spec = parse_spec(COMPUTED, "opaque.toml", functions={"blocks": lambda config: 2**20 // config["THREADS"]})
        assert estimate_configs(spec, {"n": n}, H200, [spec.default]) is None
        chosen = {"THREADS": 256}
        times = {config_key(chosen): 10.0} | ({config_key(spec.default): default_us} if default_us else {})
        found = prefer(
            spec, {"n": n}, H200, spec.default, [Tuned({"n": at}, H200, {config_key(chosen): chosen}, times)]
        )
        assert found is not None
        return found.expectation

    def test_a_large_gain_is_kept_near_and_not_far_away(self) -> None:
        assert self.expectation(4097, 4096, 13.0).is_faster
        assert not self.expectation(4096 * 256, 4096, 13.0).is_faster

    def test_a_small_gain_is_not_kept_at_twice_the_size(self) -> None:
        assert self.expectation(4097, 4096, 11.0).is_faster
        assert not self.expectation(8192, 4096, 11.0).is_faster

    def test_without_the_defaults_time_the_usual_gain_is_kept_nearby_only(self) -> None:
        assert self.expectation(4097, 4096, None).is_faster
        assert not self.expectation(16384, 4096, None).is_faster


def test_a_size_beyond_what_was_checked_gets_the_default(tmp_path: Path) -> None:
    path = tmp_path / "far.db"
    tune(path, "4096x4096x4096", seed=11)
    assert serve(path, "2048x2048x2048").choice.tier == "nearest"
    far = serve(path, "100000x100000x8")
    empty, _ = untuned_config(KernelRequest(KERNEL, far.problem, H200, "", Shelf()))
    assert (far.choice.tier, far.config) == ("default", empty)

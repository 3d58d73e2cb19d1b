"""Steps that share no parameters: how they are found, which trials cover them, and how the best are combined."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_kernels import APART_SPACE, APART_TEMPLATE, write_steps

from autotile.core.device import device_profile
from autotile.core.model import Measurement, Outcome, Trial
from autotile.kernel.library import Kernel, load_kernel
from autotile.space.search_space import feasible_space
from autotile.tuning.start import StepGroup, StepTimes, independent_groups

H200 = device_profile("h200")


def kernel_of(folder: Path, old: str = "", new: str = "", helpers: str = "") -> Kernel:
    (folder / "apart.cu").write_text(APART_TEMPLATE.replace("HELPERS", helpers))
    assert not old or APART_SPACE.count(old) == 1
    (folder / "apart.toml").write_text(APART_SPACE.replace(old, new) if old else APART_SPACE)
    return load_kernel(str(folder / "apart.toml"))


def test_what_each_step_alone_uses_is_apart(tmp_path: Path) -> None:
    assert independent_groups(kernel_of(tmp_path)) == [StepGroup((0,), ("A", "UNROLL")), StepGroup((1,), ("B",))]


@pytest.mark.parametrize(
    ("old", "new", "helpers"),
    [
        ('small = "A * UNROLL <= 256"', 'small = "A * UNROLL <= 256 and A <= 4 * B"', ""),
        ('block = ["B"]', 'block = ["B"]\nwhen = "A > 0"', ""),
        ('t = { workspace = "float32", shape = ["N"] }', 't = { workspace = "float32", shape = ["N + A"] }', ""),
        ('[reference]\noutputs = { y = "x" }', '[reference]\noutputs = { y = "x + 0 * A + 0 * B" }', ""),
        ("[rules]", '[objective]\nvalue = "time_us / UNROLL"\n[rules]', ""),
        ("", "", "constexpr int both = A + B;"),
        ("", "", '#include "helpers.cuh"'),
        ("", "", "__global__ void first(int) { }"),
    ],
)
def test_what_ties_steps_together(tmp_path: Path, old: str, new: str, helpers: str) -> None:
    (tmp_path / "helpers.cuh").write_text("")
    assert independent_groups(kernel_of(tmp_path, old, new, helpers)) == []


@pytest.mark.parametrize("name", ["two_step_sum", "split_rows", "scan_rounds", "block_sums"])
def test_steps_that_share_parameters(tmp_path: Path, name: str) -> None:
    assert independent_groups(load_kernel(str(write_steps(tmp_path, name)))) == []


@pytest.fixture
def times(tmp_path: Path) -> StepTimes:
    kernel = kernel_of(tmp_path)
    spec = kernel.spec
    return StepTimes(independent_groups(kernel), feasible_space(spec, spec.sizes, H200), spec.default, 0)


def trial(config: dict[str, int], first_us: float, second_us: float) -> Trial:
    measured = Measurement(first_us + second_us, 0, 0)
    steps = {"step_us.0.first": first_us, "step_us.1.second<B>": second_us}
    return Trial(config, Outcome.OK, measurement=measured, telemetry=steps)


def test_a_few_trials_have_every_setting(times: StepTimes) -> None:
    configs = [dict(config) for config in times.first_configs()]
    assert (len(configs), times.count) == (7, 7)  # 8 pairs of A and UNROLL, less one that breaks the rule
    assert configs[0] == {"A": 64, "UNROLL": 1, "B": 128}
    assert {(config["A"], config["UNROLL"]) for config in configs} == {
        (a, u) for a in (32, 64, 128, 256) for u in (1, 2) if a * u <= 256
    }
    assert {config["B"] for config in configs} == {32, 64, 128}


def test_the_best_of_each_step_are_combined(times: StepTimes) -> None:
    trials = [
        trial({"A": 64, "UNROLL": 1, "B": 128}, 9, 9),
        trial({"A": 32, "UNROLL": 2, "B": 64}, 2, 20),
        trial({"A": 128, "UNROLL": 1, "B": 32}, 20, 3),
        Trial({"A": 256, "UNROLL": 1, "B": 32}, Outcome.CRASHED),
    ]
    combined = [dict(config) for config in times.best_configs(trials)]
    assert combined[0] == {"A": 32, "UNROLL": 2, "B": 32}
    assert len(combined) == 4
    assert times.best_configs(trials[3:]) == []


def test_a_setting_without_a_time_is_tried_with_the_default(times: StepTimes) -> None:
    done = [trial(dict(config), 1, 1) for config in times.first_configs()]
    assert times.untimed_configs(done) == []
    assert times.untimed_configs(done[:-1]) == [{**done[-1].config, "B": 128}]

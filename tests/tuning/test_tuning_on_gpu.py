"""Tuning on a real device, from end to end."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import check_signal, count_configs, workers_with

import autotile
from autotile.core.model import Outcome
from autotile.cuda.compiler import CubinCache, compile_job
from autotile.cuda.driver import live_device
from autotile.cuda.toolchain import load_cupy
from autotile.kernel.launch import LaunchPlan, launch_geometry
from autotile.kernel.library import load_kernel
from autotile.serving.dispatcher import get_best_kernel
from autotile.space.limits import compiled_occupancy
from autotile.space.search_space import feasible_space
from autotile.tuning.options import TuneOptions
from autotile.workers.jobs import Candidate, loaded

pytestmark = pytest.mark.gpu
N = 1 << 20
STENCIL = Path(__file__).parents[2] / "examples" / "stencil_2d" / "stencil_2d.toml"
HEIGHT, WIDTH = 1000, 700


class TestWinner:
    def test_it_is_measured_stored_served_and_right(self, scale_toml):
        import cupy

        result = autotile.tune(str(scale_toml), n=N, options=TuneOptions(trials=6, seed=1))
        assert sum(result.outcomes.values()) == 6
        assert set(result.outcomes) <= {Outcome.OK, Outcome.PRUNED}
        assert result.notices == ()
        assert result.device == live_device()
        assert result.winner.measurement.low_us <= result.winner.time_us <= result.winner.measurement.high_us
        assert result.winner.stage == "finals"
        assert result.default is not None
        assert result.speedup.value > 0.95  # the default itself is a candidate
        assert 0 < result.gflops_per_s(result.winner) < 1e5

        kernel = get_best_kernel(str(scale_toml), n=N)
        assert (kernel.tier, kernel.source, kernel.config) == ("exact", "cuda", result.winner.config)
        x = cupy.asarray(np.random.default_rng(0).standard_normal(N), np.float32)
        want = 2.0 * x.get().astype(np.float64)
        np.testing.assert_allclose(kernel(x).get(), want, rtol=1e-6)
        np.testing.assert_allclose(kernel(x, factor=-3.0).get(), -1.5 * want, rtol=1e-6)

    def test_the_example(self):
        import cupy

        options = TuneOptions(trials=10, seed=2)
        result = autotile.tune(str(STENCIL), H=HEIGHT, W=WIDTH, options=options)
        assert result.winner is not None
        assert result.outcomes[Outcome.OK] + result.outcomes[Outcome.PRUNED] == 10
        u = cupy.asarray(np.random.default_rng(0).standard_normal((HEIGHT, WIDTH)), np.float32)
        padded = np.pad(u.get().astype(np.float64), 1)
        around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        kernel = get_best_kernel(str(STENCIL), H=HEIGHT, W=WIDTH)
        assert kernel.tier == "exact"
        np.testing.assert_allclose(kernel(u).get(), around - 4 * padded[1:-1, 1:-1], rtol=1e-5, atol=1e-5)
        diffused = kernel(u, centre=0.5, neighbour=0.125)
        want = 0.5 * padded[1:-1, 1:-1] + 0.125 * around
        np.testing.assert_allclose(diffused.get(), want, rtol=1e-5, atol=1e-5)

    def test_hot_and_cold_are_kept_apart(self, scale_toml):
        for l2 in ("cold", "hot"):
            result = autotile.tune(str(scale_toml), n=N, options=TuneOptions(trials=3, l2=l2))
            assert result.resumed == 0
            assert result.winner.measurement.l2 == l2
        assert get_best_kernel(str(scale_toml), n=N).measurement.l2 == "cold"


class TestInterrupts:
    @pytest.mark.parametrize(("phase", "done"), [("starting", 0), ("searching", 2), ("finals", 12)])
    def test_ctrl_c(self, bench, phase, done):
        def interrupt(progress):
            if (progress.phase, progress.done) == (phase, done):
                raise KeyboardInterrupt

        assert bench.tune(None, interrupt, n=N).interrupted
        assert workers_with(parent=os.getpid()) == []
        assert len(bench.stored()) == done
        result = bench.tune(None, n=N)
        assert (result.resumed, result.interrupted) == (done, False)
        assert set(count_configs(bench.stored()).values()) == {1}

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_a_signal(self, tmp_path, number):
        check_signal((str(STENCIL), "H=4096", "W=4096", "--trials", "300"), tmp_path / "signals.db", number)


def test_occupancy_is_the_drivers_own(cubin_cache_folder):
    """The occupancy computed from the compiled resources equals the driver's."""
    kernel = load_kernel(str(STENCIL))
    device = live_device()
    sizes = {"H": HEIGHT, "W": WIDTH}
    space = feasible_space(kernel.spec, kernel.spec.at(sizes), device)
    cache = CubinCache(cubin_cache_folder, 10**9)
    load_cupy().cuda.Device(0).use()
    for row in range(0, len(space), max(1, len(space) // 12)):
        config = space.config(row)
        cubin = cache.get_or_compile(compile_job(kernel, config, kernel.spec.at(), device.architecture))
        ours = compiled_occupancy(
            launch_geometry(kernel.spec, config, kernel.spec.at(sizes), device), cubin.resources, device
        )
        functions = loaded(Candidate(config, str(cubin.path)), kernel.spec)
        plan = LaunchPlan.of(kernel.spec, config, kernel.spec.at(sizes), device)
        functions.opt_in(plan)
        geometry = plan.main.geometry
        drivers = functions[plan.main.step].blocks_per_sm(geometry.threads, geometry.dynamic_smem_bytes)
        assert ours.blocks_per_sm == drivers, config

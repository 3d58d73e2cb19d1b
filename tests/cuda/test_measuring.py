"""Support kernels, buffers, references, timers and telemetry on a device; energy on a simulated GPU."""

import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest
from gpu_calls import compare
from spec_samples import SGEMM

from autotile.core.device import device_profile
from autotile.core.dtypes import DTYPES
from autotile.cuda import expected_outputs
from autotile.cuda import timing as energy
from autotile.cuda.driver import live_device
from autotile.cuda.expected_outputs import ExpectedOutputs, agreed_outputs, expression_output, launch_key
from autotile.cuda.support import GuardedBuffer
from autotile.cuda.timing import Nvml, Timer, drift_us, energy_meter
from autotile.errors import InputError, ToolchainError
from autotile.kernel.expressions import parse_array_expression
from autotile.kernel.launch import LaunchPlan
from autotile.kernel.parser import parse_spec
from autotile.kernel.spec import Tolerance

FLOAT = DTYPES["float32"]


@pytest.mark.gpu(shared=True)
class TestOnGpu:
    def test_properties_are_whole_and_those_of_the_runtime(self):
        device, runtime = live_device(), cupy.cuda.runtime
        assert device.source == "cuda"
        assert device.sm_count > 0
        assert device.smem_per_block_optin_bytes >= device.smem_per_block_bytes == 48 * 1024
        assert device.peak_fp32_flops_per_s > 1e11
        assert device.memory_bandwidth_bytes_per_s > 1e10
        theirs = runtime.getDeviceProperties(0)
        assert device.name == theirs["name"].decode()
        assert device.compute_capability == f"{theirs['major']}.{theirs['minor']}"
        assert (device.memory_bytes, device.max_grid_dim) == (theirs["totalGlobalMem"], tuple(theirs["maxGridSize"]))
        assert device.max_block_dim == tuple(theirs["maxThreadsDim"])
        for name, attribute in (
            ("sm_count", "MultiProcessorCount"),
            ("l2_bytes", "L2CacheSize"),
            ("max_threads_per_sm", "MaxThreadsPerMultiProcessor"),
            ("max_blocks_per_sm", "MaxBlocksPerMultiprocessor"),
            ("registers_per_sm", "MaxRegistersPerMultiprocessor"),
            ("smem_per_sm_bytes", "MaxSharedMemoryPerMultiprocessor"),
            ("smem_per_block_optin_bytes", "MaxSharedMemoryPerBlockOptin"),
            ("smem_reserved_per_block_bytes", "ReservedSharedMemoryPerBlock"),
        ):
            assert getattr(device, name) == runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{attribute}"), 0)

    @pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 33, 5), (128, 64, 300)])
    def test_float64_product(self, support, m, n, k):
        generator = np.random.default_rng(0)
        a, b = generator.standard_normal((m, k)), generator.standard_normal((k, n))
        product = support.matmul(cupy.asarray(a), cupy.asarray(b)).get()
        np.testing.assert_allclose(product, a @ b, rtol=1e-12, atol=1e-12)

    def test_values_are_summed_up(self, support):
        values = np.random.default_rng(0).standard_normal(100_003)
        array = cupy.asarray(values)  # its memory is free for others where nothing holds it
        unfinite, squares = support.summarise(array.data.ptr, values.size)
        assert (unfinite, squares) == (0, pytest.approx(np.sum(values**2)))
        values[[5, 77]] = np.inf, np.nan
        array = cupy.asarray(values)
        assert support.summarise(array.data.ptr, values.size)[0] == 2

    @pytest.mark.parametrize("name", DTYPES)
    def test_compare_finds_the_one_wrong_element(self, support, name):
        dtype = DTYPES[name]
        shape = dtype.array_shape((1000,))
        stored = dtype.encode(np.arange(np.prod(shape)).reshape(shape) % 100)
        got = GuardedBuffer((1000,), dtype, support)
        got.array.set(stored)
        want = cupy.asarray(dtype.decode(stored)).ravel()
        assert compare(support, got.pointer, want, want.size, dtype, tolerance=Tolerance(0.0), scale=1.0)[0] == 0
        want[777] += 1.0
        found = compare(support, got.pointer, want, want.size, dtype, tolerance=Tolerance(0.0), scale=1.0)
        assert found[:2] == (1, 777)

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
    def test_8_bit_floats_are_decoded_alike(self, support, name):
        dtype = DTYPES[name]
        stored = np.arange(256, dtype=np.uint8)
        got = GuardedBuffer((256,), dtype, support)
        got.array.set(stored)
        values = dtype.decode(cupy.asarray(stored))
        np.testing.assert_array_equal(values.get(), dtype.decode(stored))
        finite = int(np.isfinite(values.get()).sum())
        wrong = compare(support, got.pointer, values, 256, dtype, tolerance=Tolerance(0.0), scale=1.0)[0]
        assert wrong == 256 - finite
        beyond = cupy.full(1, 1e9)  # saturates
        largest = GuardedBuffer((1,), dtype, support)
        largest.array.set(dtype.encode(np.array([1e9])))
        assert compare(support, largest.pointer, beyond, 1, dtype, tolerance=Tolerance(0.0), scale=1.0)[0] == 0

    def test_nan_is_wrong(self, support):
        got = GuardedBuffer((64,), FLOAT, support)
        got.poison()
        want = cupy.zeros(64)
        assert compare(support, got.pointer, want, 64, FLOAT, tolerance=Tolerance(1e9), scale=1e9)[0] == 64

    @pytest.mark.parametrize("offset", [-1, 64 * 64])
    def test_a_write_outside_is_seen_and_mended(self, support, offset):
        buffer = GuardedBuffer((64, 64), FLOAT, support)

        def broken() -> int:
            return int(support.results([buffer.count_broken])[0, 0])

        assert broken() == 0
        support.fill_words(buffer.pointer + 4 * offset, 1, 0)
        assert broken() == 1
        buffer.restore_guards()
        assert broken() == 0

    def test_times_grow_with_the_work(self, support):
        device = live_device()
        timer = Timer(device.l2_bytes, "cold", 0.1)
        small, large = (GuardedBuffer((n,), FLOAT, support) for n in (1 << 20, 1 << 26))
        timer.warm_up(large.poison)
        fast = timer.measure(small.poison, None)[0]
        slow = timer.measure(large.poison, None)[0]
        assert slow.time_us > 5 * fast.time_us
        assert slow.low_us <= slow.time_us <= slow.high_us
        assert 0 <= timer.event_floor_us() < 20
        assert timer.measure(large.poison, fast.time_us)[1]
        assert not timer.measure(large.poison, slow.time_us)[1]

    def test_a_race_gives_every_candidate_every_round(self, support):
        timer = Timer(live_device().l2_bytes, "hot", 0.1)
        buffer = GuardedBuffer((1 << 20,), FLOAT, support)
        times = timer.race([buffer.poison] * 3, rounds=7, seed=0)
        assert [len(row) for row in times] == [7, 7, 7]
        assert all(t > 0 for row in times for t in row)

    @pytest.mark.parametrize("iterations", [2_000, 40_000])  # in a batch, and alone
    def test_the_time_of_a_slow_host_is_not_measured(self, support, iterations):
        timer = Timer(live_device().l2_bytes, "hot", 0.1)

        def launch(late_us: float = 0.0) -> None:
            begin = time.perf_counter()
            while 1e6 * (time.perf_counter() - begin) < late_us:
                pass
            support.spin(1, iterations)

        def late() -> None:
            launch(25.0)

        timer.warm_up(launch)
        prompt_us = min(timer.samples(launch, 32))
        assert np.median([timer.samples(late, 1)[0] for _ in range(9)]) < prompt_us + 15.0
        (alone,) = timer.race([late], rounds=9, seed=0)
        assert np.median(alone) < prompt_us + 15.0

    def test_the_reference_kernel_takes_the_same_time_again(self, support):
        device = live_device()
        timer = Timer(device.l2_bytes, "cold", 0.1)
        timer.warm_up(lambda: support.spin(device.sm_count, 100_000))
        first, second = (drift_us(support, timer, device.sm_count) for _ in range(2))
        assert 10 < first < 1000
        assert second == pytest.approx(first, rel=0.2)

    @pytest.mark.parametrize(
        "text", ["2 * (A @ B) + exp(x) / mean(x)", "sum(A, 1)", "shift(x, 1) - maximum(x, 0)", "max(x) * x"]
    )
    @pytest.mark.parametrize("size", [7, 1500])
    def test_the_device_and_numpy_give_the_same_answer(self, support, text, size):
        generator = np.random.default_rng(0)
        host = {"A": generator.standard_normal((size, size)), "B": generator.standard_normal((size, size)),
                "x": generator.standard_normal(size)}  # fmt: skip
        expression = parse_array_expression(text, host)
        expected = expression.evaluate(host)
        given = {name: cupy.asarray(array) for name, array in host.items()}
        of = "y", expression, expected.shape, DTYPES["float64"]
        output = expression_output(given, *of, place="[reference] outputs.y", support=support)
        np.testing.assert_allclose(output.values.get(), expected, rtol=1e-10, atol=1e-10)
        assert output.scale == pytest.approx(np.sqrt(np.mean(expected**2)))

    @pytest.mark.parametrize(
        ("text", "words"), [("x / 0", "is not finite"), ("sum(x)", r"has shape \(\), but the argument y")]
    )
    def test_an_answer_that_is_none_is_told(self, support, text, words):
        of = {"x": cupy.arange(1.0, 9.0)}, "y", parse_array_expression(text, ["x"]), (8,), DTYPES["float64"]
        with pytest.raises(InputError, match=words):
            expression_output(*of, place="[reference] outputs.y", support=support)

    def test_telemetry_reads_or_is_empty(self):
        readings = Nvml().read()
        assert readings == {} or readings["sm_clock_mhz"] > 0

    def test_reading_properties_makes_no_context(self, tmp_path):
        code = (
            "from autotile.cuda.driver import live_device; live_device();"
            "from cuda.bindings import driver; _, device = driver.cuDeviceGet(0);"
            "_, flags, active = driver.cuDevicePrimaryCtxGetState(device); raise SystemExit(active)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FLUSH_US, FLUSH_W = 25.0, 200.0
LAUNCH_US, LAUNCH_W = 100.0, 400.0
IDLE_W = 100.0


class SimulatedGpu:
    """Clock, board and NVML; the energy counter is updated every tenth of a second."""

    def __init__(self, *, has_counter: bool = True, counts: bool = True, has_power: bool = True) -> None:
        self.now_s = self.used_mj = 0.0
        self.shown_mj, self.power = 5.0, IDLE_W
        self.has_counter, self.counts, self.has_power = has_counter, counts, has_power

    def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds / 1e-4)):
            self.now_s += 1e-4
            self.used_mj += 1e3 * self.power * 1e-4
            if self.counts and round(self.now_s * 1e4) % 1000 == 0:
                self.shown_mj = 5.0 + float(int(self.used_mj))

    def energy_mj(self) -> float | None:
        return self.shown_mj if self.has_counter else None

    def power_w(self) -> float | None:
        return self.power if self.has_power else None


class SimulatedTimer:
    """Launches back to back on the simulated GPU."""

    def __init__(self, gpu: SimulatedGpu, l2: str = "cold") -> None:
        self._gpu = gpu
        self.l2 = l2
        self.ran: list[int] = []

    def flush(self) -> None:
        pass

    def samples(self, launch: Any, count: int) -> list[float]:
        return [FLUSH_US] * count

    @contextmanager
    def back_to_back(self, step: Sequence[Any], probe_us: float) -> Iterator[Any]:
        self.ran.append(len(step))
        flush_us = FLUSH_US if self.l2 == "cold" else 0.0
        launch_us = LAUNCH_US if len(step) > 1 else 0.0
        step_us = flush_us + launch_us
        assert probe_us == step_us
        self._gpu.power = (flush_us * FLUSH_W + launch_us * LAUNCH_W) / step_us

        yield (lambda: None), lambda: step_us
        self._gpu.power = IDLE_W


def meter(gpu: SimulatedGpu, l2: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, SimulatedTimer]:
    monkeypatch.setattr(energy.time, "perf_counter", lambda: gpu.now_s)
    monkeypatch.setattr(energy.time, "sleep", gpu.sleep)
    timer: Any = SimulatedTimer(gpu, l2)
    made_up: Any = gpu
    return energy_meter(timer, made_up), timer


class TestEnergy:
    @pytest.mark.parametrize("l2", ["cold", "hot"])
    @pytest.mark.parametrize(("has_counter", "source"), [(True, "counter"), (False, "power")])
    def test_the_energy_is_that_of_the_run_alone(self, has_counter, source, l2, monkeypatch):
        gpu = SimulatedGpu(has_counter=has_counter)
        found = meter(gpu, l2, monkeypatch)[0](lambda: None, LAUNCH_US)
        assert found == {"energy_mj": pytest.approx(1e-3 * LAUNCH_US * LAUNCH_W, rel=0.01), "energy_source": source}

    def test_a_flush_is_measured_once(self, monkeypatch):
        subject, timer = meter(SimulatedGpu(), "cold", monkeypatch)
        first, second = (subject(lambda: None, LAUNCH_US) for _ in range(2))
        assert first["energy_mj"] == pytest.approx(second["energy_mj"], rel=0.01)
        assert timer.ran == [1, 2, 2]

    def test_a_counter_that_stands_still_is_none_and_without_power_either_there_is_no_meter(self, monkeypatch):
        found = meter(SimulatedGpu(counts=False), "hot", monkeypatch)[0](lambda: None, LAUNCH_US)
        assert found["energy_source"] == "power"
        with pytest.raises(InputError, match="neither the energy nor the power of this GPU; leave the objective"):
            meter(SimulatedGpu(has_counter=False, has_power=False), "cold", monkeypatch)

    def test_a_counter_that_stops_is_told(self, monkeypatch):
        gpu = SimulatedGpu()
        subject, _ = meter(gpu, "hot", monkeypatch)
        gpu.counts = False
        with pytest.raises(ToolchainError, match="NVML has stopped updating"):
            subject(lambda: None, LAUNCH_US)


class SimulatedCuda:
    """The part of `cupy.cuda` that a timer uses, on a GPU and a host with clocks of their own, in microseconds."""

    def __init__(self) -> None:
        self.host_us = self.gpu_us = 0.0
        self.launches = 0
        self.captured: list[float] | None = None
        self.stream: Any = None

    def launch(self, time_us: float, host_us: float = 8.0) -> None:
        """Queue a kernel, which takes the host some time, or capture it in a graph."""
        if self.captured is not None:
            self.captured.append(time_us)
            return
        self.launches += 1
        self.host_us += host_us
        self.gpu_us = max(self.gpu_us, self.host_us) + time_us

    def alloc(self, size_bytes: int) -> Any:
        return SimpleNamespace(memset_async=lambda _, count: self.launch(1.2 if count < 1 << 20 else 20.0))

    def get_current_stream(self) -> Any:
        return self.stream

    def get_elapsed_time(self, start: Any, stop: Any) -> float:
        return float(1e-3 * (stop.at_us - start.at_us))

    def Stream(self) -> Any:  # noqa: N802
        cuda = self

        class Stream:
            def __enter__(self) -> None:
                cuda.stream = self

            def __exit__(self, *error: object) -> None:
                pass

            def begin_capture(self) -> None:
                cuda.captured = []

            def end_capture(self) -> Any:
                times_us, cuda.captured = cuda.captured or [], None

                def launch(stream: object) -> None:
                    for number, time_us in enumerate(times_us):
                        cuda.launch(time_us, 0.0 if number else 5.0)

                return SimpleNamespace(launch=launch)

        return Stream()

    def Event(self) -> Any:  # noqa: N802
        cuda = self

        class Event:
            def record(self) -> None:
                cuda.host_us += 3.0
                self.at_us = cuda.gpu_us = max(cuda.gpu_us, cuda.host_us)

            @property
            def done(self) -> bool:
                return self.at_us <= cuda.host_us

            def synchronize(self) -> None:
                cuda.host_us = max(cuda.host_us, self.at_us)

        return Event()


class TestSlowHost:
    @pytest.fixture
    def cuda(self, monkeypatch):
        cuda = SimulatedCuda()
        monkeypatch.setattr(energy, "load_cupy", lambda: SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(energy.time, "perf_counter", lambda: 1e-6 * cuda.host_us)
        return cuda

    @pytest.mark.parametrize("l2", ["cold", "hot"])
    @pytest.mark.parametrize("time_us", [3.0, 20.0, 59.0, 400.0])
    def test_the_time_of_the_kernel_is_measured(self, cuda, l2, time_us):
        """The host stalls at every third launch."""
        timer, stalls = Timer(50 << 20, l2, 0.1), cycle([15.0, 15.0, 200.0])

        def launch() -> None:
            cuda.launch(time_us, next(stalls))

        assert timer.samples(launch, 20) == pytest.approx([time_us] * 20)
        assert timer.measure(launch, None)[0].time_us == pytest.approx(time_us)
        assert [max(row) for row in timer.race([launch, launch], 12, 0)] == pytest.approx([time_us] * 2)
        assert timer.parts([[launch]]) == pytest.approx([time_us])

    def test_what_waits_for_the_gpu_itself_counts_in_the_end(self, cuda):
        timer, made = Timer(50 << 20, "cold", 0.1), list[int]()

        def launch() -> None:
            made.append(1)
            cuda.launch(60.0)
            cuda.host_us = max(cuda.host_us, cuda.gpu_us)

        assert timer.samples(launch, 3) == pytest.approx([60.0] * 3, abs=20.0)
        made.clear()
        assert len(timer.race([launch], 9, 0, graphs=False)[0]) == 9
        assert len(made) == 3 + 9  # nothing is repeated in such a race
        made.clear()
        timer.samples(launch, 1, repeats=False)
        assert len(made) == 1


def test_what_expressions_are_evaluated_with_is_freed_before_the_pool(monkeypatch):
    """Without the garbage collector; so are the kernels that multiply, whose code is in the device's memory."""
    decoded: list[weakref.ref[Any]] = []
    alive: list[Any] = []

    class Given:
        matmul = staticmethod(np.matmul)

        def astype(self, *_: object) -> Any:
            values = np.ones((2, 2))
            decoded.append(weakref.ref(values))
            return values

    pool = SimpleNamespace(free_all_blocks=lambda: alive.extend(values() for values in decoded))
    cupy, support = SimpleNamespace(get_default_memory_pool=lambda: pool, asarray=np.asarray), Given()
    for name, value in (("load_cupy", lambda: cupy), ("checked_output", lambda *of, **_: of[0]), ("_SMALL_FLOPS", 0)):
        monkeypatch.setattr(expected_outputs, name, value)
    spec, kernels = parse_spec(SGEMM, "sgemm.toml"), weakref.ref(support)
    inputs: Any = {name: SimpleNamespace(array=Given()) for name in "ABC"}
    found = ExpectedOutputs(spec, support).compute(spec.at(), inputs, {"alpha": 1, "beta": 1}, seed=0, check=False)
    del support
    assert (found["C"].tolist(), alive, kernels()) == ([[3.0] * 2] * 2, [None] * 3, None)


def offer(waiting: Any, launch: object, value: Any) -> Any:
    return agreed_outputs(waiting, launch, lambda other: other == value, lambda: value)


class TestAgreement:
    def test_two_launches_must_agree_and_wrong_results_give_way(self):
        waiting: list[Any] = []
        assert offer(waiting, "64", 1.0) is None
        assert offer(waiting, "64", 1.0) is None  # the same launch confirms nothing
        assert offer(waiting, "128", 2.0) is None
        assert offer(waiting, "256", 1.0) == 1.0
        assert [offer(waiting, str(n), float(n)) for n in range(20)] == [None] * 20
        assert offer(waiting, "again", 3.0) is None
        assert offer(waiting, "again", 19.0) == 19.0

    def test_the_launch_tells_configurations_apart(self):
        spec, device = parse_spec(SGEMM, "sgemm.toml"), device_profile("h100")
        parameter = next(p for p in spec.parameters if len(p.values) > 1)
        keys = set()
        for value in parameter.values:
            config = {**spec.default, parameter.name: value}
            keys.add(launch_key(spec, config, LaunchPlan.of(spec, config, spec.at(), device)))
        assert len(keys) > 1

"""A kernel bound to a configuration and a problem: call it with arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, LaunchGeometry, Measurement, Occupancy, Problem, Resources, config_text
from autotile.cuda.compiler import CachedCubin, CubinCache, compile_job
from autotile.cuda.driver import outside_of_captures
from autotile.cuda.function import Module, PackedCubin
from autotile.cuda.toolchain import load_cupy
from autotile.errors import ToolchainError
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel
from autotile.serving.arrays import on_stream
from autotile.serving.choice import Choice, Tier
from autotile.serving.launching import Caller, Launching
from autotile.settings import read_settings
from autotile.space.limits import compiled_occupancy

_NAMES = {
    "sizes": "sizes",
    "gpu_name": "GPU",
    "sm_count": "number of SMs",
    "nvrtc_version": "NVRTC version",
    "l2_mode": "L2 mode",
}
"""What is told of each difference; that a time was replayed is told in a sentence of its own."""


def explain(problem: Problem, device: DeviceProperties, choice: Choice) -> str:
    """A short paragraph about a choice."""
    served = f"{problem} on {device.name} is served {config_text(choice.config)}."
    sentences = [served, _reason(choice)]
    if choice.measurement is not None:
        time = choice.measurement
        took = "It took" if choice.tier == "exact" else _where(choice)
        interval = f"{_digits(time.low_us)} to {_digits(time.high_us)}"
        sentences.append(
            f"{took} {_digits(time.time_us)} us (95 % interval {interval}, {time.l2} L2){_when(choice.tuned_at)}."
        )
    if choice.aged:
        sentences.append(
            f"It has aged ({'; '.join(choice.aged)}); `autotile verify {problem.kernel}` measures it again."
        )
    if choice.packed:
        sentences.append(f"It comes from the bundle {choice.packed}.")
    if choice.shipped:
        sentences.append("The result came with autotile; tuning here may find a better one.")
    if choice.source == "replayed":
        sentences.append("The time was replayed from a recording, not measured on this machine.")
    if choice.unread:
        sentences.append(f"Your own results could not be read: {choice.unread}.")
    return " ".join(sentences)


def _reason(choice: Choice) -> str:
    if choice.tier == "default":
        return "Nothing is tuned that may be served for it, so this is the default configuration; run `autotile tune`."
    told = [(_NAMES[name], tuned, asked) for name, tuned, asked in choice.differences if name in _NAMES]
    differences = "; ".join(f"{name} {tuned} instead of {asked}" for name, tuned, asked in told)
    if choice.tier == "exact":
        return "It was tuned for exactly this problem on this GPU."
    if choice.tier == "family":
        return f"A rule chose it for the family {choice.rule}. Rules and limits hold here too."
    if not differences:
        return "It was tuned from a recording of this GPU, not on the GPU itself."
    how = "is the nearest that was tuned on this GPU" if choice.tier == "nearest" else "was tuned elsewhere"
    return f"It {how}: {differences}. Rules and limits hold here too."


def _where(choice: Choice) -> str:
    if choice.tier != "family" or choice.tuned_sizes is None:
        return "There it took"
    sizes = " ".join(f"{name}={value}" for name, value in choice.tuned_sizes.items())
    return f"At {sizes}, the nearest problem where it was timed, it took"


def _digits(time_us: float) -> str:
    """Four significant digits, all of those in front of the point, and no exponent."""
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def _when(tuned_at: datetime | None) -> str:
    if tuned_at is None:
        return ""
    days = (datetime.now(UTC) - tuned_at).days
    age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
    return f" when tuned {age}"


def document(kernel: BoundKernel) -> dict[str, Any]:
    """Everything that is known of a served kernel; it is compiled now where that says more."""
    measurement, choice, device = kernel.measurement, kernel.choice, kernel.device
    return {
        "kernel": kernel.kernel,
        "problem": dict(kernel.problem.sizes),
        "dtype": kernel.problem.dtype,
        "tier": kernel.tier,
        "config": dict(kernel.config),
        "time_us": measurement.time_us if measurement else None,
        "interval_us": [measurement.low_us, measurement.high_us] if measurement else None,
        "device": {"name": device.name, "source": device.source},
        "source": kernel.source,
        "tuned_on": kernel.tuned_on,
        "tuned_at": kernel.tuned_at.isoformat() if kernel.tuned_at else None,
        "differences": [list(difference) for difference in choice.differences],
        "aged": list(choice.aged),
        "shipped": choice.shipped,
        "bundle": choice.packed or None,
        "resources": _resources(kernel),
        "explain": kernel.explain(),
    }


def _resources(kernel: BoundKernel) -> dict[str, Any] | None:
    resources, occupancy, geometry = kernel.resources, kernel.occupancy, kernel.geometry
    if resources is None:
        return None
    return {
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "static_smem_bytes": resources.static_smem_bytes,
        "dynamic_smem_bytes": geometry.dynamic_smem_bytes,
        "threads": geometry.threads,
        "blocks_per_sm": occupancy.blocks_per_sm if occupancy else None,
        "occupancy": occupancy.occupancy if occupancy else None,
        "limited_by": list(occupancy.limited_by) if occupancy else None,
    }


class BoundKernel:
    """A served kernel: ``kernel(A, B, C)`` launches it.

    It compiles at the first launch, or finds its cubin in the cache. One object may be called from many threads.

    Attributes
    ----------
    kernel
        Name of the kernel.
    problem
        Sizes and dtype that it is bound to.
    config
        The configuration it runs.
    tier
        ``exact``, ``nearest``, ``transferred`` or ``default``; `explain` says why.
    measurement
        Time of the configuration where it was tuned; None for the default.
    device
        The device that it is served for.
    source
        ``cuda`` for a result measured here, ``replayed`` for one from a recording, empty for the default.
    definition
        What the search-space file says.
    choice
        What was chosen and why, with what it differs in.
    calls
        Launches so far, but for bound ones of an exact result; of threads that call at once, one may go uncounted.

    Parameters
    ----------
    kernel, problem, device, choice
        What is served, and for what.
    device_index
        CUDA device to launch on; None where the kernel can only be looked at.
    packed
        The cubin in the bundle that the kernel is served from; None where it is compiled or cached here.

    Raises
    ------
    ArgumentError
        A scalar that the problem binds does not fit in its type.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        device: DeviceProperties,
        device_index: int | None,
        choice: Choice,
        *,
        packed: PackedCubin | None = None,
    ) -> None:
        self.kernel = kernel.name
        self.problem = problem
        self.device = device
        self.calls = 0
        self._packed = packed
        self.definition = kernel
        self.choice = choice
        self._device_index = device_index
        self._geometry = launch_geometry(kernel.spec, choice.config, problem.sizes, device)
        self._caller = Caller(
            kernel.spec, problem, choice.config, geometry=self._geometry, device=device, device_index=device_index
        )
        self._cubin: CachedCubin | None = None
        written = [i for i, b in enumerate(kernel.spec.buffers) if b.access != "in"]
        self._only_output = written[0] if len(written) == 1 else None
        self._launching: Launching | None = None
        self._lock = threading.Lock()

    @property
    def can_launch(self) -> bool:
        """Whether it is served for a CUDA device of this machine, and not only for a look."""
        return self._device_index is not None

    @property
    def config(self) -> Config:
        """The configuration that is served."""
        return self.choice.config

    @property
    def tier(self) -> Tier:
        """How well the configuration fits what was asked for."""
        return self.choice.tier

    @property
    def measurement(self) -> Measurement | None:
        """Time of the configuration where it was tuned."""
        return self.choice.measurement

    @property
    def source(self) -> str:
        """Where the measurement comes from."""
        return self.choice.source

    @property
    def tuned_on(self) -> str:
        """Name of the GPU that the configuration was tuned on; empty for the default."""
        return self.choice.tuned_on

    @property
    def tuned_at(self) -> datetime | None:
        """When the configuration was tuned (UTC)."""
        return self.choice.tuned_at

    @property
    def geometry(self) -> LaunchGeometry:
        """Grid, block and dynamic shared memory of the launch."""
        return self._geometry

    @property
    def resources(self) -> Resources | None:
        """Registers, spills and static shared memory; compiled now where they are not known, None without NVRTC."""
        if self._packed is not None:
            return self._packed.resources
        if self.choice.resources is not None and self.tuned_on == self.device.name:
            return self.choice.resources
        try:
            return self._compiled().resources
        except ToolchainError:
            return None

    @property
    def occupancy(self) -> Occupancy | None:
        """Blocks per SM and the limit that binds; None where the resources are unknown."""
        resources = self.resources
        return compiled_occupancy(self._geometry, resources, self.device) if resources is not None else None

    def explain(self) -> str:
        """A short paragraph: what is served, why, what differs, and how old the result is."""
        return explain(self.problem, self.device, self.choice)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary of what is served."""
        return document(self)

    def __repr__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"<BoundKernel {self.problem} on {self.device.name}: {self.tier}, {config}>"

    def __call__(self, *arrays: Any, stream: Any = None, **scalars: float) -> Any:
        """Launch on the arrays, asynchronously.

        Parameters
        ----------
        *arrays
            The kernel's buffers in order. Outputs may be left out and are then allocated; an in-out buffer left out
            starts as zeros. Leading axes of extent 1 may be missing; they are then missing in new outputs, too.
        stream
            Of CuPy or PyTorch, or any object with ``__cuda_stream__``. None: PyTorch's current stream for PyTorch
            tensors, else CuPy's current stream.
        **scalars
            Scalars with a default, such as ``alpha``.

        Returns
        -------
        array or tuple of arrays
            The output buffers.

        Raises
        ------
        ArgumentError
            An array has the wrong shape, dtype, layout, alignment or device, a scalar is unknown, or ``stream`` is
            none.
        ToolchainError
            There is no CUDA device, or the toolchain is missing.
        CompileError
            The template does not compile.
        InputError
            At the first call: a setting is malformed.
        """
        launching = self._launching
        if launching is not None and stream is None and not scalars:
            launched = launching.quickly(arrays)
            if launched is not None:
                self.calls += 1
                return self._returned(launched) if self._only_output is None else launched[self._only_output]
        launching = launching or self._load()
        with load_cupy().cuda.Device(self._device_index), on_stream(arrays, stream):
            given = self._caller.take(arrays)
            launching.carefully(given, scalars)
        self.calls += 1
        return self._returned(given.arrays)

    def bind(self, *arrays: Any, **scalars: float) -> Callable[[], None]:
        """A launch on fixed arrays, checked once: what it returns launches on the current stream of their library.

        It may be called from any thread, and with any device current.

        Parameters
        ----------
        *arrays
            All of the kernel's buffers, in order. They are kept alive by what is returned.
        **scalars
            Scalars with a default, such as ``alpha``.

        Raises
        ------
        ArgumentError, ToolchainError, CompileError, InputError
            As for a call.
        """
        launching = self._launching or self._load()
        with load_cupy().cuda.Device(self._device_index):
            go = launching.bound(self._caller.take(arrays), scalars)
        if self.tier == "exact":
            return go  # nobody asks how often

        def launch() -> None:
            self.calls += 1
            go()

        return launch

    def _returned(self, arrays: Sequence[Any]) -> Any:
        """What a call returns of all its arrays."""
        outputs = tuple(
            array for b, array in zip(self.definition.spec.buffers, arrays, strict=True) if b.access != "in"
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def _load(self) -> Launching:
        """Compile or find the cubin and load it, once."""
        if self._device_index is None:
            raise ToolchainError(
                f"{self.kernel} was served for a look at {self.device.name}, not for a CUDA device of this machine; "
                "to launch it, call get_best_kernel where there is one, and without the device's name"
            )
        with_graphs = read_settings().graphs
        with self._lock:
            if self._launching is None:
                with load_cupy().cuda.Device(self._device_index), outside_of_captures():
                    image = self._packed.read() if self._packed is not None else self._compiled().path
                    function = Module(image).function(self.definition.spec.entry)
                    function.opt_in(self._geometry.dynamic_smem_bytes)
                self._launching = Launching(self._caller, function, self._device_index, with_graphs=with_graphs)
            return self._launching

    def _compiled(self) -> CachedCubin:
        if self._cubin is None:
            settings = read_settings()
            problem = self.problem
            job = compile_job(self.definition, self.config, problem.dtype, self.device.architecture, problem.sizes)
            self._cubin = CubinCache(settings.cache, settings.cache_limit_bytes).get_or_compile(job)
        return self._cubin

"""Code that is launched: a kernel in a configuration, or a library, and the cubins that this process knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotile.core.device import DeviceProperties
from autotile.core.forks import cached_property
from autotile.core.model import Config, Problem, config_key
from autotile.kernel.launch import LaunchData, LaunchPlan, known_names, problem_scalars
from autotile.kernel.library import Kernel
from autotile.serving.selection import RecentCache
from autotile.settings import read_settings

if TYPE_CHECKING:
    from autotile.cuda.compiler import CachedCubin
    from autotile.cuda.function import PackedCubin
    from autotile.exchange.bundle import Bundle
    from autotile.kernel.operation import Library


class KernelCode:
    """A kernel in a configuration, for its problem, which is ``asked`` for by the kernel's own names.

    ``packed`` is the cubin in the bundle that it is served from; None if it is compiled or cached on this machine.
    """

    library = None

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        device: DeviceProperties,
        config: Config,
        *,
        packed: PackedCubin | None = None,
    ) -> None:
        self.name, self.definition, self.problem, self.asked = kernel.name, kernel, problem, problem
        self.packed = packed
        self._device, self.config = device, config

    @cached_property
    def plan(self) -> tuple[LaunchPlan, Mapping[str, Any], LaunchData]:
        """Launches of a call, the scalars that the problem determines, and workspaces and tensor maps.

        That the value of a scalar, computed from the problem sizes, does not fit in its type is an `ArgumentError`.
        """
        spec, problem = self.definition.spec, self.problem
        return (
            LaunchPlan.of(spec, self.config, problem.sizes, self._device),
            problem_scalars(spec, problem.sizes, problem.dtype, check=False),
            LaunchData.of(spec, problem.dtype, known_names(spec, self.config, problem.sizes, self._device)),
        )

    @property
    def cubin(self) -> CachedCubin:
        """The cubin, compiled or found in the cache."""
        return self._find_cubin(may_compile=True)  # type: ignore[return-value] # compiled, it is there

    def needs_compiler(self, *, looks: bool = True) -> bool:
        """Return True if neither a bundle nor this process nor, as far as it was looked for, the cache holds a cubin.

        The cache is looked at once in a process, and not at all unless it ``looks``: a call must not wait for files.
        """
        key = self.key
        if self.find_packed() is not None or _cubins.get(key) or _cubins.recall(key):
            return False
        if not looks or _absent.get(key):
            return True
        if self._find_cubin(may_compile=False) is not None:
            return False
        _absent.keep(key, True)
        return True

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All that the code depends on: it is the same for many problems, as few kernels have sizes compiled in."""
        kernel, problem = self.definition, self.problem
        compiled_in = tuple([problem.sizes[name] for name in kernel.spec.compiled_names])
        target = problem.dtype, self._device.architecture
        return kernel.template_path, kernel.source_hash, target, tuple(self.config.items()), compiled_in

    def find_packed(self) -> PackedCubin | None:
        """Return the cubin in the bundle that it is served from, else in that of the setting, if it is of this source.

        That the bundle of the setting is damaged is a `BundleError`.
        """
        path = read_settings().bundle
        if self.packed is None and path is not None:
            from autotile.exchange.bundle import Bundle

            bundle = _bundles.get(path) or _bundles.setdefault(path, Bundle(path))
            if self.name in bundle.kernels and (held := bundle.kernel(self.name)).kernel.has_source_of(self.definition):
                cubin = held.cubins_for(self.problem, self._device.compute_capability).get(config_key(self.config))
                self.packed = bundle.packed(cubin) if cubin is not None else None
        return self.packed

    def _find_cubin(self, *, may_compile: bool) -> CachedCubin | None:
        known = _cubins.recall(self.key)
        if known is None or not known.path.exists():  # it may have been trimmed from the cache
            from autotile.cuda.compiler import CubinCache, check_signatures, compile_cubin, compile_job

            settings, problem = read_settings(), self.problem
            job = compile_job(self.definition, self.config, problem.dtype, self._device.architecture, problem.sizes)
            cache = CubinCache(settings.cache, settings.cache_limit_bytes)
            known = cache.get(job.key)
            if known is None and may_compile:
                known = cache.put(job.key, compile_cubin(job))
            if known is not None:
                check_signatures(self.definition, problem.dtype, known)
                _cubins.keep(self.key, known)
        return known


class LibraryCode:
    """A library for a problem of an operation; a kernel of it declares the arrays, and ``sizes`` are by its names."""

    def __init__(self, library: Library, asked: Problem, definition: Kernel, sizes: Mapping[str, int]) -> None:
        self.name, self.library, self.asked, self.definition = library.name, library, asked, definition
        self._sizes = sizes

    @cached_property
    def problem(self) -> Problem:
        """The problem by the names of the kernel, made at the first call rather than within a look-up."""
        return Problem(self.definition.name, {**self.definition.spec.sizes, **self._sizes}, self.asked.dtype)


Code = KernelCode | LibraryCode

MAX_CUBINS = 512
_cubins: RecentCache[tuple[object, ...], CachedCubin] = RecentCache(MAX_CUBINS)
"""Cubins that this process has used."""
_bundles: dict[Path, Bundle] = {}
"""Those of the setting."""
_absent: RecentCache[tuple[object, ...], bool] = RecentCache(16 * MAX_CUBINS)
"""Those that the cache did not hold when it was looked at."""

"""Choose what to serve from a bundle, which needs neither a compiler nor a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autotile.core.device import DeviceProperties
from autotile.core.model import Problem, config_key
from autotile.cuda.function import PackedCubin
from autotile.errors import BundleError
from autotile.exchange.bundle import FALLBACK, Bundle, BundledCubin, BundledKernel
from autotile.kernel.problem import check_device, runs_on
from autotile.serving.choice import Choice, choose


def choose_bundled(
    bundle: Bundle, bundled: BundledKernel, problem: Problem, device: DeviceProperties
) -> tuple[Choice, PackedCubin]:
    """Return the best configuration of which a bundle holds a cubin for a device, as `autotile.serving.choice` ranks.

    Raises
    ------
    BundleError
        There is none: the cubins are for another architecture, dtype or flags, or none is valid for these sizes; or the
        cubin is damaged.
    DeviceError
        The kernel does not support the device.
    """
    check_device(bundled.kernel.spec, device)
    cubins = _loadable(bundle, bundled, problem, device)
    stored = [
        replace(winner, resources=cubins[key].resources)
        for winner in bundled.winners
        if (key := config_key(winner.config)) in cubins
    ]
    rules = [rule for rule in bundled.rules if all(config_key(one.config) in cubins for one in rule.rule.configs)]
    choice = choose(bundled.kernel, problem, device, bundled.nvrtc_version, stored, rules=rules)
    cubin = cubins.get(config_key(choice.config))
    if cubin is None:
        raise BundleError(
            f"{bundle.path} holds no configuration of {bundled.kernel.name} that is valid for {problem} on "
            f"{device.name}; tune that problem and make the bundle again. {FALLBACK}"
        )
    bundle.read(cubin.member)  # so that damage is reported while the program can still do without the bundle
    packed = PackedCubin(cubin.resources, partial(bundle.read, cubin.member), cubin.symbols)
    origin = f"{bundle.path}, compiled for {cubin.target} with NVRTC {bundled.nvrtc_version}"
    return replace(choice, packed=origin), packed


def _loadable(
    bundle: Bundle, bundled: BundledKernel, problem: Problem, device: DeviceProperties
) -> Mapping[str, BundledCubin]:
    """Return the cubins that run on the device, by configuration; for each, the one of the nearest architecture."""
    running = [cubin for cubin in bundled.cubins if runs_on(cubin.target, device.compute_capability)]
    if not running:
        targets = ", ".join(sorted({cubin.target for cubin in bundled.cubins}))
        raise BundleError(
            f"{bundle.path} holds {bundled.kernel.name} for {targets}, which does not run on {device.name} "
            f"({device.architecture}); make the bundle with --arch {device.architecture}. {FALLBACK}"
        )
    flags = {name: problem.sizes[name] for name in bundled.kernel.spec.compiled_names}
    fitting = [cubin for cubin in running if cubin.dtype == problem.dtype and dict(cubin.flags) == flags]
    if not fitting:
        raise BundleError(
            f"{bundle.path} holds {bundled.kernel.name} compiled for {_variants(running)}, but {problem} is requested; "
            f"tune such a problem and make the bundle again. {FALLBACK}"
        )
    return {config_key(cubin.config): cubin for cubin in sorted(fitting, key=lambda cubin: _target_rank(cubin.target))}


def _target_rank(target: str) -> tuple[int, bool]:
    return int(target.strip("sm_a")), target.endswith("a")


def _variants(cubins: Sequence[BundledCubin]) -> str:
    found = {" ".join([cubin.dtype, *(f"{name}={value}" for name, value in cubin.flags.items())]) for cubin in cubins}
    return ", ".join(sorted(found))

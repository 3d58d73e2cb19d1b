"""Choose from a bundle, where there is neither a compiler nor a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autotile.device.module import PackedCubin
from autotile.dispatch.choose import Choice, choose
from autotile.ground.capability import check_device, runs_on
from autotile.ground.errors import BundleError
from autotile.ground.hardware import DeviceProperties
from autotile.ground.model import Problem, config_key
from autotile.store.bundle import FALLBACK, Bundle, BundledCubin, BundledKernel


def choose_packed(
    bundle: Bundle, held: BundledKernel, problem: Problem, device: DeviceProperties
) -> tuple[Choice, PackedCubin]:
    """The best configuration that a bundle holds compiled for a device, ranked as `autotile.dispatch.choose` does.

    Raises
    ------
    BundleError
        It holds none: for another architecture, dtype or flags, or none that is valid for these sizes.
    DeviceError
        The kernel is not for the device.
    """
    check_device(held.kernel.spec, device)
    cubins = _loadable(bundle, held, problem, device)
    stored = [
        replace(winner, resources=cubins[key].resources)
        for winner in held.winners
        if (key := config_key(winner.config)) in cubins
    ]
    rules = [rule for rule in held.rules if all(config_key(one.config) in cubins for one in rule.rule.configs)]
    choice = choose(held.kernel, problem, device, held.nvrtc_version, stored, rules=rules)
    cubin = cubins.get(config_key(choice.config))
    if cubin is None:
        raise BundleError(
            f"{bundle.path} holds no configuration of {held.kernel.name} that is valid for {problem} on {device.name}; "
            f"tune that problem and make the bundle again. {FALLBACK}"
        )
    bundle.read(cubin.member)  # damage is told here, where a program can still do without the bundle
    packed = PackedCubin(cubin.resources, partial(bundle.read, cubin.member))
    return replace(choice, packed=f"{bundle.path}, compiled for {cubin.target} with NVRTC {held.nvrtc_version}"), packed


def _loadable(
    bundle: Bundle, held: BundledKernel, problem: Problem, device: DeviceProperties
) -> Mapping[str, BundledCubin]:
    """What runs on the device, by configuration; of several, the one for the nearest architecture."""
    running = [cubin for cubin in held.cubins if runs_on(cubin.target, device.compute_capability)]
    if not running:
        targets = ", ".join(sorted({cubin.target for cubin in held.cubins}))
        raise BundleError(
            f"{bundle.path} holds {held.kernel.name} for {targets}, which does not run on {device.name} "
            f"({device.architecture}); make the bundle with --arch {device.architecture}. {FALLBACK}"
        )
    flags = {name: problem.sizes[name] for name in held.kernel.spec.flags}
    fitting = [cubin for cubin in running if cubin.dtype == problem.dtype and dict(cubin.flags) == flags]
    if not fitting:
        raise BundleError(
            f"{bundle.path} holds {held.kernel.name} compiled for {_variants(running)}, and {problem} is asked for; "
            f"tune such a problem and make the bundle again. {FALLBACK}"
        )
    return {config_key(cubin.config): cubin for cubin in sorted(fitting, key=lambda cubin: _rank(cubin.target))}


def _rank(target: str) -> tuple[int, bool]:
    return int(target.strip("sm_a")), target.endswith("a")


def _variants(cubins: Sequence[BundledCubin]) -> str:
    found = {" ".join([cubin.dtype, *(f"{name}={value}" for name, value in cubin.flags.items())]) for cubin in cubins}
    return ", ".join(sorted(found))

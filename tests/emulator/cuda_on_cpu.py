"""Compile a template for the CPU and run it there; see cuda_on_cpu.cpp."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from autotile.core.device import DeviceProperties
from autotile.core.model import Config
from autotile.kernel.launch import launch_geometry
from autotile.kernel.library import Kernel

_LAUNCHER, _KERNEL = (Path(__file__).with_name(name) for name in ("cuda_on_cpu.cpp", "kernel_on_cpu.cpp"))
_FLAGS = ["-std=c++17", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-Werror=return-type"]


@functools.cache
def why_not() -> str:
    """Return the reason why templates cannot run on this machine's CPU; empty if they can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    probe = subprocess.run(
        ["g++", "-fsanitize=undefined", "-x", "c++", "-", "-o", "/dev/null"],
        input="#include <ucontext.h>\nint main() {}",
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if probe.returncode == 0 else f"g++ cannot build the emulator: {probe.stderr.strip()}"


def compile_launcher(folder: Path) -> Path:
    """Compile what is the same for all kernels, and return the object file."""
    launcher = folder / "launcher.o"
    _compile("-c", str(_LAUNCHER), "-o", str(launcher))
    return launcher


def _compile(*arguments: str) -> None:
    subprocess.run(["g++", *_FLAGS, *arguments], check=True, capture_output=True, text=True)


class CpuKernel:
    """A configuration of a kernel, compiled for the CPU with the object file of `compile_launcher`."""

    def __init__(self, kernel: Kernel, config: Config, launcher: Path, folder: Path) -> None:
        self._spec = kernel.spec
        self._config = config
        self._folder = folder
        self._program = folder / "kernel"
        macros = {"KERNEL_FILE": f'"{kernel.template_path}"', "ENTRY": kernel.spec.entry, **config}
        defines = [f"-D{name}={int(v) if isinstance(v, bool) else v}" for name, v in macros.items()]
        _compile(*defines, str(_KERNEL), str(launcher), "-o", str(self._program))

    def run(
        self, sizes: Mapping[str, int], device: DeviceProperties, values: Mapping[str, np.ndarray | float]
    ) -> dict[str, np.ndarray]:
        """Launch with buffers and scalars given by name and return all buffers after the launch.

        An `AssertionError`: it accessed memory beyond a buffer, read a misaligned vector or overflowed an integer.
        """
        geometry = launch_geometry(self._spec, self._config, sizes, device)
        buffers = {b.name: np.asarray(values[b.name]) for b in self._spec.buffers}
        files = {name: self._folder / f"{name}.bin" for name in buffers}
        for name, file in files.items():
            buffers[name].tofile(file)
        arguments = [str(files[a.name]) if a.is_given else f"={values[a.name]}" for a in self._spec.arguments]
        launch = [str(extent) for extent in (*geometry.grid, *geometry.block)]
        done = subprocess.run(
            [str(self._program), *launch, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{self._config} at {sizes}: exit code {done.returncode}\n{done.stderr}"
        return {name: np.fromfile(files[name], old.dtype).reshape(old.shape) for name, old in buffers.items()}

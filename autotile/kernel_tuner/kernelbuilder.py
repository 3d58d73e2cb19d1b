"""A configuration of a kernel as a Python function, under Kernel Tuner's name for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotile.kernel_tuner.interface import run_kernel
from autotile.kernel_tuner.strategies import installed_module
from autotile.kernel_tuner.translation import is_on_gpu


class PythonKernel:
    """A kernel that is called with arrays and returns those that it writes.

    Arrays of CuPy and CUDA tensors of PyTorch are used in place: they hold what the kernel wrote afterwards, and are
    not among the returned arrays. Each call starts a process, which is slow; `autotile.get_best_kernel` launches in
    this one.

    ``inputs`` states of each argument whether that of a call is used, else that of ``arguments`` is; ``outputs`` of
    each other array whether it is returned; None for all. The best configuration is looked up in ``results_file``, a
    file of `store_results`. ``platform`` and ``verbose`` have no effect; the others are those of `run_kernel`.
    """

    def __init__(
        self,
        kernel_name: str,
        kernel_string: Any,
        problem_size: Any,
        arguments: Sequence[Any],
        params: Mapping[str, Any] | None = None,
        inputs: Sequence[bool] | None = None,
        outputs: Sequence[bool] | None = None,
        device: int = 0,
        platform: int = 0,
        block_size_names: Sequence[str] | None = None,
        grid_div_x: Any = None,
        grid_div_y: Any = None,
        grid_div_z: Any = None,
        verbose: bool = True,
        lang: str | None = None,
        results_file: Any = None,
    ) -> None:
        self.params = dict(params or {})
        if results_file:
            from autotile.cuda.driver import live_device

            stored = installed_module("integration", "a results file").TuneResults(results_file)
            self.params |= stored.get_best_config(live_device(device).name, problem_size)
        self._arguments = list(arguments)
        self._inputs = list(inputs or [True] * len(arguments))
        self._outputs = list(outputs or [True] * len(arguments))
        self._call = {
            "kernel_name": kernel_name,
            "kernel_source": kernel_string,
            "problem_size": problem_size,
            "grid_div_x": grid_div_x,
            "grid_div_y": grid_div_y,
            "grid_div_z": grid_div_z,
            "lang": lang,
            "device": device,
            "block_size_names": block_size_names,
        }

    def run_kernel(self, args: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Launch with the given arguments; return the arrays that are outputs, as a list."""
        chosen = [
            new if is_input else old for new, old, is_input in zip(args, self._arguments, self._inputs, strict=True)
        ]
        done = run_kernel(**self._call, arguments=chosen, params=self.params)
        self._arguments = [old if is_on_gpu(old) else new for old, new in zip(chosen, done, strict=True)]
        returned = zip(args, done, self._outputs, strict=True)
        return [
            array
            for given, array, is_output in returned
            if is_output and isinstance(array, np.ndarray) and not is_on_gpu(given)
        ]

    def __call__(self, *args: Any) -> list[np.ndarray[Any, Any]]:
        """Launch with the given arguments; see `run_kernel`."""
        return self.run_kernel(args)

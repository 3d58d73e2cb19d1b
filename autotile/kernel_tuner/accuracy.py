"""Arguments that depend on a parameter, and an observer of the error: what Kernel Tuner's scripts import from here."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotile.errors import InputError
from autotile.kernel_tuner.observers import OutputObserver
from autotile.kernel_tuner.parameters import evaluate

Metric = Callable[[NDArray[Any], NDArray[Any]], float]


class Tunable(UserDict[Any, Any]):
    """An argument that is one of several arrays, by the value of a parameter.

    ``param_key`` is the name of the parameter, an expression over parameters, or a function of a dictionary of them.
    ``arrays`` has the array for each value; a list stands for the values 0, 1, ...
    """

    def __init__(
        self, param_key: str | Callable[[Mapping[str, Any]], Any], arrays: Mapping[Any, Any] | Sequence[Any]
    ) -> None:
        super().__init__(arrays if isinstance(arrays, Mapping) else dict(enumerate(arrays)))
        self.param_key = param_key

    def select_for_configuration(self, params: Mapping[str, Any]) -> Any:
        """Return the array for a configuration; a `KeyError` if there is none."""
        if callable(self.param_key):
            option = self.param_key(params)
        else:
            option = params[self.param_key] if self.param_key in params else evaluate(self.param_key, params)
        if option not in self.data:
            raise KeyError(f"there is no array for {option!r}; expected one of {', '.join(map(str, self.data))}")
        chosen = self.data[option]
        return chosen.select_for_configuration(params) if isinstance(chosen, Tunable) else chosen

    __call__ = select_for_configuration


_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("half", "f16", "__half", "khalf"), "float16"),
    **dict.fromkeys(("float", "single", "f32", "kfloat"), "float32"),
    **dict.fromkeys(("double", "f64", "kdouble"), "float64"),
    **dict.fromkeys(("bf16", "kbfloat16", "__nv_bfloat16"), "bfloat16"),
}


def TunablePrecision(
    param_key: str | Callable[[Mapping[str, Any]], Any],
    array: Any,
    dtypes: Mapping[str, Any] | Sequence[str] | None = None,
) -> Tunable:
    """Return an array or a NumPy scalar as an argument whose element type is the value of a parameter; see `Tunable`.

    ``dtypes`` are types by the values of the parameter, or a list of names of types; None for ``half``, ``float`` and
    ``double``, and ``bfloat16`` if the package ml_dtypes is installed.
    """
    names = dtypes or ["half", "float", "double", *(["bfloat16"] if _bfloat16() is not None else [])]
    chosen = dict(names) if isinstance(names, Mapping) else {name: _dtype(name) for name in names}
    values = array if isinstance(array, np.generic) else np.asarray(array)
    with np.errstate(over="ignore"):  # a value beyond a type's range is infinite in it
        return Tunable(param_key, {name: values.astype(dtype) for name, dtype in chosen.items()})


def _bfloat16() -> Any:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return None
    return bfloat16


def _dtype(name: str) -> Any:
    key = _PRECISIONS.get(name.lower(), name.lower())
    if key == "bfloat16" and _bfloat16() is None:
        raise InputError(f"the element type {name!r} needs the package ml_dtypes: pip install ml_dtypes")
    return _bfloat16() if key == "bfloat16" else np.dtype(key)


_METRICS: Mapping[tuple[str, ...], Callable[[NDArray[Any], NDArray[Any], float], Any]] = {
    ("mse", "mean sq"): lambda a, b, eps: np.mean((a - b) ** 2),
    ("rmse", "root mean sq"): lambda a, b, eps: np.sqrt(np.mean((a - b) ** 2)),
    ("nrmse", "normalized root mean sq"): lambda a, b, eps: np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2)),
    ("mae", "abs", "mean abs"): lambda a, b, eps: np.mean(np.abs(a - b)),
    ("mre", "rel", "mean rel"): lambda a, b, eps: np.mean(np.abs(a - b) / np.maximum(np.abs(a), eps)),
    ("rmsre", "root mean sq rel"): lambda a, b, eps: np.sqrt(np.mean((a - b) ** 2 / np.maximum(a, eps) ** 2)),
    ("male", "mean abs log"): lambda a, b, eps: np.mean(np.abs(np.log10(a + eps) - np.log10(b + eps))),
    ("rmsle", "root mean sq log"): lambda a, b, eps: np.sqrt(np.mean((np.log10(a + eps) - np.log10(b + eps)) ** 2)),
    ("max", "max abs"): lambda a, b, eps: np.max(np.abs(a - b)),
    ("max rel",): lambda a, b, eps: np.max(np.abs(a - b) / np.maximum(np.abs(a), eps)),
}
"""Metrics of an answer, an output and the least denominator, by names without ``error`` whose words are short."""
_SHORT = {
    **{"average": "mean", "avg": "mean", "squared": "sq", "square": "sq", "maximum": "max"},
    **{"relative": "rel", "absolute": "abs", "logarithmic": "log"},
}


def error_metric_from_name(user_key: str, EPS: float = 1e-8) -> Metric:
    """Return the function of an error metric, such as ``"RMSE"`` or ``"mean relative error"``; else a `ValueError`.

    Case, the word "error" and the kind of separator do not matter. ``EPS`` is the least denominator of relative errors.
    """
    words = re.split(r"[\s_-]+", user_key.lower().strip())
    key = " ".join(_SHORT.get(word, word) for word in words if word and word != "error")
    metrics = {name: metric for names, metric in _METRICS.items() for name in names}
    if key not in metrics:
        raise ValueError(f"there is no error metric {user_key!r}; expected one of {', '.join(metrics)}")
    return lambda a, b: float(metrics[key](np.asarray(a, np.float64), np.asarray(b, np.float64), EPS))


class AccuracyObserver(OutputObserver):
    """Records the greatest error of the outputs against the answer, under a key of the results.

    ``metric`` is a name, see `error_metric_from_name`, or a function of answer and output; None for the RMSE. ``atol``
    is the least denominator of relative errors.
    """

    def __init__(self, metric: str | Metric | None = None, key: str = "error", *, atol: float = 1e-8) -> None:
        self.key = key
        self.metric = metric if callable(metric) else error_metric_from_name(metric or "rmse", atol)
        self.result: float | None = None

    def process_output(self, answer: Sequence[Any] | None, output: Sequence[Any]) -> None:
        """Compare the outputs with the answer."""
        if answer is None:
            raise InputError("AccuracyObserver compares the outputs with the answer; pass answer to tune_kernel")
        pairs = zip(answer, output, strict=True)
        self.result = max(self.metric(expected, got) for expected, got in pairs if expected is not None)

    def get_results(self) -> dict[str, Any]:
        """Return the error."""
        return {self.key: self.result}

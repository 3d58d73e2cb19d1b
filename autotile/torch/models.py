"""`accelerate`: the layers of a model that may gain become autotile's, in place, until that is undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from autotile.core.argument_types import check_value
from autotile.core.device import device_profile
from autotile.core.documents import to_document
from autotile.core.text import NOTHING, Part, Result, ResultTable, plain_heading, plural, time_text
from autotile.errors import InputError
from autotile.serving.gains import Gain, find_product, is_transposed
from autotile.torch.products import DTYPES, PLAIN, Linear

_ROWS = (1, 16, 128, 1024, 4096)
"""Numbers of rows that are shown."""
_JUDGED = (*(2**power for power in range(15)), *(3 * 2**power for power in range(7, 13)))
"""Numbers of rows that are judged, up to 16,384, with one between each two of the larger ones."""


@dataclass(frozen=True, slots=True)
class LayerGain:
    """Expected times of a layer at a number of rows.

    ``time_us`` includes the addition of the bias; ``library_us`` is the time of cuBLAS. Both are measured or expected,
    None where nothing is known. ``launched`` tells whether ``kernel``, which may be cuBLAS, is launched, rather than
    PyTorch's own function called, where autograd records nothing.
    """

    rows: int
    kernel: str
    time_us: float | None
    library_us: float | None
    launched: bool


@dataclass(frozen=True, slots=True)
class ReplacedLayer:
    """A layer that has become autotile's: its names in the model, sizes, dtype, and what is expected of it."""

    names: tuple[str, ...]
    in_features: int
    out_features: int
    has_bias: bool
    dtype: str
    gains: tuple[LayerGain, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Acceleration(Result):
    """Outcome of `accelerate` for a model; as a context manager, it undoes the changes at the end of the block.

    Attributes
    ----------
    replaced
        Layers that have become autotile's, equal ones as one.
    left
        Reason for each linear layer that was left alone, by its name.
    """

    replaced: tuple[ReplacedLayer, ...]
    left: dict[str, str]
    _modules: tuple[torch.nn.Linear, ...] = ()

    def undo(self) -> None:
        """Make the layers PyTorch's again; those that something else has changed since stay as they are."""
        for module in self._modules:
            if type(module) is Linear:
                module.__class__ = torch.nn.Linear
                module.__dict__.pop("_noted", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [self._headline()]
        for part in self._parts():
            if isinstance(part, ResultTable):
                table = [list(map(plain_heading, part.headings)), *map(list, part.rows)]
                widths = [max(map(len, column)) for column in zip(*table, strict=True)]
                lines += ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)]
        return "\n".join(lines)

    def _headline(self) -> str:
        count = sum(len(one.names) for one in self.replaced)
        return f"{plural(count, 'linear layer')} of autotile, {len(self.left):,} left to PyTorch"

    def _parts(self) -> Iterator[Part]:
        if self.replaced:
            headings = ("layers", "sizes", "dtype", ">rows", "computed by", ">time", ">cuBLAS", ">ratio")
            yield ResultTable(headings, [row for one in self.replaced for row in _rows(one)], movable=("layers",))
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        if reasons:
            rows = [(_names(names), reason) for reason, names in reasons.items()]
            yield ResultTable(("left to PyTorch", "reason"), rows, is_wrapped=True)

    def to_json(self) -> dict[str, Any]:
        """Return the replaced layers and those that were left as JSON values."""
        return {"replaced": to_document(self.replaced), "left": self.left}


def _rows(layer: ReplacedLayer) -> Iterator[Sequence[str]]:
    sizes = f"{layer.in_features:,} -> {layer.out_features:,}{' + bias' if layer.has_bias else ''}"
    head = (_names(layer.names), sizes, layer.dtype)
    for gain in layer.gains:
        if gain.launched and gain.time_us and gain.library_us:
            ratio = f"{gain.library_us / gain.time_us:.2f}"
            yield (*head, f"{gain.rows:,}", gain.kernel, time_text(gain.time_us), time_text(gain.library_us), ratio)
        else:
            yield (*head, f"{gain.rows:,}", "PyTorch", NOTHING, time_text(gain.library_us), NOTHING)
        head = ("", "", "")


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def accelerate(model: torch.nn.Module, *, rows: int | Iterable[int] = (), device: str | None = None) -> Acceleration:
    """Replace the linear layers of a model that may gain by `Linear`, in place.

    A layer keeps its parameters, hooks, names and ``state_dict``: only its class is changed. It is replaced if a kernel
    is known or expected to be faster than PyTorch's own function at any of some numbers of rows, or cuBLAS takes less
    time there than the host does; each call is then computed as `linear` does it. Nothing is compiled or launched here.

    Parameters
    ----------
    model
        Any module. Exact ``torch.nn.Linear`` are replaced, with plain parameters in float32, float16 or bfloat16, also
        within FSDP.
    rows
        Numbers of rows, batch times sequence, that matter besides some up to 16,384.
    device
        Name of a GPU, such as ``"h200"``, that the layers are judged for, wherever they are; None for the one that each
        is on.

    Returns
    -------
    Acceleration
        What was replaced, what is expected of it, and what was left alone with the reason. Its ``undo`` makes the model
        what it was, as does the end of a ``with`` block.

    Raises
    ------
    InputError
        ``model`` is no module, a number of rows is not positive, or no GPU of that name is known.

    Examples
    --------
    >>> print(accelerate(model))  # doctest: +SKIP
    """
    check_value("model", model, torch.nn.Module)
    check_value("device", device, str | None)
    if device is not None:
        device_profile(device)
    extra = tuple(rows) if isinstance(rows, Iterable) else (rows,)
    if not all(isinstance(count, int) and count > 0 for count in extra):
        raise InputError(f"rows are {extra!r:.80}, expected positive whole numbers")
    shown = sorted({*_ROWS, *extra})
    judged = sorted({*shown, *_JUDGED})
    known: dict[tuple[Any, ...], tuple[LayerGain, ...]] = {}
    replaced: dict[tuple[Any, ...], list[str]] = {}
    left: dict[str, str] = {}
    modules: list[torch.nn.Linear] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        reason = _reason(model, name, module, device)
        if not reason:
            weight, has_bias = module.weight, module.bias is not None
            place = device if device is not None else weight.device.index
            key = (module.in_features, module.out_features, has_bias, DTYPES[weight.dtype], place)
            if key not in known:
                known[key] = tuple(_gain(count, key) for count in judged)
            if any(gain.launched for gain in known[key]):
                module.__class__ = Linear
                modules.append(module)
                replaced.setdefault(key, []).append(name)
                continue
            reason = "PyTorch is as fast at all numbers of rows, as far as is known"
        left[name] = reason
    layers = []
    for key, names in replaced.items():
        first = next(gain for gain in known[key] if gain.launched)
        gains = tuple(gain for gain in known[key] if gain.rows in shown or gain is first)
        layers.append(ReplacedLayer(tuple(names), *key[:-1], gains))
    return Acceleration(tuple(layers), left, tuple(modules))


def _reason(model: torch.nn.Module, name: str, module: torch.nn.Linear, device: str | None) -> str:
    """Return the reason to leave a linear layer alone; empty for none."""
    kind, weight = type(module), module.weight
    if kind is Linear:
        return "it is autotile's already"
    if kind is not torch.nn.Linear:
        return f"its class is {kind.__module__}.{kind.__qualname__}, which computes in its own way"
    if "forward" in vars(module):
        return "its forward was replaced"
    weight_kind = type(weight)
    if weight_kind not in PLAIN and not (weight_kind.__name__ == "DTensor" and _in_fsdp(model, name)):
        return f"its weight is a {weight_kind.__name__}, not a plain tensor"
    if weight.dtype not in DTYPES:
        return f"its dtype is {str(weight.dtype).removeprefix('torch.')}"
    if module.bias is not None and module.bias.dtype != weight.dtype:
        return "its bias has another dtype"
    if device is None and weight.device.type != "cuda":
        return f"it is on the device {weight.device.type}"
    if 0 in (module.in_features, module.out_features):
        return "it is empty"
    return ""


def _in_fsdp(model: torch.nn.Module, name: str) -> bool:
    """Whether a module is within one of FSDP2, which makes its sharded weights plain tensors when it runs."""
    parts = name.split(".") if name else []
    parents = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return any(kind.__name__ == "FSDPModule" for parent in parents for kind in type(parent).__mro__)


def _gain(rows: int, layer: tuple[int, int, bool, str, int | str]) -> LayerGain:
    """Return the expected times of a layer, given its features, whether it has a bias, its dtype and its GPU."""
    k, n, has_bias, dtype, device = layer
    served = find_product(rows, n, k, dtype, trans_b=is_transposed(n, k), device=device, keeps=False)
    if served is None:
        return LayerGain(rows, "", None, None, launched=False)
    gain = Gain.of(served, final=True)
    launched = gain.is_worthwhile(bias=has_bias) or (gain.is_short and not gain.launches)
    return LayerGain(rows, gain.kernel, gain.total_us(bias=has_bias), gain.library_us, launched)

"""Parameters of Kernel Tuner, whose values may be of any type, as parameters of autotile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from autotile.core.model import Config, Value
from autotile.errors import InputError
from autotile.kernel.table import is_c_identifier

_FORBIDDEN = frozenset({"grid_size_x", "grid_size_y", "grid_size_z", "time"})
_TEXT = re.compile(r"[A-Za-z_]\w{0,63}")


class ParameterCodec:
    """Converts configurations between the values that the caller listed, and values that autotile declares.

    Lists of whole numbers, of booleans and of C identifiers are declared as they are; any other value is declared as
    its index in the list.

    Parameters
    ----------
    tune_params
        Values of each parameter.

    Attributes
    ----------
    values
        The caller's values of each parameter, without repetitions.
    declared
        Their counterparts in autotile.

    Raises
    ------
    InputError
        A name or a list cannot be used.
    """

    def __init__(self, tune_params: Mapping[str, Sequence[Any]]) -> None:
        if not isinstance(tune_params, Mapping) or not tune_params:
            raise InputError(
                f"tune_params is {tune_params!r:.80}, expected a dictionary of at least one list of values"
            )
        self.values = {name: _listed(name, values) for name, values in tune_params.items()}
        self.declared: dict[str, list[Value]] = {name: _declared(values) for name, values in self.values.items()}
        self._decoding = {
            name: dict(zip(self.declared[name], values, strict=True)) for name, values in self.values.items()
        }
        self.is_plain = {name: self.declared[name] == values for name, values in self.values.items()}
        """Whether the values of a parameter are declared as they are."""

    def decode(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration of autotile with the caller's values; names that are no parameters are left out.

        A dictionary gives a dictionary; another mapping gives a view of it.
        """
        if isinstance(config, dict):
            return {name: self._decoding[name][value] for name, value in config.items() if name in self._decoding}
        return _Decoded(self._decoding, config)

    def encode(self, params: Mapping[str, Any]) -> Config:
        """Return the configuration of autotile with the caller's values.

        Raises
        ------
        InputError
            A parameter is missing, or a value is not listed.
        """
        config: dict[str, Value] = {}
        for name, values in self.values.items():
            position = _position(values, params[name]) if name in params else None
            if position is None:
                raise InputError(f"{name} = {params.get(name)!r} is not among its values {values}")
            config[name] = self.declared[name][position]
        return config

    def key(self, params: Mapping[str, Any]) -> str:
        """Return the key of a configuration in a cache file of Kernel Tuner."""
        return ",".join(str(params[name]) for name in self.values)

    def __len__(self) -> int:
        """Return the number of combinations."""
        return int(np.prod([len(values) for values in self.values.values()], dtype=object))


class _Decoded(Mapping[str, Any]):
    """A configuration with the caller's values, decoded as they are read."""

    def __init__(self, decoding: Mapping[str, Mapping[Any, Any]], config: Mapping[str, Any]) -> None:
        self._decoding = decoding
        self._config = config

    def __getitem__(self, name: str) -> Any:
        return self._decoding[name][self._config[name]]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._config if name in self._decoding)

    def __len__(self) -> int:
        return len(self._decoding)


def _listed(name: str, values: Any) -> list[Any]:
    if name in _FORBIDDEN or not isinstance(name, str) or not is_c_identifier(name):
        raise InputError(
            f"a parameter cannot be named {name!r}; expected a C identifier, and none of Kernel Tuner's own"
        )
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise InputError(f"tune_params[{name!r}] is {values!r:.80}, expected a list of values")
    found: list[Any] = []
    for value in values:
        plain = value.item() if isinstance(value, np.generic) else value
        if _position(found, plain) is None:
            found.append(plain)
    if not found:
        raise InputError(f"tune_params[{name!r}] is empty; give at least one value")
    return found


def _position(values: Sequence[Any], value: Any) -> int | None:
    """Return the index of a value; True is not 1 here, and 1.0 is not 1."""
    plain = value.item() if isinstance(value, np.generic) else value
    return next((i for i, each in enumerate(values) if type(each) is type(plain) and each == plain), None)


def _declared(values: list[Any]) -> list[Value]:
    is_whole = all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)
    if is_whole and all(abs(value) < 2**63 for value in values):
        return list(values)
    if all(isinstance(value, bool) for value in values):
        return list(values)
    if all(isinstance(value, str) and _TEXT.fullmatch(value) for value in values):
        return list(values)
    return list(range(len(values)))

"""Frozen dataclasses that are cheap to define, and attributes of them that are computed once.

`dataclasses.dataclass` generates the source of each class's methods and compiles it, which takes 0.4 ms per class. The
first look-up of a process needs forty classes, and definitions were a third of its time. The classes defined here share
their methods. Otherwise they are dataclasses: `replace`, `asdict` and `fields` accept them, and type checkers see the
standard decorator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar, overload

if TYPE_CHECKING:
    from dataclasses import dataclass


__all__ = ["cached_property", "dataclass"]

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")
Fields = Mapping[str, "dataclasses.Field[Any]"]


def _dataclass(*, frozen: Literal[True], slots: bool = False) -> Any:
    """Return a decorator equivalent to `dataclasses.dataclass` with these arguments."""
    return partial(_defined, slots=slots)


if not TYPE_CHECKING:
    dataclass = _dataclass


def _defined(given: Class, *, slots: bool) -> Class:
    if own := given.__dict__.keys() & _METHODS.keys():
        raise TypeError(f"{given.__name__} defines {min(own)}, which would be replaced; use the standard decorator")
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(given)
    compared = [field.name for field in dataclasses.fields(made) if field.compare]
    made._compared = attrgetter(*compared)
    made._defaults = {
        field.name: field.default for field in dataclasses.fields(made) if field.default is not dataclasses.MISSING
    }
    for name, method in _METHODS.items():
        setattr(made, name, method)
    return made  # type: ignore[no-any-return]


def _init(self: Any, *values: Any, **named: Any) -> None:
    fields = self.__dataclass_fields__
    if named or len(values) != len(fields):
        values = _completed(type(self), fields, values, named)
    for name, value in zip(fields, values, strict=True):
        object.__setattr__(self, name, value)


def _completed(made: Any, fields: Fields, values: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a value for each field, in order."""
    given = {**dict(zip(fields, values, strict=False)), **named}
    complete = {**made._defaults, **given}
    if len(given) == len(values) + len(named) and complete.keys() == fields.keys():
        return tuple([complete[name] for name in fields])
    what = made.__name__
    if len(values) > len(fields):
        raise TypeError(f"{what}() takes {len(fields)} values, got {len(values)}")
    given = dict(zip(fields, values, strict=False))
    if twice := given.keys() & named.keys():
        raise TypeError(f"{what}() got multiple values for {min(twice)!r}")
    if unknown := named.keys() - fields.keys():
        raise TypeError(f"{what}() has no field {min(unknown)!r}")
    given |= named
    return tuple(given[name] if name in given else _default(field, what) for name, field in fields.items())


def _default(field: dataclasses.Field[Any], what: str) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(f"{what}() is missing a value for {field.name!r}")


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> Any:
    return self._compared(self) == self._compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _refuse(self: Any, name: str, *value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__dataclass_fields__]


def _setstate(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__dataclass_fields__, state, strict=True):
        object.__setattr__(self, name, value)


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__getstate__": _getstate,
    "__setstate__": _setstate,
}


class cached_property(Generic[Value]):  # noqa: N801 - as in functools
    """Attribute that is computed at its first use, as `functools.cached_property` but without a lock.

    Before Python 3.12, that one has a lock per class. A child that is forked while another thread holds it would wait
    for it forever. Here two threads may both compute the value, and the last one's is kept.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Value: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value

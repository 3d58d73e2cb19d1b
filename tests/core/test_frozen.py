"""Frozen dataclasses with shared methods behave like those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from autotile.core import frozen


@frozen.dataclass(frozen=True, slots=True)
class Quick:
    """Shares its methods."""

    name: str
    count: int = 1
    notes: list[str] = dataclasses.field(default_factory=list)
    place: str = dataclasses.field(default="", repr=False, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    """Has methods of its own."""

    name: str
    count: int = 1
    notes: list[str] = dataclasses.field(default_factory=list)
    place: str = dataclasses.field(default="", repr=False, compare=False)


@frozen.dataclass(frozen=True)
class Cached:
    """Has a dictionary."""

    side: int

    @frozen.cached_property
    def area(self) -> int:
        """Computed once."""
        return self.side**2


GIVEN: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("a",), {}),
    (("a", 2), {}),
    (("a", 2, ["x"], "here"), {}),
    ((), {"name": "a"}),
    (("a",), {"place": "here", "count": 3}),
]


@pytest.mark.parametrize(("values", "named"), GIVEN)
def test_values_defaults_and_text(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    quick, standard = Quick(*values, **named), Standard(*values, **named)
    assert dataclasses.asdict(quick) == dataclasses.asdict(standard)
    assert repr(quick) == repr(standard).replace("Standard", "Quick")
    assert [field.name for field in dataclasses.fields(quick)] == [field.name for field in dataclasses.fields(standard)]


@pytest.mark.parametrize(
    ("values", "named", "words"),
    [
        ((), {}, "is missing a value for 'name'"),
        (("a", 1, [], "", 5), {}, "takes 4 values, got 5"),
        (("a",), {"name": "b"}, "multiple values for 'name'"),
        (("a",), {"other": 1}, "no field 'other'"),
    ],
)
def test_what_no_dataclass_takes(values: tuple[Any, ...], named: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Quick(*values, **named)
    with pytest.raises(TypeError):
        Standard(*values, **named)


def test_defaults_are_not_shared() -> None:
    assert Quick("a").notes is not Quick("a").notes


def test_equal_are_those_whose_compared_fields_are() -> None:
    assert Quick("a", place="here") == Quick("a", place="there")
    assert Quick("a") != Quick("b")
    assert Quick("a") != Standard("a")
    assert Quick("a").__eq__("a") is NotImplemented


def test_hashed_by_the_compared_fields() -> None:
    hashable: Any = ()
    assert hash(Quick("a", 1, hashable, "here")) == hash(Quick("a", 1, hashable, "there"))
    with pytest.raises(TypeError):
        hash(Quick("a"))  # a list is in it


@pytest.mark.parametrize("name", ["name", "other"])
def test_nothing_can_be_changed(name: str) -> None:
    quick = Quick("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(quick, name, "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(quick, name)
    assert not hasattr(quick, "__dict__")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda quick: pickle.loads(pickle.dumps(quick))])
def test_copies_are_equal(again: Callable[[Quick], Quick]) -> None:
    quick = Quick("a", 2, ["x"], "here")
    copied = again(quick)
    assert copied == quick
    assert copied.place == "here"


def test_replace_and_match() -> None:
    assert dataclasses.replace(Quick("a", 2), name="b") == Quick("b", 2)
    match Quick("a", 2):
        case Quick(name, count):
            assert (name, count) == ("a", 2)


def test_without_slots_a_property_can_be_cached() -> None:
    cached = Cached(3)
    assert (cached.area, cached.__dict__["area"]) == (9, 9)
    assert cached == Cached(3)
    assert isinstance(Cached.area, frozen.cached_property)


def test_a_property_that_is_being_computed_blocks_no_other_instance() -> None:
    class Nested:
        def __init__(self, wait: bool) -> None:
            self.wait = wait

        @frozen.cached_property
        def value(self) -> int:
            """Documented."""
            if self.wait:
                thread = threading.Thread(target=lambda: found.append(Nested(wait=False).value), daemon=True)
                thread.start()
                thread.join(10)
            return 1

    found: list[int] = []
    assert Nested(wait=True).value == 1
    assert found == [1]
    assert Nested.value.__doc__ == "Documented."


def test_methods_of_a_class_are_never_replaced_silently() -> None:
    with pytest.raises(TypeError, match="Named defines __repr__, which would be replaced"):

        @frozen.dataclass(frozen=True)
        class Named:
            name: str

            def __repr__(self) -> str:
                return self.name

"""Valid documents of declared schemas, for hypothesis."""

from functools import cache
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OFFSETS = st.sampled_from(("+00:00", "Z", "-12:00", "+14:00", "+05:30"))
MOMENTS = st.builds(lambda moment, offset: moment.isoformat() + offset, st.datetimes(), OFFSETS)


@cache
def documents_of(schema: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of JSON values that match a schema."""
    return _values(inspect.type_info(schema), 0)


def _values(kind: inspect.Type, depth: int) -> st.SearchStrategy[Any]:
    below = depth + 1
    match kind:
        case inspect.Metadata():
            return _values(kind.type, depth)
        case inspect.AnyType():
            return st.none() | st.integers(-9, 9) | TEXTS
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge if kind.ge is not None else -(2**63), kind.le if kind.le is not None else 2**63)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False, allow_infinity=False)
        case inspect.CustomType():  # a path
            return TEXTS
        case inspect.StrType():
            return st.from_regex(kind.pattern) if kind.pattern else TEXTS
        case inspect.DateTimeType():
            return MOMENTS
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.EnumType():
            return st.sampled_from([str(member.value) for member in kind.cls])
        case inspect.UnionType():
            return st.one_of([_values(one, depth) for one in _bounded(kind.types, depth)])
        case inspect.TupleType():
            return st.tuples(*(_values(one, below) for one in kind.item_types)).map(list)
        case inspect.ListType() | inspect.VarTupleType():
            least = kind.min_length or 0
            return st.lists(_values(kind.item_type, below), min_size=least, max_size=least + 2)
        case inspect.DictType():
            least = kind.min_length or 0
            return st.dictionaries(TEXTS, _values(kind.value_type, below), min_size=least, max_size=least + 2)
        case inspect.NamedTupleType():
            return st.tuples(*(_values(field.type, below) for field in kind.fields)).map(list)
        case inspect.StructType() | inspect.DataclassType():
            return st.fixed_dictionaries({field.encode_name: _values(field.type, below) for field in kind.fields})
    raise NotImplementedError(kind)


def _bounded(types: tuple[inspect.Type, ...], depth: int) -> list[inspect.Type]:
    """Return the alternatives of a union; deep inside a document only null, if it is one of them."""
    null = [one for one in types if isinstance(one, inspect.NoneType)]
    return null if null and depth > 5 else list(types)

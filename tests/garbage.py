"""Messages of the right type with anything in them, derived from their descriptors: a new field needs no new line."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

ROWS_MAX = 4
# Few values, so that signals meet: the same job, generation, ranks and devices.
_TEXT = st.sampled_from(
    ["", "j", "GPU-1", "mlx5_0", "nvml", "ACTIVE", "DOWN", "T", "D", "NaN", "0-7", "\x00", "ä" * 300]
)
_SMALL = st.integers(0, 3)
_FLOATS = st.sampled_from([0.0, 1.0, 1.5, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300, 1.7e9, 5e9])
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


@cache
def messages(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments for the message's constructor. Repeated fields are of one length, mostly: else nothing gets past the door."""
    return st.integers(0, ROWS_MAX).flatmap(lambda rows: _with_rows(descriptor, rows))


@cache
def parts(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """A few of its repeated messages, one or two of each."""
    repeated = [field for field in descriptor.fields if field.is_repeated and field.message_type is not None]
    one = {field.name: st.lists(messages(field.message_type), min_size=1, max_size=2) for field in repeated}
    return st.sampled_from(sorted(one)).flatmap(lambda name: st.fixed_dictionaries({name: one[name]}))


@cache
def _with_rows(descriptor: Descriptor, rows: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({field.name: _value(field, rows) for field in descriptor.fields})


def _value(field: FieldDescriptor, rows: int) -> st.SearchStrategy[Any]:
    one = _single(field)
    if not field.is_repeated:
        return one
    if field.message_type is not None:
        return st.lists(one, max_size=2)
    whole = st.lists(one, min_size=rows, max_size=rows)
    return st.one_of([whole] * 15 + [st.lists(one, max_size=ROWS_MAX)])


def _single(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type)
    if field.enum_type is not None:
        return st.one_of(st.sampled_from([value.number for value in field.enum_type.values]), st.just(99))
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=40)
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXT
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return _FLOATS
        case kind:
            low, high = _RANGES[kind]
            return st.one_of(_SMALL, _SMALL, st.sampled_from([low, high]))

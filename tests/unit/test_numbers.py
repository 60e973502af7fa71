"""`Numbers` is a set of small whole numbers."""

from __future__ import annotations

import random

import pytest

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.numbers import Numbers
from holdfast.wire import records


def test_it_is_what_a_set_would_be() -> None:
    rng = random.Random(3)
    for _ in range(50):
        one, other = ({rng.randrange(300) for _ in range(rng.randrange(40))} for _ in range(2))
        assert list(Numbers(one)) == sorted(one)
        assert list(Numbers(one) | Numbers(other)) == sorted(one | other)
        assert list(Numbers(one) - Numbers(other)) == sorted(one - other)
        assert len(Numbers(one)) == len(one)
        assert bool(Numbers(one)) is bool(one)
        assert all((number in Numbers(one)) is (number in one) for number in range(301))
        assert (Numbers(one) == Numbers(other)) is (one == other)
    assert list(Numbers.below(5).without(3).with_((9, 1))) == [0, 1, 2, 4, 9]


def test_it_travels_as_bits_and_is_read_from_lists_of_earlier_versions() -> None:
    for numbers in (Numbers(), Numbers((0, 5)), Numbers.below(100_000).without(77)):
        assert records.loads(records.dumps(numbers, Numbers), Numbers) == numbers
    assert records.loads(b"[0, 2, 3]", Numbers) == Numbers((0, 2, 3))
    for garbage in (b'"-5"', b'"no"', b"[-1]", b'["1"]', b"7", b"{}", b"[true]"):
        with pytest.raises(MalformedMessage):
            records.loads(garbage, Numbers)

"""The reserve of file descriptors: held while there are enough, given free when there are not, and taken back."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from holdfast.agent.host.descriptors import Descriptors
from holdfast.domain.errors import Unavailable


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def used() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


@pytest.fixture
def limit() -> Iterator[None]:
    """Put back what the test sets."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def lower(left: int) -> None:
    """The lowest limit below which `left` numbers are free."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    taken = {fd for fd in listed if _is_open(fd)}  # without the listing's own
    limit, free = 0, 0
    while free < left:
        free += limit not in taken
        limit += 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def test_it_is_given_free_before_nothing_is_left_and_taken_back(limit: None) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Descriptors(reserve=40, low=30)
    held = used()
    descriptors.require()
    assert descriptors.left()[0] > 0
    lower(20)
    with pytest.raises(Unavailable, match=r"this node has \d+ of \d+ file descriptors left: .*takes no new work"):
        descriptors.require()
    assert descriptors.short
    assert descriptors.left()[0] == 0
    assert used() <= held - 40, "what is done for running workers has them now"
    descriptors.look()
    assert descriptors.short, "as much as the reserve alone is not enough to take it back"
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    descriptors.require()
    assert used() >= held
    descriptors._give()


def test_a_limit_without_room_for_it_takes_no_work_and_says_so(limit: None) -> None:
    lower(10)
    descriptors = Descriptors(reserve=40, low=5)
    with pytest.raises(Unavailable, match="file descriptors left"):
        descriptors.require()

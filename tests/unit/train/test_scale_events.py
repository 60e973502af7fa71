"""The callbacks around a change: order, errors and limits."""

from __future__ import annotations

import functools
import logging
import threading

import pytest
import torch

from holdfast.domain.mesh import Mesh
from holdfast.train import World
from holdfast.train.scale_events import Leaving, Leavings, Resizes, is_resize

OLD, NEW = World(Mesh.of({"dp": 3}), 2), World(Mesh.of({"dp": 2}), 1, 7)
SOON = Leaving(40, "scale_up: n3 is back")


def test_callbacks_are_called_once_in_the_order_of_registration() -> None:
    calls: list[str] = []
    resizes = Resizes()
    resizes.add(lambda old, new: calls.append(f"first {old.dp_size}→{new.dp_size}"))
    resizes.add(lambda old, new: calls.append("second"))
    resizes.happened(OLD, NEW)
    resizes.add(lambda old, new: calls.append("late"))
    assert calls == ["first 3→2", "second", "late"]


@pytest.mark.parametrize("late", [False, True])
def test_the_error_of_a_callback_names_it(late: bool) -> None:
    def adjust(old: World, new: World) -> None:
        raise ZeroDivisionError("no replicas")

    def resize() -> None:
        resizes = Resizes()
        if not late:
            resizes.add(adjust)
        resizes.happened(OLD, NEW)
        if late:
            resizes.add(adjust)

    with pytest.raises(ZeroDivisionError, match="no replicas") as caught:
        resize()
    (note,) = caught.value.__notes__
    assert "on_resize callback" in note
    assert "adjust (" in note
    assert "test_scale_events.py:" in note
    assert note.endswith("for the resize from dp 3 to dp 2")


@pytest.mark.parametrize(
    ("old", "new", "resized"),
    [
        ({"dp": 2}, {"dp": 2}, False),
        ({"dp": 2}, {"dp": 1}, True),
        ({"pp": 2}, {"dp": 1, "pp": 2}, False),
        ({"pp": 2, "dp": 3}, {"dp": 3, "pp": 2}, False),
        ({"dp": 2, "tp": 1}, {"dp": 2}, False),
        ({"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}, True),
    ],
)
def test_what_counts_as_a_resize(old: dict[str, int], new: dict[str, int], resized: bool) -> None:
    assert is_resize(Mesh.of(old), Mesh.of(new)) is resized


def leavings(timeout_s: float = 30.0) -> Leavings:
    return Leavings(torch.device("cpu"), timeout_s)


def test_all_callbacks_have_returned_when_the_call_returns() -> None:
    calls: list[tuple[str, Leaving]] = []
    mine = leavings()
    assert not mine
    mine.add(lambda leaving: calls.append(("first", leaving)))
    mine.add(lambda leaving: calls.append(("second", leaving)))
    assert mine
    mine.call(SOON)
    mine.call(SOON)
    assert calls == [("first", SOON), ("second", SOON)] * 2


def test_a_callback_that_raises_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    def flush(where: str, leaving: Leaving) -> None:
        raise OSError(f"no {where}")

    calls: list[Leaving] = []
    mine = leavings()
    mine.add(functools.partial(flush, "network"))
    mine.add(calls.append)
    with caplog.at_level(logging.ERROR):
        mine.call(SOON)
    assert calls == [SOON]
    (record,) = caplog.records
    assert record.getMessage() == "the on_leaving callback partial failed; the change goes on: scale_up: n3 is back"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], OSError)


def test_a_callback_that_overruns_is_not_waited_for_and_ends_the_calls(caplog: pytest.LogCaptureFixture) -> None:
    begun, release = threading.Event(), threading.Event()
    calls: list[Leaving] = []

    def slow(leaving: Leaving) -> None:
        begun.set()
        release.wait(30)

    mine = leavings(timeout_s=0.05)
    mine.add(slow)
    mine.add(calls.append)
    with caplog.at_level(logging.ERROR):
        mine.call(SOON)
        assert begun.wait(30)
        assert "slow (" in caplog.records[-1].getMessage()
        assert "did not return within 0.1 s: step 40 is saved without waiting for it" in caplog.records[-1].getMessage()
        mine.call(SOON)
        assert "is still running from the previous call; none is called" in caplog.records[-1].getMessage()
        release.set()
        (thread,) = [each for each in threading.enumerate() if each.name == "holdfast-leaving"]
        thread.join(30)
    assert calls == []
    assert "is not called: an earlier one overran" in caplog.records[-1].getMessage()


def test_a_shorter_limit_than_usual_holds() -> None:
    release = threading.Event()
    mine = leavings()

    def slow(leaving: Leaving) -> None:
        release.wait(30)

    mine.add(slow)
    mine.call(SOON, timeout_s=0.01)
    release.set()

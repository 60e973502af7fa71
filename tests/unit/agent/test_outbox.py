"""Telemetry: what may be dropped is, oldest first and counted; what may not be, is not."""

from __future__ import annotations

from holdfast.agent.connection.outbox import (
    ACK_EVERY,
    DROPPABLE_MAX,
    IN_FLIGHT_MAX,
    KERNEL_LINES_MAX,
    UNACKNOWLEDGED_MAX,
    Outbox,
)
from holdfast.domain.signals import GenerationStopped, HostSample, KernelLine


def sample(at: float) -> HostSample:
    return HostSample("n", at, 0.0, 1, 0, 1)


def stopped(at: float) -> GenerationStopped:
    return GenerationStopped("n", at, "gpt", 1)


def outbox() -> Outbox:
    return Outbox("n", "incarnation")


def test_a_full_buffer_drops_the_oldest_droppable_signal_and_counts() -> None:
    box = outbox()
    for at in range(DROPPABLE_MAX + 3):
        box.add(sample(at))
    box.add(stopped(0.5))
    tick = box.compose(1.0)
    assert tick.dropped == 3
    assert box.compose(2.0, lost=4).dropped == 7
    assert tick.signals[0] == stopped(0.5)
    assert tick.signals[1] == sample(3)
    assert len(tick.signals) == DROPPABLE_MAX + 1


def test_reliable_signals_come_again_under_the_same_number_until_acknowledged() -> None:
    box = outbox()
    box.add(stopped(1))
    box.add(sample(1))
    first = box.compose(1.0, fresh=[sample(2)])
    assert not box.urgent
    box.compose(2.0, fresh=[sample(3)])  # nothing in it has to be kept
    box.add(stopped(3))
    third = box.compose(3.0)
    assert [(tick.seq, tick.signals) for tick in box.again()] == [
        (first.seq, (stopped(1),)),
        (third.seq, (stopped(3),)),
    ]
    box.acknowledge(2)  # covers what was before it
    assert [tick.seq for tick in box.again()] == [3]
    box.acknowledge(3)
    assert not box.urgent
    assert box.again() == ()


def test_a_flood_of_kernel_lines_pushes_out_no_exit() -> None:
    box = outbox()
    box.add(stopped(1))
    for number in range(KERNEL_LINES_MAX + 5):
        box.add(KernelLine("n", float(number), "line"))
    tick = box.compose(1.0)
    assert tick.signals[0] == stopped(1)
    assert tick.signals[1] == KernelLine("n", 5.0, "line")
    assert tick.dropped == 5


def test_without_acknowledgements_ticks_go_on_and_reliable_signals_gather() -> None:
    box = outbox()
    for at in range(UNACKNOWLEDGED_MAX + 5):
        box.add(stopped(at))
        box.compose(at)
    assert box.urgent
    assert box.compose(0.0, fresh=[sample(1)]).signals == (sample(1),)
    box.acknowledge(UNACKNOWLEDGED_MAX)
    assert len(box.compose(0.0).signals) == 5


def test_a_tick_that_diagnostics_cannot_read_is_given_up_and_counted() -> None:
    box = outbox()
    assert box.give_up_oldest() is None
    box.add(stopped(1))
    tick = box.compose(1.0)
    given_up = box.give_up_oldest()
    assert given_up is not None
    assert given_up.seq == tick.seq
    assert not box.urgent
    assert box.again() == ()
    assert box.dropped == 1


def test_an_acknowledgement_is_asked_for_at_first_and_when_the_last_is_some_ticks_back() -> None:
    box = outbox()
    asked = []
    box.again()  # a stream begins
    for at in range(1, 2 * ACK_EVERY + 2):
        tick = box.compose(at)
        asked.append(box.wants_ack)
        if box.wants_ack:
            box.acknowledge(tick.seq)
    assert asked == [True, *[False] * (ACK_EVERY - 1), True, *[False] * (ACK_EVERY - 1), True]


def test_one_who_is_late_with_acknowledgements_is_not_asked_for_more_of_them() -> None:
    box = outbox()
    box.again()
    asked = []
    for at in range(1, 4 * ACK_EVERY + 1):
        box.compose(at)
        asked.append(box.wants_ack)
    assert asked == [True, *[False] * (ACK_EVERY - 1)] * 4


def test_without_acknowledgements_telemetry_waits_here_the_newest_of_it_and_reliable_signals_go_on() -> None:
    box = outbox()
    for at in range(IN_FLIGHT_MAX):
        box.add(sample(at))
        assert box.compose(at).signals == (sample(at),)
    full = box.stalled
    assert full
    box.add(sample(100))
    box.add(stopped(100))
    assert box.compose(100.0).signals == (stopped(100),)
    box.acknowledge(IN_FLIGHT_MAX)
    assert not box.stalled
    assert box.compose(101.0).signals == (sample(100),)
    for at in range(IN_FLIGHT_MAX):
        box.compose(at)
    box.again()  # another stream: nothing is on its way there
    assert not box.stalled

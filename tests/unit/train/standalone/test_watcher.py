"""Signals reach the agreement at once and once, and a grace that runs out ends the process."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from many_files import room_from_1024_on
from waiting import wait_until

from holdfast.domain.errors import Unavailable
from holdfast.train.standalone.watcher import Watcher


class Asked:
    """An agreement that only notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.polled = 0
        self.awaiting = False
        self.poll_s = 0.25
        self.verdicts = 0
        self.error: Exception | None = None

    def ask(self, *, leave: bool) -> None:
        self.asked.append(leave)

    def poll(self) -> float:
        self.polled += 1
        if self.error is not None:
            raise self.error
        return 0.005


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def ended() -> list[int]:
    return []


@pytest.fixture
def watcher(asked: Asked, ended: list[int]) -> Iterator[Watcher]:
    before = signal.getsignal(signal.SIGTERM)
    watcher = Watcher(asked, 0.2, ended.append)  # type: ignore[arg-type]  # has the two methods that it needs
    yield watcher
    watcher.close()
    assert signal.getsignal(signal.SIGTERM) == before


def polled_twice(asked: Asked) -> None:
    seen = asked.polled
    wait_until(lambda: asked.polled >= seen + 2, description="two polls")


def polls_until(asked: Asked, expected: list[bool]) -> None:
    wait_until(lambda: asked.asked == expected, description=f"the requests {expected}")


def test_sigusr1_asks_for_a_save_once_each_time(watcher: Watcher, asked: Asked) -> None:
    for expected in ([False], [False, False]):
        os.kill(os.getpid(), signal.SIGUSR1)
        polls_until(asked, expected)
        polled_twice(asked)
        assert asked.asked == expected
    assert watcher.deadline is None


def test_sigterm_asks_to_leave_and_starts_the_grace(watcher: Watcher, asked: Asked, ended: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: bool(ended), description="the end of the grace")
    assert asked.asked == [True]
    assert ended == [128 + signal.SIGTERM]


def test_the_grace_also_ends_when_the_store_is_gone(watcher: Watcher, asked: Asked, ended: list[int]) -> None:
    asked.error = Unavailable("the store is gone")
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: bool(ended), description="the end of the grace")


def test_a_rank_whose_peers_do_not_answer_leaves_before_the_grace_is_over(
    asked: Asked, ended: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked.awaiting, asked.poll_s = True, 0.005
    watcher = Watcher(asked, 1000.0, ended.append)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: bool(ended), description="the end")
    watcher.close()
    assert "not every rank has answered" in caplog.text


def test_a_forked_child_dies_of_sigterm_and_the_parent_hears_nothing(watcher: Watcher, asked: Asked) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    polled_twice(asked)
    assert asked.asked == []
    assert watcher.deadline is None


def test_a_script_with_more_than_a_thousand_open_files_is_asked_too(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = os.pipe2

    def high(flags: int) -> tuple[int, int]:
        low = pipe(flags)
        made = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1024) for end in low]
        for end in low:
            os.close(end)
        return made[0], made[1]

    with room_from_1024_on():
        monkeypatch.setattr(os, "pipe2", high)
        watcher = Watcher(asked, 1000.0)  # type: ignore[arg-type]
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            polls_until(asked, [False])
        finally:
            watcher.close()


def test_a_taken_wakeup_descriptor_only_makes_it_slower(watcher: Watcher, asked: Asked) -> None:
    signal.set_wakeup_fd(-1)  # as an event loop of the script may do
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: asked.asked == [False], description="the request")


def test_outside_of_the_main_thread_it_says_that_it_takes_no_signals(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        Watcher(asked, 1.0).close()  # type: ignore[arg-type]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "SIGTERM and SIGUSR1 are not handled" in caplog.text

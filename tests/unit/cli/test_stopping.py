"""A stop request at the worst moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from holdfast.cli.stopping import StopRequest

# Each line of the wait, and of what it calls, is interrupted by the signal once.
SCRIPT = """
import signal, sys

{make}
{install}
sent = 0

def trace(frame, event, _):
    global sent
    if event == "line" and not handling:
        sent += 1
        signal.raise_signal(signal.SIGTERM)
    return trace

handling = False
handler = signal.getsignal(signal.SIGTERM)

def watched(*arguments):
    global handling
    handling = True
    handler(*arguments)
    handling = False

signal.signal(signal.SIGTERM, watched)
sys.settrace(trace)
stopped = stop.wait(30)
sys.settrace(None)
assert stopped and sent
"""
OURS = ("from holdfast.cli.stopping import StopRequest; stop = StopRequest()", "stop.on(signal.SIGTERM)")
EVENT = ("import threading; stop = threading.Event()", "signal.signal(signal.SIGTERM, lambda *_: stop.set())")


def _interrupted(make: str, install: str, timeout_s: float) -> int:
    script = SCRIPT.format(make=make, install=install)
    return subprocess.run([sys.executable, "-c", script], timeout=timeout_s, check=False).returncode


def test_a_signal_at_any_line_of_the_wait_ends_it() -> None:
    assert _interrupted(*OURS, timeout_s=25) == 0


def test_the_interruption_would_catch_a_lock() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        _interrupted(*EVENT, timeout_s=2)


def test_without_a_signal_the_wait_takes_its_time() -> None:
    assert not StopRequest().wait(0.0)


def test_requests_without_end_do_not_block_who_asks() -> None:
    stop = StopRequest()

    def ask() -> None:
        for _ in range(70_000):
            stop._request(signal.SIGTERM, None)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert not asking.is_alive()
    assert stop.wait(0.0)

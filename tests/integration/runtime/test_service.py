"""A service as its operator sees it: signals, exit codes and the one line that says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import TIMEOUT_S, wait_until
from warm_processes import warm

SERVE_FOR_EVER = """
    async def serve(settings):
        try:
            announce(settings.ready_file, {"pid": str(os.getpid())})
            await anyio.sleep_forever()
        finally:
            sys.stderr.write("cleaned up\\n")
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a service whose `serve` is the given source; waits for its ready file if `ready`. `new`: in a new interpreter,
    whose end is that of a service; otherwise a fork."""
    started = []

    def run(
        source: str, *, ready: bool = True, new: bool = False, shutdown_timeout_s: float = 10.0, **env: str
    ) -> subprocess.Popen[str]:
        script = tmp_path / "service.py"
        script.write_text(
            "import os, sys, anyio\n"
            "from holdfast.domain.errors import Conflict, Unavailable\n"
            "from holdfast.runtime import service\n"
            "from holdfast.runtime.ready import announce\n"
            "from holdfast.runtime.settings import ServiceSettings\n"
            f"{textwrap.dedent(source)}\n"
            f"service.main('example', ServiceSettings, serve, shutdown_timeout_s={shutdown_timeout_s})\n"
        )
        ready_file = tmp_path / "ready.json"
        environment = {**os.environ, "HOLDFAST_READY_FILE": str(ready_file), **env}
        process: subprocess.Popen[str]
        if new:
            process = subprocess.Popen(
                [sys.executable, str(script)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        else:
            process = warm("holdfast.replicator").command([str(script)], Path.cwd(), environment)
        started.append(process)
        if ready:
            wait_until(ready_file.exists, description="the ready file")
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str]:
    for number in signals:
        process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end(start: Start, number: signal.Signals) -> None:
    code, errors = end(start(SERVE_FOR_EVER, new=True), number)
    assert code == 0
    assert "cleaned up" in errors
    assert f"received {number.name}" in errors


def test_a_service_that_is_needed_to_the_last_ignores_sigterm(start: Start) -> None:
    process = start(SERVE_FOR_EVER, HOLDFAST_STOP_SIGNAL="SIGINT")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert '"signal": "SIGTERM"' in process.stderr.readline()
    assert process.poll() is None
    code, errors = end(process, signal.SIGINT)
    assert code == 0
    assert "cleaned up" in errors


FAREWELL = """
    import sys

    async def serve(settings):
        async def say():
            print("taking leave", file=sys.stderr, flush=True)
            await anyio.sleep({seconds})
        farewell.say = say
        announce(settings.ready_file, {{}})
        try:
            await anyio.sleep_forever()
        finally:
            print("cleaned up", file=sys.stderr)

    farewell = service.Farewell()
    service.main("example", ServiceSettings, serve, farewell=farewell)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_service_takes_its_leave_before_it_ends(start: Start, number: signal.Signals) -> None:
    code, errors = end(start(FAREWELL.format(seconds=0.1)), number)
    assert code == 0
    assert errors.index("taking leave") < errors.index("cleaned up")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_leave(start: Start, number: signal.Signals) -> None:
    process = start(FAREWELL.format(seconds=3600))
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    seen = ""
    while "taking leave" not in seen:
        seen += process.stderr.readline()
    code, errors = end(process, number)
    assert code == 0
    assert "cleaned up" in errors


def test_a_notice_that_is_repeated_changes_nothing(start: Start) -> None:
    process = start(FAREWELL.format(seconds=3600))
    assert process.stderr is not None
    for expected in ("taking leave", "already leaving"):
        process.send_signal(signal.SIGUSR1)
        while expected not in process.stderr.readline():
            assert process.poll() is None
    code, errors = end(process, signal.SIGTERM)
    assert (code, "cleaned up" in errors) == (0, True)


def test_ctrl_c_takes_no_leave(start: Start) -> None:
    code, errors = end(start(FAREWELL.format(seconds=3600)), signal.SIGINT)
    assert (code, "taking leave" in errors) == (0, False)


def test_a_service_that_ends_by_itself_is_a_bug(start: Start) -> None:
    code, errors = end(start("async def serve(settings): pass", ready=False, new=True))
    assert code == 1
    assert "LoopEnded" in errors
    assert "the loop 'example' returned" in errors


def test_a_loop_that_ends_takes_the_service_down(start: Start) -> None:
    source = """
        async def serve(settings):
            async def heartbeat(): pass
            async with anyio.create_task_group() as tasks:
                service.guarded(tasks, "heartbeat", heartbeat)
                service.guarded(tasks, "other", anyio.sleep_forever)
    """
    code, errors = end(start(source, ready=False))
    assert code == 1
    assert "the loop 'heartbeat' returned" in errors


def test_a_cancellation_that_nobody_ordered_takes_the_service_down_and_is_named(start: Start) -> None:
    source = """
        async def serve(settings):
            async def session(): raise anyio.get_cancelled_exc_class()
            async with anyio.create_task_group() as tasks:
                service.guarded(tasks, "session", session)
                service.guarded(tasks, "other", anyio.sleep_forever)
    """
    code, errors = end(start(source, ready=False))
    assert code == 1
    assert "the loop 'session' was cancelled, but not by Holdfast" in errors


def test_an_exception_carries_its_loops_name(start: Start) -> None:
    source = """
        async def serve(settings):
            async def ingest(): raise ZeroDivisionError("oops")
            async with anyio.create_task_group() as tasks:
                service.guarded(tasks, "ingest", ingest)
    """
    code, errors = end(start(source, ready=False))
    assert code == 1
    assert "ZeroDivisionError: oops" in errors
    assert "in the loop 'ingest'" in errors


def test_what_the_operator_can_put_right_is_one_line(start: Start) -> None:
    source = """
        async def serve(settings):
            async with anyio.create_task_group():
                raise Unavailable("no Redis answers at 127.0.0.1:1")
    """
    code, errors = end(start(source, ready=False, new=True))
    assert code == 2
    assert errors == "holdfast example: no Redis answers at 127.0.0.1:1\n"


def test_a_wrong_setting_starts_nothing(start: Start) -> None:
    code, errors = end(start(SERVE_FOR_EVER, ready=False, HOLDFAST_LOG_LEVEL="loud"))
    assert code == 2
    assert errors.startswith("holdfast example: HOLDFAST_LOG_LEVEL: 'loud' is not valid")


def test_a_clean_up_that_hangs_is_cut_short(start: Start) -> None:
    source = """
        async def serve(settings):
            try:
                announce(settings.ready_file, {})
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep_forever()
    """
    code, errors = end(start(source, new=True, shutdown_timeout_s=0.2), signal.SIGTERM)
    assert code == 3
    assert "not stopped 0.2 s after the signal" in errors


def test_the_second_signal_ends_it_at_once(start: Start) -> None:
    source = """
        async def serve(settings):
            try:
                announce(settings.ready_file, {})
                await anyio.sleep_forever()
            finally:
                sys.stderr.write("hanging\\n")
                sys.stderr.flush()
                with anyio.CancelScope(shield=True):
                    await anyio.sleep_forever()
    """
    process = start(source, new=True)
    process.send_signal(signal.SIGTERM)
    assert process.stderr
    wait_until(lambda: process.stderr and "hanging" in process.stderr.readline(), description="the clean-up")
    code, _ = end(process, signal.SIGTERM)
    assert code == -signal.SIGTERM


def test_an_error_while_cleaning_up_is_not_swallowed(start: Start) -> None:
    source = """
        async def serve(settings):
            try:
                announce(settings.ready_file, {})
                await anyio.sleep_forever()
            finally:
                raise ZeroDivisionError("while cleaning up")
    """
    code, errors = end(start(source), signal.SIGTERM)
    assert code == 1
    assert "while cleaning up" in errors

"""Runs a service: reads settings, runs until SIGTERM or SIGINT, stops in time, and reports an error in one line.

A service never ends by itself. `serve` runs until it is cancelled; if it returns, or one of its loops returns, that is an
error. A signal cancels it, and its `finally` blocks clean up. If that takes longer than `shutdown_timeout_s`, or the signal
arrives twice, the process exits at once with a message. Children exit with it (`runtime.children`).

A service with work to do before its end (`Farewell`) does this work at the first SIGTERM or SIGUSR1. The next SIGTERM or SIGINT
cancels the service."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.domain.errors import HoldfastError
from holdfast.runtime.loop import ServiceLoop
from holdfast.runtime.settings import ServiceSettings, read_settings
from holdfast.runtime.telling import logs, telemetry

EXIT_OK = 0
EXIT_CRASH = 1  # a bug: an unexpected exception, or a service that ended by itself
EXIT_USAGE = 2  # an error that the operator can fix: a wrong setting, a port in use, a Redis without data
EXIT_STUCK = 3  # did not stop in time
SHUTDOWN_TIMEOUT_S = 10.0

S = TypeVar("S", bound=ServiceSettings)
log = structlog.get_logger("holdfast.service")


class LoopEnded(RuntimeError):
    """A loop that must not end has returned, which is a bug; the service does not continue without the loop."""


@dataclass(slots=True)
class Farewell:
    """The work of a service between SIGTERM or SIGUSR1 and its end. It has no time limit: it lasts until `say` returns, or
    until the next SIGTERM or SIGINT. A repeated SIGUSR1 is ignored."""

    say: Callable[[], Awaitable[object]] | None = None  # None = the service is still starting


def main(
    name: str,
    settings: type[S],
    serve: Callable[[S], Awaitable[object]],
    *,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    farewell: Farewell | None = None,
) -> NoReturn:
    """Run `__main__` of the service `name`."""
    try:
        config = read_settings(settings)
    except HoldfastError as error:
        _print_error(name, error)
        raise SystemExit(EXIT_USAGE) from None
    logs.configure(name, level=config.log_level, form=config.log_format)
    telemetry.configure(f"holdfast-{name}", config.metrics_listen)
    code = run_service(
        name,
        lambda: serve(config),
        shutdown_timeout_s=shutdown_timeout_s,
        farewell=farewell,
        ignored=(signal.SIGTERM,) if config.stop_signal == "SIGINT" else (),
    )
    raise SystemExit(code)


def run_service(
    name: str,
    serve: Callable[[], Awaitable[object]],
    *,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
    farewell: Farewell | None = None,
    ignored: Sequence[signal.Signals] = (),
) -> int:
    """Run `serve` to its end and return the exit code. Must be called from the main thread, which receives signals.

    `ignored`: signals that are logged, and do nothing else.
    """
    watchdog = _Watchdog(name, shutdown_timeout_s)
    try:
        anyio.run(
            _until_signal, name, serve, watchdog, farewell, ignored, backend_options={"loop_factory": ServiceLoop}
        )
    except BaseException as error:
        return _report(name, error)
    finally:
        watchdog.disarm()
    return EXIT_OK


def guarded(tasks: TaskGroup, name: str, loop: Callable[[], Awaitable[object]]) -> None:
    """Start a loop that must not end. If it returns, `LoopEnded` is raised. Its exceptions have a note with its name.

    A cancellation that a library raises and no scope has requested also raises `LoopEnded`. A task group would mistake it for
    its own cancellation and end without a message.
    """

    async def run() -> None:
        try:
            await loop()
        except asyncio.CancelledError as error:
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise LoopEnded(f"the loop {name!r} was cancelled, but not by Holdfast") from error
        except Exception as error:
            error.add_note(f"in the loop {name!r}")
            raise
        raise LoopEnded(f"the loop {name!r} returned; it should run until the service stops")

    tasks.start_soon(run, name=name)


async def _until_signal(
    name: str,
    serve: Callable[[], Awaitable[object]],
    watchdog: _Watchdog,
    farewell: Farewell | None,
    ignored: Sequence[signal.Signals],
) -> None:
    expected = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if farewell is not None else ()))
    leaving = False
    async with anyio.create_task_group() as tasks:

        def end() -> None:
            watchdog.arm()
            tasks.cancel_scope.cancel()

        async def leave(work: Callable[[], Awaitable[object]]) -> None:
            await work()
            log.info("stopping", service=name, reason="the work before its end is done")
            end()

        with anyio.open_signal_receiver(*expected) as signals:
            guarded(tasks, name, serve)
            async for received in signals:
                if received in ignored:
                    log.info("signal ignored", service=name, signal=received.name)
                    continue
                if received != signal.SIGINT and farewell is not None and farewell.say is not None and not leaving:
                    leaving = True
                    log.info("leaving", service=name, reason=f"received {received.name}")
                    tasks.start_soon(leave, farewell.say, name=f"farewell of {name}")
                    continue
                if received == signal.SIGUSR1 and leaving:
                    log.info("signal ignored: already leaving", service=name, signal=received.name)
                    continue
                log.info("stopping", service=name, reason=f"received {received.name}")
                end()
                # The receiver ends with the scope, so one more signal ends the process immediately.
                break


class _Watchdog:
    """Ends the process if a shutdown takes too long, because a blocked `finally` must not occupy a node's hardware."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.daemon = True

    def arm(self) -> None:
        self._timer.start()

    def disarm(self) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        _print_error(self._name, f"not stopped {self._timeout_s:g} s after the signal; exiting immediately")
        os._exit(EXIT_STUCK)


def _report(name: str, error: BaseException) -> int:
    """Report why the service ended: one line for an error that the operator can fix, a traceback for a bug."""
    leaves = _leaves(error)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return EXIT_OK
    if all(isinstance(leaf, HoldfastError) for leaf in leaves):
        for leaf in leaves:
            _print_error(name, leaf)
        return EXIT_USAGE
    log.error("service crashed", service=name, exc_info=error)
    return EXIT_CRASH


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _print_error(name: str, text: object) -> None:
    sys.stderr.write(f"holdfast {name}: {text}\n")
    sys.stderr.flush()

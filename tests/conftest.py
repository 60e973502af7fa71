"""What every test shares: the event loop, one real Redis per test process, and a guard against keys that never go away.

Which Redis, and which object store: `servers`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVarTuple, Unpack

import failure_logs
import file_order
import hypothesis
import long_tests
import ports
import pytest
import pytest_timeout
import redis
import servers
import structlog
import warm_processes
from servers import Choice, RedisServer

from holdfast.log.keys import may_stay
from holdfast.runtime.garbage import collect_seldom

Ts = TypeVarTuple("Ts")

# Test modules are rewritten and services compiled once, not by every worker and every one of a few hundred processes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.update(ports.NO_LOCAL_API)

gc.disable()  # until everything is imported: what modules hold is no garbage

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--servers", choices=servers.MODES, default="auto", help="where Redis and the object store run")
    long_tests.add_options(parser)
    file_order.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(failure_logs)
    if config.getoption("--write-order"):
        config.pluginmanager.register(file_order.CpuTimes())
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    directory = warm_processes.share()
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))  # some of these processes end now
    if config.getoption("--write-long"):
        config.pluginmanager.register(long_tests.meter())
    if config.getoption("--write-order"):
        config.pluginmanager.register(file_order.OrderMeter())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--short"):
        long_tests.leave_out(config, items)
    file_order.sort(items)


def pytest_report_header(config: pytest.Config) -> str:
    mode = config.getoption("--servers")
    return f"servers: {mode if mode == 'containers' else servers.choose(mode)}"


def pytest_collection_finish() -> None:
    collect_seldom()
    gc.enable()


class Watch(threading.Thread):
    """Sees to the time limit of every test of this process.

    pytest-timeout has a thread for each test, whose start and end change threads four times. Where other processes want the
    processors too, each change waited for one of them."""

    EVERY_S = 0.5

    def __init__(self) -> None:
        super().__init__(name="time limit of tests", daemon=True)
        self._now, self._pause = time.monotonic, time.sleep  # tests replace them
        self._limit: tuple[float, Callable[[], object]] | None = None

    def run(self) -> None:
        while True:
            self._pause(self.EVERY_S)
            limit = self._limit
            if limit is not None and self._now() >= limit[0]:
                self._limit = None
                limit[1]()

    def begin(self, seconds: float, over: Callable[[], object]) -> None:
        if not self.is_alive():
            self.start()
        self._limit = self._now() + seconds, over

    def end(self) -> None:
        self._limit = None


WATCH = Watch()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    if settings.method != "thread":
        return None
    WATCH.begin(settings.timeout, lambda: pytest_timeout.timeout_timer(item, settings))
    item.cancel_timeout = WATCH.end  # type: ignore[attr-defined] # by which the plug-in ends it
    return True


# As a service's own log: a traceback that shows every local variable takes half a minute where the variables are large.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Commands under test can be interrupted even where a shell started us in the background, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class LoopOfOneTest(asyncio.SelectorEventLoop):
    """A loop after which others follow in its process.

    gRPC ends a cancelled call later than `Channel.close` returns, and gives the end to the call's loop by way of the loop that
    runs then. With the call's loop closed that raised in the next test. Nobody waits for such an end."""

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed() and getattr(callback, "__name__", "") == "_handle_callback_wrapper":
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon_threadsafe(callback, *args, context=context)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Async tests carry `pytest.mark.anyio`; services run on asyncio, since grpc.aio does."""
    return "asyncio", {"loop_factory": LoopOfOneTest}


@pytest.fixture(scope="session")
def server_choice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Choice]:
    with servers.chosen(request.config.getoption("--servers"), tmp_path_factory.mktemp("servers")) as choice:
        yield choice


@pytest.fixture(scope="session")
def redis_server(server_choice: Choice) -> Iterator[RedisServer]:
    """One server for all tests of this process. Take `redis_url` unless the test is about the server itself."""
    with servers.redis_server(server_choice) as server:
        yield server


@pytest.fixture
def own_server(server_choice: Choice, tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop, freeze and kill."""
    with servers.redis_server(server_choice, tmp_path / "redis") as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> Iterator[str]:
    """The URL of a real, empty Redis. The test fails when it leaves a key that neither expires nor is declared."""
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        client.flushall()
        yield redis_server.url
        leaked = [key for key in client.scan_iter(count=1000) if client.ttl(key) == -1 and not may_stay(key)]
    assert not leaked, f"these keys have no TTL and are not declared in holdfast.log.keys: {sorted(leaked)}"

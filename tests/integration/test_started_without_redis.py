"""A service that is started while Redis is away, or refuses, waits and says so; one with a plainly wrong setting ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from ports import free_ports
from servers import RedisServer
from supervisor_processes import spawn
from waiting import wait_until

from holdfast.log.embedded import server_binary
from holdfast.runtime.service import EXIT_USAGE

WAITS = "waiting for Redis: "


@contextmanager
def started(module: str, directory: Path, redis_url: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    process = spawn(
        directory / f"{module}.log",
        {
            "HOLDFAST_REDIS_URL": redis_url,
            "HOLDFAST_DATA_DIR": str(directory),
            "HOLDFAST_READY_FILE": str(directory / f"{module}.json"),
            "HOLDFAST_LOG_FORMAT": "json",
            **settings,
        },
        module,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events(directory: Path, module: str) -> list[str]:
    lines = (directory / f"{module}.log").read_text().splitlines()
    return [str(json.loads(line)["event"]) for line in lines if line.startswith("{")]


def until_said(process: subprocess.Popen[bytes], directory: Path, module: str, *words: str) -> None:
    def said() -> bool:
        assert process.poll() is None, (directory / f"{module}.log").read_text()
        waits = [event for event in events(directory, module) if event.startswith(WAITS)]
        return any(all(word in event for word in words) for event in waits)

    wait_until(said, description=f"{module} to say {words}")


def test_a_supervisor_waits_for_redis_answers_its_probes_and_leads_then(
    own_server: RedisServer, tmp_path: Path
) -> None:
    own_server.stop()
    (port,) = free_ports(1)
    api = f"http://127.0.0.1:{port}"
    settings = {"HOLDFAST_API_LISTEN": f"127.0.0.1:{port}", "HOLDFAST_SUPERVISOR_LISTEN": "127.0.0.1:0"}
    with started("supervisor", tmp_path, own_server.url, **settings) as process:
        until_said(process, tmp_path, "supervisor", "does not answer", "check that it is running")

        def health(path: str) -> httpx.Response | None:
            assert process.poll() is None, (tmp_path / "supervisor.log").read_text()
            try:
                return httpx.get(f"{api}{path}", trust_env=False)
            except httpx.TransportError:
                return None

        def is_alive() -> bool:
            answer = health("/livez")
            return answer is not None and answer.status_code == 200

        wait_until(is_alive, description="the liveness probe")
        for path in ("/healthz", "/readyz"):
            answer = health(path)
            assert answer is not None
            assert answer.status_code == 503
            assert "does not answer" in answer.json()["detail"]

        def commands_say_why() -> bool:
            refused = health("/v1/nodes")
            assert refused is not None
            assert refused.status_code == 503
            return "check that it is running" in refused.json()["detail"]

        wait_until(commands_say_why, description="the reason in the answers of the API")
        assert not (tmp_path / "supervisor.json").exists(), "it does not serve yet"
        own_server.start()
        wait_until((tmp_path / "supervisor.json").exists, description="the supervisor to lead")
        answer = health("/healthz")
        assert answer is not None
        assert answer.status_code == 200


def test_diagnostics_waits_for_redis_and_serves_then(own_server: RedisServer, tmp_path: Path) -> None:
    own_server.stop()
    with started("diagnostics", tmp_path, own_server.url, HOLDFAST_DIAGNOSTICS_LISTEN="127.0.0.1:0") as process:
        address = own_server.url.removeprefix("redis://").partition("/")[0]
        until_said(process, tmp_path, "diagnostics", address, "does not answer", "check that it is running")
        own_server.start()
        wait_until((tmp_path / "diagnostics.json").exists, description="diagnostics to serve")


@pytest.mark.parametrize("module", ["supervisor", "diagnostics"])
def test_a_redis_that_demands_a_password_is_waited_for(own_server: RedisServer, tmp_path: Path, module: str) -> None:
    settings = dict.fromkeys(
        ("HOLDFAST_API_LISTEN", "HOLDFAST_SUPERVISOR_LISTEN", "HOLDFAST_DIAGNOSTICS_LISTEN"), "127.0.0.1:0"
    )
    with redis.Redis.from_url(own_server.url) as operator:
        operator.config_set("requirepass", "secret")
    with started(module, tmp_path, own_server.url, **settings) as process:
        until_said(process, tmp_path, module, "refuses the credentials", "HOLDFAST_REDIS_URL")
        with redis.Redis.from_url(own_server.url, password="secret") as operator:
            operator.config_set("requirepass", "")
        wait_until(lambda: "Redis serves now" in events(tmp_path, module), description="the end of the wait")
        wait_until((tmp_path / f"{module}.json").exists, description=f"{module} to serve")


@pytest.mark.parametrize("module", ["supervisor", "diagnostics"])
def test_a_sentinel_and_a_database_that_does_not_exist_end_the_service(
    own_server: RedisServer, tmp_path: Path, module: str
) -> None:
    (port,) = free_ports(1)
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\n")
    sentinel = subprocess.Popen([str(server_binary()), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        for url, reason in (
            (f"redis://127.0.0.1:{port}/0", "is a Redis Sentinel"),
            (f"{own_server.url.rpartition('/')[0]}/99", "DB index is out of range"),
        ):
            with started(module, tmp_path, url) as process:
                assert process.wait(60) == EXIT_USAGE
            log = (tmp_path / f"{module}.log").read_text()
            assert reason in log.splitlines()[-1], log
            assert "Traceback" not in log
    finally:
        sentinel.kill()
        sentinel.wait()

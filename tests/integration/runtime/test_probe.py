"""What a container's health check asks, of services that serve, that are ill and that are not there."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from certificates import tls

from holdfast.runtime.probe import probe
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.trust.tls import Tls

NOTHING = "127.0.0.1:1"


class Ill(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()
        self.wfile.write(b"no Redis")

    def log_message(self, *_: object) -> None:
        """Nothing: pytest shows what matters."""


@pytest.fixture
def web() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ill) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["grpc://", "unix:"])
async def test_a_service_that_serves(scheme: str, tmp_path: Path) -> None:
    address = "127.0.0.1:0" if scheme == "grpc://" else f"unix:{tmp_path}/s.sock"
    async with listen(address, lambda _: None, services=[]) as server:
        target = server.endpoint if scheme == "unix:" else f"grpc://{server.endpoint}"
        assert await anyio.to_thread.run_sync(probe, target) == ""


@pytest.mark.anyio
async def test_a_service_with_tls_is_asked_with_it_and_nobody_else_is_answered(pki: Path) -> None:
    ours = tls(pki, "ours", "ours")
    async with listen("localhost:0", lambda _: None, services=[], tls=ours) as server:

        async def ask(target: str, with_tls: Tls | None) -> str:
            return await anyio.to_thread.run_sync(probe, target, 30.0, with_tls)

        assert await ask(f"grpc://localhost:{server.port}", ours) == ""
        assert await ask(f"grpc://127.0.0.1:{server.port}", ours) == ""
        for theirs in (None, tls(pki, "foreign", "ours"), tls(pki, "ours", "foreign")):
            said = await ask(f"grpc://localhost:{server.port}", theirs)
            assert said.startswith("UNAVAILABLE"), "at once, and why"


@pytest.mark.anyio
async def test_a_socket_of_the_machine_has_no_tls(pki: Path, tmp_path: Path) -> None:
    async with listen(f"unix:{tmp_path}/s.sock", lambda _: None, services=[]) as server:
        assert await anyio.to_thread.run_sync(probe, server.endpoint, 30.0, tls(pki, "ours", "ours")) == ""


@pytest.mark.anyio
@pytest.mark.parametrize(
    "command", [["holdfast.runtime.probe"], ["holdfast.cli.main", "health"]], ids=lambda it: it[-1]
)
async def test_the_command_takes_the_files_of_the_services(pki: Path, command: list[str]) -> None:
    files = {"CERT": pki / "ours.pem", "KEY": pki / "ours.key", "CA": pki / "ours-ca.pem"}
    environment = {**os.environ, **{f"HOLDFAST_TLS_{part}": str(path) for part, path in files.items()}}
    async with listen("localhost:0", lambda _: None, services=[], tls=tls(pki, "ours", "ours")) as server:
        run = [sys.executable, "-m", *command, f"grpc://localhost:{server.port}"]
        asked = await anyio.run_process(run, env=environment, check=False)
        assert (asked.returncode, asked.stdout.decode().split()[-1]) == (0, "serving")
        del environment["HOLDFAST_TLS_KEY"]
        asked = await anyio.run_process(run, env=environment, check=False)
        assert asked.returncode == 2
        assert "HOLDFAST_TLS_KEY: None is not valid; expected a PEM file" in asked.stderr.decode()


def test_http(web: str) -> None:
    assert probe(f"{web}/healthz") == ""
    assert probe(f"{web}/other") == "HTTP 503 no Redis"


@pytest.mark.parametrize("scheme", ["grpc://", "http://"])
def test_nothing_there(scheme: str) -> None:
    assert "Connection refused" in probe(f"{scheme}{NOTHING}", 30.0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([f"http://{NOTHING}/healthz"], 1, "is not serving: "),
        (["redis://127.0.0.1"], 2, "usage: python -m holdfast.runtime.probe TARGET"),
        ([], 2, "usage: "),
    ],
)
def test_as_a_command(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.runtime.probe", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_it_imports_little() -> None:
    """It runs every few seconds in every container."""
    code = "import sys, holdfast.runtime.probe; print(*{'grpc', 'rich', 'typer', 'pydantic', 'structlog'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""

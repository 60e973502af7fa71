"""What a container's health check asks, of services that serve, that are ill and that are not there."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from holdfast.runtime.grpc_server import listen
from holdfast.runtime.probe import probe

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


def test_http(web: str) -> None:
    assert probe(f"{web}/healthz") == ""
    assert probe(f"{web}/other") == "HTTP 503 no Redis"


@pytest.mark.parametrize("scheme", ["grpc://", "http://"])
def test_nothing_there(scheme: str) -> None:
    assert probe(f"{scheme}{NOTHING}", 0.5) != ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([f"http://{NOTHING}/healthz"], 1, "does not serve: "),
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

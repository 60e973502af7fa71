"""An HTTP server of this process that speaks JSON, for servers of tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def read(self) -> dict[str, Any]:
        """Return the request's body; empty if it has none."""
        length = int(self.headers.get("Content-Length") or 0)
        body: dict[str, Any] = json.loads(self.rfile.read(length)) if length else {}
        return body

    def send(self, code: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass  # the other end is gone

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: type[JsonHandler]) -> Iterator[str]:
    """Serve on a free port of this machine; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

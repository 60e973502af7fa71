"""Names at the prompt, as the shell asks for them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from warm_processes import COMMANDS, warm

PAGES = {
    "/v1/jobs": {"items": [{"name": "llm"}, {"name": "llm-2"}, {"name": "gpt"}], "next_cursor": None},
    "/v1/nodes": {"items": [{"node": "node-1"}], "next_cursor": None},
}


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = PAGES.get(self.path.partition("?")[0])
        self.send_response(200 if page else 503)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(page or {}).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


def completed(typed: str, url: str) -> list[str]:
    words = ["holdfast", *typed.split(" ")]
    asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    _, out, err = warm(COMMANDS)([], Path.cwd(), {**os.environ, **asked, "HOLDFAST_API": url}, 60.0)
    assert not err
    return out.split()


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("jobs show ll", ["llm", "llm-2"]),
        ("logs g", ["gpt"]),
        ("nodes cordon ", ["node-1"]),
        ("incidents show ", []),
    ],
)
def test_names_are_completed(typed: str, names: list[str], url: str) -> None:
    assert completed(typed, url) == names


def test_without_an_api_there_is_nothing_and_no_error() -> None:
    assert completed("jobs show ", "http://127.0.0.1:1") == []


def test_an_api_without_a_leader_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PAGES, "/v1/jobs")
    assert completed("jobs show ", url) == []

"""Maintenance notices from a file and from a metadata server, in every form that somebody may write them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.agent.collectors.maintenance import Watch, build_file, build_url, parse, read_file, read_url
from holdfast.agent.collectors.protocol import Surroundings


@pytest.mark.parametrize(
    ("text", "event", "starts_at"),
    [
        ("host maintenance\nat 18:00", "host maintenance at 18:00", None),
        ("", "maintenance", None),
        ('{"event": "reboot", "starts_at": 1700000000}', "reboot", 1.7e9),
        ('{"event": null}', "maintenance", None),
        ('{"event": "x", "starts_at": "tomorrow"}', "x", None),
        ('{"event": "x", "starts_at": NaN}', "x", None),
        ('{"event": "x", "starts_at": true}', "x", None),
        ('{"event": "x", "starts_at": 1' + "0" * 400 + "}", "x", None),
        ('{"event": "\\ud800"}', "?", None),
        ("[1, 2]", "[1, 2]", None),
        ("[" * 50_000, "[" * 500, None),
        ("\ufffd\x00", "\ufffd\x00", None),
    ],
)
def test_whatever_is_in_the_file_is_a_notice(text: str, event: str, starts_at: float | None) -> None:
    assert parse(text) == (event, starts_at)


def test_a_notice_is_told_once_when_it_changes_and_when_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    watch = Watch("n", "file", lambda: read_file(path))
    told = list[str]()
    for content in (None, "a", "a", "b", None, None):
        path.unlink(missing_ok=True)
        if content:
            path.write_text(content)
        told += [notice.event or "withdrawn" for notice in watch.ask()]
    assert told == ["withdrawn", "a", "b", "withdrawn"]


def test_a_source_that_cannot_be_read_takes_nothing_back(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text("a")
    watch = Watch("n", "file", lambda: read_file(path))
    assert len(watch.ask()) == 1
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="notice"):
        watch.ask()
    path.rmdir()
    path.write_text("a")
    assert watch.ask() == ()


@contextmanager
def metadata(*answers: tuple[int, bytes]) -> Iterator[str]:
    """A metadata server that gives these answers in turn, to those who ask as Google wants to be asked."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0) if self.headers["Metadata-Flavor"] == "Google" else (403, b"")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/maintenance-event"
        finally:
            server.shutdown()
            thread.join()


def test_google_clouds_metadata() -> None:
    word = b"TERMINATE_ON_HOST_MAINTENANCE"
    with metadata((200, b"NONE"), (200, word + b"\n"), (200, b"\xff" * 5000), (500, b"")) as url:
        assert read_url(url) == ("", None)
        assert read_url(url) == (word.decode(), None)
        assert len(read_url(url)[0]) == 500
        with pytest.raises(OSError, match="500"):
            read_url(url)
    with pytest.raises(OSError, match="refused"):
        read_url(url)
    with pytest.raises(OSError, match="nonsense"):
        read_url("nonsense")


def test_nothing_is_watched_unless_configured(tmp_path: Path) -> None:
    around = Surroundings("n", tmp_path, tmp_path, tmp_path, tmp_path / "k")
    assert build_file(around) is None
    assert build_url(around) is None

"""Maintenance notices from a file and from a metadata server, in every form that somebody may write them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.agent.collectors.maintenance import (
    INSTANCE,
    Watch,
    build_file,
    build_url,
    metadata_url,
    parse,
    read_file,
    read_instance,
    read_url,
)
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


def test_a_notice_is_reported_once_when_it_changes_and_when_it_is_withdrawn(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    watch = Watch("n", "file", lambda: read_file(path))
    reported = list[str]()
    for content in (None, "a", "a", "b", None, None):
        path.unlink(missing_ok=True)
        if content:
            path.write_text(content)
        reported += [notice.event or "withdrawn" for notice in watch.ask()]
    assert reported == ["withdrawn", "a", "b", "withdrawn"]


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
def served(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """A metadata server, for those who ask as Google wants to be asked; its address. `answer`: by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path) if self.headers["Metadata-Flavor"] == "Google" else (403, b"")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def metadata(*answers: tuple[int, bytes]) -> Iterator[str]:
    """One that gives these answers in turn."""
    left = list(answers)
    with served(lambda _: left.pop(0)) as address:
        yield f"{address}/maintenance-event"


@contextmanager
def instance(**keys: tuple[int, str]) -> Iterator[str]:
    """The directory of an instance, with these keys."""

    def answer(path: str) -> tuple[int, bytes]:
        status, body = keys.get(path.rpartition("/")[2].partition("?")[0].replace("-", "_"), (404, "not found"))
        return status, body.encode()

    with served(answer) as address:
        yield f"{address}/instance/"


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


NOW = 1_733_079_600.0  # 2024-12-01T19:00:00Z
SOON = '{"window_start_time": "2024-12-01T19:30:00Z", "maintenance_status": "PENDING", "can_reschedule": "TRUE"}'
HOST = (200, "TERMINATE_ON_HOST_MAINTENANCE")
QUIET = (200, "NONE")


@pytest.mark.parametrize(
    ("keys", "notice"),
    [
        ({"maintenance_event": QUIET}, ("", None)),
        ({"maintenance_event": QUIET, "preempted": (200, "FALSE")}, ("", None)),
        ({"maintenance_event": QUIET, "preempted": (200, "TRUE\n")}, ("preempted", None)),
        ({"maintenance_event": HOST}, (HOST[1], None)),
        ({"maintenance_event": HOST, "upcoming_maintenance": (200, SOON)}, (HOST[1], NOW + 1800)),
        ({"maintenance_event": QUIET, "upcoming_maintenance": (200, SOON)}, ("scheduled host maintenance", NOW + 1800)),
        ({"maintenance_event": QUIET, "upcoming_maintenance": (200, SOON.replace("-01T", "-09T"))}, ("", None)),
        (
            {
                "maintenance_event": QUIET,
                "upcoming_maintenance": (200, SOON.replace("window_start_time", "windowStartTime")),
            },
            ("scheduled host maintenance", NOW + 1800),
        ),
    ],
)
def test_the_metadata_of_an_instance_becomes_a_notice(
    keys: dict[str, tuple[int, str]], notice: tuple[str, float | None]
) -> None:
    with instance(**keys) as base:
        assert read_instance(base, lambda: NOW) == notice


@pytest.mark.parametrize(
    "nothing",
    [
        "NONE",
        '"NONE"',
        "{}",
        "",
        '{ "error": "no notifications have been received yet, try again later" }',
        '[ "some event" ]',
        '{"window_start_time": "soon"}',
        '{"window_start_time": null}',
        "[" * 20_000,
    ],
)
def test_no_schedule_in_every_form(nothing: str) -> None:
    with instance(maintenance_event=QUIET, upcoming_maintenance=(200, nothing)) as base:
        assert read_instance(base, lambda: NOW) == ("", None)


@pytest.mark.parametrize("key", ["preempted", "upcoming_maintenance", "maintenance_event"])
def test_a_server_in_trouble_takes_no_notice_back(key: str) -> None:
    keys = {"maintenance_event": QUIET} | {key: (503, "later")}
    with instance(**keys) as base, pytest.raises(OSError, match="503"):
        read_instance(base, lambda: NOW)


def test_a_wrong_address_is_an_error_and_no_quiet() -> None:
    with instance() as base, pytest.raises(OSError, match="404"):
        read_instance(base)


def test_the_metadata_server_is_asked_where_the_firmware_says_that_there_is_one(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert metadata_url("auto", product) == ""
    product.write_text("Google Compute Engine\n")
    assert metadata_url("auto", product) == INSTANCE
    assert metadata_url("", product) == ""
    assert metadata_url("http://elsewhere/", product) == "http://elsewhere/"
    product.write_text("KVM")
    assert metadata_url("auto", product) == ""
    product.write_bytes(b"\xff")
    assert metadata_url("auto", product) == ""


def test_nothing_is_watched_unless_configured(tmp_path: Path) -> None:
    around = Surroundings("n", tmp_path, tmp_path, tmp_path, tmp_path / "k")
    assert build_file(around) is None
    assert build_url(around) is None

"""Maintenance notices of the machine's owner, from a file or from Google Cloud's metadata server.

The notice exists while the file exists. The file contains text ("host maintenance at 18:00") or a JSON object with `event`
and, in Unix seconds, `starts_at`. Deleting the file withdraws the notice. The REST API takes notices, too.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from holdfast.agent.collectors.protocol import Probe, Surroundings
from holdfast.domain.signals import MaintenanceNotice

log = structlog.get_logger("holdfast.agent.maintenance")

INTERVAL_S = 5.0  # Google Cloud announces GPU machines' maintenance an hour ahead; a preemption leaves 30 s
DEADLINE_S = 5.0
EVENT_CHARS_MAX = 500
FILE_BYTES_MAX = 64 << 10
NONE = ("", "NONE")
_Notice = tuple[str, float | None]  # (event, starts_at); event "" = none


def build_file(surroundings: Surroundings) -> Probe | None:
    path = surroundings.maintenance_file
    if path is None:
        return None
    return _probe("maintenance-file", surroundings.node, "file", lambda: read_file(path))


def build_url(surroundings: Surroundings) -> Probe | None:
    url = surroundings.maintenance_url
    return _probe("maintenance-url", surroundings.node, "gce", lambda: read_url(url)) if url else None


def _probe(name: str, node: str, source: str, read: Callable[[], _Notice]) -> Probe:
    return Probe(name, node, Watch(node, source, read).ask, interval_s=INTERVAL_S, deadline_s=DEADLINE_S)


class Watch:
    """Emits a notice when it appears, changes or is withdrawn. The first reading is emitted also if there is no notice,
    because the machine may have returned from maintenance."""

    def __init__(self, node: str, source: str, read: Callable[[], _Notice]) -> None:
        self._node, self._source, self._read = node, source, read
        self._last: _Notice | None = None

    def ask(self) -> Sequence[MaintenanceNotice]:
        """Read the source. Raises OSError if it cannot be read; the last notice then stays valid."""
        notice = self._read()
        if notice == self._last:
            return ()
        self._last = notice
        event, starts_at = notice
        log.info("maintenance notice", source=self._source, event_=event or "none", starts_at=starts_at)
        return (MaintenanceNotice(self._node, time.time(), self._source, event, starts_at),)


def read_file(path: Path) -> _Notice:
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX).decode(errors="replace").strip()
    except FileNotFoundError:
        return "", None
    return parse(text)


def parse(text: str) -> _Notice:
    """Parse the file. Any content is a notice, so that a malformed one is not lost."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return " ".join(text.split())[:EVENT_CHARS_MAX] or "maintenance", None
    # JSON can contain a lone surrogate.
    event = str(record.get("event") or "maintenance").encode(errors="replace").decode()
    return " ".join(event.split())[:EVENT_CHARS_MAX], _time(record.get("starts_at"))


def _time(value: object) -> float | None:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass  # an integer outside of the range of times
    if value is not None:
        log.warning("maintenance notice with invalid start time", starts_at=repr(value)[:100])
    return None


def read_url(url: str) -> _Notice:
    """Google Cloud's `maintenance-event`: NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the metadata server is local
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with opener.open(request, timeout=DEADLINE_S / 2) as answer:
            text = answer.read(EVENT_CHARS_MAX).decode(errors="replace")
    except (http.client.HTTPException, ValueError) as error:  # an answer that is not HTTP, or an invalid URL
        raise OSError(f"{url}: {error!r}") from error
    event = " ".join(text.split())
    return ("", None) if event.upper() in NONE else (event, None)

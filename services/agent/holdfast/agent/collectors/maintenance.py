"""Maintenance notices of the machine's owner, from a file or from Google Cloud's metadata server.

The notice exists while the file exists. The file contains text ("host maintenance at 18:00") or a JSON object with `event`
and, in Unix seconds, `starts_at`. Deleting the file withdraws the notice. The REST API takes notices, too.
"""

from __future__ import annotations

import http
import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog

from holdfast.agent.collectors.protocol import Probe, Surroundings
from holdfast.domain.signals import MaintenanceNotice

log = structlog.get_logger("holdfast.agent.maintenance")

INTERVAL_S = 5.0  # Google Cloud announces GPU machines' maintenance an hour ahead; a preemption leaves 30 s
DEADLINE_S = 5.0
EVENT_CHARS_MAX = 500
FILE_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 16 << 10
NONE = ("", "NONE")
AUTO = "auto"
INSTANCE = "http://metadata.google.internal/computeMetadata/v1/instance/"
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
SCHEDULED_LEAD_S = 3600.0  # windows are announced weeks ahead; before this time the node can be used normally
_Notice = tuple[str, float | None]  # (event, starts_at); event "" = none


def build_file(surroundings: Surroundings) -> Probe | None:
    path = surroundings.maintenance_file
    if path is None:
        return None
    return _probe("maintenance-file", surroundings.node, "file", lambda: read_file(path))


def build_url(surroundings: Surroundings) -> Probe | None:
    url = surroundings.maintenance_url
    read = read_instance if url.endswith("/") else read_url
    return _probe("maintenance-url", surroundings.node, "gce", lambda: read(url)) if url else None


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


def metadata_url(setting: str, product_name: Path = PRODUCT_NAME) -> str:
    """Resolve HOLDFAST_MAINTENANCE_URL on this machine; "" = no source. AUTO is the metadata server if the firmware names
    Google Compute Engine, and otherwise no source."""
    if setting != AUTO:
        return setting
    try:
        return INSTANCE if product_name.read_text().strip() == "Google Compute Engine" else ""
    except (OSError, UnicodeDecodeError):
        return ""


def read_url(url: str) -> _Notice:
    """Read Google Cloud's `maintenance-event`: NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE."""
    event = " ".join(_get(url).split())[:EVENT_CHARS_MAX]
    return ("", None) if event.upper() in NONE else (event, None)


def read_instance(base: str, now: Callable[[], float] = time.time) -> _Notice:
    """Read the metadata server's directory of this instance: a preemption, maintenance that begins now, or maintenance that is
    scheduled within the next hour.

    https://cloud.google.com/compute/docs/instances/monitor-plan-host-maintenance-event
    """
    if _get_if_there(f"{base}preempted").strip().upper() == "TRUE":
        return "preempted", None  # in at most 30 s
    starts_at = _scheduled(_get_if_there(f"{base}upcoming-maintenance?alt=json"))
    event, _ = read_url(f"{base}maintenance-event")
    if event:
        return event, starts_at
    if starts_at is not None and starts_at - now() <= SCHEDULED_LEAD_S:
        return "scheduled host maintenance", starts_at
    return "", None


def _scheduled(answer: str) -> float | None:
    """Return when the maintenance begins, in Unix seconds; None if none is scheduled. Accepts each form of the answer."""
    try:
        record = json.loads(answer)
    except (ValueError, RecursionError):
        return None  # the answer is NONE, which is not JSON
    if not isinstance(record, dict):
        return None
    text = next((record[key] for key in ("window_start_time", "windowStartTime", "startTime") if key in record), None)
    try:
        start = datetime.fromisoformat(str(text))
    except ValueError:
        if text is not None:
            log.warning("scheduled maintenance with invalid start time", starts_at=repr(text)[:100])
        return None
    return (start if start.tzinfo is not None else start.replace(tzinfo=UTC)).timestamp()


def _get_if_there(url: str) -> str:
    """Return the value of a key; "" if the key does not exist on machines of this kind."""
    try:
        return _get(url)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        if error.code == http.HTTPStatus.NOT_FOUND:
            return ""
        raise


def _get(url: str) -> str:
    """Raises OSError if the server does not answer, or if its answer is an error or invalid."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the metadata server is local
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with opener.open(request, timeout=DEADLINE_S / 4) as answer:
            text: str = answer.read(ANSWER_BYTES_MAX).decode(errors="replace")
    except (http.client.HTTPException, ValueError) as error:  # an answer that is not HTTP, or an invalid URL
        raise OSError(f"{url}: {error!r}") from error
    return text

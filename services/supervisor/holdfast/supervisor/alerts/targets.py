"""Where alerts go: a webhook that takes CloudEvents, what Apprise can reach, and plug-ins.

| address | who gets it |
|---|---|
| `https://…`, `http://…` | a webhook: a CloudEvent in structured JSON, signed if there is a secret |
| `slack://…`, `pagerduty://…`, `mailto://…` and others | Apprise's service of that scheme (extra `alerts`) |
| the scheme of a plug-in in `holdfast.notifiers` | its object |

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/http-protocol-binding.md
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote, urlsplit

import httpx

from holdfast import plugins
from holdfast.domain.errors import HoldfastError, InvalidSpec, PluginError, Unavailable
from holdfast.plugins import Group
from holdfast.supervisor.alerts.alert import Alert, Level

TIMEOUT_S = 10.0
SIGNATURE = "Holdfast-Signature"
_APPRISE_TYPES = {Level.INFO: "info", Level.WARNING: "warning", Level.ERROR: "failure"}
_TRY_AGAIN = frozenset({408, 425, 429})  # besides 5xx


@runtime_checkable
class Notifier(Protocol):
    """One address. `name` tells addresses apart and has no secret in it."""

    @property
    def name(self) -> str: ...

    async def send(self, alert: Alert) -> None:
        """Raises `Unavailable` if it may succeed later, another `HoldfastError` if not."""


class Webhook:
    def __init__(
        self, url: str, *, secret: str, source: str, link: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`source` names the fleet, `link` is where the dashboard is."""
        self._url, self._secret, self._source, self._link = url, secret.encode(), source, link.rstrip("/")
        self._transport = transport

    @property
    def name(self) -> str:
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"

    async def send(self, alert: Alert) -> None:
        body = json.dumps(self.event(alert)).encode()
        headers = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
        if self._secret:
            headers[SIGNATURE] = signature(self._secret, int(time.time()), body)
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=self._transport) as client:
                answer = await client.post(self._url, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.name}: {str(error) or type(error).__name__}") from error
        if answer.status_code in _TRY_AGAIN or answer.status_code >= 500:
            raise Unavailable(f"{self.name} answered {answer.status_code}")
        if not answer.is_success:
            raise HoldfastError(f"{self.name} answered {answer.status_code}, so the alert is not sent again")

    def event(self, alert: Alert) -> dict[str, Any]:
        """The alert as a CloudEvent, version 1.0."""
        link = f"{self._link}/#/incidents/{quote(alert.incident)}" if alert.incident else f"{self._link}/"
        return {
            "specversion": "1.0",
            "id": alert.id,
            "source": self._source,
            "type": f"dev.holdfast.{alert.topic}",
            "time": datetime.fromtimestamp(alert.at, UTC).isoformat(),
            "datacontenttype": "application/json",
            "data": {**asdict(alert), "link": link},
        }


def signature(secret: bytes, at: int, body: bytes) -> str:
    """`t=UNIX SECONDS,v1=HEX`: HMAC-SHA256 of the time, a dot and the body, so that a receiver can refuse old requests."""
    digest = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


class Apprise:
    """Any service that Apprise knows. https://github.com/caronc/apprise"""

    def __init__(self, url: str) -> None:
        """Raises `InvalidSpec` if Apprise is not installed or does not take the address. Its text has no secret in it."""
        self._scheme = urlsplit(url).scheme
        try:
            apprise: Any = importlib.import_module("apprise")
        except ImportError:
            raise InvalidSpec(
                "HOLDFAST_ALERT_URLS",
                f"{self._scheme}://…",
                "an address that needs Apprise: install the extra `alerts`",
            ) from None
        self._service = apprise.Apprise()
        if not self._service.add(url):
            raise InvalidSpec(
                "HOLDFAST_ALERT_URLS",
                f"{self._scheme}://…",
                "an address as Apprise's documentation of the service has it",
            )
        self.name = f"{self._scheme}://"

    async def send(self, alert: Alert) -> None:
        sent = await self._service.async_notify(
            title=alert.title, body=alert.text, notify_type=_APPRISE_TYPES[alert.level]
        )
        if not sent:
            raise Unavailable(f"{self.name}: Apprise could not deliver the alert")


def notifiers(urls: Iterable[str], webhook: Callable[[str], Notifier]) -> list[Notifier]:
    """The notifiers of these addresses. Raises `InvalidSpec` or `PluginError` for one that nobody takes."""
    return [_notifier(url, webhook) for url in urls]


def _notifier(url: str, webhook: Callable[[str], Notifier]) -> Notifier:
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https") and urlsplit(url).hostname:
        return webhook(url)
    if (plugin := plugins.find(Group.NOTIFIERS, scheme)) is not None:
        built = plugins.build(plugin, url)
        if not isinstance(built, Notifier):
            raise PluginError(Group.NOTIFIERS, str(plugin), f"{type(built).__name__} has no `name` or `send`")
        return built
    if not scheme:
        raise InvalidSpec("HOLDFAST_ALERT_URLS", "an address without a scheme", "https://…, or an address of Apprise")
    return Apprise(url)

"""A notifier that appends each alert to a file, as one line of JSON: `HOLDFAST_ALERT_URLS=lines:///var/log/holdfast-alerts.jsonl`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from urllib.parse import unquote, urlsplit

import anyio.to_thread

from holdfast.domain.errors import Unavailable
from holdfast.supervisor.alerts.alert import Alert


class Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = f"lines:{path.name}"

    async def send(self, alert: Alert) -> None:
        await anyio.to_thread.run_sync(self._append, json.dumps(asdict(alert)) + "\n")

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise Unavailable(f"{self.name}: {error.strerror}") from error


def build(url: str) -> Lines:
    return Lines(Path(unquote(urlsplit(url).path)))

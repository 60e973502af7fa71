"""TensorBoard: an event file of its own, beside those of the user's writer.

The files are in `LOG_DIR/holdfast`, which TensorBoard shows as another run: of several writers in one directory it follows only
the one whose file is newest. After a restart a new file purges what was logged of steps that are repeated (`purge_step`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.integrations.loggers.package import imported
from holdfast.integrations.loggers.sink import MARKER, Entry

SUBDIRECTORY = "holdfast"


class TensorBoard:
    """Log to `log_dir`, the directory that the user's own `SummaryWriter` writes to."""

    def __init__(self, log_dir: str | Path) -> None:
        self._directory = Path(log_dir) / SUBDIRECTORY
        self._writer: Any = None

    def check(self) -> None:
        """Raise `ModuleNotFoundError` if the package is missing."""
        imported("torch.utils.tensorboard", "tensorboard")

    def open(self, restored_step: int) -> None:
        make = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = make(str(self._directory), purge_step=restored_step + 1 if restored_step else None)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def entry(self, entry: Entry) -> None:
        self._writer.add_text(entry.topic, f"**{entry.title}**\n\n{entry.text}", entry.step)
        if entry.is_incident:
            self._writer.add_scalar(MARKER, 1.0, entry.step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

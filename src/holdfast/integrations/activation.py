"""What other packages' entry points call. Imports nothing but the standard library until it is clear that a worker of
Holdfast runs it, so that an installed Holdfast costs other programs nothing."""

from __future__ import annotations

import os
from typing import Any

from holdfast.domain import worker


def lightning_callbacks() -> list[Any]:
    """Entry point `lightning.pytorch.callbacks_factory`: the callback in a worker of Holdfast, otherwise none."""
    if not os.environ.get(worker.ENV_JOB):
        return []
    from holdfast.integrations.lightning import HoldfastCallback

    return [HoldfastCallback(optional=True)]

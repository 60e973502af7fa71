"""The last upload of a finished job to its object store, for launchers whose nodes end with them."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from holdfast.cli.client import Client
from holdfast.domain.errors import HoldfastError

WAIT_S = 3600.0
POLL_S = 1.0


def wait_for_upload(
    client: Client,
    name: str,
    console: Console,
    *,
    ended: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the final upload of a finished job, for at most `WAIT_S`."""
    until, logged = clock() + WAIT_S, False
    while not ended():
        try:
            leaving = client.job(name).get("leaving")
        except HoldfastError as error:
            console.print(f"the state of the final upload is unknown: {error}", soft_wrap=True, markup=False)
            return
        if not leaving:
            return
        if clock() >= until:
            console.print(f"the final upload has not ended within {WAIT_S:g} s; the nodes are released")
            return
        if not logged:
            logged = True
            console.print("the last checkpoint is being uploaded to the object store; the nodes are kept until then")
        sleep(POLL_S)

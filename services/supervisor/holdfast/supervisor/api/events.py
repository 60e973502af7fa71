"""`/v1/events`: what changes, as it changes.

An event's id is its place in the stream, so a reader that lost its connection goes on where it was.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent

from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.log.names import EVENTS
from holdfast.supervisor.api.access import Watching, guarded
from holdfast.supervisor.api.backend import Serving
from holdfast.supervisor.api.event_tail import is_sent

router = guarded("/v1", tags=["events"])

_POSITION = re.compile(r"[0-9]{1,19}-[0-9]{1,19}", re.ASCII)


async def _start(backend: Serving, last: Annotated[str | None, Header(alias="Last-Event-ID")] = None) -> str:
    """Where to begin. Asked for before the answer begins, so that what is wrong can still be said with a status."""
    if last is None:
        return await backend.log.last_position(EVENTS)
    if last != "0" and not _POSITION.fullmatch(last):
        raise InvalidSpec("Last-Event-ID", last, "the id of an event of this stream, or 0 for all that is left of it")
    await backend.log.ping()
    return last


@router.get("/events", response_class=EventSourceResponse)
async def events(
    backend: Serving, may_go_on: Watching, position: Annotated[str, Depends(_start)]
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events from now on, or from after `Last-Event-ID`. The event's type is the record's, its data the record.
    The stream ends when its token is no longer valid."""
    while may_go_on():
        try:
            batch = await backend.events.after(position)
        except Unavailable:
            return  # the reader comes again with the last id that it has seen, and finds out how things are
        for delivery in batch:
            position = delivery.position
            if is_sent(delivery):
                yield ServerSentEvent(id=position, event=delivery.entry.type, raw_data=delivery.entry.data.decode())

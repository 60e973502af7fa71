"""A bound on request bodies: the largest honest one is a job with a thousand arguments."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 1024 * 1024


class BodyLimit:
    """ASGI middleware: reading more than `BODY_BYTES_MAX` of a body raises 413, however it is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > BODY_BYTES_MAX:
                raise HTTPException(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, bounded, send)

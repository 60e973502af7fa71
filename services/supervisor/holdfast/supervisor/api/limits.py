"""Bounds on request bodies: the largest honest one is a job with a thousand arguments, the deepest has four levels.

Text must be Unicode: JSON has room for halves of surrogate pairs, and nothing behind the API has."""

from __future__ import annotations

import json

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 1024 * 1024
DEPTH_MAX = 32


class BodyLimit:
    """ASGI middleware: reading more than `BODY_BYTES_MAX` of a body raises 413, however it is sent; its end raises 422 if it is
    JSON that nothing behind can take."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read = bytearray()

        async def bounded() -> Message:
            message = await receive()
            read.extend(message.get("body", b""))
            if len(read) > BODY_BYTES_MAX:
                raise HTTPException(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
            if not message.get("more_body", False) and (problem := problem_of(bytes(read))):
                raise HTTPException(422, problem)
            return message

        await self._app(scope, bounded, send)


def problem_of(body: bytes) -> str:
    """Return what is wrong with the values of a body; "" also for what is no JSON, of which the route says more."""
    if not body:
        return ""
    try:
        document = json.loads(body)
    except RecursionError:
        return _too_deep()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return ""
    except ValueError as error:  # Python's limit for the digits of an integer
        return f"body: a number is too long ({error})"
    todo = [("body", document, 1)]
    while todo:
        where, value, depth = todo.pop()
        if depth > DEPTH_MAX:
            return _too_deep()
        if isinstance(value, dict):
            if any(map(_is_broken, value)):
                return f"{where}: a key is not valid; expected Unicode text, without halves of surrogate pairs"
            todo += [(f"{where}.{key}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [(f"{where}.{index}", inner, depth + 1) for index, inner in enumerate(value)]
        elif isinstance(value, str) and _is_broken(value):
            return f"{where.removeprefix('body.')}: not valid; expected Unicode text, without halves of surrogate pairs"
    return ""


def _too_deep() -> str:
    return f"body: nested too deeply; expected at most {DEPTH_MAX} levels"


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False

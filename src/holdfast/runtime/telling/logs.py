"""Logs: one line per decision, as JSON for machines or aligned text for a terminal, on stderr.

The standard library's loggers (uvicorn, grpc, asyncio) go through the same formatter, so a service has one log.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor

from holdfast.runtime.telling import telemetry

QUIET = ("httpx", "httpcore", "asyncio")  # log too much at level info


def configure(service: str, *, level: str = "info", form: Literal["auto", "json", "console"] = "auto") -> None:
    """Set up the process's logging. Call once, before the first line."""
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _logger, _method, event: {"service": service, **event},
        _add_trace,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(as_json=as_json))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _add_trace(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Add the current trace to a line that does not name one."""
    if "trace_id" not in event and (context := telemetry.current()) is not None:
        event["trace_id"] = context.trace_id
    return event


def _renderers(*, as_json: bool) -> list[Processor]:
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if as_json:
        return [strip, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # Plain tracebacks: the formatted ones show every local variable, including secrets, and block the event loop for
    # seconds.
    plain = structlog.dev.plain_traceback
    return [strip, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]

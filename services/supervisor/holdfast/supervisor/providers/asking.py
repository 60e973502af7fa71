"""Asks a provider, and turns whatever becomes of it into an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.supervisor.protocol import RequestReplacement
from holdfast.supervisor.providers.protocol import Machine, MoreNodes, Provider, Supplier

LIMIT_S = 480.0  # less than the core waits for an answer
_WORDS_MAX = 500

log = structlog.get_logger("holdfast.supervisor.providers")


async def ask(provider: Provider | None, wanted: RequestReplacement) -> tuple[bool, str]:
    """Whether another machine comes, and what the provider said."""
    machine = Machine(wanted.node, wanted.hostname, wanted.address, wanted.reason, wanted.request)
    log.warning("another machine is requested", node=wanted.node, request=wanted.request, reason=wanted.reason)
    if provider is None:
        return False, "this supervisor has no HOLDFAST_PROVIDER, though the leader before it had"
    return await _answer(partial(provider.replace, machine))


async def ask_more(supplier: Supplier, asked: MoreNodes) -> tuple[bool, str]:
    """Whether there will be more nodes, and what the provider said."""
    log.warning("more nodes are requested", pool=asked.pool, wanted=asked.wanted, reason=asked.reason)
    return await _answer(partial(supplier.more, asked))


async def _answer(call: Callable[[], Awaitable[str]]) -> tuple[bool, str]:
    try:
        with anyio.fail_after(LIMIT_S):
            said = await call()
    except TimeoutError:
        return False, f"the provider has not answered within {LIMIT_S:g} s"
    except HoldfastError as error:
        return False, str(error)[:_WORDS_MAX]
    except Exception as error:  # it may be another package's
        log.error("the provider failed", exc_info=error)
        return False, f"{type(error).__name__}: {error}"[:_WORDS_MAX]
    return True, " ".join(str(said or "").split())[:_WORDS_MAX]

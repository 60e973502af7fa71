"""Calls a provider, and turns every outcome, including errors, into an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.supervisor.protocol import RequestReplacement
from holdfast.supervisor.providers.protocol import Machine, MoreNodes, Provider, Supplier

LIMIT_S = 480.0  # less than the time that the core waits for an answer
_WORDS_MAX = 500

log = structlog.get_logger("holdfast.supervisor.providers")


async def ask(provider: Provider | None, wanted: RequestReplacement) -> tuple[bool, str]:
    """Returns whether another machine comes, and the provider's text."""
    machine = Machine(wanted.node, wanted.hostname, wanted.address, wanted.reason, wanted.request)
    log.warning("another machine is requested", node=wanted.node, request=wanted.request, reason=wanted.reason)
    if provider is None:
        return False, "this supervisor has no HOLDFAST_PROVIDER, though the leader before it had"
    return await _answer(partial(provider.replace, machine))


async def ask_more(supplier: Supplier, asked: MoreNodes) -> tuple[bool, str]:
    """Returns whether there will be more nodes, and the provider's text."""
    log.warning("more nodes are requested", pool=asked.pool, wanted=asked.wanted, reason=asked.reason)
    return await _answer(partial(supplier.more, asked))


async def _answer(call: Callable[[], Awaitable[str]]) -> tuple[bool, str]:
    try:
        with anyio.fail_after(LIMIT_S):
            answer = await call()
    except TimeoutError:
        return False, f"the provider has not answered within {LIMIT_S:g} s"
    except HoldfastError as error:
        return False, str(error)[:_WORDS_MAX]
    except Exception as error:  # the provider may be another package's
        log.error("the provider failed", exc_info=error)
        return False, f"{type(error).__name__}: {error}"[:_WORDS_MAX]
    return True, " ".join(str(answer or "").split())[:_WORDS_MAX]

"""Asks a provider, and turns whatever becomes of it into an answer."""

from __future__ import annotations

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.supervisor.protocol import RequestReplacement
from holdfast.supervisor.providers.protocol import Machine, Provider

LIMIT_S = 480.0  # less than the core waits for an answer
_WORDS_MAX = 500

log = structlog.get_logger("holdfast.supervisor.providers")


async def ask(provider: Provider | None, wanted: RequestReplacement) -> tuple[bool, str]:
    """Whether another machine comes, and what the provider said."""
    machine = Machine(wanted.node, wanted.hostname, wanted.address, wanted.reason, wanted.request)
    log.warning("another machine is requested", node=wanted.node, request=wanted.request, reason=wanted.reason)
    if provider is None:
        return False, "this supervisor has no HOLDFAST_PROVIDER, though the leader before it had"
    try:
        with anyio.fail_after(LIMIT_S):
            said = await provider.replace(machine)
    except TimeoutError:
        return False, f"the provider has not answered within {LIMIT_S:g} s"
    except HoldfastError as error:
        return False, str(error)[:_WORDS_MAX]
    except Exception as error:  # it may be another package's
        log.error("the provider failed", node=wanted.node, exc_info=error)
        return False, f"{type(error).__name__}: {error}"[:_WORDS_MAX]
    return True, " ".join(str(said or "").split())[:_WORDS_MAX]

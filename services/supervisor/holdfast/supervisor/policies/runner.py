"""Evaluates policies: the default policy directly, a user's script in its own process and never in the event loop.

If a script raises, exceeds its deadline or returns an invalid answer, `decided_by` says so, and the default policy decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from holdfast.domain.errors import InvalidSpec, PolicyError
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import PolicySpec
from holdfast.policy import JobView, default
from holdfast.supervisor.policies.script import PolicyScript, ask_samples

DEFAULT = "default policy"
SCRIPTS_MAX = 32  # script processes kept warm; the least recently used one is closed

T = TypeVar("T")
log = structlog.get_logger("holdfast.supervisor.policy")


class _Script:
    """Asks a script's process one question at a time; other scripts do not wait for it."""

    def __init__(self, policy: PolicySpec) -> None:
        self._script = PolicyScript(policy)
        self._lock = anyio.Lock()

    async def ask(self, question: Callable[[PolicyScript], T]) -> T:
        async with self._lock:
            return await anyio.to_thread.run_sync(question, self._script)


class PolicyRunner:
    """Close with `aclose`, which ends the scripts' processes."""

    def __init__(self) -> None:
        self._scripts: OrderedDict[tuple[str, str], _Script] = OrderedDict()  # by name and text

    async def decide(self, policy: PolicySpec, incident: Incident, job: JobView) -> tuple[Action, str]:
        """(action, who decided, with the reason if it was not the user's script)."""
        if not policy.name:
            return default(incident, job), DEFAULT
        try:
            return await self._ask(policy, lambda script: script.decide(incident, job)), policy.name
        except PolicyError as error:
            log.warning("the policy script did not decide", incident=incident.id, reason=str(error))
            return default(incident, job), f"{DEFAULT}, because the script failed: {error}"

    async def check(self, policy: PolicySpec) -> None:
        """Raises `InvalidSpec` unless the script loads and answers a sample of every kind of incident."""
        if not policy.name:
            return
        try:
            await self._ask(policy, lambda script: ask_samples(script, policy.params))
        except PolicyError as error:
            raise InvalidSpec(
                "policy", policy.name, f"a script with decide(incident, job) -> Action that works ({error})"
            ) from error

    async def aclose(self) -> None:
        while self._scripts:
            _, script = self._scripts.popitem()
            await script.ask(PolicyScript.close)

    async def _ask(self, policy: PolicySpec, question: Callable[[PolicyScript], T]) -> T:
        key = policy.name, policy.source
        if key not in self._scripts:
            self._scripts[key] = _Script(policy)
        self._scripts.move_to_end(key)
        try:
            return await self._scripts[key].ask(question)
        finally:
            while len(self._scripts) > SCRIPTS_MAX:
                _, oldest = self._scripts.popitem(last=False)
                await oldest.ask(PolicyScript.close)

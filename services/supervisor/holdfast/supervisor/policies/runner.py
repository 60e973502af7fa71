"""Asks policies: the default one at once, a user's script in its own process and never in the event loop.

A script that raises, overruns its deadline or answers nonsense is reported in `decided_by`, and the default policy decides.
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
from holdfast.policy import JobView, default
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job

DEFAULT = "default policy"
SCRIPTS_MAX = 32  # script processes kept warm; the one that was not asked for longest goes

T = TypeVar("T")
log = structlog.get_logger("holdfast.supervisor.policy")


class _Script:
    """A script's process is asked one question at a time; another script's does not wait for it."""

    def __init__(self, path: str) -> None:
        self._script = PolicyScript(path)
        self._lock = anyio.Lock()

    async def ask(self, question: Callable[[PolicyScript], T]) -> T:
        async with self._lock:
            return await anyio.to_thread.run_sync(question, self._script)


class PolicyRunner:
    """Close with `aclose`: it ends the scripts' processes."""

    def __init__(self) -> None:
        self._scripts: OrderedDict[str, _Script] = OrderedDict()

    async def decide(self, path: str, incident: Incident, job: JobView) -> tuple[Action, str]:
        """(what to do, who decided and why if it was not the user's script). `path` is empty for the default policy."""
        if not path:
            return default(incident, job), DEFAULT
        try:
            return await self._ask(path, lambda script: script.decide(incident, job)), path
        except PolicyError as error:
            log.warning("the policy script did not decide", incident=incident.id, reason=str(error))
            return default(incident, job), f"{DEFAULT}, because the script failed: {error}"

    async def check(self, path: str) -> None:
        """Raises `InvalidSpec` unless the script loads and answers a sample of every kind of incident."""
        try:
            await self._ask(path, _try)
        except PolicyError as error:
            raise InvalidSpec(
                "policy", path, f"a script with decide(incident, job) -> Action that works ({error})"
            ) from error

    async def aclose(self) -> None:
        while self._scripts:
            _, script = self._scripts.popitem()
            await script.ask(PolicyScript.close)

    async def _ask(self, path: str, question: Callable[[PolicyScript], T]) -> T:
        if path not in self._scripts:
            self._scripts[path] = _Script(path)
        self._scripts.move_to_end(path)
        try:
            return await self._scripts[path].ask(question)
        finally:
            while len(self._scripts) > SCRIPTS_MAX:
                _, oldest = self._scripts.popitem(last=False)
                await oldest.ask(PolicyScript.close)


def _try(script: PolicyScript) -> None:
    script.load()
    for incident in sample_incidents():
        script.decide(incident, sample_job(incident))

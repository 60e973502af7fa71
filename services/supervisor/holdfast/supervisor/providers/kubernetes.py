"""Kubernetes as a provider: deletes the pod of a condemned machine, so that its replacement is scheduled on another one."""

from __future__ import annotations

from holdfast.kubernetes.replace import Replacer
from holdfast.supervisor.providers.protocol import Machine


class Kubernetes:
    def __init__(self, replacer: Replacer) -> None:
        self._replacer = replacer

    async def replace(self, machine: Machine) -> str:
        """Raises `NotFound`, `Conflict`, `Refused` or `Unavailable`."""
        return await self._replacer.replace(machine.node, machine.reason)

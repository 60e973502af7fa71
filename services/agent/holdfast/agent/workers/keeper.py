"""Keeps one worker template ready. A template for other modules replaces it only when it is ready; the old one then ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent.workers.template import Template, TemplateKey
from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.runtime.processes.training_user import TrainingUser
from holdfast.runtime.rpc.backoff import Backoff

log = structlog.get_logger("holdfast.agent.template")

DEATHS_MAX = 3  # exits in a row, after which the failure is reported
SETTLED_S = 60.0  # the exit of a template that has run for this long does not count as one in a row
FAILURE_CHARS_MAX = 500


class TemplateKeeper:
    """Runs templates in `tasks`. A template that exits by itself (for example, out of memory) is started again."""

    def __init__(
        self,
        tasks: TaskGroup,
        log_path: Path,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        user: TrainingUser | None = None,
        *,
        restarts: bool = True,
    ) -> None:
        """`on_change` is called when `key`, `ready` or `failure` may have changed. `user`: as of `Template`. `restarts`: a
        template that exits is started again."""
        self._user, self._restarts = user, restarts
        self._on_change = on_change
        self.key: TemplateKey | None = None  # of the current template, also while its successor is starting
        self.failure = ""  # why there is no template, after `DEATHS_MAX` exits in a row
        self._deaths = 0  # exits in a row
        self._tasks = tasks
        self._log_path = log_path
        self._environment = environment
        self._templates: dict[TemplateKey, Template] = {}  # the current template, and those that are starting
        self._current: Template | None = None
        self._scopes: set[anyio.CancelScope] = set()

    def close(self) -> None:
        """Stop every template; forked workers continue."""
        for scope in list(self._scopes):
            scope.cancel()

    @property
    def ready(self) -> bool:
        """Whether a template can fork now."""
        return self._current is not None and self._current.ready

    def serves(self, key: TemplateKey) -> bool:
        """Whether the current template has this key and can fork now."""
        return self.ready and self._current is not None and self._current.key == key

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(template.pid for template in self._templates.values())

    async def any(self) -> Template:
        """Return the current template, or else a default one, for a program that needs only torch. No template is replaced
        if one is usable."""
        if self._current is not None and self._current.usable:
            return self._current
        return await self.ensure(TemplateKey())

    async def ensure(self, key: TemplateKey) -> Template:
        """Return a template that can fork for `key`. Raises `Unavailable` with the reason if its imports fail."""
        template = self._templates.get(key)
        if template is None or not template.usable:
            template = self._templates[key] = Template(key, self._log_path, self._environment, self._user)
            self._tasks.start_soon(self._shielded_host, template, name="template")
        await template.wait_ready()
        if self._current is not template:
            previous, self._current = self._current, template
            if self.key != key:
                self.key, self._deaths, self.failure = key, 0, ""
            self._on_change()
            if previous is not None and previous.usable:
                if self._templates.get(previous.key) is previous:
                    del self._templates[previous.key]
                await previous.drain()
        return template

    async def renewed(self, template: Template) -> Template:
        """Return a new template in place of this one, as `ensure` does."""
        if self._templates.get(template.key) is template:
            del self._templates[template.key]
        return await self.ensure(template.key)

    async def end(self) -> None:
        """Let the current template end, and start no other before the next `ensure`."""
        current, self._current = self._current, None
        if current is not None:
            self._templates.pop(current.key, None)
            await current.drain()

    async def _shielded_host(self, template: Template) -> None:
        """Run a template until `close`, so that an order in progress at the agent's end can still use it."""
        with anyio.CancelScope(shield=True) as scope:
            self._scopes.add(scope)
            try:
                await self._host(template)
            finally:
                self._scopes.discard(scope)

    async def _host(self, template: Template) -> None:
        backoff = Backoff(first_s=0.1, max_s=10.0)
        while True:
            began = anyio.current_time()
            await template.run()
            if self._templates.get(template.key) is template:
                del self._templates[template.key]
            if self._current is not template:
                return  # replaced, or never ready; `ensure` has raised the reason
            self._current = None
            if not self._restarts:
                log.warning(
                    "worker template exited, and is not started again", pid=template.pid, reason=template.failure
                )
                return
            log.error("worker template exited", pid=template.pid, reason=template.failure)
            if anyio.current_time() - began >= SETTLED_S:
                self._deaths, self.failure = 0, ""
                backoff.reset()
            self._deaths += 1
            if self._deaths >= DEATHS_MAX:
                self.failure = f"{self._deaths} exits in a row: {template.failure}"[:FAILURE_CHARS_MAX]
            self._on_change()
            successor: Template | None = None
            while successor is None:
                await backoff.sleep()
                if self._current is not None or template.key in self._templates:
                    return  # an order has started another template during the pause
                successor = self._start_again(template.key)
            template = self._current = self._templates[template.key] = successor
            self._tasks.start_soon(self._settle, successor, name="template settles")

    async def _settle(self, template: Template) -> None:
        """Report when a successor is ready. Clear the failure when the successor has run for `SETTLED_S`."""
        with suppress(Unavailable):
            await template.wait_ready()
            self._on_change()
            await anyio.sleep(SETTLED_S)
            if self._current is template and template.usable and self.failure:
                self._deaths, self.failure = 0, ""
                self._on_change()

    def _start_again(self, key: TemplateKey) -> Template | None:
        try:
            return Template(key, self._log_path, self._environment, self._user)
        except (HoldfastError, OSError) as error:  # no process or descriptor is available now
            log.error("worker template not started", reason=str(error))
            return None

"""Chooses the worker template of each job, and reports the template's state. `keeper` runs the templates.

A job requests the modules of its `preload`. If `preload` contains `AUTO`, its workers record the modules that they import. A
template with these modules is then started in the background, and serves the job's next generation.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog
from anyio.abc import TaskGroup

from holdfast.agent.workers.environment import Site
from holdfast.agent.workers.keeper import TemplateKeeper
from holdfast.agent.workers.learned import AUTO, Learned
from holdfast.agent.workers.template import Template, TemplateKey
from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.domain.job import LaunchSpec
from holdfast.domain.nodes import TemplateState

log = structlog.get_logger("holdfast.agent.workers")

JOBS_MAX = 64  # jobs whose template is remembered


class Templates:
    """The worker templates of one node."""

    def __init__(self, site: Site, inherited: Mapping[str, str], on_change: Callable[[], None]) -> None:
        """`inherited`: environment of the templates. `on_change` is called when `state` may have changed."""
        self._site, self._inherited, self._on_change = site, inherited, on_change
        self._learned = Learned(site.learned, None if site.user is None else site.user.uid)
        self._keys: OrderedDict[str, TemplateKey] = OrderedDict()  # by job, the key of its template
        # Key of the last learned template that was started; it is not started again while nothing changes.
        self._learning: TemplateKey | None = None
        self._tasks: TaskGroup | None = None
        self._keeper: TemplateKeeper | None = None

    def open(self, tasks: TaskGroup) -> None:
        """Start the default template, which serves most jobs, because they preload no modules. Templates run in `tasks`."""
        self._tasks = tasks
        log_path = self._site.agent_dir / "template.log"
        self._keeper = TemplateKeeper(tasks, log_path, self._inherited, self._on_change, self._site.user)
        tasks.start_soon(self._start, TemplateKey(), "worker template not started", name="first template")

    def close(self) -> None:
        """Stop every template; forked workers continue."""
        if self._keeper is not None:
            self._keeper.close()

    async def any(self) -> Template:
        """Return a template for a program that needs only torch. Raises `Unavailable` if there is none."""
        return await self._opened().any()

    async def of(self, job: str, launch: LaunchSpec) -> Template:
        """Return a template that has imported the job's modules. Raises `Unavailable` with the reason if an import fails."""
        key, learned = self._requested(launch)
        if learned is not None and self._keeper is not None and self._keeper.serves(learned):
            key = learned
        self._keys[job] = key
        self._keys.move_to_end(job)
        while len(self._keys) > JOBS_MAX:
            self._keys.popitem(last=False)
        template = await self._opened().ensure(key)
        self._on_change()
        return template

    def state(self) -> TemplateState:
        """The current template, and the jobs that it serves."""
        if self._keeper is None or self._keeper.key is None:
            return TemplateState()
        kept = self._keeper.key
        jobs = tuple(sorted(job for job, key in self._keys.items() if key == kept))
        return TemplateState(jobs, self._keeper.ready, self._keeper.failure)

    def imports_file(self, launch: LaunchSpec) -> Path | None:
        """Return the file in which a worker records the modules that it imports; None if the job does not request that.
        Creates its directory. Raises `HoldfastError` if that fails."""
        if AUTO not in launch.preload:
            return None
        try:
            self._site.learned.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HoldfastError(f"cannot create the directory {self._site.learned}: {error.strerror}") from error
        return self._learned.path(launch)

    def learn(self, running: Iterable[LaunchSpec]) -> None:
        """Start a template with the modules that a running script has imported, in the background."""
        for launch in running:
            _, key = self._requested(launch) if AUTO in launch.preload else (None, None)
            if key is None or key == self._learning or self._keeper is None or self._keeper.serves(key):
                continue
            self._learning = key
            assert self._tasks is not None, "set together with the keeper"
            failure = "template with learned modules not started"
            self._tasks.start_soon(self._start, key, failure, name="template with learned modules")
            return

    async def _start(self, key: TemplateKey, failure: str) -> None:
        """Start a template that no order waits for. If it cannot start, log `failure`; the next order reports the error."""
        try:
            await self._opened().ensure(key)
            self._on_change()
        except HoldfastError as error:
            log.warning(failure, reason=str(error))

    def _requested(self, launch: LaunchSpec) -> tuple[TemplateKey, TemplateKey | None]:
        """Return the key that the job requests, and the one with the modules that its last workers have imported, if these are
        known."""
        directory = launch.script if Path(launch.script).is_dir() else os.path.dirname(launch.script) or launch.cwd
        preload, env = tuple(name for name in launch.preload if name != AUTO), dict(launch.env)
        modules = self._learned.modules(launch)
        return (
            TemplateKey.of(directory, preload, env, self._inherited),
            TemplateKey.of(directory, preload, env, self._inherited, modules) if modules else None,
        )

    def _opened(self) -> TemplateKeeper:
        if self._keeper is None:
            raise Unavailable("the agent is still starting")
        return self._keeper

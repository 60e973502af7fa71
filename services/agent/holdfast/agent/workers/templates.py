"""Chooses the worker template of each start, and reports the template's state. `keeper` runs the templates.

A job requests the modules of its `preload`. If `preload` contains `LEARN_IMPORTS`, its workers record what they import. When
the ranks have stepped, a second template with these modules is started in the background. It serves the next starts of the job.
The first template is kept: a start that the second one must not serve (`learned`), or cannot, waits for nothing.

No worker is forked from a template that has imported files which have changed since."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import structlog
from anyio.abc import TaskGroup

from holdfast.agent.workers.environment import Site
from holdfast.agent.workers.generation import LocalGeneration
from holdfast.agent.workers.keeper import TemplateKeeper
from holdfast.agent.workers.learned import Learned
from holdfast.agent.workers.template import Template, TemplateKey
from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.domain.job import LEARN_IMPORTS, LaunchSpec
from holdfast.domain.nodes import TemplateState

log = structlog.get_logger("holdfast.agent.workers")

JOBS_MAX = 64  # jobs whose template is remembered
SECRET = "secret"  # no fingerprint of a value


class Templates:
    """The worker templates of one node."""

    def __init__(self, site: Site, inherited: Mapping[str, str], on_change: Callable[[], None]) -> None:
        """`inherited`: environment of the templates. `on_change` is called when `state` may have changed."""
        self._site, self._inherited, self._on_change = site, inherited, on_change
        self._learned = Learned(site.learned, site.agent_dir / "doubts", None if site.user is None else site.user.uid)
        self._keys: OrderedDict[str, TemplateKey] = OrderedDict()  # by job, the key of its template
        # Learned templates that were started, each once for a generation: (job, generation, key).
        self._started: OrderedDict[tuple[str, int, TemplateKey], None] = OrderedDict()
        self._tasks: TaskGroup | None = None
        self._keeper: TemplateKeeper | None = None
        self._with_learned: TemplateKeeper | None = None

    def open(self, tasks: TaskGroup) -> None:
        """Start the default template, which serves most jobs, because they preload no modules. Templates run in `tasks`."""
        self._tasks = tasks
        log_path = self._site.agent_dir / "template.log"
        self._keeper = TemplateKeeper(tasks, log_path, self._inherited, self._on_change, self._site.user)
        self._with_learned = TemplateKeeper(
            tasks, log_path, self._inherited, lambda: None, self._site.user, restarts=False
        )
        tasks.start_soon(self._start, self._keeper, TemplateKey(), "worker template not started", name="first template")

    def close(self) -> None:
        """Stop every template; forked workers continue."""
        for keeper in (self._keeper, self._with_learned):
            if keeper is not None:
                keeper.close()

    async def any(self) -> Template:
        """Return a template for a program that needs only torch. Raises `Unavailable` if there is none."""
        return await self._opened().any()

    async def of(self, job: str, launch: LaunchSpec) -> Template:
        """Return a template that has imported the modules that the job names. Raises `Unavailable` with the reason if an import
        fails."""
        key = self._key(launch)
        self._keys[job] = key
        self._keys.move_to_end(job)
        while len(self._keys) > JOBS_MAX:
            self._keys.popitem(last=False)
        template = await self._opened().ensure(key)
        if changed := await template.changed():
            log.info("worker template replaced", reason=changed)
            template = await self._opened().renewed(template)
        self._on_change()
        return template

    async def for_start(self, generation: LocalGeneration) -> Template:
        """As `of`, for the start of this generation: with the modules that its script has imported before, if there is such a
        template. Notes in the generation why not, if there is a reason."""
        order = generation.order
        template = await self._learned_template(generation)
        if template is None:
            return await self.of(order.job, order.launch)
        generation.has_learned = True
        return template

    async def _learned_template(self, generation: LocalGeneration) -> Template | None:
        launch, keeper = generation.order.launch, self._with_learned
        key = self._learned_key(launch)
        if key is None or keeper is None:
            return None
        if refused := self._learned.refused(launch, generation.submission):
            generation.start_note = f"imports are not loaded ahead: {refused}"
            await keeper.end()
            return None
        if not keeper.serves(key):
            return None
        template = await keeper.ensure(key)
        try:
            changed = await template.changed()
        except Unavailable as error:
            changed = str(error)
        if not changed:
            return template
        log.info("template with learned modules not used", reason=changed)
        generation.start_note = f"imports are not loaded ahead: {changed}"
        await keeper.end()
        return None

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
        if LEARN_IMPORTS not in launch.preload:
            return None
        try:
            self._site.learned.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HoldfastError(f"cannot create the directory {self._site.learned}: {error.strerror}") from error
        return self._learned.path(launch)

    def learn(self, running: Iterable[LocalGeneration]) -> None:
        """Start a template with the modules that a running script has imported, in the background: for the newest generation
        that has stepped, once for each generation."""
        stepped = [each for each in running if each.has_stepped and LEARN_IMPORTS in each.order.launch.preload]
        for generation in sorted(stepped, key=lambda each: each.started_at or 0.0)[-1:]:
            order, key = generation.order, self._learned_key(generation.order.launch)
            if key is None or self._with_learned is None or self._with_learned.serves(key):
                continue
            this = (order.job, order.generation, key)
            if this in self._started or self._learned.refused(order.launch, generation.submission):
                continue
            self._started[this] = None
            while len(self._started) > JOBS_MAX:
                self._started.popitem(last=False)
            assert self._tasks is not None, "set together with the keeper"
            failure = "template with learned modules not started"
            self._tasks.start_soon(self._start, self._with_learned, key, failure, name="template with learned modules")

    def judge(self, generation: LocalGeneration, at: float, failure: str = "", *, cascading: bool = False) -> None:
        """Judge the start of a generation: when it has stepped, when one of its ranks fails by itself, or when it ends.
        `failure`: how a rank has ended by itself; empty = no rank has. `cascading`: its communication has failed, so another
        rank may still fail by itself."""
        if generation.judged or generation.started_at is None or LEARN_IMPORTS not in generation.order.launch.preload:
            return
        launch, run = generation.order.launch, generation.submission
        if generation.has_stepped_or_lasted(at):
            generation.judged = True
            if generation.has_learned:
                self._learned.stepped(launch)
            else:
                self._learned.reached(launch, run)
            return
        lasted_s = at - generation.started_at
        cascaded = cascading or generation.has_cascaded
        is_slow = lasted_s >= generation.order.hang.init_s  # a fault of its own, and not only overtaken by another
        is_own = (bool(failure) and not cascading) or (is_slow and not cascaded)
        generation.judged = not cascading
        if not generation.has_learned:
            if is_own:
                self._learned.failed_without(launch, run)
            return
        if generation.has_cascaded and not is_own:
            return
        generation.has_cascaded = cascading
        how = failure or f"it was stopped {lasted_s:.0f} s after its start"
        reason = f"with its imports loaded ahead, generation {generation.order.generation} made no step: {how}"
        self._learned.failed(launch, run, reason, of_ranks=is_own, cascading=cascading)

    async def _start(self, keeper: TemplateKeeper, key: TemplateKey, failure: str) -> None:
        """Start a template that no order waits for. If it cannot start, log `failure`; the next order reports the error."""
        try:
            await keeper.ensure(key)
            self._on_change()
        except HoldfastError as error:
            log.warning(failure, reason=str(error))

    def _key(self, launch: LaunchSpec) -> TemplateKey:
        """Return the key that the job requests."""
        return TemplateKey.of(_directory(launch), _named(launch), dict(launch.env), self._inherited)

    def _learned_key(self, launch: LaunchSpec) -> TemplateKey | None:
        """Return the key with the modules that the job's last workers have imported; None if these are not known."""
        if (imports := self._learned.imports(launch)) is None:
            return None
        secrets = {source.name: SECRET for source in launch.env_from}  # which a template does not have
        known = replace(imports, variables=tuple(sorted((dict(imports.variables) | secrets).items())))
        return TemplateKey.of(_directory(launch), _named(launch), dict(launch.env), self._inherited, known)

    def _opened(self) -> TemplateKeeper:
        if self._keeper is None:
            raise Unavailable("the agent is still starting")
        return self._keeper


def _named(launch: LaunchSpec) -> tuple[str, ...]:
    return tuple(name for name in launch.preload if name != LEARN_IMPORTS)


def _directory(launch: LaunchSpec) -> str:
    """Return the directory in which the modules of a job are looked up first."""
    return launch.script if Path(launch.script).is_dir() else os.path.dirname(launch.script) or launch.cwd

"""The live view of one job: its mesh with node states, step, loss, and the current incident; plain lines without a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.cli.tables import STATE_STYLE, markup, mesh
from holdfast.cli.terminal import worker_output
from holdfast.domain.mesh import Mesh

MESSAGES_MAX = 8
PLAIN_EVERY_S, PLAIN_EVERY_S_MAX = 5.0, 60.0  # between status lines on a pipe: the later, the rarer
PLAIN_SHARE = 1 / 12  # of the time since the start
PAUSE_S, PAUSE_STEPS = 20.0, 10  # a pause that is shown: at least so many seconds, and so many steps
FIRST_STEP_S = 60.0  # after which a missing first step is explained
REPLICAS_SHOWN_MAX = 16
OTHERS_SHOWN_MAX = 12
COLUMN_GAP_CHARS = 4
BAR_CHARS = 60

_WITHOUT_STEPS = ("pending", "waiting", "suspended", "preparing")

Job = Mapping[str, Any]


class JobDisplay:
    """Call `update(job, nodes)` regularly; `say` adds a message. On a pipe, prints messages and a status line.

    Messages are markup: escape text from other sources.
    """

    def __init__(
        self, console: Console, *, target_step: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._target = target_step
        self._clock = clock
        self._started = clock()
        self._events: deque[str] = deque(maxlen=MESSAGES_MAX)
        self._job: Job = {}
        self._count: tuple[Any, ...] = ()  # counts of steps; `_count_since`: when they last changed
        self._count_since = clock()
        self._nodes: Sequence[Job] = ()
        self._last_plain = -PLAIN_EVERY_S
        self._plain_state: tuple[Any, ...] = ()  # phase and generation of the last status line
        self._plain_waiting = ""
        self._live = (
            Live(console=console, auto_refresh=False, get_renderable=self._render) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.refresh()
            self._live.stop()

    def say(self, line: str) -> None:
        stamped = f"[dim]{self._elapsed():6.1f} s[/]  {line}"
        if self._live is None:
            self._console.print(markup(stamped), soft_wrap=True)
        else:
            self._events.append(stamped)
            self._live.refresh()

    def print(self, line: str) -> None:
        """Print a line above the live view, such as the output of a worker."""
        self._console.print(worker_output(line), soft_wrap=True)

    def update(self, job: Job, nodes: Sequence[Job]) -> None:
        self._job, self._nodes = job, nodes
        count = (job["phase"], job["generation"], job.get("step"), job.get("observed_steps"))
        if count != self._count:
            self._count, self._count_since = count, self._clock()
        if self._live is not None:
            self._live.refresh()
        elif self._plain_due():
            self._last_plain, self._plain_state, self._plain_waiting = self._clock(), count[:2], self._waiting()
            self._console.print(markup(f"[dim]{self._elapsed():6.1f} s[/]  {self._headline()}"), soft_wrap=True)

    # ------------------------------------------------------------------ pieces

    def _plain_due(self) -> bool:
        if self._waiting() not in ("", self._plain_waiting):
            return True
        usual_s = min(max(PLAIN_EVERY_S, PLAIN_SHARE * self._elapsed()), PLAIN_EVERY_S_MAX)
        changed = self._count[:2] != self._plain_state
        return self._clock() - self._last_plain >= (PLAIN_EVERY_S if changed else usual_s)

    def _elapsed(self) -> float:
        return self._clock() - self._started

    def _headline(self) -> str:
        if not self._job:
            return "waiting for the job"
        return f"{self._state()}   {self._waiting() or self._progress()}"

    def _waiting(self) -> str:
        """Return the reason why the job does not train; empty if it does."""
        waits = self._job["phase"] in _WITHOUT_STEPS and self._job.get("reason")
        return escape(str(self._job["reason"])) if waits else ""

    def _state(self) -> str:
        job = self._job
        style = STATE_STYLE.get(job["phase"], "white")
        state = f"[bold]{escape(job['name'])}[/]  [{style}]{job['phase']}[/]"
        return f"{state}   generation {job['generation']}   {escape(mesh(job['mesh']))}"

    def _progress(self) -> str:
        job = self._job
        if job.get("step") is None:
            return f"{_observed(job)}{self._pause() if job.get('observed_steps') else ''}"
        if not job["step"] and not self._target:
            return f"no step yet{self._overdue()}"
        step = f"step {job['step']}" + (f"/{self._target}" if self._target else "")
        loss = f"   loss {job['loss']:.4f}" if job.get("loss") is not None else ""
        rate = f"   {job['tokens_per_s']:,.0f} tokens/s" if job.get("tokens_per_s") else ""
        return f"{step}{loss}{rate}{self._pause()}"

    def _overdue(self) -> str:
        """What to know of a job whose ranks were started and report no step, once that takes longer than usual."""
        quiet_s = self._clock() - self._count_since
        if self._job["phase"] not in ("starting", "running") or quiet_s < FIRST_STEP_S:
            return ""
        if self._job["phase"] == "running":
            return " that all ranks have reported"
        return f" [yellow]after {quiet_s:,.0f} s[/]; a script that uses holdfast.train must call run.step"

    def _pause(self) -> str:
        """Describe how long a running job has finished no step, if that is unusual; it may evaluate, save, or hang."""
        quiet_s = self._clock() - self._count_since
        if self._job["phase"] != "running" or quiet_s < max(
            PAUSE_S, PAUSE_STEPS * (self._job.get("observed_step_s") or 0.0)
        ):
            return ""
        return f", [yellow]none for {quiet_s:,.0f} s[/]"

    def _render(self) -> Group:
        parts: list[Any] = []
        if not self._job:
            parts.append(markup(self._headline()))
        else:
            parts += [markup(self._state()), markup(self._progress())]
            if waiting := self._waiting():
                parts.append(markup(f"[yellow]{waiting}[/]"))
            if self._target:
                bar = ProgressBar(total=self._target, completed=self._job.get("step") or 0, width=BAR_CHARS)
                parts.append(Padding(bar, 0))  # the bar does not end its line
            parts += [self._mesh(), self._others()]
            if incident := self._job.get("incident"):
                parts.append(_incident(incident))
        if self._events:
            parts.append(Panel(markup("\n".join(self._events)), title="events", title_align="left"))
        return Group(*parts)

    def _mesh(self) -> Table:
        """Return one row per replica with one cell per model-parallel index; a large mesh is shortened to the screen."""
        states = {node["node"]: node["state"] for node in self._nodes}
        layout = Mesh.of(self._job["mesh"])
        ranks = sorted(self._job["ranks"], key=lambda worker: (layout.replica_of(worker["rank"]), worker["rank"]))
        width = max(1, len(ranks) // layout.dp)
        roomy = self._roomy(width, ranks)
        grid = Table(box=None, pad_edge=False, padding=(0, 2), show_header=roomy and bool(ranks))
        grid.add_column("")
        for position in range(width if roomy else 1):
            grid.add_column(f"index {position}", overflow="fold")
        rows = [ranks[start : start + width] for start in range(0, len(ranks), width)]
        for number, row in enumerate(rows[:REPLICAS_SHOWN_MAX]):
            cells = [_cell(worker, states) for worker in row]
            if not roomy:
                cells = ["".join(_square(worker, states) for worker in row)]
            grid.add_row(f"[dim]replica {number}[/]", *cells)
        if len(rows) > REPLICAS_SHOWN_MAX:
            grid.add_row(f"[dim]and {len(rows) - REPLICAS_SHOWN_MAX} more[/]")
        return grid

    def _roomy(self, width: int, ranks: list[Mapping[str, Any]]) -> bool:
        """Return whether `width` ranks fit side by side with their node names; otherwise each is one square."""
        longest = max((len(f"■ rank {worker['rank']} {worker['node']}") for worker in ranks), default=0)
        first_column = len(f"replica {len(ranks)}")
        return first_column + width * (longest + COLUMN_GAP_CHARS) <= self._console.width

    def _others(self) -> Text:
        mine = {worker["node"] for worker in self._job["ranks"]}
        rest = [node for node in self._nodes if node["node"] not in mine]
        parts = [
            f"[{STATE_STYLE.get(node['state'], 'white')}]{escape(node['node'])} {node['state']}[/]"
            for node in rest[:OTHERS_SHOWN_MAX]
        ]
        if len(rest) > OTHERS_SHOWN_MAX:
            parts.append(f"[dim]and {len(rest) - OTHERS_SHOWN_MAX} more[/]")
        return markup("[dim]other nodes[/]  " + ("   ".join(parts) or "none"))


def _observed(job: Job) -> str:
    """Describe the progress of a script that reports no steps."""
    if (count := job.get("observed_steps")) is None:
        return "steps are not reported by the script"
    return f"{count:,} optimizer step{'' if count == 1 else 's'} observed, {job['observed_step_s']:.3g} s each"


def _cell(worker: Mapping[str, Any], states: Mapping[str, str]) -> str:
    return f"{_square(worker, states)} rank {worker['rank']} [dim]{escape(worker['node'])}[/]"


def _square(worker: Mapping[str, Any], states: Mapping[str, str]) -> str:
    state = states.get(worker["node"], "lost")
    return f"[{STATE_STYLE.get(state, 'white')}]■[/]"


def _incident(incident: Mapping[str, Any]) -> Panel:
    action = incident.get("action") or {}
    lines = [escape(incident["cause"])]
    if action:
        lines.append(f"[bold]{action['kind']}[/]: {escape(action['reason'])}")
    return Panel(
        markup("\n".join(lines)), title=f"incident · {incident['state']}", title_align="left", border_style="yellow"
    )

"""`holdfast logs`: prints the output of ranks, from files on this machine, or through the API from agents of others."""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from holdfast.agent.workers.errors import read_error_file
from holdfast.agent.workers.logs import GENERATIONS_KEPT
from holdfast.cli.client import Client
from holdfast.cli.completion import names
from holdfast.cli.connection import NoApi, default_url
from holdfast.cli.endings import ENDED, FAILED
from holdfast.cli.first_error import Raised, first_error, headline, nothing, of_agents
from holdfast.cli.local_runs import RUNS, api_url
from holdfast.cli.log_tail import REMOTE_MAX, Ranks, RemoteTail, Tail
from holdfast.cli.tables import Api, console
from holdfast.cli.terminal import worker_output
from holdfast.cli.torchrun import shown_ranks
from holdfast.domain.errors import HoldfastError, InvalidSpec, NotFound, Unavailable
from holdfast.domain.signals import WorkerError
from holdfast.domain.words import plural

AnyTail = TypeVar("AnyTail", bound=Tail)
LINES = 100
NEWEST = -1
POLL_S = 0.2
LOOK_EVERY = 5  # polls between checks for new generations, and for the end of the job
# Of a log on another machine, which is read from its beginning only if all lines are requested; of one on this machine, first.
TAIL_BYTES = 1 << 20
WIDER = 8  # times as much is read if the last lines that match are not among these

_LOG = re.compile(r"g(\d+)/rank-(\d+)\.log")


def register(app: typer.Typer) -> None:
    app.command(
        rich_help_panel="Look",
        epilog="Examples: [bold]holdfast logs llm -f[/] · [bold]holdfast logs llm --rank all --grep nan[/] · "
        "[bold]holdfast logs llm --generation -2 --first-error[/]",
    )(logs)


def logs(
    job: Annotated[str, typer.Argument(help="Name of the job.", autocompletion=names)],
    rank: Annotated[str, typer.Option(help="Ranks: all, or a list such as 0,7.")] = "0",
    generation: Annotated[
        int, typer.Option(help="Generation; -1 = the newest, -2 = the previous one. Agents keep the newest five.")
    ] = NEWEST,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Lines per rank; 0 = all.", min=0)] = LINES,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the job ends.")] = False,
    grep: Annotated[str, typer.Option(help="Only lines that contain this regular expression.")] = "",
    first: Annotated[
        bool,
        typer.Option(
            "--first-error",
            help="Show the exception of the rank that failed first, on any node, and the log of that rank.",
        ),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help=f"Directory of a local stack. Default without an API: {RUNS}/JOB.", show_default=False
        ),
    ] = None,
    api: Api = "",
) -> None:
    """Print the output of a job's ranks, also after its end: from the files on this machine, and from the agents of others."""
    if first and follow:
        raise InvalidSpec("--follow", True, "either --follow or --first-error")
    wanted, ranks = _pattern(grep), shown_ranks(rank, "")
    with ExitStack() as cleanup:
        client = None if directory else _client(api, job, cleanup)
        places = _Places.of_stack(directory, job) if client is None else _Places.of_fleet(client)
        if first:
            _first_error(client, places, job, generation, lines, wanted)
            return
        found = places.logs(job)
        view = _view(client, job)
        chosen = _chosen(found, generation, view)
        shown = [log for log in found.get(chosen, ()) if ranks is None or log.rank in ranks]
        tails = {(chosen, log.rank): _print(_tail(log, ranks), log.where, lines, wanted) for log in shown}
        if client is not None:
            remote = _elsewhere(client, places, view, chosen, ranks, {log.rank for log in shown})
            for tail in remote[:REMOTE_MAX]:
                try:
                    tails[chosen, tail.rank] = _print(tail, "", lines, wanted)
                except HoldfastError as error:
                    typer.echo(f"rank {tail.rank}: {error}", err=True)
            if more := remote[REMOTE_MAX:]:
                others = plural(len(more), "more rank")
                typer.echo(f"{others} on other machines: choose up to {REMOTE_MAX} with --rank", err=True)
        if not tails and not follow:
            here = sorted(log.rank for log in found.get(chosen, ()))
            if client is not None and view is None and not here:
                raise NotFound(f"there is no job {job}; `holdfast jobs list` shows those there are")
            rest = (
                f"of generation {chosen} there is that of rank{'s' * (len(here) > 1)} {', '.join(map(str, here))}"
                if here
                else "no rank of the job has one"
            )
            raise NotFound(f"no log of rank {rank} on this machine; {rest}")
        if follow:
            _follow(_Followed(client, places, job, ranks, wanted, tails))


# ---------------------------------------------------------------- location of logs


@dataclass(frozen=True, slots=True)
class _Log:
    rank: int
    node: str
    path: Path

    @property
    def where(self) -> str:
        return f"rank {self.rank} on {self.node}: {self.path}"

    @property
    def error(self) -> WorkerError | None:
        return read_error_file(self.path.with_suffix(".error.json"))


@dataclass(frozen=True, slots=True)
class _Places:
    here: Mapping[str, Path]  # node → its agent's directory

    @classmethod
    def of_fleet(cls, client: Client) -> _Places:
        nodes = {
            node["node"]: (node["hostname"], node["directory"]) for node in client.nodes() if node.get("directory")
        }
        own = socket.gethostname()
        return cls({node: Path(directory) for node, (host, directory) in nodes.items() if host == own})

    @classmethod
    def of_stack(cls, directory: Path | None, job: str) -> _Places:
        """The nodes of a local stack. Raises `Unavailable` if no stack has run in the directory."""
        stack = (directory or RUNS / job).expanduser()
        if not (stack / "nodes").is_dir():
            why = "" if directory else f"no Holdfast API answers at {default_url()}, and "
            raise Unavailable(f"{why}no local stack has run in {stack}: set --api, or --dir to the directory of one")
        return cls({path.name: path for path in sorted((stack / "nodes").iterdir()) if path.is_dir()})

    def logs(self, job: str) -> dict[int, list[_Log]]:
        """Return generation → the logs of its ranks on this machine, by rank."""
        found: dict[int, list[_Log]] = {}
        for node, directory in self.here.items():
            top = directory / "logs"
            for path in top.glob(f"{escape(job)}/g*/rank-*.log"):
                if match := _LOG.fullmatch(str(path.relative_to(top / job))):
                    found.setdefault(int(match[1]), []).append(_Log(int(match[2]), node, path))
        return {number: sorted(of, key=lambda log: log.rank) for number, of in sorted(found.items())}


def _elsewhere(
    client: Client, places: _Places, view: Mapping[str, Any] | None, generation: int, ranks: Ranks, shown: set[int]
) -> list[RemoteTail]:
    """Return the logs of this generation on other machines. Of an earlier generation, only those of explicitly requested ranks,
    because the supervisor knows on which nodes these ran."""
    if view is None:
        return []
    if view["generation"] == generation:
        on_others = [each["rank"] for each in view["ranks"] if each["node"] not in places.here]
    else:
        on_others = sorted(ranks or ())
    wanted = [each for each in on_others if each not in shown and (ranks is None or each in ranks)]
    alone = ranks is not None and len(ranks) == 1
    return [
        RemoteTail(
            Path(), "" if alone else f"[rank{each}] ", client=client, job=view["name"], generation=generation, rank=each
        )
        for each in wanted
    ]


def _client(api: str, job: str, cleanup: ExitStack) -> Client | None:
    """Return a client; None if no API answers at the default address, since a local stack may have run."""
    client = cleanup.enter_context(Client(api or api_url(job)))
    try:
        client.version()
    except NoApi:
        if api:
            raise
        return None
    return client


def _view(client: Client | None, job: str) -> Mapping[str, Any] | None:
    try:
        return client.job(job) if client else None
    except NotFound:  # the supervisor has deleted the job; its logs may still be on this machine
        return None


def _chosen(found: Mapping[int, list[_Log]], generation: int, view: Mapping[str, Any] | None) -> int:
    """Return the number of the requested generation. Without a supervisor, only generations with logs on this machine count."""
    numbers = list(found)
    if view is not None and view["generation"]:
        numbers = sorted({*numbers, *range(max(1, view["generation"] - GENERATIONS_KEPT + 1), view["generation"] + 1)})
    if generation < 0 and not numbers:
        return 0
    if generation in numbers:
        return generation
    if generation < 0 and -generation <= len(numbers):
        return numbers[generation]
    present = ", ".join(map(str, numbers)) or "none: no rank of the job has a log on this machine"
    raise InvalidSpec("--generation", generation, f"one that has logs on this machine ({present})")


# ---------------------------------------------------------------- output


def _pattern(grep: str) -> re.Pattern[str]:
    try:
        return re.compile(grep)
    except re.error as error:
        raise InvalidSpec("--grep", grep, f"a regular expression ({error})") from error


def _print(tail: AnyTail, where: str, lines: int, wanted: re.Pattern[str]) -> AnyTail:
    """Print the last lines of a log. Returns the tail, which continues after them."""
    if isinstance(tail, RemoteTail):
        where = tail.begin(TAIL_BYTES if lines else 0)
    typer.echo(where, err=True)
    for line in _last_lines(tail, lines, wanted):
        _show(line)
    return tail


def _last_lines(tail: Tail, lines: int, wanted: re.Pattern[str]) -> Iterable[str]:
    """Return the last `lines` that match, 0 = all. Of a file on this machine, only as much of the end is read as is needed."""
    window = TAIL_BYTES
    while lines and not isinstance(tail, RemoteTail) and tail.skip(window):
        found = deque((line for line in tail.whole_lines() if wanted.search(line)), maxlen=lines)
        if len(found) == lines:
            return found
        tail.position, tail.partial = 0, b""
        window *= WIDER
    matching = (line for line in tail.whole_lines() if wanted.search(line))
    return deque(matching, maxlen=lines) if lines else matching


def _show(line: str) -> None:
    console.print(worker_output(line), soft_wrap=True)


def _tail(log: _Log, ranks: Ranks) -> Tail:
    return Tail(log.path, "" if ranks is not None and len(ranks) == 1 else f"[rank{log.rank}] ")


@dataclass(slots=True)
class _Followed:
    client: Client | None
    places: _Places
    job: str
    ranks: Ranks
    wanted: re.Pattern[str]
    tails: dict[tuple[int, int], Tail]  # by generation and rank

    def look(self) -> bool:
        """Find the logs of new generations. Returns whether the job continues."""
        newest = max((number for number, _ in self.tails), default=0)
        for number, logs in self.places.logs(self.job).items():
            for log in logs if number >= newest else ():
                if (number, log.rank) not in self.tails and (self.ranks is None or log.rank in self.ranks):
                    typer.echo(f"rank {log.rank} on {log.node}, generation {number}: {log.path}", err=True)
                    self.tails[number, log.rank] = _tail(log, self.ranks)
        view = _view(self.client, self.job)
        return view is None or view["phase"] not in ENDED

    def show(self, *, rest: bool = False) -> None:
        for tail in self.tails.values():
            for line in tail.rest() if rest else tail.lines():
                if self.wanted.search(line):
                    _show(line)


def _follow(followed: _Followed) -> None:
    unfinished = True
    while unfinished:
        unfinished = followed.look()
        for _ in range(LOOK_EVERY if unfinished else 0):
            followed.show()
            time.sleep(POLL_S)
    followed.show(rest=True)


def _first_error(
    client: Client | None, places: _Places, job: str, generation: int, lines: int, wanted: re.Pattern[str]
) -> None:
    """Show the exception of the rank that failed first, and the end of its log, on whatever machine that is."""
    found = places.logs(job)
    number = 0 if generation == NEWEST else _chosen(found, generation, _view(client, job))
    here = {(of, log.rank): log for of, some in found.items() for log in some if number in (0, of)}
    files = [Raised(of, log.rank, log.node, error) for (of, _), log in here.items() if (error := log.error) is not None]
    first = first_error(of_agents(client, job, number) if client else None, files)
    if not first.raised:
        typer.echo(nothing(first, job, number), err=True)
        raise typer.Exit(FAILED)
    raised = first.raised[0]
    typer.echo(headline(first))
    if first.silent:
        typer.echo(first.silent, err=True)
    _show(f"{raised.error.type}: {raised.error.message}" if raised.error.type else raised.error.message)
    for frame in raised.error.frames:
        _show(f"  {frame}")
    if (log := here.get((raised.generation, raised.rank))) is not None:
        _print(_tail(log, frozenset({log.rank})), log.where, lines, wanted)
    elif client is not None:
        tail = RemoteTail(Path(), "", client=client, job=job, generation=raised.generation, rank=raised.rank)
        try:
            _print(tail, "", lines, wanted)
        except HoldfastError as error:
            typer.echo(f"rank {raised.rank}: {error}", err=True)

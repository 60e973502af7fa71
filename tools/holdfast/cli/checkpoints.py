"""`holdfast checkpoints`: lists, verifies, deletes and exports checkpoints in an object store, and on the nodes of a job if a
supervisor answers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holdfast.cli import checkpoint_rows, node_checkpoints
from holdfast.cli.checkpoint_rows import Json, Stored
from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi
from holdfast.cli.local_runs import api_url
from holdfast.cli.tables import Api, AsJson, console, mesh, show_list, show_one, table
from holdfast.cli.terminal import Terminal
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.distribution import install_command
from holdfast.domain.errors import HoldfastError, InvalidSpec, NotFound, Unavailable
from holdfast.domain.tiers import NEARNESS
from holdfast.domain.words import plural
from holdfast.stores import ObjectStore, open_store, transfer
from holdfast.stores.layout import CheckpointManifest, delete_step

app = typer.Typer(
    help="Checkpoints: list, show, verify, prune, fetch, export.",
    epilog="Without --store, the commands use the job's own object store, or its nodes if it has none; this needs the API. "
    "With --store, they need only the object store: "
    "`holdfast checkpoints list gpt --store gs://bucket/dir`.",
    no_args_is_help=True,
)

COLUMNS = ("step", "attempt", "mesh", *NEARNESS, "store", "bytes", "saved_at", "")
notes = Terminal(stderr=True, highlight=False, emoji=False)

Job = Annotated[str, typer.Argument(help="Job name.")]
Store = Annotated[
    str,
    typer.Option(
        help="Object store: gs://bucket/prefix or file:///directory.", envvar="HOLDFAST_STORE", show_default=False
    ),
]
Step = Annotated[
    int | None, typer.Option(help="Step of the checkpoint. Default: the newest complete one.", show_default=False)
]
Attempt = Annotated[
    int | None,
    typer.Option(help="Attempt of the checkpoint. Default: the newest one with this step.", show_default=False),
]


# ---------------------------------------------------------------- list, show


@app.command("list", epilog="Example: holdfast checkpoints list gpt --store file:///mnt/checkpoints")
def list_checkpoints(job: Job, store: Store = "", api: Api = "", as_json: AsJson = False) -> None:
    """List checkpoints, newest first: in the object store, and on the nodes if a supervisor answers."""
    held, silent = _held(job, api or api_url())
    if not store and silent is not None:
        raise type(silent)(f"{silent}; to list an object store, set it with --store") from silent
    url = store or _store_of(job, api)
    stored: list[Stored] = []
    missing: HoldfastError | None = None
    try:
        if url:
            with closing(open_store(url)) as opened:
                stored = checkpoint_rows.in_store(opened, job)
    except HoldfastError as error:
        if silent is not None:  # both failed
            raise
        missing = error
    rows = checkpoint_rows.rows(stored, held)
    show_list(rows if as_json else map(_shown, rows), COLUMNS, as_json, f"no checkpoints of {job} yet")
    for what, problem in (("on the nodes", silent), ("in the object store", missing)):
        if problem is not None:
            notes.print(f"[dim]checkpoints {what} are not shown: {escape(str(problem))}[/]", soft_wrap=True)


def _held(job: str, api: str) -> tuple[list[Json], HoldfastError | None]:
    """Return the checkpoints on the job's nodes, and the error if the supervisor did not answer."""
    try:
        with Client(api) as client:
            return list(client.checkpoints(job)), None
    except NoApi:
        return [], NoApi(f"no supervisor answers at {api}")
    except (Unavailable, NotFound) as error:
        return [], error


def _shown(row: Json) -> Json:
    """Format a row for the screen: the tiers of nodes as the number of ranks out of all ranks of the mesh."""
    ranks = 1
    for size in row["mesh"].values():
        ranks *= size
    return row | {
        **{tier: f"{row[tier]} of {ranks}" if row[tier] else None for tier in NEARNESS},
        "bytes": None if row["bytes"] is None else decimal(row["bytes"]),
        "": "newest complete" if row["newest"] else "" if row["complete"] else "incomplete",
    }


@app.command(
    epilog="Examples: [bold]holdfast checkpoints show gpt[/] · "
    "[bold]holdfast checkpoints show gpt --store gs://bucket/dir --step 1200[/]"
)
def show(
    job: Job, store: Store = "", api: Api = "", step: Step = None, attempt: Attempt = None, as_json: AsJson = False
) -> None:
    """Show one checkpoint with the shards of all ranks: in the object store, or on the nodes of a job without one."""
    if not store and not _store_of(job, api):
        with Client(api or api_url()) as client:
            show_one(node_checkpoints.described(client, job, step, attempt), as_json)
        return
    with _opened(job, store, api) as opened:
        checkpoint = checkpoint_rows.choose(opened, job, step, attempt)
    show_one(_described(checkpoint, screen=not as_json), as_json)


def _described(checkpoint: CheckpointManifest, *, screen: bool) -> Json:
    dims = checkpoint.domain_mesh()
    return {
        "job": checkpoint.job,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "continues": None if checkpoint.parent is None else checkpoint.parent._asdict(),
        "mesh": dict(checkpoint.mesh),
        "sharded": checkpoint.sharded,
        "saved_at": checkpoint.created_at,
        "bytes": _size(transfer.bytes_to_verify(checkpoint), screen=screen),
        "ranks": [
            {
                "rank": entry.rank,
                **dims.coords(entry.rank),
                "size": _size(entry.size, screen=screen),
                "digest": entry.digest,
                "tensors": entry.tensors.rpartition("/")[2],
            }
            for entry in checkpoint.ranks
        ],
    }


def _size(nbytes: int, *, screen: bool) -> str | int:
    return decimal(nbytes) if screen else nbytes


# ---------------------------------------------------------------- verify


@app.command(
    epilog="Exit code 1 if a checkpoint is damaged. Example: holdfast checkpoints verify gpt --store gs://bucket/dir --all"
)
def verify(
    job: Job,
    store: Store = "",
    api: Api = "",
    step: Step = None,
    attempt: Attempt = None,
    every: Annotated[bool, typer.Option("--all", help="Verify all complete checkpoints.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint in the object store and compare checksums."""
    with _opened(job, store, api) as opened:
        if every:
            found = [each.checkpoint for each in checkpoint_rows.in_store(opened, job)]
            meant = [checkpoint for checkpoint in found if checkpoint is not None]
        else:
            meant = [checkpoint_rows.choose(opened, job, step, attempt)]
        reports = [_verified(opened, checkpoint, quiet=as_json) for checkpoint in meant]
    if as_json:
        print(json.dumps(reports, indent=2))
    if any(report["damaged"] for report in reports):
        raise typer.Exit(1)


def _verified(store: ObjectStore, checkpoint: CheckpointManifest, *, quiet: bool) -> Json:
    total = transfer.bytes_to_verify(checkpoint)
    with _bar(f"step {checkpoint.step}", total) as advance:
        damaged = list(transfer.verify(store, checkpoint, advance))
    if not quiet:
        name = f"step {checkpoint.step} (attempt {checkpoint.attempt})"
        verdict = "[red]damaged[/]" if damaged else f"[green]intact[/], {decimal(total)} verified"
        console.print(f"{name}: {verdict}")
        for each in damaged:
            console.print(f"  {escape(each.key)}: {escape(each.problem)}", soft_wrap=True)
    return {
        "attempt": checkpoint.attempt,
        "step": checkpoint.step,
        "bytes": total,
        "damaged": [{"key": each.key, "problem": each.problem} for each in damaged],
    }


# ---------------------------------------------------------------- prune


@app.command(
    epilog="Examples: [bold]holdfast checkpoints prune gpt[/] (all checkpoints of a finished job on its nodes) · "
    "[bold]holdfast checkpoints prune gpt --store gs://bucket/dir --keep 3[/]"
)
def prune(
    job: Job,
    keep: Annotated[
        int,
        typer.Option(
            help="Number of complete checkpoints to retain; with --store at least 1.", min=0, show_default=False
        ),
    ] = 0,
    store: Store = "",
    api: Api = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints after confirmation: from the nodes, or with --store from the object store.

    Retains the newest complete checkpoint of an object store, and all checkpoints that an unfinished job may restore.
    """
    if not store:
        _prune_nodes(job, keep, api or api_url(), yes=yes, as_json=as_json)
        return
    if not keep:
        raise InvalidSpec("--keep", keep, "at least 1 with --store")
    with _opened(job, store, api) as opened:
        plan = checkpoint_rows.pruning(checkpoint_rows.in_store(opened, job), keep, time.time())
        if not as_json:
            _show_plan(job, plan)
        if plan.go and not yes:
            _confirm(len(plan.go), len(plan.stay), "", as_json)
        for each, _ in plan.go:
            delete_step(opened, job, *each.age)
            if not as_json:
                console.print(f"deleted step {each.objects.step} (attempt {each.objects.attempt})")
    if as_json:
        print(json.dumps({"deleted": _plan_rows(plan.go), "kept": _plan_rows(plan.stay)}, indent=2))


def _confirm(go: int, stay: int, where: str, as_json: bool) -> None:
    if as_json:
        raise InvalidSpec("--yes", False, "--yes together with --json, because --json does not ask for confirmation")
    typer.confirm(f"Delete {go} of {plural(go + stay, 'checkpoint')}{where}?", abort=True)


def _prune_nodes(job: str, keep: int, api: str, *, yes: bool, as_json: bool) -> None:
    stored = bool(_store_of(job, api))
    with Client(api) as client:
        go, stay = node_checkpoints.prunable(client, job, keep)
        if not as_json:
            if go:
                rows = [row | {"plan": word} for word, part in (("delete", go), ("keep", stay)) for row in part]
                console.print(table(rows, ("step", "attempt", "plan")))
            else:
                console.print(f"{job}: nothing to delete on its nodes; {plural(len(stay), 'checkpoint')} retained")
        if go and not yes:
            _confirm(len(go), len(stay), " from the nodes", as_json)
        if go:
            client.prune(job, [CheckpointId(row["attempt"], row["step"]) for row in go])
    if as_json:
        print(json.dumps({"deleted": go, "kept": stay}, indent=2))
        return
    if go:
        console.print(f"{job}: {plural(len(go), 'checkpoint')} deleted from its nodes")
    if stored:
        notes.print("[dim]its checkpoints in the object store are not deleted; to delete them, use --store[/]")


def _show_plan(job: str, plan: checkpoint_rows.Pruning) -> None:
    if not plan.go:
        console.print(f"{job}: nothing to delete; {plural(len(plan.stay), 'checkpoint')} retained")
        return
    rows = [
        row | {"bytes": decimal(row["bytes"]), "plan": word}
        for word, part in (("delete", plan.go), ("keep", plan.stay))
        for row in _plan_rows(part)
    ]
    console.print(table(rows, ("step", "attempt", "bytes", "plan", "reason")))


def _plan_rows(part: tuple[tuple[Stored, str], ...]) -> list[Json]:
    return [
        {
            "step": each.objects.step,
            "attempt": each.objects.attempt,
            "bytes": each.objects.size,
            "state": each.state,
            "reason": reason,
        }
        for each, reason in part
    ]


# ---------------------------------------------------------------- fetch, export


@app.command(epilog="Example: holdfast checkpoints fetch gpt --store gs://bucket/dir --step 1200 --to ./checkpoints")
def fetch(
    job: Job,
    to: Annotated[Path, typer.Option(help="Directory; created if it does not exist.", file_okay=False)],
    store: Store = "",
    api: Api = "",
    step: Step = None,
    attempt: Attempt = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Only this rank; can be given several times.", show_default=False)
    ] = None,
) -> None:
    """Download shard files with their manifests from the object store or the nodes, and verify them."""
    if not store and not _store_of(job, api):
        with Client(api or api_url()) as client:
            meant = node_checkpoints.choose(client, job, step, attempt)
            paths = _from_nodes(client, meant, rank or meant.ranks, to)
        console.print(
            f"step {meant.step} (attempt {meant.attempt}): {plural(len(paths), 'shard')} in {escape(str(paths[0].parent))}"
        )
        return
    with _opened(job, store, api) as opened:
        checkpoint = checkpoint_rows.choose(opened, job, step, attempt)
        paths = _fetched(opened, checkpoint, tuple(rank or range(len(checkpoint.ranks))), to)
    console.print(
        f"step {checkpoint.step} (attempt {checkpoint.attempt}): {plural(len(paths), 'shard')} in "
        f"{escape(str(paths[0].parent))}"
    )


@app.command(epilog="Example: holdfast checkpoints export gpt --store gs://bucket/dir --to ./step-1200")
def export(
    job: Job,
    to: Annotated[Path, typer.Option(help="Directory of the export; must be empty or not exist.", file_okay=False)],
    store: Store = "",
    api: Api = "",
    step: Step = None,
    attempt: Attempt = None,
) -> None:
    """Export a checkpoint as a torch.distributed.checkpoint directory, which torch loads without Holdfast."""
    if importlib.util.find_spec("torch") is None:
        raise InvalidSpec("export", "this Python", f"one with torch: {install_command('train')}")
    if to.exists() and any(to.iterdir()):
        raise InvalidSpec("--to", str(to), "a directory that is empty or does not exist")
    shards = to.with_name(f".{to.name}.shards")  # on the same file system, so that the export can use links
    if not store and not _store_of(job, api):
        with Client(api or api_url()) as client:
            meant = node_checkpoints.choose(client, job, step, attempt)
            try:
                _write_dcp(_from_nodes(client, meant, meant.ranks, shards), to)
            finally:
                shutil.rmtree(shards, ignore_errors=True)
        console.print(f"step {meant.step} ({mesh(meant.mesh)}) exported to {escape(str(to))}")
        return
    with _opened(job, store, api) as opened:
        checkpoint = checkpoint_rows.choose(opened, job, step, attempt)
        try:
            paths = _fetched(opened, checkpoint, checkpoint_rows.distinct_ranks(checkpoint), shards)
            _write_dcp(paths, to)
        finally:
            shutil.rmtree(shards, ignore_errors=True)
    console.print(f"step {checkpoint.step} ({mesh(dict(checkpoint.mesh))}) exported to {escape(str(to))}")


def _write_dcp(shards: list[Path], to: Path) -> None:
    from holdfast.train import dcp  # torch is imported only when it is needed

    done = 0
    with _bar("export", sum(path.stat().st_size for path in shards)) as advance:

        def progress(now: int, _total: int) -> None:
            nonlocal done
            advance(now - done)
            done = now

        dcp.export(shards, to, progress=progress)


def _fetched(store: ObjectStore, checkpoint: CheckpointManifest, ranks: tuple[int, ...], to: Path) -> list[Path]:
    total = sum(checkpoint.entry(rank).size for rank in ranks)
    with _bar(f"step {checkpoint.step}", total) as advance:
        return transfer.fetch(store, checkpoint, ranks, to, advance)


def _from_nodes(client: Client, meant: node_checkpoints.OnNodes, ranks: Sequence[int], to: Path) -> list[Path]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} ranks"))
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task(f"step {meant.step}", total=len(ranks))
        return node_checkpoints.fetch(client, meant, ranks, to, lambda count: progress.advance(task, count))


# ---------------------------------------------------------------- shared


@contextmanager
def _opened(job: str, store: str, api: str) -> Iterator[ObjectStore]:
    """Open `store`, or the job's own object store according to the supervisor."""
    store = store or _store_of(job, api)
    if not store:
        raise NotFound(f"{job} has no object store, because its job file has no checkpoint.store; set one with --store")
    with closing(open_store(store)) as opened:
        yield opened


def _store_of(job: str, api: str) -> str:
    """Return the URL of the job's object store; empty = none. Raises `NoApi` with advice."""
    api = api or api_url()
    try:
        with Client(api) as client:
            spec = client.job(job).get("spec") or {}
    except NoApi as error:
        raise NoApi(
            f"no supervisor answers at {api}, so the object store of {job} is unknown; set it with --store"
        ) from error
    return str((spec.get("checkpoint") or {}).get("store") or "")


@contextmanager
def _bar(what: str, total: int) -> Iterator[transfer.Progress]:
    """Show a progress bar while the block runs; on a pipe, nothing."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)

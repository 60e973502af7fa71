"""Converts torchrun's command line to a job: the same options, spelled with - or _."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.log_tail import ALL_RANKS, Ranks
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.wire.job_fields import NAME_CHARS_MAX

GPUS = Path("/proc/driver/nvidia/gpus")  # as the kernel lists them; needs no driver library


# Ignored: every generation has its own rendezvous, and the output of every rank goes to the agent's log directory.
NOT_NEEDED = (
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr", "--master-port"),
    *("--node-rank", "--local-addr", "--monitor-interval", "--start-method", "--role", "--event-log-handler"),
    *("--log-dir", "--redirects", "--logs-specs", "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
    *("--shutdown-timeout", "-r"),
)
Preload = Annotated[
    list[str] | None,
    typer.Option(
        "--preload",
        help="Modules that the worker template imports ahead of time, and functions (module:function) that it calls, separated "
        "by commas: restarts do not wait for them. The modules that the script imports are learned in addition; none turns "
        "that off.",
        show_default=False,
    ),
]
Unneeded = Annotated[list[str] | None, typer.Option(*NOT_NEEDED, hidden=True)]
LocalRanksFilter = Annotated[str, typer.Option(hidden=True)]  # torchrun's name for --show-ranks
Tee = Annotated[str, typer.Option("--tee", "-t", hidden=True)]
Standalone = Annotated[bool, typer.Option("--standalone", hidden=True)]

# The kind of program to start.
Module = Annotated[bool, typer.Option("-m", "--module", help="The script is a module's name, as in `python -m`.")]
NoPython = Annotated[
    bool,
    typer.Option(
        "--no-python",
        help="The script is a program: a path, or a name in PATH. A Python program of this environment starts as fast as a "
        "script; others take longer.",
    ),
]
# With this option, torchrun runs the script in its own process. A worker of Holdfast always does.
RunPath = Annotated[bool, typer.Option("--run-path", hidden=True)]

# Rejected: these options change how a worker is started, and Holdfast does not support them.
VirtualLocalRank = Annotated[bool, typer.Option("--virtual-local-rank", hidden=True)]
NumaBinding = Annotated[str, typer.Option("--numa-binding", hidden=True)]
SignalsToHandle = Annotated[str, typer.Option("--signals-to-handle", hidden=True)]


def modules(preload: list[str] | None) -> list[str]:
    """Return the modules of `--preload a.b,c`, which may be repeated."""
    return [name for names in preload or () for part in names.split(",") if (name := part.strip())]


def spelling(flag: str) -> str:
    """Normalise options: torchrun accepts `--nproc-per-node` and `--nproc_per_node`."""
    return flag.replace("_", "-")


def kind_of(*, module: bool, no_python: bool, run_path: bool) -> str:
    """Return the key of a job file for the kind of program. Raises `InvalidSpec` for options that exclude each other."""
    if no_python and (module or run_path):
        raise InvalidSpec(
            "--no-python", "--module" if module else "--run-path", "only one of --module, --no-python and --run-path"
        )
    if module and run_path:
        raise InvalidSpec("--run-path", "--module", "only one of --module, --no-python and --run-path")
    return "module" if module else "command" if no_python else "script"


def refuse(flags: dict[str, bool | str]) -> None:
    """Raises `InvalidSpec` for an option of torchrun that is not supported."""
    for flag, value in flags.items():
        if value:
            raise InvalidSpec(
                flag, value, "this option of torchrun to be left out, because `holdfast run` does not support it"
            )


def body(
    script: str,
    arguments: list[str],
    *,
    nnodes: str,
    nproc_per_node: str,
    max_restarts: int | None,
    name: str,
    policy: str,
    spares: int,
    kind: str = "script",
    preload: list[str] | None = None,
) -> dict[str, Any]:
    """Return the job body. Raises `InvalidSpec` that names the flag."""
    fewest, most = _nodes(nnodes)
    per_node = workers(nproc_per_node)
    result: dict[str, Any] = {
        "name": name or job_name(script.removesuffix(".__main__") if kind == "module" else script, kind),
        kind: script,
        "args": arguments,
        "cwd": os.getcwd(),  # as torchrun: the script runs in the current directory
        "nodes": most,
        "nproc_per_node": per_node,
        "mesh": {"dp": most * per_node},
        "elastic": {"min_dp": fewest * per_node, "max_dp": most * per_node},
        "spares": spares,
    }
    if max_restarts is not None:
        result["limits"] = {"restarts_without_progress_max": max_restarts}
    if policy:
        result["policy"] = policy
    if preload:
        result["preload"] = preload
    return result


def job_name(script: str, kind: str = "script") -> str:
    """Return a valid job name for a script's file name, or the last part of a module's name."""
    last = script.rpartition(".")[2] if kind == "module" else Path(script).stem
    return re.sub(r"[^a-z0-9]+", "-", last.lower())[:NAME_CHARS_MAX].strip("-") or "job"


def shown_ranks(show_ranks: str, tee: str, mesh: Mesh | None = None) -> Ranks:
    """Return the ranks whose output is shown: `--show-ranks all` or `0,7`; otherwise torchrun's `--tee`, whose numbers are
    streams; otherwise rank 0, and of a mesh with pipeline stages the first rank of the last stage, which knows the loss."""
    stages = dict(mesh.dims).get("pp", 1) if mesh is not None else 1
    if mesh is not None and stages > 1 and not (show_ranks or tee):
        return frozenset({0, next(rank for rank in range(mesh.world_size) if mesh.coords(rank)["pp"] == stages - 1)})
    if not show_ranks and tee:
        return _teed(tee)
    if show_ranks == "all":
        return ALL_RANKS
    parts = [part.strip() for part in (show_ranks or "0").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise InvalidSpec("--show-ranks", show_ranks, "all, or ranks separated by commas, for example 0,7")
    return frozenset(int(part) for part in parts)


def _teed(tee: str) -> Ranks:
    """Parse `--tee`: `3` shows both streams of every rank, `0:1,1:3` those of ranks 0 and 1. Holdfast merges the streams."""
    if re.fullmatch(r"[0-3]", tee):
        return frozenset() if tee == "0" else ALL_RANKS
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", tee, re.ASCII):
        raise InvalidSpec("--tee", tee, "0 to 3 or RANK:0 to 3, as in torchrun; to choose ranks use --show-ranks 0,7")
    pairs = [part.split(":") for part in tee.split(",")]
    return frozenset(int(rank) for rank, streams in pairs if streams != "0")


def _nodes(nnodes: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", nnodes, re.ASCII):
        raise InvalidSpec("--nnodes", nnodes, "a number or MIN:MAX, for example 2 or 1:4")
    minimum, _, maximum = nnodes.partition(":")
    fewest, most = int(minimum), int(maximum or minimum)
    if not 1 <= fewest <= most:
        raise InvalidSpec("--nnodes", nnodes, "a number of at least 1, or MIN:MAX with 1 ≤ MIN ≤ MAX")
    return fewest, most


def workers(nproc: str) -> int:
    """Return the workers per node for torchrun's `--nproc-per-node`. Raises `InvalidSpec`."""
    gpus = len(list(GPUS.glob("*")))
    match nproc:
        case "gpu" if not gpus:
            raise InvalidSpec("--nproc-per-node", nproc, "a number or cpu: this machine has no GPU")
        case "gpu":
            return gpus
        case "cpu":
            return os.cpu_count() or 1
        case "auto":
            return gpus or os.cpu_count() or 1
        case number if re.fullmatch(r"[1-9][0-9]{0,8}", number, re.ASCII):
            return int(number)
    raise InvalidSpec("--nproc-per-node", nproc, "a number of at least 1, gpu, cpu or auto")

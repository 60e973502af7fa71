"""The chain: several allocations of one job, one after the other, and the files that they share.

<directory>/chain.json     written before the submission to Slurm; each allocation adds its exit code
<directory>/state/         state of the control plane: jobs, history, join token. Used by one allocation at a time
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from holdfast.cli.endings import FAILED, SUSPENDED, UNAVAILABLE
from holdfast.domain.errors import InvalidSpec, NotFound
from holdfast.runtime.files import write_whole

FILE = "chain.json"


@dataclass(frozen=True, slots=True)
class Link:
    """One ended allocation. `code`: exit code of the job (`endings.py`)."""

    slurm_job: str
    code: int


@dataclass(frozen=True, slots=True)
class Chain:
    """`id`: token that identifies every allocation of the chain as the same launcher. `slurm_jobs`: in order of submission."""

    id: str
    job: str
    slurm_jobs: tuple[str, ...] = ()
    ended: tuple[Link, ...] = field(default=())

    @classmethod
    def new(cls, job: str) -> Chain:
        return cls(secrets.token_hex(16), job)

    @classmethod
    def of(cls, directory: Path, job: str) -> Chain:
        """Return the chain for a submission from this directory. It continues the run of the previous chain unless that run has
        ended: it keeps the token, by which the supervisor, whose state is in the directory, identifies a launcher. All earlier
        allocations must have ended."""
        try:
            before = newest(directory)
        except (NotFound, InvalidSpec):
            return cls.new(job)
        return replace(before, slurm_jobs=()) if before.job == job and before.over is None else cls.new(job)

    @property
    def over(self) -> int | None:
        """The exit code of the job if no further allocation is needed, otherwise None."""
        if not self.ended or self.ended[-1].code in (SUSPENDED, FAILED, UNAVAILABLE):
            return None
        return self.ended[-1].code

    def ended_by(self, link: Link) -> Chain:
        return replace(self, ended=(*self.ended, link))

    def write(self, directory: Path) -> None:
        write_whole(directory / FILE, json.dumps(asdict(self), indent=1).encode(), durable=True)


def read(directory: Path, chain_id: str) -> Chain:
    """Read the chain. Raises `NotFound` if this machine does not see its file, `InvalidSpec` if the file is of another
    chain."""
    chain = newest(directory)
    if chain.id != chain_id:
        raise InvalidSpec(
            "--dir",
            str(directory),
            f"the directory of this submission, but {chain.job} has been submitted from it again since",
        )
    return chain


def newest(directory: Path) -> Chain:
    """Return the chain that was submitted last. Raises as `read` does."""
    path = directory / FILE
    try:
        raw = json.loads(path.read_bytes())
        ended = tuple(Link(str(each["slurm_job"]), int(each["code"])) for each in raw["ended"])
        return Chain(str(raw["id"]), str(raw["job"]), tuple(map(str, raw["slurm_jobs"])), ended)
    except FileNotFoundError:
        raise NotFound(
            f"{path} does not exist on this node: --dir must be on a file system that the login node and all nodes share"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InvalidSpec("--dir", str(path), f"the file that `holdfast slurm submit` has written ({error})") from error

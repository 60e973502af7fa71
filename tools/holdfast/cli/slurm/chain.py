"""The chain: several allocations of one job, one after the other, and what each leaves for the next in the shared directory.

<directory>/chain.json     written at submission, before Slurm knows of it; its allocations add how they ended
<directory>/state/         the control plane's: jobs, history, join token. Used by one allocation at a time
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
    """One allocation that has ended. `code`: exit code of the job (`endings.py`)."""

    slurm_job: str
    code: int


@dataclass(frozen=True, slots=True)
class Chain:
    """`id`: token by which every allocation of the chain is the same launcher to the supervisor. `slurm_jobs`: as submitted."""

    id: str
    job: str
    slurm_jobs: tuple[str, ...] = ()
    ended: tuple[Link, ...] = field(default=())

    @classmethod
    def new(cls, job: str) -> Chain:
        return cls(secrets.token_hex(16), job)

    @classmethod
    def of(cls, directory: Path, job: str) -> Chain:
        """The chain for a submission from this directory: it goes on with the run of the one before, unless that is over.
        The supervisor, whose state is in the directory, knows a launcher by its token. None of the allocations before may be
        left."""
        try:
            before = newest(directory)
        except (NotFound, InvalidSpec):
            return cls.new(job)
        return replace(before, slurm_jobs=()) if before.job == job and before.over is None else cls.new(job)

    @property
    def over(self) -> int | None:
        """The exit code of the job, if a further allocation is of no use."""
        if not self.ended or self.ended[-1].code in (SUSPENDED, FAILED, UNAVAILABLE):
            return None
        return self.ended[-1].code

    @property
    def failed_before(self) -> bool:
        return bool(self.ended) and self.ended[-1].code == FAILED

    def ended_by(self, link: Link) -> Chain:
        return replace(self, ended=(*self.ended, link))

    def write(self, directory: Path) -> None:
        write_whole(directory / FILE, json.dumps(asdict(self), indent=1).encode(), durable=True)


def read(directory: Path, chain_id: str) -> Chain:
    """Raises `NotFound` if this machine does not see what the submission has written, `InvalidSpec` for another chain's."""
    chain = newest(directory)
    if chain.id != chain_id:
        raise InvalidSpec(
            "--dir",
            str(directory),
            f"the directory of this submission: {chain.job} was submitted from it again meanwhile",
        )
    return chain


def newest(directory: Path) -> Chain:
    """The chain that was submitted last. Raises as `read` does."""
    path = directory / FILE
    try:
        raw = json.loads(path.read_bytes())
        ended = tuple(Link(str(each["slurm_job"]), int(each["code"])) for each in raw["ended"])
        return Chain(str(raw["id"]), str(raw["job"]), tuple(map(str, raw["slurm_jobs"])), ended)
    except FileNotFoundError:
        raise NotFound(
            f"{path} does not exist on this node: --dir must be on a file system that the login node and all nodes share"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidSpec("--dir", str(path), f"the file that `holdfast slurm submit` has written ({error})") from error

"""Finds the checkpoint that a job's `checkpoint.resume` names. Done at submission, so that the client gets errors at once.

Blocking; call it from a thread. The supervisor's machine reads a listing and a manifest; the shards go to the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import structlog

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import HoldfastError, IncompatibleVersion, IntegrityError, InvalidSpec, NotFound
from holdfast.domain.generations import StoredStep
from holdfast.domain.job import JobSpec, ResumeSpec
from holdfast.stores import ObjectStore, layout, open_store

NAMED_MAX = 8  # items that an error lists

_FIELD = "checkpoint.resume"

log = structlog.get_logger("holdfast.supervisor.resume")


def resolve(spec: JobSpec, opener: Callable[[str], ObjectStore] = open_store) -> StoredStep | None:
    """None if the job starts from step 0. Raises `InvalidSpec`, which lists the existing checkpoints, or `Unavailable`."""
    wanted = spec.resume
    if wanted is None:
        return None
    with closing(opener(wanted.store)) as store:
        found = _find(store, wanted)
    if found.mesh.resized(1) != spec.mesh.resized(1):
        raise InvalidSpec(
            _FIELD,
            str(wanted),
            f"a checkpoint of the mesh {spec.mesh}, in any number of replicas; that of step {found.step} was saved by "
            f"{found.mesh}",
        )
    return found


def own_checkpoint(
    spec: JobSpec, step: int | None, opener: Callable[[str], ObjectStore] = open_store
) -> StoredStep | None:
    """The newest complete step, or this one, under the job's own name in its object store. None if there is none, or if the
    store does not answer: then only the checkpoints on the nodes are known."""
    if not spec.checkpoint.store:
        return None
    try:
        with closing(opener(spec.checkpoint.store)) as store:
            return _find(store, ResumeSpec(spec.checkpoint.store, spec.name, None, step))
    except HoldfastError as error:
        log.info("no checkpoint of this name in the object store", job=spec.name, reason=str(error))
        return None


def _find(store: ObjectStore, wanted: ResumeSpec) -> StoredStep:
    complete = layout.steps(store, wanted.job)
    fitting = [age for age in complete if wanted.attempt in (None, age.attempt) and wanted.step in (None, age.step)]
    damaged: list[str] = []
    for age in fitting:
        try:
            return layout.load(store, wanted.job, *age).stored_step
        except (
            IntegrityError,
            IncompatibleVersion,
            NotFound,
        ) as error:  # deleted meanwhile, or unusable: try the one before it
            damaged.append(str(error))
    raise InvalidSpec(_FIELD, str(wanted), _what_is_there(store, wanted, complete, damaged))


def _what_is_there(
    store: ObjectStore, wanted: ResumeSpec, complete: Sequence[CheckpointId], damaged: Sequence[str]
) -> str:
    if damaged:
        return f"a checkpoint that can be read: {'; '.join(damaged[:NAMED_MAX])}"
    if complete:
        shown = ", ".join(f"{step} (attempt {attempt})" for attempt, step in complete[:NAMED_MAX])
        return f"a complete step of {wanted.job} in {wanted.store}, newest first: {shown}{_more(complete)}"
    if names := layout.jobs(store):
        return f"a job with checkpoints in {wanted.store}: {', '.join(names[:NAMED_MAX])}{_more(names)}"
    return f"a job with checkpoints: there are none in {wanted.store}"


def _more(found: Sequence[object]) -> str:
    return f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""

"""The same exception at the same step again: a bug in the script or its data, which no restart can cure.

Two failures are the same when type and stack frames agree (not the message: it holds addresses, sizes and indices) and the
job has made no step between them that it had not made before. Where the step is not known (a script without `holdfast.train`,
or a failure before the first step) both must also have come early, or a rare crash hours apart would look like a loop.

Not a detector of its own: its conclusion *replaces* the plain WORKER_EXCEPTION, so `worker_exit` asks it first.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from holdfast.domain.signals import WorkerError

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class Failure:
    """The newest root exception of a job, and in how many generations running it has been seen."""

    fingerprint: str
    step: int  # last step that the rank had finished
    generation: int
    early: bool  # soon after the generation started
    tries: int = 1
    nodes: frozenset[str] = frozenset()  # where it was seen


def fingerprint(error: WorkerError) -> str:
    """Type and frames, as 16 hex digits; without frames the message with its numbers removed."""
    where = error.frames or (_NUMBER.sub("#", error.message),)
    return hashlib.blake2s("\n".join((error.type, *where)).encode(), digest_size=8).hexdigest()


def judge(last: Failure | None, error: WorkerError, *, step: int, generation: int, early: bool, node: str) -> Failure:
    """The failure as it now stands; `tries` > 1 means that it is the same one again.

    `last` must have been forgotten by the caller when the job has since finished a step beyond it.
    """
    print_ = fingerprint(error)
    new = Failure(fingerprint=print_, step=step, generation=generation, early=early, nodes=frozenset({node}))
    if last is None or last.fingerprint != print_:
        return new
    if generation <= last.generation:
        return last  # another rank of the same generation, or an old signal that came late
    same_place = (step == last.step and step > 0) or (step == 0 and early and (last.step > 0 or last.early))
    if not same_place:
        return new
    # A rank that failed before it finished anything in this generation has restored the step that it failed at before.
    return Failure(print_, step or last.step, generation, early, last.tries + 1, last.nodes | {node})

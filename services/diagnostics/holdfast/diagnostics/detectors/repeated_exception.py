"""Recognises the same exception at the same step again: a bug in the script or its data, which a restart cannot fix. Pure.

Two failures are the same if type and stack frames agree and the job has finished no new step between them. The message is not
compared, because it contains addresses, sizes and indices. If the step is not known (a script without `holdfast.train`, or a
failure before the first step), both failures must also have occurred soon after the start: rare crashes that are hours apart
are not a loop.

The fingerprint of a crash without an exception is the POSIX signal or the exit code; `blame` counts it only on two nodes. A
rank that has ended with code 0 while others needed it has the fingerprint of this code, and counts like an exception.

Not a detector: `worker_exit` calls this module, because the finding *replaces* the plain WORKER_EXCEPTION.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.diagnostics.detectors.blame import FROM_OUTSIDE, Blame, Who
from holdfast.diagnostics.detectors.error_class import ErrorClass
from holdfast.domain.signals import WorkerError, WorkerExited

ROOTS_MAX = 8  # different failures kept per job
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class Failure:
    """One root failure of a job, and the number of generations in which it was seen without progress in between."""

    fingerprint: str
    step: int  # last step that the rank had finished
    generation: int
    early: bool  # soon after the generation started
    tries: int = 1
    nodes: frozenset[str] = frozenset()  # nodes on which it was seen


def fingerprint(error: WorkerError) -> str:
    """Hash of type and frames, as 16 hex digits. Without frames, the message with its numbers removed is used."""
    where = error.frames or (_NUMBER.sub("#", error.message),)
    return hashlib.blake2s("\n".join((error.type, *where)).encode(), digest_size=8).hexdigest()


def fingerprint_of(exit_: WorkerExited) -> str:
    """Fingerprint of the exception, or else of the exit code or POSIX signal. Empty if the process was ended from outside."""
    if exit_.error is not None:
        return fingerprint(exit_.error)
    if exit_.signal in FROM_OUTSIDE:
        return ""
    return f"signal {exit_.signal}" if exit_.signal is not None else f"exit code {exit_.exit_code}"


def got_past(known: Mapping[str, Failure], step: int) -> dict[str, Failure]:
    """Drop the failures at steps that the job has now passed by finishing `step`: they do not repeat at their step."""
    return {print_: failure for print_, failure in known.items() if step <= failure.step}


def remembered(known: Mapping[str, Failure], failure: Failure) -> dict[str, Failure]:
    """Return `known` with `failure` added. Failures are counted separately, so that alternating bugs do not hide each other."""
    others = {print_: each for print_, each in known.items() if print_ != failure.fingerprint}
    newest = sorted(others.values(), key=lambda each: each.generation)[-(ROOTS_MAX - 1) :]
    return {each.fingerprint: each for each in (*newest, failure)}


def left_again(left: Failure | None) -> Blame | None:
    """Attribute a rank that has ended with code 0 while others needed it: to the script, if it has done so again."""
    if left is None or left.tries == 1:
        return None
    return Blame(Who.USER, ErrorClass.SCRIPT, "ended with exit code 0 before the others again, at the same place")


def judge(last: Failure | None, print_: str, *, step: int, generation: int, early: bool, node: str) -> Failure:
    """Return the failure with its count; `tries` > 1: the same failure again.

    If the job has since finished a step beyond `last`, the caller must have dropped `last` (`got_past`).
    """
    new = Failure(fingerprint=print_, step=step, generation=generation, early=early, nodes=frozenset({node}))
    if last is None or last.fingerprint != print_:
        return new
    if generation <= last.generation:
        # Another rank of the same generation, or a late signal of an earlier one.
        return replace(last, nodes=last.nodes | {node}) if generation == last.generation else last
    same_place = (step == last.step and step > 0) or (step == 0 and early and (last.step > 0 or last.early))
    if not same_place:
        return new
    # A rank that failed before its first step in this generation had restored the step of the earlier failure.
    return Failure(print_, step or last.step, generation, early, last.tries + 1, last.nodes | {node})

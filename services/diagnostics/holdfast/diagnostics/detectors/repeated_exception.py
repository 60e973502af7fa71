"""Recognises the same exception at the same step again: a bug in the script or its data, which a restart cannot cure. Pure.

Two failures are the same if type and stack frames agree (not the message, which holds addresses, sizes and indices) and the
job made no new step between them. If the step is not known (a script without `holdfast.train`, or a failure before the first
step), both must also have come soon after the start: a rare crash hours apart is not a loop.

A crash without an exception has the signal or the exit code as its fingerprint; `blame` counts it only on two nodes.

Not a detector of its own: its finding *replaces* the plain WORKER_EXCEPTION, so `worker_exit` calls it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.diagnostics.detectors.blame import FROM_OUTSIDE
from holdfast.domain.signals import WorkerError, WorkerExited

ROOTS_MAX = 8  # different failures remembered per job
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class Failure:
    """One root failure of a job, and in how many generations it has been seen without progress in between."""

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


def fingerprint_of(exit_: WorkerExited) -> str:
    """Of the exception, or of the exit code or signal. Empty if the process was ended from outside."""
    if exit_.error is not None:
        return fingerprint(exit_.error)
    if exit_.signal in FROM_OUTSIDE:
        return ""
    return f"signal {exit_.signal}" if exit_.signal is not None else f"exit code {exit_.exit_code}"


def got_past(known: Mapping[str, Failure], step: int) -> dict[str, Failure]:
    """Drop the failures that the job has passed by finishing `step`: they were no bugs of the script, or other ones."""
    return {print_: failure for print_, failure in known.items() if step <= failure.step}


def remembered(known: Mapping[str, Failure], failure: Failure) -> dict[str, Failure]:
    """`known` with `failure` as the newest. Each is counted separately: two bugs that alternate do not hide each other."""
    others = {print_: each for print_, each in known.items() if print_ != failure.fingerprint}
    newest = sorted(others.values(), key=lambda each: each.generation)[-(ROOTS_MAX - 1) :]
    return {each.fingerprint: each for each in (*newest, failure)}


def judge(last: Failure | None, print_: str, *, step: int, generation: int, early: bool, node: str) -> Failure:
    """The failure with its count; `tries` > 1: the same failure again.

    `last` must have been forgotten by the caller when the job has since finished a step beyond it.
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
    # A rank that failed before its first step in this generation had restored the step at which it failed before.
    return Failure(print_, step or last.step, generation, early, last.tries + 1, last.nodes | {node})

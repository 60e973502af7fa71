"""Failure attribution: decides whether the user's script, the hardware or neither is responsible. Pure.

The first rule that matches decides. Sources are ByteRobust (SOSP'25) and the restart policies of NVRx and NVSentinel:

1. a hardware finding on the same node within a minute of the failure, and since the first start of the job: hardware, whatever
the exception is; a failure of a start with learned modules, before its first step: not known, since the next start has none;
2. at the job's first start, before its first step, the command line was refused or the script could not be
loaded, and all ranks are on this node or two nodes have shown it: the user's; 3. the kernel ran out of memory on the node, or
the exception is about memory: an error class of its own, the user's if it repeats; 4. an error that broken hardware raises as
well (an illegal address, an ECC error; not the assertion of a kernel): the user's if it was seen on two nodes; hardware if two
other jobs failed in this way on the node and on none of their other nodes; otherwise not known. A repetition on the same node
proves nothing about the script; 5. a file system, a service, a driver that fails, or a limit of the node: not known, however
often; a missing file or package: the user's only if it was missing on two nodes; 6. the same exception again at the same place:
the user's; the same POSIX signal or exit code only if it was seen on two nodes; 7. a POSIX signal or exit code on a node where
two other jobs failed in this way, and on none of their other nodes: hardware. Signals from outside (SIGKILL …) do not count;
8. an exception of the script, before the first step and soon after the start: user's.

An attribution to the user does not stop the job by itself: after a failure on one node the policy tries another node first, if
there is one.

The attribution also contains the probability of a user's fault by the time to failure alone (`prior_user`). No rule here uses
it; the supervisor uses it to weigh faults of a node.

Not a detector: `worker_exit` calls this module and writes the result into the finding's evidence.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.diagnostics.detectors.error_class import ErrorClass, class_of, is_assertion, is_usage
from holdfast.domain.signals import WorkerExited


class Who(StrEnum):
    USER = "user"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


OTHER_JOBS_MIN = 2  # one other job's failure on a node may be chance
FROM_OUTSIDE = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)  # signals that an operator or another program sends to a process
_USER_EVENTS, _USER_MEAN_S = 1890, 144.0
_MACHINE_EVENTS, _MACHINE_MEAN_S = 281, 1303 * 60.0


@dataclass(frozen=True, slots=True)
class Blame:
    who: Who
    error: ErrorClass
    why: str  # a clause of an English sentence
    after_s: float = 0.0  # from the job's first start to the failure
    prior_user: float = 0.0  # probability that such a failure is the user's, by its time alone


@dataclass(frozen=True, slots=True)
class Context:
    """Facts in addition to the exit itself."""

    hardware: str = ""  # the summary of a hardware finding on this node within a minute
    host_oom: str = (
        ""  # the kernel's line about a process that it killed for lack of memory on this node within a minute
    )
    tries: int = 1  # how often this exception was seen at this place
    nodes: int = 1  # number of nodes on which it was seen
    # Other jobs that failed on this node within a day in a way that a broken node can cause, and on no other of their nodes.
    other_jobs: int = 0
    after_s: float = 0.0  # since the job's first generation started
    before_first_step: bool = False
    early: bool = False  # soon after the start
    first_start: bool = False  # of the job, as far as is known
    alone: bool = False  # all ranks of the generation are on this node


def may_be_the_nodes(exit_: WorkerExited, *, host_oom: bool = False) -> bool:
    """Whether a broken node can cause this exit. It cannot cause a script's exception, a lack of memory, a NaN or a POSIX
    signal from outside."""
    if exit_.error is None and exit_.signal in FROM_OUTSIDE:
        return False
    return class_of(exit_.error, exit_.signal, host_oom=host_oom) in (ErrorClass.DEVICE, ErrorClass.CRASH)


def prior_user(after_s: float) -> float:
    """Return the probability of a user's fault by the time to failure alone: a mixture of two exponentials, weighted by their
    observed frequencies.

    Source: Acme's failure study: 1,890 script errors after 2.4 minutes on average (0.7 to 4, by kind), 281 infrastructure
    errors after 1,303 minutes (ECC). This is only a prior: no job is stopped and no node replaced because of it.
    """
    user = _USER_EVENTS / _USER_MEAN_S * math.exp(-after_s / _USER_MEAN_S)
    machine = _MACHINE_EVENTS / _MACHINE_MEAN_S * math.exp(-after_s / _MACHINE_MEAN_S)
    return user / (user + machine) if user + machine > 0 else 0.0


def blame(exit_: WorkerExited, context: Context) -> Blame:
    """Attribute the root failure of a generation. Not to be used for cascading failures."""
    return replace(_attribute(exit_, context), after_s=context.after_s, prior_user=prior_user(context.after_s))


_NOT_THE_SCRIPT = {
    ErrorClass.STORAGE: "a file system failed, and no script makes it fail",
    ErrorClass.SERVICE: "a service on the network did not answer, which may be temporary",
    ErrorClass.NODE: "the node's own driver or libraries failed, and no script makes them fail",
    ErrorClass.RESOURCES: "a limit of the node was reached, which may be another one elsewhere",
}


def _attribute(exit_: WorkerExited, context: Context) -> Blame:
    error = class_of(exit_.error, exit_.signal, host_oom=bool(context.host_oom))
    if context.hardware:
        return Blame(Who.HARDWARE, error, f"at the same time: {context.hardware}")
    if exit_.learned_start:
        learned = "its imports were loaded ahead of time (preload: auto), and the next start does not load them"
        return Blame(Who.UNKNOWN, ErrorClass.LEARNED_START, learned)
    if context.first_start and (context.alone or context.nodes > 1) and is_usage(exit_):
        return Blame(Who.USER, ErrorClass.USAGE, "its command line or its code is wrong")
    if error in (ErrorClass.DEVICE_OOM, ErrorClass.HOST_OOM, ErrorClass.NAN) and context.tries > 1:
        return Blame(Who.USER, error, f"the same {error.value} for the {context.tries}th time at the same place")
    if error is ErrorClass.HOST_OOM and context.host_oom:
        return Blame(Who.UNKNOWN, error, context.host_oom)
    if error is ErrorClass.DEVICE and context.nodes > 1:
        return Blame(Who.USER, error, f"the same device error at the same place on {context.nodes} nodes")
    if error is ErrorClass.CRASH and context.nodes > 1:
        return Blame(Who.USER, error, f"ended the same way at the same place on {context.nodes} nodes")
    if context.other_jobs >= OTHER_JOBS_MIN and may_be_the_nodes(exit_, host_oom=bool(context.host_oom)):
        return Blame(
            Who.HARDWARE, error, f"{context.other_jobs} other jobs failed on this node, and on no other of theirs"
        )
    if error is ErrorClass.DEVICE and not is_assertion(exit_.error):
        return Blame(Who.UNKNOWN, error, "a bug in a kernel and a broken board raise this alike")
    if (why := _NOT_THE_SCRIPT.get(error)) is not None:
        return Blame(Who.UNKNOWN, error, why)
    if error is ErrorClass.ENVIRONMENT and context.nodes < 2:
        return Blame(Who.UNKNOWN, error, "missing on one node so far: the script's fault, or the node's")
    if exit_.error is not None and context.tries > 1:
        return Blame(Who.USER, error, "the same exception again at the same place")
    if error is ErrorClass.SCRIPT and context.before_first_step and context.early:
        return Blame(Who.USER, error, "the script's own exception, before the first step")
    return Blame(Who.UNKNOWN, error, "seen once")

"""Classifies exits: a failure of the rank itself, or a cascading failure because another rank has ended. Pure.

When one rank of a job ends, the others fail in their next collective within milliseconds (`holdfast.domain.communication`).
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable
from enum import IntEnum

from holdfast.diagnostics.detectors.error_class import is_of_this_rank
from holdfast.diagnostics.detectors.outage import of_a_client
from holdfast.domain.communication import COMMUNICATION_TEXT, CONNECTION_LOST, is_communication, is_of_collectives
from holdfast.domain.signals import WorkerExited

MESSAGE_CHARS_MAX = 240  # of an exception, in a sentence
# last lines of the log; earlier lines may be about another connection, or an exception that was caught
_LOG_LINES_MAX = 8

# In a log, the names of the libraries also stand in lines that every healthy run prints: "NCCL version 2.27.3", "[Gloo] Rank 0
# is connected …", "[W… ProcessGroupNCCL.cpp:1538] Warning: … destroy_process_group() was not called". Only these state why a
# process ended: an exception of Python at the end of the log, an exception of C++ that nothing caught, its frames, and torch's
# log lines of level error or fatal; faulthandler may have printed much after those.
_EXCEPTION = re.compile(r"^(?:\[\S{1,40}\]: ?)*[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b")
_ABORT = re.compile(r"what\(\):|terminate called after|^(?:\[\S{1,40}\]: ?)*frame #\d|\[[EF]\d{3,4} ")


class Cause(IntEnum):
    """Kind of failure; the kind that is more likely the root sorts first."""

    OWN = 0  # a POSIX signal, an exit code, the script's own exception
    COLLECTIVE = 1  # a communication error: some other rank has ended


def is_failure(exit_: WorkerExited) -> bool:
    """Whether the worker ended unexpectedly, and not with code 0."""
    return not exit_.expected and (exit_.signal is not None or exit_.exit_code != 0)


def is_clean(exit_: WorkerExited) -> bool:
    """Whether the worker ended with code 0 and not on an order."""
    return not exit_.expected and exit_.signal is None and exit_.exit_code == 0


def cause_of(exit_: WorkerExited) -> Cause:
    """Distinguish a failure of the rank itself from a cascading failure."""
    if (error := exit_.error) is not None:
        if not is_communication(error):
            return Cause.OWN
        if is_of_collectives(error):
            # NCCL could not use the GPU of this rank, for example: "ncclUnhandledCudaError: … Cuda failure 2 'out of memory'".
            return Cause.OWN if is_of_this_rank(error.message) else Cause.COLLECTIVE
        return Cause.OWN if of_a_client(error) else Cause.COLLECTIVE
    # Without an error file only the log is available. NCCL's watchdog ends a process by abort(); any other POSIX signal is a
    # failure of this process itself.
    if exit_.signal is not None and exit_.signal != signal.SIGABRT:
        return Cause.OWN
    log_end = exit_.log_tail[-_LOG_LINES_MAX:]
    reasons = [line for line in exit_.log_tail if _ABORT.search(line)] + list(filter(_EXCEPTION.search, log_end))
    if any(map(is_of_this_rank, reasons)):
        return Cause.OWN
    cascading = any(map(COMMUNICATION_TEXT.search, reasons)) or any(map(CONNECTION_LOST.search, log_end))
    return Cause.COLLECTIVE if cascading else Cause.OWN


def failed_at(exit_: WorkerExited) -> float:
    """Time of the failure: the time of the exception if it is known, because the end of a process can take seconds."""
    if exit_.error is not None and 0.0 < exit_.error.at <= exit_.at:
        return exit_.error.at
    return exit_.at


def _has_uptimes(exit_: WorkerExited) -> bool:
    """Whether the agent sent monotonic times, and they are finite."""
    return exit_.uptime_s > 0.0 and math.isfinite(exit_.uptime_s + sum(exit_.step_end_uptimes_s))


def _failed_uptime_s(exit_: WorkerExited) -> float:
    """As `failed_at`, by the monotonic clock of the node; 0.0 if that time is not known."""
    if exit_.error is not None and 0.0 < exit_.error.uptime_s <= exit_.uptime_s:
        return exit_.error.uptime_s
    return exit_.uptime_s


def _after_step_s(exit_: WorkerExited, back: int) -> float:
    """Seconds from the end of a step, `back` steps before the last one, to the failure; by the monotonic clock if known."""
    if _has_uptimes(exit_) and len(exit_.step_end_uptimes_s) == len(exit_.step_ends):
        return _failed_uptime_s(exit_) - exit_.step_end_uptimes_s[back]
    return failed_at(exit_) - exit_.step_ends[back]


def earlier_by(exit_: WorkerExited, other: WorkerExited) -> float:
    """Seconds by which `exit_` failed before `other`.

    On one node the monotonic clock is used. Between nodes each failure is measured on its own node, from the end of the newest
    step that both exits list, because all ranks end a step at about the same time. Without such a step two clocks are compared.
    """
    if exit_.node == other.node and _has_uptimes(exit_) and _has_uptimes(other):
        return _failed_uptime_s(other) - _failed_uptime_s(exit_)
    for back in range(len(exit_.step_ends)):
        behind = other.step - (exit_.step - back)
        if 0 <= behind < len(other.step_ends):
            return _after_step_s(other, behind) - _after_step_s(exit_, back)
    return failed_at(other) - failed_at(exit_)


def first_of(exits: Iterable[WorkerExited]) -> WorkerExited | None:
    """Return the exit that failed, or ended, first; if several are at the same time, that of the lowest rank. None if empty."""
    first: WorkerExited | None = None
    for each in sorted(exits, key=lambda each: each.rank):
        if first is None or earlier_by(each, first) > 0.0:
            first = each
    return first


def ending(exit_: WorkerExited) -> str:
    """How the worker ended, as a verb phrase: `was killed by SIGKILL`, `exited with code 3`, `raised ValueError: bad batch`."""
    if exit_.error is not None:
        message = in_a_sentence(exit_.error.message)
        return f"raised {exit_.error.type}" + (f": {message}" if message else "")
    if exit_.signal is not None:
        try:
            name = signal.Signals(exit_.signal).name
        except ValueError:
            name = f"signal {exit_.signal}"
        return f"was killed by {name}"
    return f"exited with code {exit_.exit_code}"


def in_a_sentence(message: str) -> str:
    """The beginning of an exception's message, without its full stop: the sentence goes on behind it."""
    line = " ".join(message.split()).removesuffix(".")
    return line if len(line) <= MESSAGE_CHARS_MAX else f"{line[:MESSAGE_CHARS_MAX].rstrip()} …"

"""Faults that can be injected on purpose into a job that allows it (`chaos: true` in its job file). Each fault ends by itself.

Faults of a rank or its node, caused by the agent of the node:

* crash: the agent sends SIGKILL to the rank.
* hang: SIGSTOP to the rank, SIGCONT after `for_s`.
* slow: the rank is stopped and continued in turn, stopped for half of the time, until `for_s` is over.
* node_loss: the agent ends itself by SIGKILL, and its workers with it. The service manager starts the agent again.
* disk_full: a file fills the disk that holds the checkpoints of the rank's node, until `for_s` is over.
* bit_flip: one bit of a stored checkpoint on the rank's node is changed. The change is found when a restore reads the bit.
* xid: an Xid line is added to the kernel log that the agent reads. The action of the Xid catalogue follows.
* lossy_link: a share of the packets of one network interface of the node is lost, in each direction, until `for_s` is over.
* clock_jump: the wall clock of the node's machine jumps by `offset_s`, and back when `for_s` is over.

Faults of the control plane, caused by the leading supervisor:

* redis_kill: the Redis server of the event log is shut down. The service manager starts it again.
* leader_kill: the leading supervisor ends itself by SIGKILL. A standby takes over, or the service manager starts it again.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from holdfast.domain.errors import Conflict, InvalidSpec


class FaultKind(StrEnum):
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    NODE_LOSS = "node_loss"
    XID = "xid"
    DISK_FULL = "disk_full"
    BIT_FLIP = "bit_flip"
    LOSSY_LINK = "lossy_link"
    CLOCK_JUMP = "clock_jump"
    REDIS_KILL = "redis_kill"
    LEADER_KILL = "leader_kill"


# Faults that last for `for_s`.
LASTING: Final = frozenset(
    {FaultKind.HANG, FaultKind.SLOW, FaultKind.DISK_FULL, FaultKind.LOSSY_LINK, FaultKind.CLOCK_JUMP}
)
# Faults that may have no visible effect: a bit is not read, lost packets are sent again, nothing depends on the clock.
SILENT: Final = frozenset({FaultKind.BIT_FLIP, FaultKind.LOSSY_LINK, FaultKind.CLOCK_JUMP})
CONTROL_PLANE: Final = frozenset({FaultKind.REDIS_KILL, FaultKind.LEADER_KILL})


FOR_S_MAX: Final = 3600.0  # no fault lasts longer
FOR_S_DEFAULT: Final = 60.0
INJECT_TIMEOUT_S: Final = 15.0  # an agent refuses an order that arrives later
DIE_AFTER_S: Final = 0.5  # delay before a process ends itself, in which it sends its answer
XID_MAX: Final = 999
LOSS_PERCENT_MIN: Final = 0.1
LOSS_PERCENT_MAX: Final = 95.0  # a higher loss would be a disconnected link
LOSS_PERCENT_DEFAULT: Final = 5.0
OFFSET_S_MAX: Final = 86_400.0
OFFSET_S_DEFAULT: Final = 60.0


def require_allowed(job: str, chaos: bool) -> None:
    """Raises `Conflict` unless the job file contains `chaos: true`."""
    if not chaos:
        raise Conflict(
            f"{job} does not allow injected faults; a job that is meant for such tests has `chaos: true` in its file"
        )


def require_valid(kind: FaultKind, *, for_s: float, xid: int, loss_percent: float, offset_s: float) -> None:
    """Raises `InvalidSpec` for a value that is not valid for the kind."""
    if not 0 < for_s <= FOR_S_MAX:
        raise InvalidSpec("for_s", for_s, f"more than 0 and at most {FOR_S_MAX:g} s")
    if kind is FaultKind.XID and not 1 <= xid <= XID_MAX:
        raise InvalidSpec("xid", xid, f"1 to {XID_MAX}")
    if kind is FaultKind.LOSSY_LINK and not LOSS_PERCENT_MIN <= loss_percent <= LOSS_PERCENT_MAX:
        raise InvalidSpec("loss_percent", loss_percent, f"{LOSS_PERCENT_MIN:g} to {LOSS_PERCENT_MAX:g}")
    if kind is FaultKind.CLOCK_JUMP and not (offset_s and math.isfinite(offset_s) and abs(offset_s) <= OFFSET_S_MAX):
        raise InvalidSpec("offset_s", offset_s, f"seconds from -{OFFSET_S_MAX:g} to {OFFSET_S_MAX:g}, not 0")


# At the end of an injected line of the kernel log: the agent reads such a line although the kernel has not written it.
INJECTED = "injected by holdfast inject"


def xid_line(code: int, gpu: int = 0) -> str:
    """An Xid line as the NVIDIA driver writes it to the kernel log."""
    return f"NVRM: Xid (PCI:0000:{gpu + 0x18:02x}:00): {code}, pid='<unknown>', name=<unknown>, {INJECTED}"

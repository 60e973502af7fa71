"""Faults that are injected on purpose into a job that allows it (`chaos: true` in its job file). Each ends by itself.

* crash: the agent of the rank's node sends it SIGKILL.
* hang: SIGSTOP to the rank, SIGCONT after `for_s`.
* slow: the rank is stopped and continued in turn, for half of the time, until `for_s` is over.
* node_loss: the agent ends itself by SIGKILL, and its workers with it. Whatever runs the agent starts it again.
* disk_full: a file fills the disk that keeps the checkpoints of the rank's node, until `for_s` is over.
* bit_flip: one bit of a stored checkpoint on the rank's node. It is found when a restore reads it.
* xid: an Xid line in the kernel log that the agent reads. The action of the Xid catalogue follows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from holdfast.domain.errors import Conflict


class FaultKind(StrEnum):
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    NODE_LOSS = "node_loss"
    XID = "xid"
    DISK_FULL = "disk_full"
    BIT_FLIP = "bit_flip"


LASTING: Final = frozenset({FaultKind.HANG, FaultKind.SLOW, FaultKind.DISK_FULL})  # for `for_s`
SILENT: Final = frozenset({FaultKind.BIT_FLIP})  # nothing shows them before something reads what is stored


FOR_S_MAX: Final = 3600.0  # no fault lasts longer
FOR_S_DEFAULT: Final = 60.0
INJECT_TIMEOUT_S: Final = 15.0  # an order that reaches its agent later is refused
XID_MAX: Final = 999


def require_allowed(job: str, chaos: bool) -> None:
    """Raises `Conflict` unless the job file says `chaos: true`."""
    if not chaos:
        raise Conflict(
            f"{job} does not allow injected faults; a job that is there to be tested has `chaos: true` in its file"
        )


def xid_line(code: int, gpu: int = 0) -> str:
    """An Xid as the NVIDIA driver words it in the kernel log."""
    return f"NVRM: Xid (PCI:0000:{gpu + 0x18:02x}:00): {code}, pid='<unknown>', name=<unknown>, injected by holdfast inject"

"""Recognizes exceptions of a rank whose communication with another rank has failed, by messages of gloo, NCCL and the TCPStore.

When one rank of a job ends, the others fail in their next collective within milliseconds. The rank that such a message names is
not evidence: three ranks that had lost the same rank named three different ones. Only the class of the error is used.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.domain.signals import WorkerError

_COLLECTIVE_TYPES: Final = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
# An exception of any other type is the script's own, whatever its message contains.
_TRANSPORT_TYPES = frozenset(
    {
        "IoException",  # of gloo
        "EnforceNotMet",
        "runtime_error",  # of C++
        "c10.Error",
        "RuntimeError",
        "TimeoutError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "BrokenPipeError",
        "EOFError",
        "OSError",
    }
)
_COMPONENT = r"gloo|nccl|tcpstore|processgroup|process group|"
_LOST = (
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|socket (?:closed|timeout)"
    r"|watchdog caught collective|timed out waiting \d+ ?ms for (?:recv|send)"
    r"|application timeout caused pair closure|remote process (?:exited|closed)|failed to recv|wait timeout after"
)
CONNECTION_LOST = re.compile(_LOST, re.IGNORECASE)
COMMUNICATION_TEXT = re.compile(_COMPONENT + _LOST, re.IGNORECASE)


def is_of_collectives(error: WorkerError) -> bool:
    """Whether torch's own exception type says that communication failed."""
    return error.type.rpartition(".")[2] in _COLLECTIVE_TYPES


def is_communication(error: WorkerError) -> bool:
    """Whether the communication of this rank failed, so that another rank may be the cause."""
    is_transport = not _TRANSPORT_TYPES.isdisjoint((error.type.rpartition(".")[2], error.type))
    return is_of_collectives(error) or (is_transport and COMMUNICATION_TEXT.search(error.message) is not None)

"""Injects a fault of the network: a percentage of the packets of one interface is lost, in each direction.

Theory. A classic BPF program at the ingress and at the egress of the interface (`tc`, qdisc clsact) draws a random number per
packet. Unlike netem, it does not change the interface's queueing, works in both directions, and needs only the modules of
`tc ... bpf`. An outgoing packet that it drops counts as sent, as if the wire had lost it. Traffic that bypasses the kernel
(RDMA) is not affected.

A record of the change is written before the change. `undo` needs only this record and may be repeated. It is called by the
first process that can do so (`machine_faults`).
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

from holdfast.agent.records import Unreadable, read_record, write_record
from holdfast.domain.errors import Conflict, HoldfastError

PREFERENCE: Final = "8471"  # identifies Holdfast's filters; the fault is refused on an interface with other filters
TC_TIMEOUT_S: Final = 10.0
_DROPS: Final = {"ingress": 2, "egress": 4}  # TC_ACT_SHOT; TC_ACT_STOLEN, which returns no error to the sender
_PASS: Final = 0xFFFFFFFF  # TC_ACT_UNSPEC: continue with the next filter
_RANDOM: Final = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_TEXT_CHARS_MAX: Final = 300


def lose(record: Path, interface: str, percent: float) -> None:
    """Drop `percent` of the packets. Raises `Conflict` with the reason, and changes nothing, if that is not possible."""
    if interface not in {name for _, name in socket.if_nameindex()}:
        raise Conflict(f"this node has no network interface {interface} (HOLDFAST_FAULT_LINK of the agent)")
    if shutil.which("tc") is None:
        raise Conflict("packets are dropped by `tc` of iproute2, which is not installed")
    try:
        kinds = {str(each.get("kind")) for each in _listed("qdisc", "show", "dev", interface)}
        if "ingress" in kinds or any(_filters(interface, direction) for direction in _DROPS):
            raise Conflict(f"{interface} has filters of other programs (see `tc filter show dev {interface} ingress`)")
        write_record(record, {"interface": interface, "made_clsact": "clsact" not in kinds})
    except (OSError, _Refused) as error:
        raise Conflict(f"the filters of {interface} cannot be changed: {error}") from error
    try:
        if "clsact" not in kinds:
            _tc("qdisc", "add", "dev", interface, "clsact")
        for direction, verdict in _DROPS.items():
            place = (direction, "pref", PREFERENCE, "protocol", "all")
            program = ("bpf", "bytecode", _program(percent, verdict), "direct-action")
            _tc("filter", "add", "dev", interface, *place, *program)
    except (OSError, _Refused) as error:
        undo(record)
        raise Conflict(
            f"packets of {interface} cannot be dropped: {error}. It needs CAP_NET_ADMIN, and a kernel with the qdisc clsact "
            "and the classifier bpf"
        ) from error


def undo(record: Path) -> bool:
    """Remove the recorded filters, if there is a record. Returns whether there was one. Raises `HoldfastError` if packets may
    still be lost; the record is then kept."""
    try:
        changed = read_record(record)
    except Unreadable:
        record.unlink(missing_ok=True)  # nothing is changed before the complete record is written
        return False
    if changed is None:
        return False
    interface = str(changed["interface"])
    try:
        if interface in {name for _, name in socket.if_nameindex()}:
            _remove(interface, made_clsact=bool(changed["made_clsact"]))
    except (OSError, _Refused) as error:
        raise HoldfastError(f"packets of {interface} may still be lost: {error}") from error
    record.unlink(missing_ok=True)
    return True


def _remove(interface: str, *, made_clsact: bool) -> None:
    for direction in _DROPS:
        if _ours(interface, direction):
            try:
                _tc("filter", "del", "dev", interface, direction, "pref", PREFERENCE)
            except _Refused:
                if _ours(interface, direction):  # otherwise another process has removed it
                    raise
    if made_clsact and not any(_filters(interface, direction) for direction in _DROPS):
        try:
            _tc("qdisc", "del", "dev", interface, "clsact")
        except _Refused:
            if any(each.get("kind") == "clsact" for each in _listed("qdisc", "show", "dev", interface)):
                raise


def _program(percent: float, verdict: int) -> str:
    """Return the program `A = random; if A < share: return verdict; return pass` in the format of tc."""
    below = min(round(percent / 100 * 2**32), 2**32 - 1)
    return f"4,32 0 0 {_RANDOM},53 1 0 {below},6 0 0 {verdict},6 0 0 {_PASS}"


def _ours(interface: str, direction: str) -> bool:
    return any(str(each.get("pref")) == PREFERENCE for each in _filters(interface, direction))


def _filters(interface: str, direction: str) -> list[dict[str, Any]]:
    return _listed("filter", "show", "dev", interface, direction)


def _listed(*words: str) -> list[dict[str, Any]]:
    text = _tc(*words)
    try:
        found = json.loads(text or "[]")
    except ValueError as error:
        raise _Refused(f"the output of `tc -j {' '.join(words)}` is not JSON: {text[:_TEXT_CHARS_MAX]!r}") from error
    return [each for each in found if isinstance(each, dict) and each]


def _tc(*words: str) -> str:
    try:
        done = subprocess.run(
            ["tc", "-j", *words],
            capture_output=True,
            text=True,
            timeout=TC_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise _Refused(f"`tc {' '.join(words)}` took more than {TC_TIMEOUT_S:g} s") from error
    if done.returncode:
        reason = " ".join(done.stderr.split())[:_TEXT_CHARS_MAX] or f"exit code {done.returncode}"
        raise _Refused(f"`tc {' '.join(words)}`: {reason}")
    return done.stdout


class _Refused(Exception):
    """tc failed; contains its message."""

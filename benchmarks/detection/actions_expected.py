"""The right action for each Xid, from NVIDIA's catalogue and not from Holdfast's own mapping.

Source of `NVIDIA`: the immediate action of every code in NVIDIA's Xid catalogue, from the column `nvidia_immediate` of the
table of public sources (xid.csv); 162 to 173 have no action there. Source of `DEPARTURES`: the table's other public sources
(NVSentinel, gpud, DCGM, Meta GCM, operators' reports), for codes for which NVIDIA names a workflow or only its support, or for
which NVIDIA's immediate action would leave a broken GPU in use. No part of the product reads either of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from holdfast.domain.incidents import ActionKind


class Rung(Enum):
    """The first safe action."""

    NOTHING = "the run goes on"
    RESTART_IF_ENDED = "the run goes on; if it ends, new processes on the same nodes"
    RESTART = "new processes on the same nodes"
    RESET = "the GPU is reset before any rank uses it again"
    RESET_LATER = "the run goes on to its next boundary, and the GPU is reset there"
    SWAP_LATER = "the run goes on to its next checkpoint, where a spare takes over if one is free"
    LEAVE = "the job leaves the node at a checkpoint, before it is taken away"
    REBOOT = "no rank uses the node before it has booted"
    REPLACE = "no rank uses the node"


NVIDIA: Mapping[str, tuple[Rung, str]] = {
    "IGNORE": (Rung.NOTHING, "14 37-38 43-44 63 66-67 92-93 106-108 121 137 141 152-153 157 160-161"),
    "CONTACT_SUPPORT": (
        Rung.NOTHING,  # software cannot do anything; most of these codes are no longer used
        "1-7 9-10 12 15-24 26-30 33-36 42 47 49-53 55-59 61 65 73 81 87 90-91 111-118 122-125 138 142",
    ),
    "CHECK_UVM": (Rung.NOTHING, "159"),
    "none": (Rung.NOTHING, "162-173"),
    "RESTART_APP": (
        Rung.RESTART_IF_ENDED,
        "8 11 13 25 31-32 39-41 60 68-72 75-77 80 82-86 88-89 94 96-105 126-135 139",
    ),
    "RESET_GPU": (Rung.RESET, "46 62 64 95 109-110 119-120 136 140 143 155-156 158"),
    "RESTART_BM": (Rung.REBOOT, "79"),
    "RESTART_VM": (Rung.REBOOT, "151"),
    "CHECK_MECHANICALS": (Rung.REPLACE, "54"),  # the power of the GPU is not connected
    "UPDATE_SWFW": (Rung.REBOOT, "78"),  # the driver does not match the GPU, and another driver needs a boot
    "WORKFLOW_XID_45": (Rung.NOTHING, "45"),  # with another Xid, the other one decides; alone, a process was killed
    "WORKFLOW_XID_48": (Rung.RESET, "48"),
    "WORKFLOW_NVLINK_ERR": (Rung.RESET, "74"),
}
NVLINK5 = range(144, 151)  # WORKFLOW_NVLINK5_ERR: the line states whether the error is fatal
DEPARTURES: Mapping[int, tuple[Rung, str]] = {
    44: (Rung.RESTART, "a fault during a context switch: the channel is gone, the process restarts; gpud reboots"),
    57: (Rung.REPLACE, "the link to the memory was not trained: hardware"),
    58: (Rung.REPLACE, "memory interface: hardware"),
    61: (Rung.RESET, "the PMU has stopped, as with 62"),
    63: (Rung.RESET_LATER, "a row is to be remapped, which a reset does: at the next boundary of the job"),
    64: (Rung.REPLACE, "the remapping failed: a reset does not help, and the board is returned"),
    79: (Rung.REPLACE, "off the bus: a boot may bring it back once, then the board is returned"),
    94: (Rung.RESTART, "contained: the process that used the memory does not survive it"),
    123: (Rung.REBOOT, "the PMU does not answer; gpud: reboot, then inspect"),
    156: (Rung.RESET_LATER, "a resource was retired, which becomes effective by a reset"),
    157: (Rung.REPLACE, "the retirement failed, as with 64"),
    167: (Rung.REBOOT, "fatal timeout of PCIe; gpud: reboot"),
    171: (Rung.RESET, "the DRAM's detail of 48"),
    172: (Rung.RESET, "the SRAM's detail of 48"),
    173: (Rung.REBOOT, "C2C; gpud: reboot"),
}
# 154: the driver's own recovery action, NVML field 230, as written in its line.
RECOVERY: Mapping[str, Rung] = {
    "0x0 (None)": Rung.NOTHING,
    "0x1 (GPU Reset Required)": Rung.RESET,
    "0x2 (Node Reboot Required)": Rung.REBOOT,
    "0x3 (Drain P2P)": Rung.NOTHING,
    "0x4 (Drain and Reset)": Rung.RESET_LATER,
    "0x5 (Recover IMEX Domain)": Rung.NOTHING,
    "0x6 (Bus Reset)": Rung.RESET,
    "0x7 (System Reboot)": Rung.REBOOT,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the driver, and the right action for it."""

    name: str
    text: str
    rung: Rung


def rungs() -> dict[int, Rung]:
    """The action of every code for which the text of the line does not matter."""
    known = {code: rung for rung, text in NVIDIA.values() for code in codes_in(text)}
    return known | {code: rung for code, (rung, _) in DEPARTURES.items()}


def codes_in(text: str) -> Iterator[int]:
    for part in text.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def cases() -> list[Case]:
    """A case for every code, in the notation of the driver; several cases if the text of the line decides."""
    plain = [
        Case(str(code), f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4242, name=python, Ch 00000001", rung)
        for code, rung in sorted(rungs().items())
    ]
    units = ["SAW_MVB", "RLW_REMAP", "TLW_RX", "TREX_EVT", "NVLPW_CTRL", "NETIR_LINK_EVT", "MSE_WATCHDOG"]
    links = [
        Case(
            f"{code} {word}", f"NVRM: Xid (PCI:0000:3b:00): {code}, {unit} {word} XC0 i0 Link 04 (0x{4:08x} 0x0)", rung
        )
        for code, unit in zip(NVLINK5, units, strict=True)
        for word, rung in (("Nonfatal", Rung.NOTHING), ("Fatal", Rung.RESET))
    ]
    changed = "GPU recovery action changed from 0x0 (None) to"
    verdicts = [
        Case(f"154 {action}", f"NVRM: Xid (PCI:0000:3b:00): 154, {changed} {action}", rung)
        for action, rung in RECOVERY.items()
    ]
    return [*plain, *links, *verdicts]


@dataclass(frozen=True, slots=True)
class Situation:
    """The abilities of node and fleet. `spares`: 0 or 1. `minimum`: the job already runs its fewest replicas."""

    resets: bool
    reboots: bool
    spares: int
    minimum: bool = False

    def __str__(self) -> str:
        able = " and ".join([*(["resets"] if self.resets else []), *(["boots"] if self.reboots else [])])
        spare = "a spare" if self.spares else "no spare"
        return f"{able or 'no commands'}, {spare}{', fewest replicas' if self.minimum else ''}"


SITUATIONS = tuple(
    Situation(resets, reboots, spares, minimum)
    for resets in (True, False)
    for reboots in (True, False)
    for spares, minimum in ((1, False), (0, False), (0, True))
)


def right_action(rung: Rung, situation: Situation, *, ended: bool) -> ActionKind | None:
    """The right action; None = the run continues unchanged. `ended`: the rank on the GPU fails directly after the line."""
    away = (
        ActionKind.HOT_SWAP if situation.spares else (ActionKind.WAIT if situation.minimum else ActionKind.SCALE_DOWN)
    )
    match rung:
        case Rung.NOTHING | Rung.RESTART_IF_ENDED:
            return ActionKind.RESTART if ended else None
        case Rung.RESTART:
            return ActionKind.RESTART
        case Rung.RESET:
            return ActionKind.GPU_RESET if situation.resets else away
        case Rung.RESET_LATER if not situation.resets:
            return None  # the run can continue to use the GPU
        case Rung.RESET_LATER:  # if a spare takes over, the other nodes do not wait for the reset
            return ActionKind.HOT_SWAP if situation.spares else ActionKind.GPU_RESET
        case Rung.SWAP_LATER:
            return ActionKind.HOT_SWAP if situation.spares else None
        case Rung.LEAVE:
            return None if situation.minimum else away  # without a spare, the fewest replicas run as long as possible
        case Rung.REBOOT | Rung.REPLACE:
            return away

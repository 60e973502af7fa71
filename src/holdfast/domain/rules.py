"""Why a finding was made: the rule behind each kind, where the rule comes from, and what a person can do about it.

A detector that has several rules under one kind (the Xid catalogue, the machine's counters) names the one that fired in the
finding's evidence, under `rule` and `source`; `rule_of` puts both together. docs/diagnostics.md has it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.domain.findings import Finding, FindingKind


@dataclass(frozen=True, slots=True)
class Rule:
    """Three English sentences or clauses: what makes the finding, who says so, and what to do."""

    rule: str
    source: str
    advice: str


RULES: Mapping[FindingKind, Rule] = {
    FindingKind.WORKER_CRASH: Rule(
        "the first rank of a generation that ended by itself, by a signal or an exit code; communication errors that "
        "follow are its echo",
        "NVRx: roles root and cascade",
        "read `blame`, and the last lines of the rank's log",
    ),
    FindingKind.WORKER_EXCEPTION: Rule(
        "the first rank of a generation whose script raised; communication errors that follow are its echo",
        "NVRx: roles root and cascade",
        "read `blame`, the exception and its frames",
    ),
    FindingKind.REPEATED_EXCEPTION: Rule(
        "the same exception type and frames at the same place, without a new step in between, and nothing but the script "
        "explains it",
        "NVRx: a restart budget per root, reset by progress",
        "mend the script or its data; a restart cannot cure it, and when only one node has shown it a spare tries it first",
    ),
    FindingKind.NODE_LOST: Rule(
        "the telemetry stream broke and did not come back, or no beats came; the supervisor must have lost the node's "
        "control session as well",
        "Holdfast: two witnesses",
        "look at the machine: power, kernel, network",
    ),
    FindingKind.HANG: Rule(
        "no rank finished a step for max(floor_s, 3 × p99 of its steps), with an allowance for each phase",
        "Unicron: three times the mean step",
        "read which rank the others wait for; when nobody is named, look at the network and the storage",
    ),
    FindingKind.GPU_ERROR: Rule(
        "the driver said so: an Xid by the catalogue, a lost GPU, or a changed recovery action",
        "NVIDIA's driver and Xid catalogue",
        "follow the ladder; `holdfast nodes repair NODE` when the hardware is good again",
    ),
    FindingKind.HOST_PRESSURE: Rule(
        "memory, a directory, the disk's latency, blocked tasks or the clock is past its limit",
        "Holdfast: limits of the detector",
        "make room, or find what uses it",
    ),
    FindingKind.RANKS_MISSING: Rule(
        "a generation did not start within the job's first_step_timeout_s",
        "the supervisor itself",
        "look at the logs of the ranks that are missing; raise limits.first_step_timeout_s when the start is slow",
    ),
    FindingKind.HOST_OOM: Rule(
        "the kernel killed a process because the machine had no memory left",
        "kernel log",
        "fewer data-loading workers, or a smaller batch",
    ),
    FindingKind.KERNEL_STALL: Rule(
        "soft lockup or hung task in the kernel log", "kernel log", "look at storage and drivers of the node"
    ),
    FindingKind.STORAGE_FAULT: Rule(
        "an NVMe timeout, or a file system that became read-only", "kernel log", "replace the disk"
    ),
    FindingKind.NETWORK_FAULT: Rule(
        "a port is down, flaps or is missing, its counters show losses, or its adapter says that it is broken",
        "gpud, NVSentinel and the kernel log",
        "look at the cable and the switch port",
    ),
    FindingKind.MAINTENANCE: Rule("a notice, or its withdrawal", "the machine's owner", "leave before it starts"),
    FindingKind.STRAGGLER: Rule(
        "a rank's own work is more than 10 % and five standard errors above its peers', over 15 steps",
        "Greyhound (ATC'25), with leave-one-out medians",
        "look at the node; replace it when `cost_share_of_step` is worth it",
    ),
    FindingKind.IMBALANCE: Rule(
        "what makes ranks slow is explained by their data, or by their pipeline stage",
        "What-if analysis of ByteDance's stragglers (OSDI'25)",
        "bucket sequences by length, or move layers between stages",
    ),
    FindingKind.SLOW_COLLECTIVE: Rule(
        "even the rank that waits least waits at least 15 % of a step longer than in the first steps",
        "Holdfast: thresholds.StragglerThresholds",
        "look at the network, and at findings of kind network_fault",
    ),
    FindingKind.NUMERICAL: Rule(
        "loss or gradient norm is a robust outlier, or not a number; an error when it stays so",
        "ByteRobust (SOSP'25)",
        "look at the data of that step; go on from before `verified_step`",
    ),
    FindingKind.DEGRADATION: Rule(
        "a counter grows faster than its limit, or a disk or the memory fills",
        "gpud, NVSentinel, NVRx and DCGM, one limit each",
        "plan a repair at the job's next boundary",
    ),
    FindingKind.PREFLIGHT: Rule(
        "a node without ranks failed one of the tests that it makes of itself: GPUs, devices, memory, disk, peers",
        "gpud, NVSentinel, DCGM; Holdfast for disk and peers",
        "`holdfast nodes show NODE` lists the tests; it is tested again every minute and used again once it passes",
    ),
    FindingKind.CHECKPOINT: Rule(
        "a rank's saves did not happen three times in a row, a tier takes no copies, an image stays locked although nobody "
        "restores from it, or a stored file is damaged",
        "Holdfast",
        "make room where it is full, end the process that it names; `holdfast checkpoints list JOB` shows what a restart takes",
    ),
    FindingKind.SILENT_CORRUPTION: Rule(
        "parameters that replicas must hold alike differ in their checksums, or a node's exact matrix products are wrong",
        "AEGIS (OSDI'26)",
        "replace the node, and do not return it after a reboot",
    ),
}


def rule_of(finding: Finding) -> Rule:
    """The rule of the finding's kind, with what the detector says of the one that fired."""
    known = RULES[finding.kind]
    if not (fired := finding.evidence.get("rule", "")):
        return known
    return Rule(f"{known.rule}: {fired}", finding.evidence.get("source", "") or known.source, known.advice)

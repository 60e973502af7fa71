"""The rule behind each kind of finding, its source, and the advice for operators.

A detector with several rules for one kind (the Xid catalogue, the machine's counters) names the matched rule in the finding's
evidence, under `rule` and `source`; `rule_of` combines both. A detector of another package has a rule of its own.
docs/diagnostics.md lists all rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.domain.findings import Finding, FindingKind

PLUGIN = "plugin"  # evidence key with the name of the detector of another package


@dataclass(frozen=True, slots=True)
class Rule:
    """Three English sentences or clauses: the condition, its source, and the advice."""

    rule: str
    source: str
    advice: str


RULES: Mapping[FindingKind, Rule] = {
    FindingKind.WORKER_CRASH: Rule(
        "the first rank of a generation to fail on its own, by a signal or an exit code; later communication errors are "
        "cascading failures",
        "NVRx: roles root and cascade",
        "read `blame`, and the last lines of the rank's log",
    ),
    FindingKind.WORKER_EXCEPTION: Rule(
        "the first rank of a generation whose script raised an exception; later communication errors are cascading failures",
        "NVRx: roles root and cascade",
        "read `blame`, the exception and its frames",
    ),
    FindingKind.REPEATED_EXCEPTION: Rule(
        "the same exception type and frames at the same place, without a new step in between, and no cause other than the "
        "script",
        "NVRx: a restart budget per root, reset by progress",
        "fix the script or its data; a restart does not help. If only one node has shown it, a spare tries it first",
    ),
    FindingKind.NODE_LOST: Rule(
        "the telemetry stream broke and did not reconnect, or no heartbeat arrived; the supervisor must have lost the node's "
        "control session as well",
        "Holdfast: two-witness rule",
        "check the machine: power, kernel, network",
    ),
    FindingKind.HANG: Rule(
        "no rank finished a step for max(floor_s, 3 × p99 of its steps), with an allowance for each phase",
        "Unicron: three times the mean step",
        "see which rank the others wait for; if no rank is named, check the network and the storage",
    ),
    FindingKind.GPU_ERROR: Rule(
        "the driver reported it: an Xid of the catalogue, a lost GPU, or a changed recovery action",
        "NVIDIA's driver and Xid catalogue",
        "follow the recommended actions; `holdfast nodes repair NODE` after the hardware is repaired",
    ),
    FindingKind.HOST_PRESSURE: Rule(
        "memory, a directory, the disk's latency, blocked tasks or the clock is past its limit",
        "Holdfast: limits of the detector",
        "make room, or find the cause of the load",
    ),
    FindingKind.RANKS_MISSING: Rule(
        "a generation did not start within the job's first_step_timeout_s",
        "Holdfast: the supervisor",
        "read the logs of the missing ranks; raise limits.first_step_timeout_s if the start is slow; a script that uses "
        "holdfast.train must call run.step",
    ),
    FindingKind.HOST_OOM: Rule(
        "the kernel killed a process because the machine had no memory left",
        "kernel log",
        "use fewer data-loading workers, or a smaller batch",
    ),
    FindingKind.KERNEL_STALL: Rule(
        "soft lockup or hung task in the kernel log", "kernel log", "check storage and drivers of the node"
    ),
    FindingKind.STORAGE_FAULT: Rule(
        "an NVMe timeout, or a file system that became read-only", "kernel log", "replace the disk"
    ),
    FindingKind.NETWORK_FAULT: Rule(
        "a port is down, flaps or is missing, its counters show losses, or its adapter reports a failure",
        "gpud, NVSentinel and the kernel log",
        "check the cable and the switch port",
    ),
    FindingKind.MAINTENANCE: Rule(
        "a maintenance notice, or its withdrawal", "the machine's owner", "move the job before the start"
    ),
    FindingKind.STRAGGLER: Rule(
        "a rank's own work is more than 10 % and five standard errors above that of its comparison group, over 15 steps",
        "Greyhound (ATC'25), with leave-one-out medians",
        "check the node; replace it if `cost_share_of_step` justifies it",
    ),
    FindingKind.IMBALANCE: Rule(
        "the ranks are slow because of their data, or because of their pipeline stage",
        "What-if analysis of ByteDance's stragglers (OSDI'25)",
        "bucket sequences by length, or move layers between stages",
    ),
    FindingKind.SLOW_COLLECTIVE: Rule(
        "even the rank that waits least waits at least 15 % of a step longer than in the first steps",
        "Holdfast: thresholds.StragglerThresholds",
        "check the network, and findings of kind network_fault",
    ),
    FindingKind.NUMERICAL: Rule(
        "loss or gradient norm is a robust outlier, or not a number; an error if it persists",
        "ByteRobust (SOSP'25)",
        "check the data of that step. The run goes on; if the loss stays NaN, a restart restores no step after `verified_step`",
    ),
    FindingKind.DEGRADATION: Rule(
        "a counter grows faster than its limit, or a disk or the memory fills",
        "gpud, NVSentinel, NVRx and DCGM, one limit each",
        "plan a repair at the job's next boundary",
    ),
    FindingKind.PREFLIGHT: Rule(
        "a node without ranks failed a check of its pre-flight test: GPUs, devices, memory, disk, peers",
        "gpud, NVSentinel, DCGM; Holdfast for disk and peers",
        "`holdfast nodes show NODE` lists the checks; the node is tested again every minute and gets ranks when it passes",
    ),
    FindingKind.CHECKPOINT: Rule(
        "a rank missed three saves in a row, a tier accepts no copies, an image stays locked without a restore, or a stored "
        "file is damaged",
        "Holdfast",
        "make room, end the process that it names; `holdfast checkpoints list JOB` shows what a restart would restore",
    ),
    FindingKind.NO_PROGRESS: Rule(
        "of a script that reports no steps, no optimizer step was observed in any rank for max(300 s, 3 × its longest pause); "
        "after a restart, none since the start of the ranks",
        "Unicron: three times the mean step",
        "see what the ranks do (`holdfast logs JOB --rank all`); a policy may restart a job whose script never pauses so long",
    ),
    FindingKind.SILENT_CORRUPTION: Rule(
        "parameters that must be equal in all replicas have different checksums, or a node's exact matrix products are wrong",
        "AEGIS (OSDI'26)",
        "replace the node, and do not return it after a reboot",
    ),
}


def rule_of(finding: Finding) -> Rule:
    """Return the rule of the finding's kind, combined with the matched rule of its detector."""
    known = RULES[finding.kind]
    if plugin := finding.evidence.get(PLUGIN):  # the kind's own rule is that of Holdfast's detectors
        rule = finding.evidence.get("rule") or f"that of the detector {plugin}"
        return Rule(rule, f"plug-in {plugin}", "read what the plug-in says about this finding")
    if not (fired := finding.evidence.get("rule", "")):
        return known
    return Rule(f"{known.rule}: {fired}", finding.evidence.get("source", "") or known.source, known.advice)

"""The numbers of a report: how often a job was interrupted, for how long, where its time went, what that cost.

Everything is computed from what the API tells of the newest run (`/v1/jobs/JOB`, its goodput and incidents). What is not known
is None, and a note says why. Pure.

* A **fault** is an incident of severity error or fatal: the run had stopped, or would have. Planned changes and warnings are
  none.
* **MTBF** is the time in which the job had nodes, divided by the number of faults. Without a fault only a lower bound is known:
  a third of that time, at 95 % confidence (the rule of three: Hanley and Lippman-Hand, 1983).
* **MTTR** is the mean time from a fault to the first step that every rank has finished after it, of the faults that ended so.
* **Goodput** is scheduling × runtime × program (arXiv 2502.06982): the share of time with nodes, the share of that in useful
  steps, and the share of the devices' peak that those steps reach, which is MFU; the last one only if both its FLOP counts are
  given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Annotated, Any

from holdfast.domain.errors import InvalidSpec

RULE_OF_THREE = 3.0
HOUR_S = 3600.0

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Terms:
    """What the job file or the reader adds: price of an hour of one GPU in a currency, FLOPs of a trained token, peak FLOP/s of
    a device, and what recovery would be without Holdfast: seconds of a restart, and seconds between checkpoints."""

    price_per_gpu_hour: float | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    restart_s: float | None = None
    checkpoint_every_s: float | None = None
    currency: str | None = None  # what stands before an amount; None = DOLLAR


DOLLAR = "$"


def joined(given: Terms, stated: Terms) -> Terms:
    """`given` by the reader, and what the job file has `stated` where the reader gives nothing. Raises `InvalidSpec` if one
    value of a pair is given, and the other one neither given nor stated."""
    values = {
        name: ours if (ours := getattr(given, name)) is not None else getattr(stated, name)
        for name in (each.name for each in fields(Terms))
    }
    for one, other in (
        ("restart_s", "checkpoint_every_s"),
        ("checkpoint_every_s", "restart_s"),
        ("flops_per_token", "peak_flops"),
    ):
        if getattr(given, one) is not None and values[other] is None:
            raise InvalidSpec(one, getattr(given, one), f"{other} as well, here or in the job file")
    return Terms(**values)


@dataclass(frozen=True, slots=True)
class Faults:
    """Of one kind, one node, or all. Times in seconds. The texts describe the fields in the API, as in the next classes."""

    name: str
    count: int
    repaired: Annotated[int, "of them: those after which every rank has finished a step"]
    mtbf_s: Annotated[float | None, "time with nodes ÷ faults; null: no fault"]
    mtbf_at_least_s: Annotated[float | None, "lower bound at 95 % confidence, without a fault"]
    mttr_s: Annotated[float | None, "mean time from a fault to the next step of every rank"]
    longest_s: float | None
    rework_steps: int
    cost: Annotated[float | None, "of the time to repair and of the steps done again"]


@dataclass(frozen=True, slots=True)
class Share:
    """A class of goodput or badput."""

    name: str
    seconds: float
    share: float
    cost: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The repaired faults, each with a restart and half of a checkpoint interval of lost work instead."""

    faults: int
    left_out: Annotated[int, "faults that are not over, or that ended the job"]
    restart_s: float
    checkpoint_every_s: float
    seconds: Annotated[float, "that they would take"]
    actual_s: Annotated[float, "that they took, with the steps done again"]
    saved: Annotated[float | None, "cost; null: no price is stated"]


@dataclass(frozen=True, slots=True)
class Report:
    job: str
    phase: str
    started_at: float
    wall_s: float
    ranks: Annotated[int, "of the full mesh"]
    step: int | None
    tokens: int
    scheduling: Annotated[float | None, "share of time with nodes"]
    runtime: Annotated[float | None, "share of that in useful steps; null = not known"]
    mfu: Annotated[float | None, "null: FLOPs or the peak are not stated, or not reported"]
    goodput: Annotated[float | None, "scheduling × runtime"]
    goodput_paid: float | None
    cost: Annotated[float | None, "of all ranks of the full mesh; null: no price is stated"]
    shares: tuple[Share, ...]
    all_faults: Faults
    by_kind: tuple[Faults, ...]
    by_node: tuple[Faults, ...]
    comparison: Comparison | None
    notes: tuple[str, ...]
    currency: str = DOLLAR


def report(job: Json, ledger: Json, incidents: Iterable[Json], terms: Terms) -> Report:
    """`job`, `ledger` and `incidents`: as the API tells them."""
    notes: list[str] = []
    wall_s, started_at = float(ledger["wall_s"]), float(ledger["started_at"])
    ranks = prod(job["mesh"].values())
    waited_s = float(ledger["badput_s"].get("wait", 0.0))
    present_s = max(0.0, wall_s - waited_s)
    price_s = None if terms.price_per_gpu_hour is None else terms.price_per_gpu_hour * ranks / HOUR_S
    measured = ledger["goodput_job"] is not None
    if not measured:
        notes.append("The script reports no steps: how much of the time was useful, and so the goodput, is not known.")
    elif ledger["unmeasured_s"]:
        notes.append("For a part of the time the script reported no steps: it counts as running, not as useful.")
    rework_s, rework_steps = float(ledger["badput_s"].get("rework", 0.0)), int(ledger["rework_steps"])
    step_s = rework_s / rework_steps if rework_steps else 0.0
    faults = faults_of(incidents, started_at)

    def of(name: str, some: Sequence[Json]) -> Faults:
        return _faults(name, some, present_s, step_s, price_s)

    if measured and not rework_steps and any(each["rework_steps"] for each in faults):
        notes.append(
            "The steps that were done again are no longer kept one by one: their cost is not part of a fault's."
        )
    ended = [each for each in faults if each["state"] == "failed"]
    if ended:
        notes.append(f"{len(ended)} of the faults ended the job: their cost and MTTR are not known.")
    open_ = [each for each in faults if each["state"] not in ("resolved", "failed")]
    if open_:
        notes.append(f"Faults that are not over yet, and count for MTBF, not for MTTR: {len(open_)}.")
    return Report(
        job=str(job["name"]),
        phase=str(job["phase"]),
        started_at=started_at,
        wall_s=wall_s,
        ranks=ranks,
        step=job["step"],
        tokens=int(ledger["tokens"]),
        scheduling=present_s / wall_s if wall_s else None,
        runtime=float(ledger["useful_s"]) / present_s if measured and present_s else None,
        mfu=_mfu(ledger, ranks, terms, notes),
        goodput=ledger["goodput_job"],
        goodput_paid=ledger["goodput_paid"],
        cost=None if price_s is None else wall_s * price_s,
        shares=_shares(ledger, wall_s, price_s),
        all_faults=of("all", faults),
        by_kind=tuple(of(name, some) for name, some in _grouped(faults, lambda each: each["kind"])),
        by_node=tuple(of(name, some) for name, some in _grouped(faults, lambda each: each["node"] or "none")),
        comparison=_comparison(faults, step_s, terms, price_s, notes),
        notes=tuple(notes),
        currency=terms.currency or DOLLAR,
    )


def faults_of(incidents: Iterable[Json], started_at: float) -> list[Json]:
    """The faults of the run that began then."""
    return [each for each in incidents if each["severity"] in ("error", "fatal") and each["fault_at"] >= started_at]


def _repair_s(incident: Json) -> float | None:
    done = incident["first_step_at"]
    return None if done is None else max(0.0, float(done) - float(incident["fault_at"]))


def _lost_s(faults: Sequence[Json], step_s: float) -> float:
    """Time to repair, and the steps done again."""
    return sum((_repair_s(each) or 0.0) + int(each["rework_steps"]) * step_s for each in faults)


def _faults(name: str, faults: Sequence[Json], present_s: float, step_s: float, price_s: float | None) -> Faults:
    repairs = [repair for each in faults if (repair := _repair_s(each)) is not None]
    return Faults(
        name=name,
        count=len(faults),
        repaired=len(repairs),
        mtbf_s=present_s / len(faults) if faults else None,
        mtbf_at_least_s=None if faults else present_s / RULE_OF_THREE,
        mttr_s=sum(repairs) / len(repairs) if repairs else None,
        longest_s=max(repairs, default=None),
        rework_steps=sum(int(each["rework_steps"]) for each in faults),
        cost=None if price_s is None else _lost_s(faults, step_s) * price_s,
    )


def _grouped(faults: Sequence[Json], key: Callable[[Json], str]) -> list[tuple[str, list[Json]]]:
    """Most faults first."""
    groups: dict[str, list[Json]] = defaultdict(list)
    for each in faults:
        groups[key(each)].append(each)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def _shares(ledger: Json, wall_s: float, price_s: float | None) -> tuple[Share, ...]:
    seconds = {"useful": float(ledger["useful_s"]), "running": float(ledger["unmeasured_s"])}
    seconds |= {name: float(value) for name, value in ledger["badput_s"].items()}
    return tuple(
        Share(name, value, value / wall_s if wall_s else 0.0, None if price_s is None else value * price_s)
        for name, value in seconds.items()
        if value or name == "useful"
    )


def _mfu(ledger: Json, ranks: int, terms: Terms, notes: list[str]) -> float | None:
    """FLOPs per token that are given or stated come before those that the script reports."""
    rate = float(ledger["fault_free_tokens_per_s"]) * (terms.flops_per_token or 0.0)
    if terms.flops_per_token is None:
        rate = float(ledger.get("fault_free_flops_per_s") or 0.0)
        if terms.peak_flops is None or not rate:
            return None
    elif terms.peak_flops is None:
        notes.append("The peak FLOP/s of a device is not stated, so MFU is not known.")
        return None
    elif not rate:
        notes.append("The script reports no tokens, so MFU is not known (step.log(tokens=…)).")
        return None
    mfu = rate / (ranks * terms.peak_flops)
    if mfu > 1:
        notes.append(
            "MFU is more than 100 %: one of the two FLOP counts is wrong, or the tokens that the script reports."
        )
    return mfu


def _comparison(
    faults: Sequence[Json], step_s: float, terms: Terms, price_s: float | None, notes: list[str]
) -> Comparison | None:
    if terms.restart_s is None or terms.checkpoint_every_s is None:
        if terms.restart_s is not None or terms.checkpoint_every_s is not None:
            notes.append("Nothing is compared: only one of restart_s and checkpoint_every_s is stated.")
        return None
    repaired = [each for each in faults if _repair_s(each) is not None]
    actual_s = _lost_s(repaired, step_s)
    seconds = len(repaired) * (terms.restart_s + terms.checkpoint_every_s / 2)
    return Comparison(
        faults=len(repaired),
        left_out=len(faults) - len(repaired),
        restart_s=terms.restart_s,
        checkpoint_every_s=terms.checkpoint_every_s,
        seconds=seconds,
        actual_s=actual_s,
        saved=None if price_s is None else (seconds - actual_s) * price_s,
    )

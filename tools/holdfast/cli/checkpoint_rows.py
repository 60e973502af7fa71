"""Rows and deletion plans of `holdfast checkpoints`, from an object store and the supervisor's answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IncompatibleVersion, IntegrityError, NotFound
from holdfast.domain.tiers import NEARNESS, STORE
from holdfast.stores import ObjectStore
from holdfast.stores.layout import CheckpointManifest, StepObjects, jobs, load, survey

ABANDONED_S = 24 * 3600.0  # after this time without new objects, an upload counts as abandoned

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """One checkpoint in the store. `state`: complete, incomplete (no manifest), damaged, or newer (later Holdfast version)."""

    objects: StepObjects
    state: str
    checkpoint: CheckpointManifest | None  # when complete
    problem: str = ""

    @property
    def age(self) -> CheckpointId:
        return CheckpointId(self.objects.attempt, self.objects.step)


@dataclass(frozen=True, slots=True)
class Pruning:
    """Checkpoints to delete and to retain, oldest last, each with its reason."""

    go: tuple[tuple[Stored, str], ...]
    stay: tuple[tuple[Stored, str], ...]


def in_store(store: ObjectStore, job: str) -> list[Stored]:
    """Return the checkpoints of a job, newest first. Raises NotFound if the store has none, Unavailable."""
    found = [_described(store, job, objects) for objects in survey(store, job)]
    if not found:
        others = jobs(store)
        present = f"it has checkpoints of: {', '.join(others)}" if others else "it has no checkpoints"
        raise NotFound(f"no checkpoints of {job} in {store.url}; {present}")
    return found


def _described(store: ObjectStore, job: str, objects: StepObjects) -> Stored:
    if not objects.complete:
        return Stored(
            objects,
            "incomplete",
            None,
            f"{len(objects.ranks)} {'rank is' if len(objects.ranks) == 1 else 'ranks are'} uploaded",
        )
    if objects.damage:
        return Stored(objects, "damaged", None, objects.damage)
    try:
        return Stored(objects, "complete", load(store, job, objects.attempt, objects.step))
    except IncompatibleVersion as error:
        return Stored(objects, "newer", None, str(error))
    except (IntegrityError, NotFound) as error:  # NotFound: deleted since the listing
        return Stored(objects, "damaged", None, str(error))


def choose(store: ObjectStore, job: str, step: int | None, attempt: int | None) -> CheckpointManifest:
    """Return the newest complete checkpoint, or that of `step` and `attempt`. Raises NotFound that lists the complete ones."""
    found = in_store(store, job)
    complete = [each for each in found if each.checkpoint is not None]
    for each in complete:
        assert each.checkpoint is not None
        if step in (None, each.objects.step) and attempt in (None, each.objects.attempt):
            return each.checkpoint
    wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
    wanted += "" if attempt is None else f" in attempt {attempt}"
    problem = next((f" ({each.state}: {each.problem})" for each in found if each.objects.step == step), "")
    steps = ", ".join(f"{each.objects.step} (attempt {each.objects.attempt})" for each in complete) or "none"
    raise NotFound(f"no {wanted} of {job} in {store.url}{problem}; complete ones: {steps}")


def rows(stored: Sequence[Stored], held: Iterable[Json]) -> list[Json]:
    """Return one row per checkpoint, newest first, from the contents of the store and the inventories of the nodes."""
    by_age: dict[CheckpointId, Json] = {}
    newest = None
    for item in held:
        if item.get("newest"):  # only the supervisor knows which lineages are abandoned
            newest = int(item["attempt"]), int(item["step"])
        tiers = item.get("tiers") or {}
        by_age[CheckpointId(int(item["attempt"]), int(item["step"]))] = {
            "step": int(item["step"]),
            "attempt": int(item["attempt"]),
            "mesh": dict(item.get("mesh") or {}),
            **{tier: tiers.get(tier, 0) for tier in NEARNESS},
            "store": "complete" if tiers.get(STORE) else "",
            "complete": bool(item.get("complete")),
            "bytes": None,
            "saved_at": None,
        }
    for each in stored:
        row = by_age.setdefault(each.age, _empty(each))
        row |= {"store": each.state, "bytes": each.objects.size, "saved_at": each.objects.updated_at}
        if each.checkpoint is not None:
            row |= {
                "mesh": dict(each.checkpoint.mesh),
                "saved_at": each.checkpoint.created_at,
                "complete": True,
            }
    newest = newest or max((age for age, row in by_age.items() if row["complete"]), default=None)
    return [row | {"newest": age == newest} for age, row in sorted(by_age.items(), reverse=True)]


def _empty(each: Stored) -> Json:
    return {
        "step": each.objects.step,
        "attempt": each.objects.attempt,
        "mesh": {},
        **dict.fromkeys(NEARNESS, 0),
        "store": "",
        "complete": False,
        "bytes": None,
        "saved_at": None,
    }


def pruning(stored: Sequence[Stored], keep: int, now: float) -> Pruning:
    """Plan the deletion of `stored` (newest first). Retains the newest `keep` (at least 1) complete ones and unreadable ones.

    Incomplete checkpoints are deleted after a day without new objects, because their upload may be in progress.
    """
    go: list[tuple[Stored, str]] = []
    stay: list[tuple[Stored, str]] = []
    kept = 0
    for each in stored:
        idle_s = now - each.objects.updated_at
        match each.state:
            case "complete" if kept < max(keep, 1):
                kept += 1
                stay.append((each, "the newest complete one" if kept == 1 else f"one of the newest {keep}"))
            case "complete":
                go.append((each, "a newer one is complete" if kept == 1 else f"{kept} newer ones are complete"))
            case "incomplete" if idle_s > ABANDONED_S:
                go.append((each, f"incomplete, without new objects for {idle_s / 3600:.0f} h"))
            case "incomplete":
                stay.append((each, "incomplete; its upload may be in progress"))
            case state:
                stay.append((each, f"{state}: {each.problem}"))
    return Pruning(tuple(go), tuple(stay))


def distinct_ranks(checkpoint: CheckpointManifest) -> tuple[int, ...]:
    """Return the ranks whose shards together contain the complete state: the first of replicas with equal tensors."""
    first: dict[str, int] = {}
    for entry in checkpoint.ranks:
        first.setdefault(entry.tensors, entry.rank)
    return tuple(sorted(first.values()))

"""A user's policy that returns recipes, many of which cannot be carried out. It uses separate random numbers, so that seeds of
earlier versions give the same runs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.policy import JobView, default

SHARE = 0.25  # fraction of the seeds with this policy
RUNGS_DRAWN_MAX = 9  # one more than is allowed, so that the default policy must decide
# Excluded: `stop` and a wait without a limit would end the run, and cordons would use up the nodes.
_KINDS = (
    ActionKind.RESTART,
    ActionKind.HOT_SWAP,
    ActionKind.SCALE_DOWN,
    ActionKind.SCALE_UP,
    ActionKind.GPU_RESET,
    ActionKind.CHECKPOINT_NOW,
    ActionKind.NOTIFY,
    ActionKind.WAIT,
)


@dataclass(slots=True)
class Cook:
    chance: Random

    @classmethod
    def of(cls, seed: int) -> Cook | None:
        chance = Random(f"recipes of {seed}")
        return cls(chance) if chance.random() < SHARE else None

    def decide(self, incident: Incident, job: JobView) -> Action:
        if self.chance.random() < 0.3:
            return default(incident, job)
        recipe = self._rung(job)
        for _ in range(self.chance.choice((0, 1, 2, 3, 3, RUNGS_DRAWN_MAX - 1))):
            recipe = recipe.otherwise(self._rung(job))
        return recipe

    def _rung(self, job: JobView) -> Action:
        kind = self.chance.choice(_KINDS)
        nodes = tuple(self.chance.sample(job.nodes, k=min(len(job.nodes), self.chance.choice((0, 0, 1, 1, 2)))))
        rung = Action(kind, "a rung", nodes, self.chance.choice((None, None, 1, 2)))
        if self.chance.random() < 0.15:
            first = self.chance.choice((ActionKind.NOTIFY, ActionKind.CHECKPOINT_NOW, ActionKind.RESTART))
            rung = Action(first, "a step before").then(rung)
        limited = kind is ActionKind.WAIT or self.chance.random() < 0.4
        at_once = kind in (ActionKind.NOTIFY, ActionKind.CHECKPOINT_NOW)
        return rung.within(self.chance.choice((1.0, 3.0, 10.0, 30.0))) if limited and not at_once else rung

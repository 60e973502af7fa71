"""A dry run of another policy: what it would have answered to recorded questions. Blocking.

Each question is asked as it was recorded. The consequences of a different answer are unknown: later questions are those of the
actual run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.domain.errors import PolicyError
from holdfast.domain.incidents import Action
from holdfast.domain.job import PolicySpec
from holdfast.policy import check, default
from holdfast.supervisor.policies.script import PolicyScript
from holdfast.supervisor.published import PolicyAsked


@dataclass(frozen=True, slots=True)
class Review:
    """`action` is the decision by the reviewed policy; if that fails, the default policy's, and `problem` says why."""

    asked: PolicyAsked
    action: Action
    problem: str

    @property
    def differs(self) -> bool:
        """Whether another action would be taken. A different reason for the same action does not count."""
        return self.action.without_reasons() != self.asked.action.without_reasons()


def review(policy: PolicySpec, questions: Iterable[PolicyAsked]) -> list[Review]:
    """In the order of `questions`. Raises `PolicyError` if the policy does not load."""
    if not policy.name:
        return [Review(asked, default(asked.incident, asked.job), "") for asked in questions]
    with PolicyScript(policy) as script:
        script.load()
        return [_one(script, policy, asked) for asked in questions]


def _one(script: PolicyScript, policy: PolicySpec, asked: PolicyAsked) -> Review:
    job = replace(asked.job, params=policy.params)
    try:
        action = script.decide(asked.incident, job)
        problem = check(action, asked.incident, job)
    except PolicyError as error:
        return Review(asked, default(asked.incident, job), f"the default policy decides: {error}")
    if problem:
        instead = default(asked.incident, job)
        return Review(asked, instead, f"the default policy decides: {action.kind} is not possible: {problem}")
    return Review(asked, action, "")

"""The actions that a policy can return, and the meaning of each.

A recipe is an action with fallbacks (`Action.otherwise`): its rungs are walked until one succeeds. A rung may have steps before
its action (`Action.then`) and a limit (`Action.within`). `flaw` returns errors that do not depend on the situation.

An action is declared once, in the table at the end of this file: what it does to the run (`Effect`), which generation it leads
to (`Aim`), and when it is impossible. The checks of a policy's answer, the supervisor's plan and decision, goodput and
`holdfast policy actions` follow from the table. A new action is a member of `ActionKind`, a function that makes it, and one
entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import LOAN, MAINTENANCE, Action, ActionKind, Incident
from holdfast.policy.job import JobView

RETRY_MAX_S = 86_400.0  # maximum time before the policy is asked again
INTERVAL_STEPS_MAX = 1_000_000_000
RUNGS_MAX = 8  # of a recipe
STEPS_MAX = 4  # of a rung, before its action
LIMIT_MIN_S, LIMIT_MAX_S = 1.0, 86_400.0  # of a rung; no generation begins and steps in less than a second

# Faults that end the run: doing nothing would leave the job without workers.
RUN_ENDING = frozenset(
    {
        FindingKind.WORKER_CRASH,
        FindingKind.WORKER_EXCEPTION,
        FindingKind.REPEATED_EXCEPTION,
        FindingKind.NODE_LOST,
        FindingKind.HANG,
        FindingKind.RANKS_MISSING,
    }
)


def restart(reason: str) -> Action:
    """New processes on the same nodes, from the newest complete checkpoint."""
    return Action(ActionKind.RESTART, reason)


def gpu_reset(reason: str, *nodes: str) -> Action:
    """Stop the workers, reset GPUs and start again on the same nodes: those in `JobView.resets`, and GPUs of `nodes` (default:
    of the incident's node, if `JobView.resets` is empty). If a reset fails, the next rung of the recipe follows; without one
    the policy is asked again."""
    return Action(ActionKind.GPU_RESET, reason, nodes=nodes)


def hot_swap(reason: str, *nodes: str) -> Action:
    """Spares take over the ranks of `nodes` (default: of the incident's node). Unusable nodes are always replaced."""
    return Action(ActionKind.HOT_SWAP, reason, nodes=nodes)


def scale_down(reason: str, *nodes: str, dp: int | None = None) -> Action:
    """Remove the replicas of `nodes`; their healthy nodes become spares. `dp`: number of replicas to keep."""
    return Action(ActionKind.SCALE_DOWN, reason, nodes=nodes, dp=dp)


def scale_up(reason: str, dp: int | None = None) -> Action:
    """Add replicas, up to `dp` (default: as many as the job wants and the nodes allow)."""
    return Action(ActionKind.SCALE_UP, reason, dp=dp)


def cordon(reason: str, *nodes: str) -> Action:
    """Take `nodes` out of service for every job, and replace them in this one: by spares, otherwise by scaling down."""
    return Action(ActionKind.CORDON, reason, nodes=nodes)


def checkpoint_now(reason: str) -> Action:
    """Save at the next step and continue. Only for a run that is still healthy."""
    return Action(ActionKind.CHECKPOINT_NOW, reason)


def set_interval(reason: str, steps: int) -> Action:
    """Save every `steps` steps from now on, in this generation and all that follow; 0 = as the job file says, which may be
    `auto`. The run continues."""
    return Action(ActionKind.SET_INTERVAL, reason, interval_steps=steps)


def wait(reason: str, *, retry_s: float = 0.0) -> Action:
    """Do nothing until a node becomes available, or for `retry_s` if it is not 0; then the policy is asked again."""
    return Action(ActionKind.WAIT, reason, retry_s=retry_s)


def stop(reason: str) -> Action:
    """End the job as failed."""
    return Action(ActionKind.STOP, reason)


def notify(reason: str) -> Action:
    """Notify the operators and change nothing. Only for a run that is still healthy."""
    return Action(ActionKind.NOTIFY, reason)


def ignore(reason: str) -> Action:
    """Change nothing and notify nobody. Only for a run that is still healthy."""
    return Action(ActionKind.IGNORE, reason)


# ---------------------------------------------------------------- the declaration of an action


class Effect(StrEnum):
    """What an action does to the run."""

    CHANGE = "new generation"  # the workers end, and the next generation is planned
    CONTINUE = "run continues"  # only for a run that is still healthy
    WAIT = "run waits"  # the workers end; the policy is asked again
    END = "job ends"


@dataclass(frozen=True, slots=True)
class Aim:
    """The generation that an action leads to: `dp` replicas, or fewer down to `dp_min`, on none of the nodes `out`."""

    dp: int | None = None  # None: as many as run now, except those with ranks on `out`
    dp_min: int = 1
    out: frozenset[str] = frozenset()


def _possible(action: Action, incident: Incident, job: JobView) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """The declaration of one action. `check` returns why it is impossible, as `check` below does."""

    kind: ActionKind
    effect: Effect
    summary: str  # one sentence for users
    check: Callable[[Action, Incident, JobView], str] = _possible
    aim: Callable[[Action, Incident, JobView], Aim] | None = None  # of actions with the effect CHANGE
    removes: bool = False  # the nodes that it names (default: the incident's) leave the job
    # the nodes that it names are taken out of service for every job, even if this one then has to wait
    condemns: bool = False
    saves: bool = False  # the run saves at its next step
    paces: bool = False  # the run saves at another interval
    silent: bool = False  # the operators are not notified
    resets: bool = False  # GPUs of nodes are reset before the next generation is planned
    goes_first: bool = False  # another action may follow it in a rung: then it starts no ranks by itself


def leaving(action: Action, incident: Incident, job: JobView) -> tuple[str, ...]:
    """Return the job's nodes that `action` removes: those it names (default: the incident's) and the unusable ones."""
    named = action.nodes or ((incident.node,) if incident.node else ())
    return tuple(node for node in job.nodes if node in named or node in job.unusable)


def check(action: Action, incident: Incident, job: JobView) -> str:
    """Return why `action` cannot be carried out now, in one sentence; empty if it can, or if any rung of a recipe can."""
    if problem := flaw(action):
        return problem
    problems = [check_rung(rung, incident, job) for rung in action.rungs]
    if not all(problems):
        return ""
    return problems[0] if len(problems) == 1 else f"no rung is possible: {'; '.join(problems)}"


def flaw(action: Action) -> str:
    """Return what is wrong with an action or a recipe whatever the situation, in one sentence; empty if nothing is."""
    rungs = action.rungs
    if len(rungs) > RUNGS_MAX:
        too_many = rungs[RUNGS_MAX].kind
        return (
            f"the recipe has {len(rungs)} rungs, but at most {RUNGS_MAX} are allowed; {too_many} is the first too many"
        )
    return next(filter(None, map(_flaw_of, rungs)), "")


def _flaw_of(rung: Action) -> str:
    for step in (*rung.before, rung):
        if not step.reason:
            return f"{step.kind} has no reason; pass a reason to every action"
    if len(rung.before) > STEPS_MAX:
        return f"{rung.steps}: a rung has at most {STEPS_MAX} steps before its action, not {len(rung.before)}"
    for step in rung.before:
        if not ACTIONS[step.kind].goes_first:
            allowed = ", ".join(kind for kind, spec in ACTIONS.items() if spec.goes_first)
            return (
                f"{rung.steps}: nothing can follow {step.kind} in a rung, only {allowed} (and gpu_reset, which restart may "
                "follow); for what to do if it fails write otherwise"
            )
        if step.before or step.fallbacks or step.within_s:
            return f"{rung.steps}: the step {step.kind} has steps, fallbacks or a limit of its own; they belong to the rung"
    if rung.within_s and ACTIONS[rung.kind].effect in (Effect.CONTINUE, Effect.END):
        return f"{rung.kind} is done at once: a limit of {rung.within_s:g} s has no meaning; remove it"
    if rung.within_s and not LIMIT_MIN_S <= rung.within_s <= LIMIT_MAX_S:
        return f"{rung.kind}: within {rung.within_s:g} s is not between {LIMIT_MIN_S:g} and {LIMIT_MAX_S:g}"
    return ""


def check_rung(action: Action, incident: Incident, job: JobView) -> str:
    """Return why this rung cannot be carried out now, whatever follows it; empty if it can be."""
    for step in action.before:
        if problem := _check_step(step, incident, job):
            return problem
    job = after_steps(action, job)
    if not action.reason:
        return f"{action.kind} has no reason; pass a reason to every action"
    spec = ACTIONS[action.kind]
    if problem := _ended(action, incident):
        return problem
    if incident.kind == MAINTENANCE and spec.effect is Effect.CHANGE and _keeps(spec, action, incident):
        # The policy would be asked again and again.
        return f"{action.kind} keeps {incident.node}, whose maintenance is announced; remove the node, or return wait"
    if incident.kind == LOAN and spec.effect is Effect.CHANGE and (problem := _gives_nothing(action, incident)):
        return problem
    return spec.check(action, incident, job)


def _gives_nothing(action: Action, incident: Incident) -> str:
    """Return why a change is not an answer to a job of higher priority that asks for replicas."""
    loan = incident.loan
    if loan is not None and action.kind is ActionKind.SCALE_DOWN and action.dp == loan.dp and not action.nodes:
        return ""
    wanted = "fewer replicas" if loan is None else f"scale_down(reason, dp={loan.dp})"
    return f"{action.kind} does not give what is asked for; answer {wanted}, or refuse with wait or ignore"


def _ended(action: Action, incident: Incident) -> str:
    if ACTIONS[action.kind].effect is Effect.CONTINUE and incident.kind in RUN_ENDING and not incident.warning:
        return f"{action.kind} is only for a running job, but {incident.kind} has ended the run"
    return ""


def _check_step(step: Action, incident: Incident, job: JobView) -> str:
    """Return why a step cannot come before the action of its rung."""
    if step.kind is ActionKind.CHECKPOINT_NOW:  # the others are possible whatever happens to the run
        return _ended(step, incident)
    return ACTIONS[step.kind].check(step, incident, job)


def after_steps(action: Action, job: JobView) -> JobView:
    """Return the job as the steps before `action` leave it: nodes that they take out of service cannot be used."""
    out = {node for step in action.before if ACTIONS[step.kind].condemns for node in step.nodes}
    if not out:
        return job
    unusable = tuple(node for node in job.nodes if node in out or node in job.unusable)
    return evolve(job, unusable=unusable, spares=tuple(node for node in job.spares if node not in out))


def _keeps(spec: ActionSpec, action: Action, incident: Incident) -> bool:
    """Return whether the incident's node would have ranks in the next generation, too."""
    named = action.nodes or ((incident.node,) if action.dp is None else ())
    return not spec.removes or incident.node not in named


def _check_restart(action: Action, incident: Incident, job: JobView) -> str:
    return f"restart needs every node of the job, but {_list(job.unusable)} cannot be used" if job.unusable else ""


def _check_swap(action: Action, incident: Incident, job: JobView) -> str:
    out = leaving(action, incident, job)
    if not out:
        return f"hot_swap names no node of {job.name}"
    if len(out) > len(job.spares):
        return f"hot_swap of {_list(out)} needs {_spares(len(out))}; free: {len(job.spares)}"
    return ""


def _check_scale_down(action: Action, incident: Incident, job: JobView) -> str:
    dp = action.dp
    if dp is None:
        if not leaving(action, incident, job):
            return f"scale_down names neither a number of replicas nor a node of {job.name}"
        return f"{job.name} already runs its minimum number of replicas ({job.min_dp})" if job.dp <= job.min_dp else ""
    if not job.min_dp <= dp < job.dp:
        return f"scale_down to dp {dp}: {job.name} runs dp {job.dp} and accepts no fewer than {job.min_dp}"
    return ""


def _check_scale_up(action: Action, incident: Incident, job: JobView) -> str:
    dp = action.dp
    if dp is not None and not job.dp < dp <= job.max_dp:
        return f"scale_up to dp {dp}: {job.name} runs dp {job.dp} and accepts at most {job.max_dp}"
    if job.reachable_dp < (dp or job.dp + 1):
        return f"scale_up to dp {dp or job.dp + 1}: the available nodes can run {job.reachable_dp} replicas"
    return ""


def _check_cordon(action: Action, incident: Incident, job: JobView) -> str:
    return "" if action.nodes else "cordon names no node"


def _check_gpu_reset(action: Action, incident: Incident, job: JobView) -> str:
    if incident.planned and not incident.wants_reset_later:
        return "gpu_reset is for faults, and for warnings that recommend it: a run that continues is not stopped for others"
    targets = reset_targets(action, incident, job)
    if not targets:
        return f"gpu_reset names no node of {job.name}"
    if foreign := [node for node in targets if node not in job.nodes]:
        return f"gpu_reset: {_list(foreign)} has no ranks of {job.name}"
    for node in targets:
        if obstacle := job.resets[node].obstacle if node in job.resets else "":
            return f"gpu_reset of {node}: {obstacle}"
    if unable := [node for node in targets if node not in job.resettable]:
        return f"gpu_reset: the agent of {_list(unable)} cannot reset GPUs"
    if out := [node for node in job.unusable if node not in targets]:
        return f"gpu_reset keeps every node of the job, but {_list(out)} cannot be used"
    return ""


def reset_targets(action: Action, incident: Incident, job: JobView) -> tuple[str, ...]:
    """Return the nodes whose GPUs `action` resets: those with a pending reset and those it names (default, if no reset is
    pending: the incident's)."""
    own = (incident.node,) if incident.node in job.nodes and not job.resets else ()
    named = action.nodes or own
    return tuple(dict.fromkeys((*named, *sorted(job.resets))))


def _check_wait(action: Action, incident: Incident, job: JobView) -> str:
    if 0.0 <= action.retry_s <= RETRY_MAX_S:
        return ""
    return f"wait: retry_s is {action.retry_s:g}, but must be between 0 and {RETRY_MAX_S:g}"


def _check_interval(action: Action, incident: Incident, job: JobView) -> str:
    if 0 <= action.interval_steps <= INTERVAL_STEPS_MAX:
        return ""
    return f"set_interval: {action.interval_steps} steps, but must be between 0 and {INTERVAL_STEPS_MAX}"


def _spares(count: int) -> str:
    return "1 spare node" if count == 1 else f"{count} spare nodes"


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(nodes)


def _same_size(action: Action, incident: Incident, job: JobView) -> Aim:
    return Aim(job.dp, job.dp)


def _swapped(action: Action, incident: Incident, job: JobView) -> Aim:
    return Aim(job.dp, job.dp, frozenset((*leaving(action, incident, job), *action.nodes)))


def _smaller(action: Action, incident: Incident, job: JobView) -> Aim:
    if action.dp is not None:
        return Aim(action.dp, action.dp, frozenset(action.nodes))
    return Aim(None, job.min_dp, frozenset((*leaving(action, incident, job), *action.nodes)))


def _larger(action: Action, incident: Incident, job: JobView) -> Aim:
    return Aim(action.dp or job.target_dp, action.dp or job.min_dp)


def _without(action: Action, incident: Incident, job: JobView) -> Aim:
    return Aim(job.dp, job.min_dp, frozenset(leaving(action, incident, job)))


# ---------------------------------------------------------------- the actions

_CHANGE, _CONTINUE = Effect.CHANGE, Effect.CONTINUE
_SPECS = (
    ActionSpec(ActionKind.RESTART, _CHANGE, "New processes on the same nodes.", _check_restart, _same_size),
    ActionSpec(
        ActionKind.HOT_SWAP, _CHANGE, "Spares take over the ranks of nodes.", _check_swap, _swapped, removes=True
    ),
    ActionSpec(
        ActionKind.SCALE_DOWN, _CHANGE, "The job continues with fewer replicas.", _check_scale_down, _smaller, removes=True
    ),
    ActionSpec(ActionKind.SCALE_UP, _CHANGE, "The job continues with more replicas.", _check_scale_up, _larger),
    ActionSpec(
        ActionKind.GPU_RESET, _CHANGE, "GPUs are reset, then new processes on the same nodes.", _check_gpu_reset, _same_size,
        resets=True,
    ),
    ActionSpec(
        ActionKind.CORDON, _CHANGE, "Nodes are taken out of service for every job, and replaced in this one.",
        _check_cordon, _without, removes=True, condemns=True, goes_first=True,
    ),
    ActionSpec(ActionKind.CHECKPOINT_NOW, _CONTINUE, "The run saves at its next step.", saves=True, goes_first=True),
    ActionSpec(
        ActionKind.SET_INTERVAL, _CONTINUE, "The run saves at another interval from now on.", _check_interval,
        paces=True, goes_first=True,
    ),
    ActionSpec(ActionKind.WAIT, Effect.WAIT, "The job waits for a node or for a time.", _check_wait),
    ActionSpec(ActionKind.STOP, Effect.END, "The job ends as failed."),
    ActionSpec(ActionKind.NOTIFY, _CONTINUE, "The operators are notified; nothing changes.", goes_first=True),
    ActionSpec(ActionKind.IGNORE, _CONTINUE, "Nothing changes, and nobody is notified.", silent=True),
)  # fmt: skip

ACTIONS: Mapping[ActionKind, ActionSpec] = {spec.kind: spec for spec in _SPECS}
if missing := set(ActionKind) - ACTIONS.keys():
    raise TypeError(f"actions that are not declared: {sorted(missing)}")

"""Saves at one step that all ranks of a job are ordered to make: on request, before a planned change or a stop, and where the
checkpoint interval changes.

Theory. The step lies ahead of the steps that ranks may have reached when the order arrives, by the measured pace. If the steps
become quicker meanwhile, the order reaches some ranks too late. A save with collectives, or `on_leaving`, would then run on
some ranks only. Therefore the ranks agree first:

    proposed ──every node has answered that its ranks wait at the step for the result──► agreed: every rank saves
        └──a node has answered that one of its ranks has passed the step──► void ──► proposed again, farther ahead

A rank that reaches the step before the result waits for it (`holdfast.train.orders`). After `_PROPOSALS_MAX` proposals the
timeout of what waits for the save decides. Agents of earlier versions do not know proposals: if the generation has one, every
rank that the order reaches in time saves.

An interval applies to the steps after such a save, so all ranks save at the same steps before and after the change. Between the
two stages, all nodes get the interval, while no rank can pass the step.
"""

from __future__ import annotations

import math

from holdfast.domain.evolve import evolve
from holdfast.domain.orders import CheckpointNow, OrderDone, SaveStage, SetInterval
from holdfast.supervisor.core import progress
from holdfast.supervisor.core.model.job import Job, OnDemandSave
from holdfast.supervisor.core.model.lifecycle import Running, Saving
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import Send
from holdfast.supervisor.timers import SaveTimeout, StopTimeout

_AHEAD_S = 0.6  # an order reaches every rank well within it
_AHEAD_STEPS = 2
_UNAGREED_AHEAD_S = 3.0  # the same, where nothing notices that it did not: an order may have to be sent again
_PROPOSALS_MAX = 4  # each one twice as far ahead as the one before
LEAVING_CHARS_MAX = 500  # of the reason that the script receives


def patience_s(turn: Turn, job: Job, at_step: int) -> float:
    """How long it may take until every rank has saved a checkpoint at `at_step`."""
    return turn.config.save_s + max(0, at_step - job.progress.newest_step) * job.progress.seconds_per_step


def limit_wait(turn: Turn, job: Job, at_step: int) -> None:
    """A stop waits for the checkpoint at `at_step`, but not without end."""
    wait_s = min(patience_s(turn, job, at_step), turn.config.stop_save_s_max)
    turn.set_timer(StopTimeout(job.name), turn.at + wait_s)


def drop_leaving(turn: Turn, job: Job, at_step: int) -> None:
    """The planned change that was to follow the save at `at_step` is dropped. If the ranks have not agreed on the save yet, the
    script is not notified; a save that was also requested for another reason is proposed again without it."""
    save = job.checkpoints.on_demand
    if (
        save is None
        or not save.votes_missing
        or save.changing
        or (save.generation, save.at_step) != (job.number, at_step)
    ):
        return
    _withdraw(turn, job, save)
    left = evolve(save, leaving=False, reason="")
    turn.put_checkpoints(job.name, on_demand=None)
    if left.to_object_store or left.interval_steps:
        _order(turn, turn.jobs[job.name], left, None)


def save_soon(turn: Turn, job: Job, *, to_object_store: bool = False, leaving: str = "") -> int:
    """Have every rank save at one step that none has passed when the order arrives. Returns that step. If the ranks cannot
    agree on it, what waits for it (`Planned`, `Saving`, requests) is changed to a later step.

    A step that was requested before and is still ahead is used again. `to_object_store`: upload it, whatever the store's
    interval; a save that is due in any case is uploaded only if the order arrives before it. The same holds for `leaving`: why
    this generation ends after the save, of which the script is notified before it; empty if the generation continues.
    """
    before = asked = turn.jobs[job.name].checkpoints.on_demand
    newest = job.progress.newest_step
    if asked is not None and (asked.generation != job.number or asked.at_step <= newest):
        asked = None
    if asked is not None and asked.to_object_store >= to_object_store and asked.leaving >= bool(leaving):
        return asked.at_step
    ahead = _ahead(turn, job)
    due = (newest // job.interval_steps + 1) * job.interval_steps  # saved in any case
    in_time = to_object_store or bool(leaving) or due - newest >= ahead
    at_step = newest + ahead if in_time else due
    if asked is not None and asked.at_step >= at_step and not asked.of_interval_only:  # one save serves both requests
        at_step, to_object_store = asked.at_step, to_object_store or asked.to_object_store
        leaving = leaving or asked.reason
    save = OnDemandSave(job.number, at_step, to_object_store, bool(leaving), leaving[:LEAVING_CHARS_MAX])
    _order(turn, job, save, before)
    return at_step


def change_interval(turn: Turn, job: Job, before: int) -> int:
    """Have all ranks save at the job's interval, in place of `before`, from one step on. Returns that step, which changes if
    the ranks cannot agree on it."""
    assert job.generation is not None
    save, interval = job.checkpoints.on_demand, job.interval_steps
    if not _all_agree(turn, job):
        from_step = job.progress.newest_step + _ahead(turn, job, _UNAGREED_AHEAD_S)
        for node in job.generation.nodes:
            turn.send(node, SetInterval(job.name, job.number, from_step, interval))
        return from_step
    if save is not None and save.votes_missing and not save.changing and save.generation == job.number:
        turn.put_checkpoints(job.name, on_demand=evolve(save, interval_steps=interval))
        return save.at_step + 1
    soonest = job.progress.newest_step + _ahead(turn, job)
    if save is not None and save.generation == job.number and save.interval_steps:
        soonest = max(soonest, save.at_step + 1)  # another interval applies to the steps after that one
    at_step = min(-(-soonest // each) * each for each in (before, interval))  # the next save that is due by one of them
    _order(turn, job, OnDemandSave(job.number, at_step, to_object_store=False, interval_steps=interval), save)
    return at_step + 1


def on_answer(turn: Turn, send: Send, done: OrderDone) -> None:
    """A node has answered a proposal."""
    order = send.order
    assert isinstance(order, CheckpointNow)
    job = turn.jobs.get(order.job)
    save = job.checkpoints.on_demand if job is not None else None
    if job is None or save is None or not save.votes_missing or order != _order_of(job, save, SaveStage.PROPOSED):
        return  # decided already, or replaced by another proposal
    if done.ok:
        save = evolve(save, votes_missing=save.votes_missing - 1)
        turn.put_checkpoints(job.name, on_demand=save)
        if not save.votes_missing and save.interval_steps:
            _send_interval(turn, job, save)
        elif not save.votes_missing:
            _send(turn, job, save, SaveStage.AGREED)
        return
    turn.note(job.name, f"step {save.at_step} is not saved by any rank: {send.node}: {done.reason}")
    if save.proposals >= _PROPOSALS_MAX:
        _withdraw(turn, job, save)
        turn.put_checkpoints(job.name, on_demand=None)
        return
    newest = max(job.progress.newest_step, save.at_step)
    at_step = newest + 2**save.proposals * _ahead(turn, job)
    _order(turn, job, evolve(save, at_step=at_step, proposals=save.proposals + 1), save)


def on_interval(turn: Turn, send: Send) -> None:
    """A node has answered the order of an interval. A rank that did not accept it accepts no other order either."""
    job = turn.jobs.get(send.order.job)
    save = job.checkpoints.on_demand if job is not None else None
    if job is None or save is None or not save.changing or send.order != _interval_of(job, save):
        return
    left = save.votes_missing - 1
    turn.put_checkpoints(job.name, on_demand=evolve(save, votes_missing=left, changing=left > 0))
    if not left:
        _send(turn, job, save, SaveStage.AGREED)


def _send_interval(turn: Turn, job: Job, save: OnDemandSave) -> None:
    members = job.generation.nodes if job.generation is not None else ()
    turn.put_checkpoints(job.name, on_demand=evolve(save, votes_missing=len(members), changing=True))
    for node in members:
        turn.send(node, _interval_of(job, save))


def _interval_of(job: Job, save: OnDemandSave) -> SetInterval:
    return SetInterval(job.name, save.generation, save.at_step + 1, save.interval_steps)


def _ahead(turn: Turn, job: Job, ahead_s: float = _AHEAD_S) -> int:
    """The number of steps that ranks may finish until an order has arrived."""
    pace_s = job.progress.seconds_per_step
    return _AHEAD_STEPS + (
        math.ceil((progress.lag_s(turn, job) + ahead_s) / pace_s) if pace_s > 0 else job.interval_steps
    )


def _all_agree(turn: Turn, job: Job) -> bool:
    """Whether every agent of the generation knows proposals."""
    members = job.generation.nodes if job.generation is not None else ()
    return all(turn.nodes[node].facts.agrees_on_saves for node in members)


def _order(turn: Turn, job: Job, save: OnDemandSave, before: OnDemandSave | None) -> None:
    """Propose `save` to all nodes, or order it. A proposal `before` without a result is withdrawn, and what waits for it waits
    for `save`, which also does what was proposed."""
    if before is not None and before.changing and before.generation == job.number:
        _send(turn, job, before, SaveStage.AGREED)  # ranks get it after the interval
    elif before is not None and before.votes_missing and before.generation == job.number:
        save = evolve(save, interval_steps=before.interval_steps)
        if before.at_step != save.at_step:
            _withdraw(turn, job, before)
            upload = save.to_object_store or before.to_object_store
            reason = save.reason or before.reason
            save = evolve(save, to_object_store=upload, leaving=bool(reason), reason=reason)
        turn.put_checkpoints(job.name, on_demand=save)
        job = _wait_for(turn, job.name, before.at_step, save.at_step)
    members = job.generation.nodes if job.generation is not None else ()
    agree = _all_agree(turn, job)
    save = evolve(save, votes_missing=len(members) if agree else 0)
    turn.put_checkpoints(job.name, on_demand=save)
    _send(turn, job, save, SaveStage.PROPOSED if agree else SaveStage.ORDER)


def _wait_for(turn: Turn, name: str, before: int, at_step: int) -> Job:
    """Let what waits for the checkpoint at step `before` wait for that at `at_step`."""
    job = turn.jobs[name]
    if before == at_step:
        return job
    requests = tuple(
        evolve(each, at_step=at_step) if each.at_step == before else each for each in job.checkpoints.requests
    )
    job = turn.put_checkpoints(name, requests=requests)
    if job.planned is not None and job.planned.at_step == before:
        job = turn.put_job(name, doing=Running(evolve(job.planned, at_step=at_step)))
        turn.set_timer(SaveTimeout(name), turn.at + patience_s(turn, job, at_step))
    elif isinstance(job.doing, Saving) and job.doing.at_step == before:
        suspends = job.doing.suspends  # then the end of its nodes is the limit
        job = turn.update(name, at_step=at_step)
        if not suspends:
            limit_wait(turn, job, at_step)
    return job


def _withdraw(turn: Turn, job: Job, save: OnDemandSave) -> None:
    """End the proposals of this step without a save. A node that has not received one yet never does."""
    for send in turn.orders(job=job.name, to_one=True):
        match send.order:
            case CheckpointNow(stage=SaveStage.PROPOSED.value, at_step=save.at_step, generation=save.generation):
                turn.forget_order(send)
            case _:
                pass
    _send(turn, job, save, SaveStage.VOID)


def _send(turn: Turn, job: Job, save: OnDemandSave, stage: SaveStage) -> None:
    for node in job.generation.nodes if job.generation is not None else ():
        turn.send(node, _order_of(job, save, stage))


def _order_of(job: Job, save: OnDemandSave, stage: SaveStage) -> CheckpointNow:
    return CheckpointNow(job.name, save.generation, save.at_step, save.to_object_store, save.reason, stage.value)

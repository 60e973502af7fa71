"""The result of an order: what its execution returns or raises, and the answer that follows from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.errors import Conflict, HoldfastError, Unrestorable
from holdfast.domain.links import LinkMeasured
from holdfast.domain.nodes import Preflight, RunningWorker
from holdfast.domain.orders import OrderDone


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an order: the fields of `OrderDone` that an order can fill."""

    master: str = ""
    phases_s: tuple[tuple[str, float], ...] = ()
    workers: tuple[RunningWorker, ...] = ()
    restored_from: tuple[tuple[str, int], ...] = ()
    restored_bytes: tuple[tuple[str, int], ...] = ()
    reason: str = ""  # details of a success, such as the output of a command
    tested: Preflight | None = None
    link: LinkMeasured | None = None


class FailedTests(Conflict):
    """This node was suspected, and has failed its quick tests."""

    def __init__(self, node: str, tested: Preflight) -> None:
        super().__init__(f"{node} was suspected, and has failed its tests: {tested.failures}")
        self.tested = tested


def answer_of(command_id: str, result: Outcome | Exception, at: float) -> OrderDone:
    """Return the answer to an order that returned an outcome or raised an exception."""
    match result:
        case Outcome():
            return OrderDone(
                command_id,
                ok=True,
                reason=result.reason,
                master=result.master,
                at=at,
                phases_s=result.phases_s,
                workers=result.workers,
                restored_from=result.restored_from,
                restored_bytes=result.restored_bytes,
                tested=result.tested,
                link=result.link,
            )
        case HoldfastError() | OSError():
            tested = result.tested if isinstance(result, FailedTests) else None
            unrestorable = isinstance(result, Unrestorable)
            return OrderDone(command_id, ok=False, reason=str(result), at=at, unrestorable=unrestorable, tested=tested)
        case _:
            return OrderDone(command_id, ok=False, reason=f"agent bug: {type(result).__name__}: {result}", at=at)

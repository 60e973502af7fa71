"""Waiting in tests: for a condition, with a deadline and a name, never for a fixed time.

    wait_until(lambda: path.exists(), description="the ready file")
    await wait_until_async(lambda: len(seen) == 3, description="three findings")

Both return the predicate's first true value, so that a test can wait for a thing and use it. How long they wait costs
nothing where the thing comes; it is long, since the machine may be ten times slower, or busy with something else. A shorter
`timeout_s` makes a test depend on the machine: a thing that must come soon, and not later, needs another proof.

A bound on a duration is met by the best of a few measurements:

    assert quickest(lambda round: seconds_of(round), below_s=0.25) < 0.25

`VIRTUAL_TIME` is a backend whose clock jumps to the next timer when nothing is ready; a module takes it by
`pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]`.
Not with real I/O.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio
import looptime

T = TypeVar("T")

POLL_S = 0.005
# Many predicates ask a service, which costs the service and the test some milliseconds of CPU time. Who has waited long asks
# more seldom, and learns of the condition later by a twentieth of the wait at most.
POLL_S_MAX = 0.2
POLL_SHARE = 0.05
TIMEOUT_S = 120.0
ROUNDS = 5


class FreezingLoop(looptime.LoopTimeEventLoop, asyncio.SelectorEventLoop):
    """Virtual time, of which a process can miss a part: `freeze` as SIGSTOP and SIGCONT would."""

    frozen_s = 0.0

    def time(self) -> float:
        return super().time() + self.frozen_s


FREEZING_TIME = ("asyncio", {"loop_factory": FreezingLoop})


def freeze(length_s: float) -> None:
    """Let time pass without any timer being seen to."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FreezingLoop)
    loop.frozen_s += length_s


VIRTUAL_TIME = ("asyncio", {"loop_factory": looptime.new_event_loop})


def wait_until(
    predicate: Callable[[], T | None], *, description: str, timeout_s: float = TIMEOUT_S, poll_s: float = POLL_S
) -> T:
    """Block until `predicate()` is true and return it. Raises `AssertionError` naming what never came.

    What the predicate raises is raised: a broken predicate is not a condition that is not yet met.
    """
    began = time.monotonic()
    while not (value := predicate()):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s for {description}; last value: {value!r}")
        time.sleep(_pause_s(poll_s, waited_s))
    return value


def _pause_s(poll_s: float, waited_s: float) -> float:
    """Until the next look at the condition."""
    return max(poll_s, min(POLL_S_MAX, POLL_SHARE * waited_s))


@overload
async def wait_until_async(
    predicate: Callable[[], Awaitable[T | None]], *, description: str, timeout_s: float = ..., poll_s: float = ...
) -> T: ...
@overload
async def wait_until_async(
    predicate: Callable[[], T | None], *, description: str, timeout_s: float = ..., poll_s: float = ...
) -> T: ...
async def wait_until_async(
    predicate: Callable[[], Any], *, description: str, timeout_s: float = TIMEOUT_S, poll_s: float = POLL_S
) -> Any:
    """The same in a coroutine; `predicate` may be a plain function or return an awaitable. Follows the loop's clock."""
    began = anyio.current_time()
    virtual = isinstance(asyncio.get_running_loop(), looptime.LoopTimeEventLoop)
    while True:
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        waited_s = anyio.current_time() - began
        if waited_s > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s for {description}; last value: {value!r}")
        await anyio.sleep(poll_s if virtual else _pause_s(poll_s, waited_s))


def quickest(measure: Callable[[int], float], *, below_s: float, rounds: int = ROUNDS) -> float:
    """Smallest result of `measure(round)`, in seconds; ends with the first below `below_s`.

    What else runs on the machine delays some rounds, a fault in the code delays all of them.
    """
    took: list[float] = []
    while len(took) < rounds and not (took and took[-1] < below_s):
        took.append(measure(len(took)))
    return min(took)


async def quickest_async(measure: Callable[[int], Awaitable[float]], *, below_s: float, rounds: int = ROUNDS) -> float:
    """`quickest` in a coroutine."""
    took: list[float] = []
    while len(took) < rounds and not (took and took[-1] < below_s):
        took.append(await measure(len(took)))
    return min(took)

"""Thread pools for blocking work. A recovery uses threads with the priority of the service: *urgent* for looks and checks,
*transfer* for shards that a restore fetches from peers (they may take long and must not delay the urgent ones), *retrieval*
for shards from the object store. Background work is niced: *commit* for checksums of new saves, *background* for disk and
peers, *archive* for uploads to the object store, *scrub* for scrubbing. A store that does not answer blocks only its own two
pools, and does not keep this process alive.

Background copies are also rate-limited, in bytes per second each for disk, network and object store.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import anyio

from holdfast.domain.errors import Unavailable
from holdfast.replicator.daemons import DaemonPool

NICE = 10

T = TypeVar("T")


class Threads:
    """The pools. `close` does not wait; `Pace` and `OpenSockets` make running work end.

    A thread cannot be cancelled. `urgent` therefore always waits for it and passes its result (an open, locked shard) to the
    caller or to `discard`. Work in the other pools must clean up after itself.
    """

    def __init__(
        self, *, urgent: int, transfers: int, background: int, commits: int = 1, archive: int = 1, retrievals: int = 1
    ) -> None:
        self._urgent = ThreadPoolExecutor(urgent, "urgent")
        self._transfers = ThreadPoolExecutor(transfers, "transfer")
        self._retrievals = DaemonPool(retrievals, "retrieval")
        self._commits = ThreadPoolExecutor(commits, "commit", initializer=be_nice)
        self._background = ThreadPoolExecutor(background, "background", initializer=be_nice)
        self._archive = DaemonPool(archive, "archive", be_nice)
        self._scrub = ThreadPoolExecutor(1, "scrub", initializer=be_nice)

    async def urgent(self, work: Callable[..., T], *args: object, discard: Callable[[T], None] | None = None) -> T:
        """Run `work`. If this call is cancelled, also repeatedly, `discard` receives the result of the work."""
        future = asyncio.get_running_loop().run_in_executor(self._urgent, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                while not future.done():
                    # The shield covers cancel scopes; a gRPC server cancels the task itself when its client cancels the
                    # call.
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait((future,))
            if not future.cancelled() and future.exception() is None and discard is not None:
                discard(future.result())
            raise

    async def transfer(self, abort: Callable[[], None], work: Callable[..., T], *args: object) -> T:
        """Run `work`. If this call is cancelled, `abort` ends the work, and the call waits for it, so that a retry finds no
        other writer."""
        future = asyncio.get_running_loop().run_in_executor(self._transfers, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            abort()
            with anyio.CancelScope(shield=True):
                await asyncio.wait((future,))
            if not future.cancelled():
                future.exception()  # consume the error that the abort caused
            raise

    async def retrieval(self, work: Callable[..., T], *args: object, cancelled: threading.Event | None = None) -> T:
        """Run `work`. If this call is cancelled, `cancelled` is set, and the work is not waited for, because a store
        may not answer."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._retrievals, work, *args)
        except asyncio.CancelledError:
            if cancelled is not None:
                cancelled.set()
            raise

    async def commit(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._commits, work, *args)

    async def background(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._background, work, *args)

    async def archive(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._archive, work, *args)

    async def scrub(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._scrub, work, *args)

    def close(self) -> None:
        recovering = (self._urgent, self._transfers, self._retrievals)
        for pool in (*recovering, self._commits, self._background, self._archive, self._scrub):
            pool.shutdown(wait=False, cancel_futures=True)


class Pace:
    """Rate limit of `bytes_per_s_max`, averaged over one second; 0 = unlimited. Thread-safe. `stop` wakes every waiter."""

    def __init__(self, bytes_per_s_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_s_max
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._holds = 0
        self._open = threading.Event()
        self._open.set()
        self._free_at = clock()

    def __call__(self, nbytes: int) -> None:
        """Wait until a piece of this size may pass. Raises Unavailable when the service stops."""
        self._open.wait()
        if self._stopped.wait(self.reserve(nbytes)):
            raise Unavailable("the copy was cancelled because this replicator is stopping")

    def reserve(self, nbytes: int) -> float:
        """Account for a piece. Returns its waiting time in seconds."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._free_at, now - 1.0)  # unused capacity of the last second may be used
            self._free_at = start + nbytes / self._rate
            return max(0.0, start - now)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block all pieces inside the block, in favour of more urgent work."""
        self._hold(1)
        try:
            yield
        finally:
            self._hold(-1)

    def stop(self) -> None:
        self._stopped.set()
        self._open.set()

    def _hold(self, change: int) -> None:
        with self._lock:
            self._holds += change
            if self._holds and not self._stopped.is_set():
                self._open.clear()
            else:
                self._open.set()


def be_nice() -> None:
    """Lower the calling thread's priority permanently."""
    # On Linux priority belongs to the thread; an executor's threads are not shared with urgent work.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
